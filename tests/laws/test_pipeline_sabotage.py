"""Sabotage of the pipeline: drop one rule, and the comparison with one process fails."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from framework.model.objective import count_tokens
from framework.parallel.pipeline.execute import _Step
from framework.parallel.zero.buffers import UnitBuffer
from framework.recipe.schema import Zero
from framework.train.stage import RankStage
from tests.laws.sabotage import Sabotage, errors_of
from tests.ranks.parity import Case
from tests.ranks.pool import RankPool
from tests.ranks.test_pipeline import case_of, recipe_of

# One day has them all.
pytestmark = pytest.mark.grid(part=5)

VISIBLE = 1e-3


def average_microbatches() -> AbstractContextManager[Any]:
    """Each microbatch is divided by its own tokens and then averaged, as if all had equally many."""
    whole = RankStage._part_of_loss

    def part_of_loss(stage: RankStage, microbatch: int, output: Any, *sums: Tensor) -> Tensor:
        inputs = stage.inputs
        own = count_tokens(inputs.microbatches[microbatch].labels, None).sum() * inputs.num_microbatches
        stage.start_step(replace(inputs, num_tokens=own))
        loss = whole(stage, microbatch, output, *sums)
        stage.start_step(inputs)
        return loss

    return patch.object(RankStage, "_part_of_loss", part_of_loss)


def reduce_before_the_last_backward() -> AbstractContextManager[Any]:
    """The first backward of a stage is taken for the last."""

    def is_last(executed: _Step, stage: int) -> bool:
        executed._rest[stage] -= 1
        return executed._rest[stage] == 3

    return patch.object(_Step, "_is_last_of", is_last)


def forget_the_other_end() -> AbstractContextManager[Any]:
    """The two owners of a tied embedding do not sum their gradients."""
    allocate = UnitBuffer.allocate

    def alone(buffer: UnitBuffer, *args: Any) -> None:
        partial = tuple(axis for axis in buffer.plan.axes.partial if axis.name != "embedding")
        buffer.plan = replace(buffer.plan, axes=replace(buffer.plan.axes, partial=partial))
        allocate(buffer, *args)

    return patch.object(UnitBuffer, "allocate", alone)


def of(schedule: str, zero: int) -> Case:
    recipe = recipe_of(2, schedule, 4, "fp64", zero=Zero(stage=zero))
    case = case_of("llama", {"": recipe}, tie_word_embeddings=True)
    return replace(case, name=f"{schedule} at zero {zero}")


SABOTAGES = (
    (average_microbatches, of("1f1b", 0), "loss"),
    (reduce_before_the_last_backward, of("1f1b", 1), "gradient, step 1"),
    (forget_the_other_end, of("zb_h1", 0), "gradient, step 1"),
)


@pytest.mark.parametrize(("sabotage", "case", "quantity"), SABOTAGES, ids=lambda each: getattr(each, "__name__", None))
def test_a_dropped_rule_shows_and_the_whole_code_does_not(
    pool: RankPool, sabotage: Sabotage, case: Case, quantity: str
) -> None:
    errors = errors_of(pool, [sabotage], case)
    assert max(errors["whole"].values()) < case.tolerance
    assert errors[sabotage.__name__][quantity] > VISIBLE
