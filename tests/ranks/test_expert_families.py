"""Experts of unusual forms, divided among ranks, train as in one process."""

from operator import attrgetter

import pytest

from framework.recipe.schema import Parallel, Zero
from tests.families import UNGATED, Family, family
from tests.grid import few_of
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

LAYOUTS = {
    "whole": (2, Parallel(ep=2), Zero(stage=3)),
    "alike": (2, Parallel(tp=2, ep=2, sequence=False), Zero(stage=0)),
    "parts": (4, Parallel(tp=2, ep=2), Zero(stage=1)),
    "sliced": (4, Parallel(tp=2, ep=2, expert_tp=2), Zero(stage=2)),
    "slices alone": (2, Parallel(tp=2), Zero(stage=0)),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    "each", few_of([family("longcat_flash"), UNGATED], lambda each: each is UNGATED), ids=attrgetter("name")
)
def test_tokens_that_stay_and_experts_without_gate_train_alike(pool: RankPool, each: Family) -> None:
    """longcat_flash routes tokens to themselves, which one of the ranks that sum their results adds."""
    layouts = {
        label: small_recipe("fp64", world, clip_norm=0.05, zero=zero, parallel=parallel)
        for label, (world, parallel, zero) in LAYOUTS.items()
    }
    assert_equal(pool, 4, [Case(each.name, each, layouts)])
