"""fp16 with a loss scale: every gradient is scaled once whatever the layout, all ranks agree on the scale, and a layout is as
near to one process as fp16's rounding allows.

A power of two changes no digit, so that a scaled run in fp32 is the unscaled one in every bit: a gradient that is scaled twice or
not at all shows at once.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Pipeline, Precision, Recipe, Zero
from framework.train.beside_optimizer import INITIAL, LossScale
from framework.train.build import build
from framework.train.stage import RankStage, StepInputs
from framework.train.step import TrainingRun, train_step
from framework.verify.compare import NUM_REFERENCES, exceeds, judge
from framework.verify.evidence import perturb
from framework.verify.layout import initial_weights, share
from framework.verify.oracle import run_oracle
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, Case, small_recipe, topology_of, train_layouts
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
SCALED = Precision("fp32", loss_scale=1024.0)


def recipe_of(world: int, zero: int = 0, accumulation: int = 3, schedule: str = "1f1b", **parallel: Any) -> Recipe:
    small = small_recipe("fp32", world, accumulation, 12, 0.05, Zero(zero), Parallel(**parallel))
    return replace(small, pipeline=Pipeline(schedule))  # type: ignore[arg-type]


# A tied embedding over stages, a mixture's load-balancing loss over stages and ep, tp with sharded parameters.
LAYOUTS = {
    "pp, tied, zero 1": ("gpt2", {}, recipe_of(4, 1, pp=2)),
    "pp x ep, load-balancing loss": ("qwen3_moe", BALANCE, recipe_of(4, 2, 4, "zb_h1", pp=2, ep=2)),
    "zero 3 x sp": ("llama", {}, recipe_of(4, 3, 1, tp=2)),
    "zero 3 x sp, accumulated": ("llama", {}, recipe_of(4, 3, tp=2)),
}


def in_fp16(recipe: Recipe, loss_scale: Any = 1024.0) -> Recipe:
    return replace(recipe, precision=Precision("fp16", "fp32", "fp32", loss_scale=loss_scale))


@pytest.mark.parametrize("name", few_of(LAYOUTS, lambda name: name == "zero 3 x sp"))
def test_every_gradient_is_scaled_once(pool: RankPool, name: str) -> None:
    model, changes, recipe = LAYOUTS[name]
    case = Case(name, family(model), {"plain": recipe, "scaled": replace(recipe, precision=SCALED)}, changes)
    found = pool.run(4, train_layouts, [case])[0]
    plain, scaled = found[name, "plain"], found[name, "scaled"]
    assert scaled.losses == plain.losses
    assert scaled.norms == plain.norms
    for kind in ("gradients", "weights"):
        for parameter, values in getattr(plain, kind).items():
            assert torch.equal(getattr(scaled, kind)[parameter], values), (kind, parameter)


@pytest.mark.parametrize(
    "name", [next(iter(LAYOUTS)), *(pytest.param(each, marks=pytest.mark.grid) for each in list(LAYOUTS)[1:])]
)
def test_a_layout_in_fp16_is_one_process_within_rounding(pool: RankPool, name: str) -> None:
    model, changes, recipe = LAYOUTS[name]
    case = Case(name, family(model), {"fp16": in_fp16(recipe)}, changes, by_microbatch=True)
    found = pool.run(4, train_layouts, [case])[0][name, "fp16"]
    weights, batches = initial_weights(case.config, case.recipe.train.seed), case.batches()
    exact = replace(case.recipe, precision=Precision("fp32"))
    truth = run_oracle(exact, case.config, weights, batches, torch.float32)
    references = []
    for seed in range(NUM_REFERENCES):
        rounded = {each: perturb(weight, torch.float16, seed) for each, weight in weights.items()}
        references.append(run_oracle(case.recipe, case.config, rounded, batches, torch.float16))
    assert not exceeds(judge(found, references, truth, "fp16"), 0.0)


# --- all ranks agree


def overflow_here(step: list[int]) -> Any:
    """In the second step this rank's backward, and no other's, begins from an infinite gradient."""
    whole = RankStage.start_step

    def start(stage: RankStage, inputs: StepInputs) -> None:
        endless = torch.full_like(inputs.loss_scale, torch.inf)
        whole(stage, replace(inputs, loss_scale=endless) if step[0] == 1 else inputs)

    return patch.object(RankStage, "start_step", start)


def scale_by_own_gradients(run: TrainingRun) -> Any:
    """Sabotage: each rank judges the gradients of its own backward."""
    whole = LossScale.update

    def update(scale: LossScale, _is_finite: torch.Tensor) -> None:
        own = torch.tensor(all(bool(each.inputs.loss_scale.isfinite()) for each in run.stages.values()))
        whole(scale, own)

    return patch.object(LossScale, "update", update)


def train_with_an_overflow(
    rank: int, world: int, rendezvous: str, case: Case, sabotage: Callable[[TrainingRun], Any]
) -> list[tuple[float, float, bool]]:
    """Body: of each step its scale, the scale after it, and whether this rank's masters have moved."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    found, at = [], [0]
    with overflow_here(at) if rank == 1 else nullcontext(), sabotage(run):
        for at[0], batch in enumerate(case.batches()):
            before = [buffer.master.clone() for buffer in run.buffers]
            values = train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), at[0], 1e-2).read()
            moved = any(not torch.equal(old, each.master) for old, each in zip(before, run.buffers, strict=True))
            scale, _ = run.loss_scale.read()
            assert scale is not None
            found.append((values.loss_scale, scale, moved))
    mesh.close()
    return found


def test_a_rank_that_overflows_halves_the_scale_of_all(pool: RankPool) -> None:
    case = Case("", family("llama"), {"": in_fp16(small_recipe("fp32", 2, 1, 4, 1.0, Zero(2)), "dynamic")})
    both = pool.run(2, train_with_an_overflow, case, whole)
    expected = [(INITIAL, INITIAL, True), (INITIAL, INITIAL / 2, False), (INITIAL / 2, INITIAL / 2, True)]
    assert both == [expected, expected]
    first, second = pool.run(2, train_with_an_overflow, case, scale_by_own_gradients)
    assert [scale for _, scale, _ in first] != [scale for _, scale, _ in second]


def whole(_run: TrainingRun) -> Any:
    return nullcontext()
