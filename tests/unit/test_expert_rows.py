"""Tokens weighted by their experts, in the dtypes that models have."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from framework.comm.algorithms import Pending
from framework.comm.codec import BlockCodec
from framework.comm.communicator import Communicator
from framework.mesh.topology import Axis
from framework.parallel.experts.rows import ROW_CODEC, RowExchange, add_up, combine, permute, spread
from tests.codec_bound import error_bound

TOKENS, TOP_K, WIDTH = 12, 3, 512


@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32])
def test_what_experts_give_in_bf16_is_weighted_as_autograd_does_it(weights_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    order = torch.randperm(TOKENS * TOP_K, generator=generator)
    y = torch.randn(TOKENS * TOP_K, WIDTH, generator=generator).bfloat16()
    weights = torch.rand(TOKENS, TOP_K, generator=generator).to(weights_dtype)
    upstream = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16()
    own = [y.clone().requires_grad_(), weights.clone().requires_grad_()]
    combine(*own, order).backward(upstream)
    stock = [y.clone().requires_grad_(), weights.clone().requires_grad_()]
    pairs = torch.zeros(TOKENS * TOP_K, WIDTH, dtype=y.dtype).index_copy(0, order, stock[0])
    (pairs.view(TOKENS, TOP_K, -1) * stock[1].unsqueeze(-1)).sum(1).to(y.dtype).backward(upstream)
    exact = (upstream.double()[:, None] * pairs.detach().double().view(TOKENS, TOP_K, -1)).sum(-1)
    for mine, theirs in zip(own, stock, strict=True):
        assert mine.grad is not None and theirs.grad is not None  # noqa: PT018
        assert torch.allclose(mine.grad.double(), theirs.grad.double(), rtol=2**-7, atol=2**-7)
    assert own[1].grad is not None
    error = (own[1].grad.double() - exact).norm() / exact.norm()
    # Routers give weights in fp32, and sums of products that were rounded to bf16 would be wrong by 2e-3.
    assert error < (1e-6 if weights_dtype == torch.float32 else 2**-8)


def test_pairs_that_were_not_sent_add_nothing() -> None:
    y = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([[0.25, 0.5], [2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    out = combine(y, weights, torch.tensor([0, 3]))
    out.sum().backward()
    assert out[:, 0].tolist() == [0.25, 3.0]
    assert weights.grad is not None
    assert weights.grad.tolist() == [[4.0, 0.0], [0.0, 4.0]]


def test_a_rank_without_a_token_spreads_and_combines_nothing() -> None:
    """Where ranks of tp divide fewer tokens than there are ranks, or parts, some have none."""
    x = torch.zeros(0, 4, requires_grad=True)
    weights, order = torch.zeros(0, 2, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    combine(spread(x, order, 2), weights, order).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_row_that_has_been_rounded_arrives_as_it_is(dtype: torch.dtype) -> None:
    """So two hops round as one does. Numbers of all sizes, one in a block of zeros, and the two beside a power of two."""
    generator = torch.Generator().manual_seed(4)
    x = (torch.randn(64, 700, generator=generator) * 10 ** torch.linspace(-20, 20, 64).unsqueeze(1)).to(dtype)
    x[0], x[1, :256], x[2, :3] = 0, 0, torch.tensor([224.0, 223.9, 225.0])
    x[1, 5] = 3.0
    once, twice = torch.empty_like(x), torch.empty_like(x)
    ROW_CODEC.decode(ROW_CODEC.encode(x), once)
    ROW_CODEC.decode(ROW_CODEC.encode(once), twice)
    assert torch.equal(once, twice)
    assert ((once - x).abs() <= error_bound(ROW_CODEC, x)).all()
    assert not torch.equal(once, x)


def send_to_itself(out: torch.Tensor, x: torch.Tensor, *_: Any) -> Pending:
    out.copy_(x)
    return Pending()


def take_scales_of_another_row() -> AbstractContextManager[Any]:
    """Codes of a row are read with the scales of its neighbour."""
    decode = BlockCodec.decode

    def misread(self: BlockCodec, message: torch.Tensor, out: torch.Tensor) -> None:
        message = message.clone()
        scales, _ = self.split(message, out.shape[-1])
        scales.copy_(scales.roll(1, 0))
        decode(self, message, out)

    return patch.object(BlockCodec, "decode", misread)


@pytest.mark.parametrize("bug", [nullcontext, take_scales_of_another_row])
def test_rows_of_all_sizes_arrive_within_the_stated_error(bug: Callable[[], AbstractContextManager[Any]]) -> None:
    x = torch.randn(16, 300, generator=torch.Generator().manual_seed(5)) * 2.0 ** torch.arange(16).unsqueeze(1)
    weights, ids = torch.rand(16, 3), torch.arange(48, dtype=torch.int32).view(16, 3)
    transfer = RowExchange(Communicator(Axis("ep", 2, 0)), [16, 0], [16, 0], ROW_CODEC)
    with patch("framework.parallel.experts.rows.start_all_to_all", send_to_itself), bug():
        rows, *beside = transfer.arrive(*transfer.depart(x, weights, ids))
    assert all(torch.equal(each, given) for each, given in zip(beside, (weights, ids), strict=True))
    assert bool(((rows - x).abs() <= error_bound(ROW_CODEC, x)).all()) == (bug is nullcontext)


def test_rows_are_differentiated_within_activation_checkpointing() -> None:
    """There a tensor that was saved can be asked for once."""
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([3, 0, 9, 4, 7])

    def compute(x: Tensor) -> Tensor:
        rows = permute(spread(x, order, 2), torch.tensor([1, 0, 2, 4, 3]), torch.tensor([1, 0, 2, 4, 3]))
        return add_up(rows.sin(), order, 5, 2)

    expected = torch.autograd.grad(compute(x).square().sum(), x)
    assert torch.equal(
        torch.autograd.grad(checkpoint(compute, x, use_reentrant=False).square().sum(), x)[0], expected[0]
    )
