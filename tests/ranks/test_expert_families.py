"""Experts of unusual forms, divided among ranks, train as in one process."""

from dataclasses import replace
from operator import attrgetter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from framework.model.matmul import RowGroups
from framework.parallel.experts.dispatch import StockExperts
from framework.recipe.schema import Memory, Muon, Optim, Parallel, Pipeline, Recipe, Zero
from tests.families import STOCK_EXPERTS, UNGATED, Family, family
from tests.grid import few_of
from tests.ranks.parity import Case, assert_equal, run_cases, small_recipe, worst_error
from tests.ranks.pool import RankPool

LAYOUTS = {
    "whole": (2, Parallel(ep=2), Zero(stage=3)),
    "alike": (2, Parallel(tp=2, ep=2, sequence=False), Zero(stage=0)),
    "parts": (4, Parallel(tp=2, ep=2), Zero(stage=1)),
    "sliced": (4, Parallel(tp=2, ep=2, expert_tp=2), Zero(stage=2)),
    "slices alone": (2, Parallel(tp=2), Zero(stage=0)),
}
# Of experts with code of their own.
MORE = {
    "two hops": (4, Parallel(ep=4, expert_hierarchical=2), Zero(stage=3)),
    "turns": (2, Parallel(ep=2, expert_overlap=True), Zero(stage=2)),
    "stages": (4, Parallel(pp=2, ep=2), Zero(stage=1)),
    "context": (2, Parallel(cp=2, ep=2), Zero(stage=3)),
}


def recipe_of(world: int, parallel: Parallel, zero: Zero, **groups: Any) -> Recipe:
    recipe = small_recipe("fp64", world, 3 if parallel.pp > 1 else 1, clip_norm=0.05, zero=zero, parallel=parallel)
    return replace(recipe, pipeline=Pipeline(schedule="1f1b"), **groups)


@pytest.mark.grid
@pytest.mark.parametrize(
    "each", few_of([family("longcat_flash"), UNGATED], lambda each: each is UNGATED), ids=attrgetter("name")
)
def test_tokens_that_stay_and_experts_without_gate_train_alike(pool: RankPool, each: Family) -> None:
    """longcat_flash routes tokens to themselves, which one of the ranks that sum their results adds."""
    assert_equal(pool, 4, [Case(each.name, each, {label: recipe_of(*layout) for label, layout in LAYOUTS.items()})])


def starve(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook of all modules: routers, the only layers of four outputs, never choose the last two experts."""
    is_router = isinstance(module, nn.Linear) and module.out_features == 4
    return output + torch.tensor([9.0, 9.0, -9.0, -9.0], dtype=output.dtype) if is_router else None


def run_starved(rank: int, world: int, rendezvous: str, cases: list[Case]) -> Any:
    """Body: `run_cases` where the experts of the last rank get no rows, in the layouts and in the oracle."""
    hook = register_module_forward_hook(starve)
    try:
        return run_cases(rank, world, rendezvous, cases)
    finally:
        hook.remove()


def stock_case(each: Family, labels: list[str], **groups: Any) -> Case:
    layouts = {label: recipe_of(*{**LAYOUTS, **MORE}[label], **groups) for label in labels}
    return Case(each.name, each, layouts)


def test_experts_with_code_of_their_own_train_as_one_process(pool: RankPool) -> None:
    recomputed = Memory(activation_checkpointing="full", compile="never")
    assert_equal(pool, 2, [stock_case(each, ["whole"], memory=recomputed) for each in STOCK_EXPERTS])
    assert_equal(pool, 2, [stock_case(STOCK_EXPERTS[0], ["whole"])], run_starved)


def test_muon_leaves_experts_with_code_of_their_own_to_adamw(pool: RankPool) -> None:
    muon = Optim(name="muon", lr=1e-2, momentum=0.9, clip_norm=0.05, muon=Muon(dtype="master"))
    assert_equal(pool, 2, [stock_case(each, ["whole"], optim=muon) for each in STOCK_EXPERTS])


def run_shifted(rank: int, world: int, rendezvous: str, cases: list[Case]) -> Any:
    """Body: `run_cases` where a rank's experts are given one another's rows, not so in the oracle."""
    compute = StockExperts.compute

    def shift(local: StockExperts, x: Tensor, ids: Tensor, groups: RowGroups, between: Any) -> Tensor:
        shifted = RowGroups.of(groups.counts[::-1], x.device)
        return compute(local, x, len(groups.counts) - 1 - ids, shifted, between)

    with patch.object(StockExperts, "compute", shift):
        return run_cases(rank, world, rendezvous, cases)


@pytest.mark.grid
@pytest.mark.parametrize("each", STOCK_EXPERTS, ids=attrgetter("name"))
def test_a_rank_that_takes_one_expert_for_another_is_seen(pool: RankPool, each: Family) -> None:
    found = pool.run(2, run_shifted, [stock_case(each, ["whole"])], timeout_s=300)
    assert worst_error(row for rows in found for row in next(iter(rows.values()), ())) > 1e-4


@pytest.mark.grid
def test_experts_with_code_of_their_own_train_alike_in_all_layouts(pool: RankPool) -> None:
    dbrx, jetmoe = STOCK_EXPERTS
    assert_equal(pool, 4, [stock_case(dbrx, ["alike", "parts", "sliced", "slices alone"])])
    assert_equal(pool, 4, [stock_case(each, ["turns", "stages", "context"]) for each in (dbrx, jetmoe)])
    assert_equal(pool, 4, [stock_case(each, ["two hops"]) for each in (dbrx, jetmoe)])
    assert_equal(pool, 4, [stock_case(each, ["two hops"]) for each in (dbrx, jetmoe)], run_starved)
    assert_equal(pool, 2, [stock_case(jetmoe, ["whole"])], run_starved)
