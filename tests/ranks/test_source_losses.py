"""The losses of a step's sources are means over their own tokens, or pairs, in every layout: in fp64 to 1e-9."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from framework.comm.connect import connect
from framework.model.objective import LOSSES
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Recipe, Source, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import keep_double
from framework.verify.layout import initial_weights, share
from tests.families import family
from tests.grid import IN_TURN
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, SEQUENCES, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_preferences import case_of, recipe_of

pytestmark = IN_TURN

NAMES = ("web", "code", "absent", "books")


def number_rows(count: int) -> torch.Tensor:
    """The source of each row, of all but one."""
    return torch.tensor([0, 3, 1, 1, 0]).repeat(count)[:count]


def make_case(
    loss: str, pp: int = 1, tp: int = 1, cp: int = 1, dp: int = 1, count: int = 1, chunked: bool = False
) -> Case:
    sources = {name: Source("somewhere") for name in NAMES}
    if loss == "next_token":
        world, parallel = pp * tp * cp * dp, Parallel(pp=pp, tp=tp, cp=cp)
        recipe = small_recipe("fp64", world, count, zero=Zero(stage=1), parallel=parallel)
        recipe = replace(recipe, memory=replace(recipe.memory, chunked_loss=chunked))
        recipe = replace(recipe, train=replace(recipe.train, z_loss=0.01 if chunked else 0.0))
        return Case(loss, family("llama"), {"": replace(recipe, data=replace(recipe.data, sources=sources))})
    recipe = recipe_of(loss, 1, tp, pp, cp, dp, count, chunked)
    return case_of(replace(recipe, data=replace(recipe.data, sources=sources)))


def find_losses(rank: int, world: int, rendezvous: str, case: Case) -> tuple[float, tuple[float | None, ...]]:
    """Body: of a step the loss, and the losses of its sources."""
    recipe: Recipe = next(iter(case.layouts.values()))
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    batch, rows, dp = case.batches()[0], recipe.batch.sequences_per_microbatch, mesh.axis("dp")
    assert rows is not None
    numbers = number_rows(len(batch.input_ids)).split(rows)[dp.rank :: dp.size]
    own = [replace(each, sources=own) for each, own in zip(share(batch, rows, mesh), numbers, strict=True)]
    with keep_double(torch.float64):
        values = train_step(run, own, 0, 0.1).read()
    found = values.metrics[len(run.objective.metrics) :]
    run.close()
    mesh.close()
    return values.loss, found


def expect_losses(case: Case) -> list[float | None]:
    """The same of a stock model in one process."""
    batch = case.batches()[0]
    model = AutoModelForCausalLM.from_config(case.config, dtype=torch.float64)
    weights = initial_weights(case.config, case.recipe.train.seed, CPU)
    model.load_state_dict({name: each.double() for name, each in weights.items()}, strict=False)
    with torch.no_grad(), keep_double(torch.float64):
        logits = model(input_ids=batch.input_ids).logits
    losses = F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none")
    losses = losses + case.recipe.train.z_loss * logits.logsumexp(-1).square() * (batch.labels != -100)
    of_row, counts, sources = losses.sum(1), (batch.labels != -100).sum(1), number_rows(len(losses))
    own = [sources == number for number in range(len(NAMES))]
    return [float(of_row[each].sum() / counts[each].sum()) if each.any() else None for each in own]


FACTORS: list[list[Any]] = [["next_token", "simpo"], [1, 2], [1, 2], [1, 2], [1, 2], [1, 3], [False, True]]
ROWS = cover_pairs(FACTORS, lambda loss, pp, tp, cp, dp, count, chunked: 1 < pp * tp * cp * dp <= 4)
SHOWN = [("next_token", 2, 2, 1, 1, 1, True), ("next_token", 1, 1, 2, 2, 3, False)]


@pytest.mark.parametrize("row", [*SHOWN, *(pytest.param(row, marks=pytest.mark.grid) for row in ROWS)], ids=str)
def test_losses_of_sources_are_those_of_one_process(pool: RankPool, row: tuple[Any, ...], tmp_path: Any) -> None:
    case = make_case(*row)
    if row[0] == "next_token":
        expected = expect_losses(case)
    else:
        _, found_alone = find_losses(0, 1, str(tmp_path / "alone"), make_case(row[0], chunked=row[-1]))
        expected = list(found_alone)
    assert expected[2] is None
    world = next(iter(case.layouts.values())).launch.ranks
    assert world is not None
    for _, found in pool.run(world, find_losses, case, timeout_s=300):
        assert list(found) == [None if each is None else pytest.approx(each, rel=1e-9) for each in expected]


def test_their_weighted_mean_is_the_loss_and_a_mean_of_rows_shows(tmp_path: Any) -> None:
    case = make_case("next_token", count=3)
    loss, found = find_losses(0, 1, str(tmp_path / "a"), case)
    counts, sources = (case.batches()[0].labels != -100).sum(1), number_rows(SEQUENCES)
    of_source = [float(counts[sources == number].sum()) for number in range(len(NAMES))]
    total = sum(mean * count for mean, count in zip(found, of_source, strict=True) if mean is not None)
    assert total / sum(of_source) == pytest.approx(loss, rel=1e-9)
    by_row = replace(LOSSES["next_token"], count=lambda labels, pairs: torch.ones(len(labels), dtype=torch.int64))
    with patch.dict(LOSSES, next_token=by_row):
        _, wrong = find_losses(0, 1, str(tmp_path / "b"), case)
    assert wrong[0] != pytest.approx(found[0], rel=1e-3)
