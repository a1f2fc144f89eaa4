"""AdamW on the host goes tile by tile and casts each: bit for bit the update of whole tensors, and their cast."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from framework.optim import adamw
from framework.optim.adamw import TiledAdamW
from framework.optim.contract import FlatShard, ShardGroup
from framework.optim.optimizers import FlatOptimizer
from framework.recipe.schema import Optim

CPU = torch.device("cpu")


def train(numel: int, casts: bool, divisor: float, step: Callable | None = None) -> tuple[torch.Tensor, ...]:
    """Two updates and, between them, a step that is skipped. Returns value, moments and what the value is cast to. step: of
    torch's optimizer, in the place of ours."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(numel, generator=generator)
    gradient = torch.empty(numel)
    cast = torch.zeros(numel, dtype=torch.bfloat16)
    shard = FlatShard((), value, gradient, cast=cast if casts else None)
    optimizer = FlatOptimizer(Optim(), [ShardGroup("all", (shard,), 1.0, 0.1)], CPU)
    assert optimizer.fills_casts == casts
    for number, skip in enumerate((False, True, False)):
        gradient.copy_(torch.randn(numel, generator=generator))
        with patch.object(TiledAdamW, "step", step or TiledAdamW.step):
            optimizer.step(1e-2, torch.tensor(divisor, dtype=torch.float64), torch.tensor(skip), number)
    assert optimizer.num_updates == 2
    moments = (optimizer.state(shard, name) for name in optimizer.state_names)
    return value, *moments, cast if casts else value.to(torch.bfloat16)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("divisor", [1.0, 3.7])
@pytest.mark.parametrize("numel", [7, 64, 1000, 1003])
def test_tiles_are_bit_for_bit_the_whole(numel: int, divisor: float, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with patch.object(adamw, "TILE", 64):
            found = train(numel, True, divisor)
        expected = train(numel, False, divisor)
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("divisor", [1.0, 3.7])
def test_without_casts_it_is_torchs_own(divisor: float) -> None:
    found, expected = train(1003, False, divisor), train(1003, False, divisor, step=torch.optim.AdamW.step)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_values_of_two_dtypes_are_updated_each_in_its_own() -> None:
    values = [torch.ones(5, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float32)]
    kernel = TiledAdamW([{"params": values}], lr=1e-3, fused=True)
    count = torch.zeros(())
    for value in values:
        value.grad = torch.ones_like(value)
        kernel.state[value] = {"exp_avg": torch.zeros_like(value), "exp_avg_sq": torch.zeros_like(value), "step": count}
    kernel.step()
    assert count == 1
    for value in values:
        assert ((value - (1 - 1e-3)).abs() < 1e-4).all()
