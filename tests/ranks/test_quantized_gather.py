"""Parameters that travel as codes, and second copies of shards: the run of one process that rounds alike, exact otherwise."""

from typing import Any

from framework.recipe.schema import Parallel, Recipe, Zero
from tests.families import family
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

# Matrices of the tiny models have some hundred elements.
SMALL = 64


def make(world: int = 4, accumulation: int = 1, precision: str = "fp64", parallel: Any = None, **zero: Any) -> Recipe:
    zero = {"stage": 3, "quantize_min_elements": SMALL} | zero
    return small_recipe(precision, world, accumulation, 12, 0.05, Zero(**zero), Parallel(**(parallel or {})))


FEW = {
    "llama": make(quantize_gather="int8", secondary_shard=2, accumulation=3),
    "mixtral": make(quantize_gather="fp8", shard_within=2, optimizer_within="all", stage=2, parallel={"ep": 2}),
}


def test_few_layouts_equal_one_process_that_rounds_alike(pool: RankPool) -> None:
    assert_equal(pool, 4, [Case(name, family(name), {"": recipe}) for name, recipe in FEW.items()])
