"""Communication under matrix products (parallel.overlap): the same losses and gradients, and nobody reads what has not come."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.comm.p2p import exchange
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Topology
from framework.parallel.tensor import async_tp
from framework.parallel.tensor.async_tp import AsyncGather, AsyncGatherTensor
from framework.parallel.tensor.borders import ShardedBorder, make_border
from framework.parallel.tensor.regions import Region
from tests.families import family
from tests.grid import IN_TURN
from tests.ranks.pool import RankFailure, RankPool
from tests.ranks.tensor_parity import CPU, TensorCase
from tests.ranks.test_tensor import assert_equal, errors

pytestmark = IN_TURN

# Dense; biases in rows and columns, transposed weights, two dims instead of three; what reads a region's input besides column
# layers: routers, down-projections of latent attention; sequences that the ranks do not divide.
CASES = (
    TensorCase(family("llama"), 4, True),
    TensorCase(family("llama"), 2, True, regathers=True, tokens=13),
    TensorCase(family("gpt2"), 2, True),
    TensorCase(family("phi"), 4, True, tokens=13),
    TensorCase(family("opt"), 4, True, tokens=9),
    TensorCase(family("mixtral"), 2, True),
    TensorCase(family("qwen2_moe"), 4, True, regathers=True, tokens=13),
    TensorCase(family("deepseek_v3"), 2, True),
)


# Dense over four ranks with odd sequences; experts, regathered.
FEW = (CASES[3], CASES[6])


@pytest.mark.parametrize("cases", [pytest.param(FEW, id="few"), pytest.param(CASES, marks=pytest.mark.grid, id="all")])
def test_products_in_pieces_equal_whole(pool: RankPool, cases: tuple[TensorCase, ...]) -> None:
    assert_equal(pool, [replace(case, overlaps=True) for case in cases])


def send_late() -> AbstractContextManager[Any]:
    """What is received is not a number until it is waited for."""

    def late(
        sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Communicator, label: str
    ) -> Pending:
        (place, source), *others = receives
        assert not others
        received = torch.empty_like(place)
        place.fill_(torch.nan)
        pending = exchange(sends, [(received, source)], axis, label)

        def arrive() -> None:
            pending.wait()
            place.copy_(received)

        return Pending([], [received, place], arrive)

    return patch.object(async_tp, "exchange", late)


def send_late_and_do_not_wait() -> AbstractContextManager[Any]:
    """As if the region's input were handed out as it is."""

    def whole(arrival: AsyncGather) -> Tensor:
        assert arrival._pieces is not None
        return arrival._pieces.movedim(0, -3).flatten(-3, -2)[..., : arrival.length, :].contiguous()

    late = send_late()
    return _Both(late, patch.object(AsyncGather, "whole", whole))


class _Both:
    def __init__(self, *contexts: AbstractContextManager[Any]):
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in self.contexts:
            context.__exit__(*error)


@pytest.mark.grid
def test_who_reads_what_has_not_come_waits(pool: RankPool) -> None:
    """Routers of mixtral, down-projections of deepseek: with messages that are late nothing changes; without the wait they are an
    error with their names."""
    cases = [
        TensorCase(family(name), 2, True, overlaps=True, sabotage=send_late) for name in ("mixtral", "deepseek_v3")
    ]
    assert_equal(pool, cases)
    with pytest.raises(
        RankFailure, match="never waited for at the end of the run: send and receive of tokens of a region"
    ):
        errors(pool, [replace(case, sabotage=send_late_and_do_not_wait) for case in cases])


def test_what_is_arriving_has_no_memory_and_every_operation_waits(pool: RankPool) -> None:
    for found in pool.run(2, read_arriving):
        assert found == dict.fromkeys(found, True)


def read_arriving(rank: int, world: int, rendezvous: str) -> dict[str, bool]:
    """Body: what operations give of tokens 1, 1, 2, 2 of which this rank has two."""
    mesh = connect(Topology(tp=world), CPU, rendezvous, rank)
    tp, expected = mesh.axis("tp"), torch.tensor([1.0, 1, 2, 2]).view(1, 4, 1).expand(1, 4, 3)
    found = {}

    def arrive() -> Any:
        layout = TokenLayout(1, 4, tp.axis, is_sharded=True)
        shard = ShardedBorder(layout, tp).scatter(expected.contiguous()).requires_grad_()
        return shard, Region(make_border(layout, tp, overlaps=True)).enter(shard)

    with send_late():
        shard, x = arrive()
        found["is arriving"] = isinstance(x, AsyncGatherTensor) and x.shape == expected.shape and x.requires_grad
        # Code that goes past every operation finds nothing.
        found["no address"] = x.data_ptr() == 0
        with pytest.raises(RuntimeError):
            x.untyped_storage().data_ptr()
        with pytest.raises(RuntimeError):
            x.numpy()
        found["still under way"] = bool(x.arrival._pending)
        found["an operation"] = torch.equal(x + 1, expected + 1)
        _, x = arrive()
        found["a view"] = torch.equal(x.view(-1, 3), expected.reshape(-1, 3))
        _, x = arrive()
        found["a copy"] = torch.equal(torch.empty(1, 4, 3).copy_(x), expected)
        shard, x = arrive()
        x *= 2
        found["in place"] = torch.equal(x + 0, 2 * expected)
        (x * x).sum().backward()
        # d/dx of (2x)^2 = 8x, from both ranks.
        found["its gradient"] = torch.equal(shard.grad, 16 * shard.detach())
    mesh.close()
    return found
