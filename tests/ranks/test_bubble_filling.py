"""Validation in the bubbles of a step leaves no trace in training and finds, bit by bit, what it would find by itself."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.connect import connect
from framework.model.stage import StageModel
from framework.plan.plan import make_plan
from framework.recipe.schema import Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.stage import RankStage
from framework.train.step import train_step
from framework.train.validation import Validation
from framework.verify.evidence import make_batches
from framework.verify.layout import owned_weights, share
from tests.evaluation import evaluate
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CONTEXT, CPU, STEPS, Case, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_pipeline import SCHEDULES, case_of, recipe_of

pytestmark = IN_TURN

DROPOUT = {"resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
NUM_VALIDATION = (
    5  # microbatches of a rank; the bubbles of 1f1b and gpipe hold 1 where the head makes the last stage slower
)

Sabotage = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Trained:
    """Of one rank: of each step loss and norm, the validation of the weights before it, the generator's state; last weights."""

    readings: list[Tensor]
    validations: list[float]
    states: list[Tensor]
    weights: dict[str, Tensor]
    free_fraction: float

    def equals(self, other: "Trained") -> bool:
        """All that training leaves."""
        pairs = [*zip(self.readings, other.readings, strict=True), *zip(self.states, other.states, strict=True)]
        pairs += [(self.weights[name], other.weights[name]) for name in self.weights]
        return all(torch.equal(*pair) for pair in pairs)


def train_both(
    rank: int, world: int, rendezvous: str, case: Case, sabotage: Sabotage = nullcontext
) -> dict[str, tuple[Trained, Trained]]:
    """Body: each layout with validation by itself before each step, and in it; the second under a sabotage."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        alone = train(case, recipe, mesh, fills=False)
        with sabotage():
            found[label] = alone, train(case, recipe, mesh, fills=True)
        mesh.close()
    return found


def train(case: Case, recipe: Recipe, mesh: Any, fills: bool) -> Trained:
    run = build(make_plan(recipe, case.config), mesh)
    rows = recipe.batch.sequences_per_microbatch
    sequences = NUM_VALIDATION * rows * mesh.axis("dp").size
    held_out = share(make_batches(case.config, 1, sequences, CONTEXT, seed=3)[0], rows, mesh)
    readings, validations, states, free = [], [], [], 0.0
    for step in range(STEPS):
        microbatches = share(case.batches()[step], rows, mesh)
        validation = Validation(held_out if fills else ())
        if not fills:
            validations.append(evaluate(run, held_out))
        readings.append(train_step(run, microbatches, step, 1e-2, validation=validation).sums.vector)
        if fills:
            validations.append(validation.means(mesh).mean)
            free = validation.free_fraction
        states.append(torch.get_rng_state())
    weights = {name: values.clone() for name, (_, values) in owned_weights(run).items()}
    return Trained(readings, validations, states, weights, free)


def assert_no_trace(pool: RankPool, world: int, case: Case) -> dict[str, float]:
    """Returns what share of each layout's validation was free."""
    by_rank = pool.run(world, train_both, case)
    for label, (alone, filled) in (item for of_rank in by_rank for item in of_rank.items()):
        assert filled.equals(alone), label
        assert filled.validations == alone.validations, label
        assert len(set(filled.validations)) == STEPS, label
    return {label: filled.free_fraction for label, (_, filled) in by_rank[0].items()}


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"),
    few_of([("1f1b", 3, 1 / 5), ("zb_h1", 1, 0.0)], lambda schedule, *_: schedule == "1f1b"),
)
def test_training_and_validation_are_bitwise_what_they_are_apart(
    pool: RankPool, schedule: str, stage: int, expected: float
) -> None:
    """With dropout, under ZeRO, with two data-parallel ranks; whatever finds no room runs behind the step."""
    layouts = {"": recipe_of(2, schedule, 7, dp=2, zero=Zero(stage=stage))}
    assert assert_no_trace(pool, 4, case_of("gpt2", layouts, **DROPOUT)) == {"": expected}


@pytest.mark.grid
def test_every_schedule_validates_without_a_trace(pool: RankPool) -> None:
    """Uneven cuts give gaps to schedules that have none with even ones."""
    layouts = {schedule: recipe_of(2, schedule, 7, zero=Zero(stage=2)) for schedule in SCHEDULES}
    for schedule, layers in (("interleaved", [1, 3, 3, 1]), ("zbv", [1, 2, 2, 3])):
        recipe = replace(layouts[schedule], pipeline=Pipeline(schedule=schedule, layers=layers))  # type: ignore[arg-type]
        layouts[f"{schedule} {layers}"] = recipe
    free = assert_no_trace(pool, 2, case_of("llama", layouts, num_layers=8))
    assert max(free.values()) > 0
    balanced = {"output_router_logits": True, "attention_dropout": 0.2}
    assert_no_trace(pool, 2, case_of("qwen3_moe", {"": recipe_of(2, "1f1b", 4, zero=Zero(stage=3))}, **balanced))


def validate_in_training() -> AbstractContextManager[Any]:
    """Dropout stays on in validation."""
    return patch.object(RankStage, "_set_dropout", lambda stage, is_on: stage.model.model.train())


def draw_for_validation() -> AbstractContextManager[Any]:
    """A validation microbatch moves the generator."""
    whole = StageModel.__call__

    def call(model: StageModel, received: Any, seed: Any = None, **inputs: Any) -> Any:
        if seed is None:
            torch.rand(1)
        return whole(model, received, seed, **inputs)

    return patch.object(StageModel, "__call__", call)


@pytest.mark.grid
@pytest.mark.parametrize("sabotage", [validate_in_training, draw_for_validation])
def test_a_dropped_rule_shows(pool: RankPool, sabotage: Sabotage) -> None:
    case = case_of("gpt2", {"": recipe_of(2, "1f1b", 4)}, **DROPOUT)
    by_rank = pool.run(2, train_both, case, sabotage)
    same = [
        filled.equals(alone) and filled.validations == alone.validations
        for alone, filled in (each[""] for each in by_rank)
    ]
    assert not all(same)
