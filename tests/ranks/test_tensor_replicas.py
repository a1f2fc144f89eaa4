"""Replicas: what tensor-parallel ranks hold alike is bitwise equal after 20 steps, and a drift does not go unseen."""

from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import framework.train.rank
from framework.comm.connect import connect
from framework.data.prepare import prepare
from framework.errors import EXIT_DONE, DriftError
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.replicas import find_drift
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Parallel, Zero
from framework.train import loop
from framework.train.build import build
from framework.train.replicas import check_replicas
from framework.train.step import train_step
from framework.verify.layout import share
from tests import tiny_run
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

STEPS = 20
WORLD = 4


def forget_tp() -> Any:
    """Gradients are not summed over tp: law 1 without its line."""

    def without(sync: GradientSync, buffer: UnitBuffer) -> Any:
        axes, other = buffer.plan.axes, copy(buffer)
        axes = replace(axes, partial=tuple(axis for axis in axes.partial if axis.name != "tp"))
        other.plan = replace(buffer.plan, axes=axes)
        yield from whole(sync, other)

    whole = GradientSync._sum_replicas
    return patch.object(GradientSync, "_sum_replicas", without)


def flip_a_bit(buffers: Any) -> None:
    """Of the first norm, on one rank, the lowest."""
    buffer = next(buffer for buffer in buffers if any("norm" in slot.name for slot in buffer.slots))
    buffer.master.view(torch.int32)[0] ^= 1


def train(
    rank: int, world: int, rendezvous: str, case: Case, fault: str, num_steps: int = STEPS
) -> tuple[list[str], str]:
    """Body: what has drifted after the steps, and the error that says so."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    batches = case.batches()
    with forget_tp() if fault == "sum" else nullcontext():
        for step in range(num_steps):
            batch = batches[step % len(batches)]
            train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), step, 1e-2)
    if fault == "bit" and rank == 1:
        flip_a_bit(run.buffers)
    drifted, message = find_drift(run.buffers, run.hashes), ""
    try:
        check_replicas(run, num_steps)
    except DriftError as error:
        message = str(error)
    mesh.close()
    return drifted, message


def cases() -> list[Case]:
    found = []
    for name, tp, sequence, stage in (("llama", 2, True, 1), ("llama", 4, False, 0), ("gpt2", 2, False, 0)):
        recipe = small_recipe("fp32", WORLD, 1, 12, 0.05, Zero(stage=stage), Parallel(tp=tp, sequence=sequence))
        found.append(Case(f"{name} tp={tp} sequence={sequence}", family(name), {"": recipe}))
    return found


@pytest.mark.grid  # in fewer steps: test_divergence.py
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_replicas_are_bitwise_equal_after_20_steps(pool: RankPool, case: Case) -> None:
    assert pool.run(WORLD, train, case, "") == [([], "")] * WORLD


@pytest.mark.grid
@pytest.mark.parametrize("case", cases()[:1], ids=lambda case: case.name)
def test_a_sum_that_is_left_out_shows_as_drift_of_what_it_is_of(pool: RankPool, case: Case) -> None:
    found = pool.run(WORLD, train, case, "sum", 3)
    # With ZeRO each rank sees what it owns.
    drifted = {name for names, _ in found for name in names}
    assert {"model.layers.0.input_layernorm.weight over tp", "model.norm.weight over tp"} <= drifted
    assert all(name.endswith("over tp") and "norm" in name for name in drifted)
    assert all("after step 3 ranks hold different values" in message for _, message in found)


def test_one_bit_on_one_rank_is_seen_by_all(pool: RankPool) -> None:
    found = pool.run(WORLD, train, cases()[0], "bit", 1)
    assert all("ranks hold different values" in message for _, message in found)
    assert any("layernorm" in message for _, message in found)


@pytest.mark.parametrize("debug", few_of([True, False], bool))
def test_the_debug_mode_checks_after_each_step(tmp_path: Path, debug: bool) -> None:
    checks: list[int] = []
    tiny_run.write_corpus(tmp_path / "corpus")
    words = [
        f"data.sources.files.path={tmp_path}/corpus",
        f"data.root={tmp_path}/data",
        "train.steps=3",
        "launch.device=cpu",
    ]
    (tmp_path / "run").mkdir()
    recipe = compose([*tiny_run.RECIPE, *words, f"track.debug_collectives={str(debug).lower()}"]).require()
    prepare(recipe)
    with patch.object(loop, "check_replicas", lambda run, step, hashed: checks.append(step)):
        assert framework.train.rank.train_rank(recipe, tmp_path / "run") == EXIT_DONE
    assert checks == ([1, 2, 3] if debug else [])
