"""Gradients that leave a node as codes: a layout is the training run of one process that rounds as its messages do."""

from dataclasses import replace

import pytest

from framework.recipe.schema import Parallel, Recipe, Zero
from framework.verify.compare import compare, render
from tests.families import family
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import DATA_PARALLEL, Case, small_recipe, train_layouts, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.quantized import on_nodes, run_quantized_oracle

WORLD = 4
TOLERANCE = 1e-9
CODES = ("int8", "int4", "int4_rotated")


def recipe_of(zero: Zero, codes: str = "int8", accumulation: int = 1, parallel: Parallel = DATA_PARALLEL) -> Recipe:
    """On two nodes of two ranks. Every matrix is quantised."""
    zero = replace(zero, quantize_reduce=codes, quantize_min_elements=0)  # type: ignore[arg-type]
    return on_nodes(small_recipe("fp64", WORLD, accumulation, 24, 0.05, zero, parallel), 2)


SHOWN = {
    "zero 3": recipe_of(Zero(stage=3), "int4", 3),
    "zero 2, hsdp, divided": recipe_of(Zero(2, 2, optimizer_within="all"), accumulation=2),
}
ZEROS = (
    Zero(stage=1),
    Zero(stage=2),
    Zero(stage=2, accumulate="local"),
    Zero(stage=3),
    Zero(stage=3, shard_within=2),
    Zero(stage=3, shard_within=2, optimizer_within="all"),
)
PARALLELS = (DATA_PARALLEL, Parallel(tp=2), Parallel(pp=2), Parallel(ep=2))


def may_meet(zero: Zero, parallel: Parallel, codes: str, accumulation: int) -> bool:
    """Whether replicas are left to HSDP, and microbatches to a pipeline."""
    is_whole = parallel == DATA_PARALLEL or parallel.ep > 1
    return (zero.shard_within is None or is_whole) and (parallel.pp == 1 or accumulation > 1)


ROWS = cover_pairs([ZEROS, PARALLELS, CODES, [1, 3]], may_meet)


def assert_parity(pool: RankPool, case: Case) -> None:
    """Loss, gradients, norm and weights after three steps."""
    found = pool.run(WORLD, train_layouts, [case], timeout_s=300)[0]
    for label, recipe in case.layouts.items():
        rows = compare(found[case.name, label], run_quantized_oracle(case, recipe))
        assert worst_error(rows) < TOLERANCE, f"{label}\n{render(rows, TOLERANCE)}"


def test_a_few_layouts_equal_one_process_that_rounds_as_they_do(pool: RankPool) -> None:
    assert_parity(pool, Case("llama", family("llama"), SHOWN))


@pytest.mark.grid
@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row[0].stage} {row[1].tp}{row[1].pp}{row[1].ep} {row[2]} {row[3]}"
)
def test_layouts_equal_one_process_that_rounds_as_they_do(pool: RankPool, row: tuple[Zero, Parallel, str, int]) -> None:
    zero, parallel, codes, accumulation = row
    name = "mixtral" if parallel.ep > 1 else "llama"
    recipe = recipe_of(zero, codes, accumulation, parallel)
    assert_parity(pool, Case(name, family(name), {"": recipe}, by_microbatch=name == "mixtral"))
