"""Gradients that leave a node as codes: a layout is the training run of one process that rounds as its messages do."""

from dataclasses import replace

import pytest

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.compare import compare, render
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import family
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, DATA_PARALLEL, Case, small_recipe, topology_of, train_layouts, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.quantized import on_nodes, run_quantized_oracle

WORLD = 4
TOLERANCE = 1e-9
CODES = ("int8", "int4", "int4_rotated")


def recipe_of(zero: Zero, codes: str = "int8", accumulation: int = 1, parallel: Parallel = DATA_PARALLEL) -> Recipe:
    """On two nodes of two ranks. Every matrix is quantised."""
    zero = replace(zero, quantize_reduce=codes, quantize_min_elements=0)  # type: ignore[arg-type]
    return on_nodes(small_recipe("fp64", WORLD, accumulation, 24, 0.05, zero, parallel), 2)


ALL_THREE = Zero(stage=3, quantize_gather="int8", secondary_shard=2)
SHOWN = {
    "zero 3, all three": recipe_of(ALL_THREE, "int4", 3),
    "zero 2, hsdp, divided": recipe_of(Zero(2, 2, optimizer_within="all"), accumulation=2),
}
ZEROS = (
    Zero(stage=1),
    Zero(stage=2),
    Zero(stage=2, accumulate="local"),
    Zero(stage=3),
    Zero(stage=3, shard_within=2),
    Zero(stage=3, shard_within=2, optimizer_within="all"),
    ALL_THREE,
)
PARALLELS = (DATA_PARALLEL, Parallel(tp=2), Parallel(pp=2), Parallel(ep=2))


def may_meet(zero: Zero, parallel: Parallel, codes: str, accumulation: int) -> bool:
    """Whether replicas are left to HSDP, and microbatches to a pipeline."""
    is_whole = parallel == DATA_PARALLEL or parallel.ep > 1
    is_small = zero.shard_within is None and zero.secondary_shard is None
    return (is_small or is_whole) and (parallel.pp == 1 or accumulation > 1)


ROWS = cover_pairs([ZEROS, PARALLELS, CODES, [1, 3]], may_meet)


def assert_parity(pool: RankPool, case: Case) -> None:
    """Loss, gradients, norm and weights after three steps."""
    found = pool.run(WORLD, train_layouts, [case], timeout_s=300)[0]
    for label, recipe in case.layouts.items():
        layout = found[case.name, label]
        rows = compare(layout, run_quantized_oracle(case, recipe, layout))
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


# --- what DeepSpeed's issues tell of quantised gradients


def train_one_batch(rank: int, world: int, rendezvous: str, recipes: list[Recipe], steps: int) -> list[list[float]]:
    """Body: of each recipe the losses of so many steps on one batch, in bf16, and the largest gradient of each norm's weight."""
    config, found = Case("", family("llama"), {"": recipes[0]}, ODD).config, []
    for number, recipe in enumerate(recipes):
        mesh = connect(topology_of(recipe, config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, config), mesh)
        batch = make_batches(config, 1, 24, recipe.batch.context, 3)[0]
        microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
        found.append([train_step(run, microbatches, step, 1e-2).read().loss for step in range(steps)])
        mesh.close()
    return found


# Nothing divides, neither blocks nor ranks (4852: an assertion on odd shapes).
ODD = {"hidden_size": 30, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10}


@pytest.mark.grid
def test_a_bf16_run_learns_with_codes_as_without(pool: RankPool) -> None:
    """6926: the loss stays where it was; 4851: it does not converge; 7606, 7775: bf16 is read as fp16."""
    steps = 12
    plain = replace(recipe_of(Zero(stage=3)), precision=Precision("bf16", "fp32", "bf16"))
    plain = replace(plain, zero=replace(plain.zero, quantize_reduce="none", quantize_min_elements=2**16))
    recipes = [plain] + [
        replace(plain, zero=replace(plain.zero, quantize_reduce=each, quantize_min_elements=0)) for each in CODES
    ]
    exact, *coded = pool.run(WORLD, train_one_batch, recipes, steps)[0]
    assert exact[-1] < 0.8 * exact[0]
    for losses in coded:
        assert losses[0] == exact[0]
        assert losses != exact
        assert abs(losses[-1] - exact[-1]) < 0.05 * (exact[0] - exact[-1])
