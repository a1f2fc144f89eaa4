"""Head and loss in chunks of tokens are the same training run: with every way to lay out the head, beside the oracle."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest

from framework.model import loss
from framework.recipe.schema import Memory, Model, Parallel, Pipeline, Recipe, Zero
from framework.verify.compare import ErrorRow
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import Case, assert_equal, run_cases, small_recipe
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# Of the microbatches here a chunk is at most an eighth: most have eight chunks, and the last is smaller.
LEAST_CHUNK = 2


def recipe_of(
    parallel: Parallel,
    zero: Zero,
    schedule: str = "1f1b",
    gathered_inputs: str = "keep",
    precision: str = "fp64",
    frozen: Sequence[str] = (),
) -> Recipe:
    recipe = small_recipe(precision, 4, 3, zero=zero, parallel=parallel)
    memory = Memory(chunked_loss=True, compile="never", gathered_inputs=gathered_inputs)  # type: ignore[arg-type]
    pipeline = Pipeline(schedule=schedule)  # type: ignore[arg-type]
    return replace(recipe, memory=memory, pipeline=pipeline, model=Model(freeze=list(frozen)))


DENSE = {
    "zero 3": recipe_of(Parallel(), Zero(3)),
    "zero 3 x sp, regather": recipe_of(Parallel(tp=2), Zero(3), gathered_inputs="regather"),
    "zero 2 x zb_h1": recipe_of(Parallel(pp=2), Zero(2), "zb_h1"),
    "zero 3 x zb_h1": recipe_of(Parallel(pp=2), Zero(3), "zb_h1"),
    "tp x pp, zb_h1": recipe_of(Parallel(pp=2, tp=2, sequence=False), Zero(1), "zb_h1"),
}
CASES = {
    "untied": Case("untied", family("llama"), DENSE),
    "tied, soft-capped": Case(
        "tied, soft-capped",
        family("gemma2"),
        {label: DENSE[label] for label in ("zero 3 x sp, regather", "tp x pp, zb_h1")},
    ),
    "tied, soft-capped, all": Case("tied, soft-capped, all", family("gemma2"), DENSE),
    "frozen head": Case(
        "frozen head",
        family("llama"),
        {"zero 3 x sp": recipe_of(Parallel(tp=2), Zero(3), frozen=["lm_head"])},
    ),
    "experts": Case(
        "experts",
        family("qwen3_moe"),
        {"ep, zero 2": recipe_of(Parallel(ep=2), Zero(2), precision="fp32")},
        {"output_router_logits": True, "router_aux_loss_coef": 0.05},
        by_microbatch=True,
    ),
    "scaled": Case("scaled", family("cohere"), {"sp": recipe_of(Parallel(tp=2), Zero(0), precision="fp32")}),
}


def run_in_chunks(rank: int, world: int, rendezvous: str, cases: Sequence[Case]) -> dict[str, list[ErrorRow]]:
    """Body: as `run_cases`, in chunks of few tokens."""
    with patch.object(loss, "LEAST_CHUNK", LEAST_CHUNK):
        return run_cases(rank, world, rendezvous, cases)


@pytest.mark.parametrize("name", few_of(CASES, lambda name: name == "tied, soft-capped"))
def test_every_layout_of_the_head_is_the_same_run(pool: RankPool, name: str) -> None:
    assert_equal(pool, 4, [CASES[name]], run_in_chunks)
