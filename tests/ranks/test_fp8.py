"""precision.compute: fp8. Layouts beside stock Hugging Face with torchao's own layers, and what stays bf16."""

from tests.torchao_folder import FOLDER  # noqa: F401  # isort: skip  first: what follows imports torchao from there

from dataclasses import replace

import pytest
import torch

from framework.comm.communicator import read_traffic, subtract_traffic
from framework.comm.connect import connect
from framework.model.fp8 import Fp8Matmul, Scaling
from framework.model.matmul import MatmulLinear
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Parallel, Pipeline, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.compare import ErrorRow, compare
from framework.verify.evidence import Evidence
from framework.verify.layout import share
from tests.families import build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import CPU, Case, expect, small_recipe, topology_of, train_layouts
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

SEQUENCES = 8
# Wide enough for layers of every tp rank to be multiples of 16.
WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CHECKPOINTED = Memory(activation_checkpointing="full")
ZB_H1 = Pipeline(schedule="zb_h1")


def make_recipe(
    world: int,
    scaling: Scaling = "tensor",
    parallel: Parallel = Parallel(),  # noqa: B008  a frozen value
    zero: int = 0,
    compute: str = "fp8",
) -> Recipe:
    accumulation = 4 * parallel.tp * parallel.pp // world
    recipe = small_recipe("bf16", world, accumulation, SEQUENCES, None, Zero(stage=zero), parallel)
    return replace(recipe, precision=Precision(compute, fp8_scaling=scaling))  # type: ignore[arg-type]


# Those that multiply the same rows together as one process does: but for the order of sums they round alike.
EQUAL = {
    "one rank": make_recipe(1),
    "dp 2, stage 3, checkpointed": replace(make_recipe(2, zero=3), memory=CHECKPOINTED),
    "pp 2, zb_h1": replace(make_recipe(2, parallel=Parallel(pp=2)), pipeline=ZB_H1),
}
EQUAL_BY_ROW = {"dp 2, stage 2": make_recipe(2, "row", zero=2)}
# Here scales are of the parts that ranks hold.
SPLIT = {
    "tp 2": make_recipe(2, parallel=Parallel(tp=2)),
    "tp 2, overlapped, stage 1": make_recipe(2, parallel=Parallel(tp=2, overlap="always"), zero=1),
}
SPLIT_BY_ROW = {"tp 2 without sequence": make_recipe(2, "row", Parallel(tp=2, sequence=False))}


def compare_layouts(
    rank: int, world: int, rendezvous: str, layouts: dict[str, Recipe]
) -> tuple[dict[str, list[ErrorRow]], list[ErrorRow]]:
    """Body: each layout beside torchao's layers in stock Hugging Face; and what fp8 itself changes, beside bf16."""
    case = Case("llama", family("llama"), layouts, WIDTHS, by_microbatch=True)
    found = train_layouts(rank, world, rendezvous, [case])
    if rank:
        return {}, []
    expected = expect(case)
    recipe = replace(case.recipe, precision=Precision("bf16"))
    noise = compare(expect(replace(case, layouts={"": recipe})), expected)
    return {label: compare(evidence, expected) for (_, label), evidence in found.items()}, noise


# Of what fp8 itself changes of a gradient, beside bf16: what is left where the same numbers are multiplied, and where others are.
SAME, OTHER = 0.1, 2.0


@pytest.mark.parametrize(
    ("layouts", "share"),
    [
        pytest.param(EQUAL, SAME, id="equal"),
        pytest.param(EQUAL_BY_ROW, SAME, id="equal, by row", marks=pytest.mark.grid),
        pytest.param(SPLIT, OTHER, id="split", marks=pytest.mark.grid),
        pytest.param(SPLIT_BY_ROW, OTHER, id="split, by row", marks=pytest.mark.grid),
    ],
)
def test_layouts_train_as_torchaos_layers_do(pool: RankPool, layouts: dict[str, Recipe], share: float) -> None:
    rows, noise = pool.run(2, compare_layouts, layouts)[0]
    effect = {row.quantity: row.error for row in noise}
    assert rows.keys() == layouts.keys()
    for label, found in rows.items():
        errors = {row.quantity: row.error for row in found}
        assert errors["gradient, step 1"] < share * effect["gradient, step 1"], label
        # Later steps start from weights that have gone apart by rounding.
        assert errors["weight, step 3"] < OTHER * effect["weight, step 3"], label


def train_coded(rank: int, world: int, rendezvous: str, recipe: Recipe) -> tuple[list[ErrorRow], list[ErrorRow]]:
    """Body: a layout whose other weights travel as codes, beside one process that rounds both; and what fp8 itself changes."""
    case = Case("llama", family("llama"), {"": recipe}, WIDTHS, by_microbatch=True)
    found = train_layouts(rank, world, rendezvous, [case])
    if rank:
        return [], []
    layout = found["llama", ""]
    assert any((blocks >= 0).any() for blocks in layout.gathered.values())
    expected = expect(case, layout)
    exact = replace(case, layouts={"": replace(recipe, precision=Precision("bf16"))})
    return compare(layout, expected), compare(expect(exact, layout), expected)


@pytest.mark.grid
def test_weights_beside_fp8_layers_may_travel_as_codes(pool: RankPool) -> None:
    recipe = replace(make_recipe(2), zero=Zero(stage=3, quantize_gather="int8", quantize_min_elements=64))
    rows, noise = pool.run(2, train_coded, recipe)[0]
    effect = {row.quantity: row.error for row in noise}
    errors = {row.quantity: row.error for row in rows}
    assert errors["gradient, step 1"] < SAME * effect["gradient, step 1"], rows
    assert errors["weight, step 3"] < OTHER * effect["weight, step 3"], rows


def find_layers_in_fp8(rank: int, world: int, rendezvous: str, recipe: Recipe, name: str) -> set[str]:
    """Body: the last words of the names of what multiplies fp8 numbers."""
    config = build_config(family(name), **WIDTHS)
    mesh = connect(topology_of(recipe, config), CPU, rendezvous, rank)
    model = build(make_plan(recipe, config), mesh).stages[0].model.model
    found = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, MatmulLinear) and isinstance(module.matmul, Fp8Matmul)
    }
    mesh.close()
    return found


def test_head_routers_and_experts_stay_bf16(pool: RankPool) -> None:
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    recipe = make_recipe(2, parallel=Parallel(tp=2))
    assert pool.run(2, find_layers_in_fp8, recipe, "llama")[0] == attention | {"gate_proj", "up_proj", "down_proj"}
    assert pool.run(2, find_layers_in_fp8, recipe, "mixtral")[0] == attention


def gather(
    rank: int, world: int, rendezvous: str, recipes: dict[str, Recipe]
) -> tuple[dict[str, Evidence], dict[str, tuple[int, int]]]:
    """Body: evidence of each layout; and the bytes that its second step has gathered on this rank, beside those of the plan."""
    case = Case("llama", family("llama"), recipes, WIDTHS)
    evidence = {label: each for (_, label), each in train_layouts(rank, world, rendezvous, [case]).items()}
    sent = {}
    for number, (label, recipe) in enumerate(recipes.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-bytes-{number}", rank)
        plan = make_plan(recipe, case.config)
        run = build(plan, mesh)
        for step, batch in enumerate(case.batches()[:2]):
            before = read_traffic(mesh.axes)
            train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), step, 1e-3)
        moved = subtract_traffic(read_traffic(mesh.axes), before)["shard"]
        sent[label] = moved["all_gather"][1], measure_traffic(plan, rank)["gathers"]
        mesh.close()
    return evidence, sent


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.grid)], ids=["few", "all"])
def test_weights_that_travel_as_fp8_change_no_bit(pool: RankPool, is_whole: bool) -> None:
    recipe = make_recipe(2, zero=3)
    recipes = {
        "fp8": recipe,
        "kept": replace(recipe, zero=Zero(stage=3, keep_gathered=True)),
        # At stage 2 parameters stay, and what has changed of them is gathered in bf16.
        "bf16": make_recipe(2, zero=2),
        "bf16, again": replace(recipe, precision=Precision("bf16")),
    }
    if not is_whole:
        recipes = {label: recipes[label] for label in ("fp8", "bf16")}
    evidence, sent = pool.run(2, gather, recipes)[0]
    for label in recipes.keys() & {"fp8", "kept"}:
        assert evidence[label].losses == evidence["bf16"].losses
        assert all(
            torch.equal(weight, evidence["bf16"].weights[name]) for name, weight in evidence[label].weights.items()
        )
    assert {label: gathered for label, (gathered, _) in sent.items()} == {
        label: told for label, (_, told) in sent.items()
    }
    if is_whole:  # embedding, head and norms travel in bf16
        assert sent["fp8"][0] < 0.8 * sent["bf16, again"][0]
