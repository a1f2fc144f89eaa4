"""AdamW on the host goes tile by tile and casts each: bit for bit the update of whole tensors, and their cast."""

from unittest.mock import patch

import pytest
import torch

from framework.optim import adamw
from framework.optim.adamw import TiledAdamW
from framework.optim.contract import FlatShard, ShardGroup
from framework.optim.optimizers import FlatOptimizer
from framework.recipe.schema import Optim

CPU = torch.device("cpu")


def train(numel: int, casts: bool, divisor: float) -> tuple[torch.Tensor, ...]:
    """Two updates and, between them, a step that is skipped. Returns value, moments and what the value is cast to."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(numel, generator=generator)
    gradient = torch.empty(numel)
    cast = torch.zeros(numel, dtype=torch.bfloat16)
    shard = FlatShard((), value, gradient, cast=cast if casts else None)
    optimizer = FlatOptimizer(Optim(), [ShardGroup("all", (shard,), 1.0, 0.1)], CPU)
    assert optimizer.fills_casts == casts
    for step, skip in enumerate((False, True, False)):
        gradient.copy_(torch.randn(numel, generator=generator))
        optimizer.step(1e-2, torch.tensor(divisor, dtype=torch.float64), torch.tensor(skip), step)
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


def test_without_casts_it_is_torchs_own() -> None:
    value = torch.ones(5)
    value.grad = torch.ones(5)
    with patch.object(TiledAdamW, "_update") as update:
        TiledAdamW([value], lr=1e-3, fused=True).step()
    assert not update.called
    assert (value < 1).all()
