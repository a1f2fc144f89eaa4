"""Replicas divide the reading of a checkpoint: r ranks that own the same do not open r files each."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import TrainingRun
from tests.families import family
from tests.grid import few_of
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_zero_lifetimes import train_steps
from tests.saving import save_checkpoint


def save_and_restore(rank: int, world: int, rendezvous: str, case: Case, root: Path) -> tuple[set[str], bool]:
    """Body: the rank files that this rank opens to restore what it has saved, and whether every state has the same bits."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    saved = build(make_plan(recipe, case.config), mesh)
    train_steps(saved, recipe, case.batches()[:1])
    with torch.no_grad():
        saved.buffers[0].master[::2] = -0.0  # a sum of numbers would lose the sign
    state = RunState("run", "", step=1, num_updates=saved.optimizer.num_updates)
    save_checkpoint(root, 1, saved_entries(saved), state.to_json(), mesh.axis("world"), keep=1)

    opened: set[str] = set()
    real_open = os.open

    def spy(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.add(os.path.basename(str(path)))
        return real_open(path, *args, **kwargs)

    run = build(make_plan(recipe, case.config), mesh, resumes=True)
    with patch("os.open", spy):
        assert restore(run, root) == state
    same = [torch.equal(mine, theirs) for mine, theirs in zip(bits_of(run), bits_of(saved), strict=True)]
    mesh.close()
    return {name for name in opened if name.startswith("rank-")}, all(same)


def bits_of(run: TrainingRun) -> list[torch.Tensor]:
    """All that this rank owns, padding left out: not only what it counts."""
    masters = [buffer.held(slot, buffer.master)[1] for buffer in run.buffers for slot in buffer.slots]
    states = [
        tensor
        for shard in run.optimizer.shards
        for tensor in run.optimizer.states_of(shard).memory(shard, 0, shard.value.numel())
    ]
    return [tensor.contiguous().view(torch.uint8) for tensor in (*masters, *states)]


@pytest.mark.parametrize(
    ("world", "zero", "moments"),
    few_of(
        [(3, Zero(), "fp32"), (4, Zero(stage=3, shard_within=2), "fp32"), (4, Zero(stage=3, shard_within=2), "int8")],
        lambda _world, _zero, moments: moments == "int8",
    ),
    ids=["stage 0", "hsdp", "hsdp, int8"],
)
def test_each_replica_reads_its_share_and_owns_all(
    pool: RankPool, tmp_path: Path, world: int, zero: Zero, moments: Any
) -> None:
    recipe = small_recipe("fp32", world, 1, 12, 0.05, zero)
    recipe = replace(recipe, precision=replace(recipe.precision, moments=moments))
    case = Case("", family("llama"), {"": recipe})
    for rank, (opened, is_same) in enumerate(pool.run(world, save_and_restore, case, tmp_path)):
        assert opened == {f"rank-{rank:05d}.bin"}
        assert is_same
