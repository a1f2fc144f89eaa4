"""Gradients that leave a node as codes: a layout is the training run of one process that rounds as its messages do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import train_step
from framework.verify.compare import compare, render
from framework.verify.evidence import make_batches
from framework.verify.layout import gather_full, owned_weights, share
from framework.verify.plain_rounding import PlainReduction
from framework.verify.prepare import VerifyOptions, shrink_recipe
from framework.verify.sides import Sides
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, DATA_PARALLEL, Case, small_recipe, topology_of, train_layouts, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.quantized import on_nodes, run_quantized_oracle
from tests.saving import save_checkpoint

pytestmark = IN_TURN

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


# --- `verify`, whose oracle rounds by its own words, and checkpoints


def sides_of(recipe: Recipe, pool: RankPool) -> Sides:
    return Sides(recipe, Case("llama", family("llama"), {"": recipe}).config, 2, pool)


@pytest.mark.parametrize(
    "recipe",
    few_of(
        [
            recipe_of(Zero(stage=3, quantize_gather="int8"), "int4", 3, Parallel(tp=2)),
            recipe_of(Zero(stage=1), "int4", 3),
            recipe_of(Zero(stage=2), "int8", 3),
            recipe_of(ALL_THREE, "int8", 1),
        ],
        lambda recipe: recipe.parallel.tp == 2,
    ),
)
def test_verify_rounds_gradients_as_ranks_do(pool: RankPool, recipe: Recipe) -> None:
    rows = compare(*sides_of(recipe, pool).run())
    assert worst_error(rows) < TOLERANCE, render(rows, TOLERANCE)


@pytest.mark.grid
def test_verify_sees_gradients_that_are_summed_in_one_hop(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = sides_of(recipe_of(Zero(stage=3)), pool)
    take = PlainReduction.take

    def take_in_one(reduction: PlainReduction) -> dict[str, Tensor]:
        reduction._on_node = 1
        return take(reduction)

    monkeypatch.setattr(PlainReduction, "take", take_in_one)
    assert worst_error(compare(*sides.run())) > 1e-4


def test_verify_keeps_codes_where_it_can_round_alike() -> None:
    recipe = recipe_of(Zero(stage=3))

    def kept(dtype: str, **parallel: int) -> str:
        wide = replace(recipe, parallel=replace(recipe.parallel, **parallel))
        small, reasons = shrink_recipe(wide, ["x"], 256, VerifyOptions(dtype=dtype))  # type: ignore[arg-type]
        assert (small.zero.quantize_reduce == "none") == ("zero.quantize_reduce" in reasons)
        return small.zero.quantize_reduce

    assert (kept("fp64"), kept("fp64", tp=2), kept("fp32"), kept("fp64", pp=2)) == ("int8", "int8", "none", "none")


def save_and_load(rank: int, world: int, rendezvous: str, folder: Path, before: Recipe, after: Recipe) -> bool:
    """Body: a step of a layout, a checkpoint, and whether another layout's weights are the same bits."""
    config, weights = Case("", family("llama"), {"": before}).config, []
    for number, recipe in enumerate((before, after)):
        mesh = connect(topology_of(recipe, config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, config), mesh, resumes=number == 1)
        if number == 0:
            (batch,) = make_batches(config, 1, 24, recipe.batch.context, 3)
            train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), 0, 0.1).read()
            save_checkpoint(folder, 1, saved_entries(run), RunState("x", "y", 1).to_json(), mesh.axis("world"), keep=1)
        else:
            restore(run, folder)
        weights.append(gather_full(owned_weights(run), mesh.axis("world")))
        run.close()
        mesh.close()
    return all(torch.equal(weights[1][name], each) for name, each in weights[0].items())


def test_masters_are_exact_in_checkpoints_and_go_on_in_another_layout(pool: RankPool, tmp_path: Path) -> None:
    after = small_recipe("fp64", WORLD, 1, 24, 0.05, Zero(stage=1), Parallel(tp=2, pp=2))
    assert all(pool.run(WORLD, save_and_load, tmp_path, recipe_of(ALL_THREE, "int4"), after, timeout_s=300))


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
