"""Every ZeRO layout is the training run of stock Hugging Face and torch in one process: losses, norms, gradients, weights."""

from collections.abc import Callable, Mapping
from itertools import product
from operator import attrgetter
from typing import Literal

import pytest

from framework.recipe.schema import Recipe, Zero
from tests.families import FAMILIES, Family, family
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

Ways = Mapping[tuple[str, float | None, bool], tuple[int, ...]]
FLAGSHIPS = ("llama", "gpt2", "qwen3", "gemma2", "mixtral", "gpt_neox")
# Divides into 2, 3 or 4 ranks x 1 or 3 microbatches.
SEQUENCES = 12
WAYS: tuple[Literal["sharded", "local"], ...] = ("sharded", "local")
# Stock code that has no fp64: xglm puts fp64's lowest number into an fp32 tensor.
WITHOUT_FP64 = ("xglm",)


def zeros(world: int, accumulation: int) -> list[Zero]:
    """Every stage, over all ranks and over two of four; over several microbatches, each way to accumulate them."""
    within = (None, 2) if world == 4 else (None,)
    ways = ("sharded", "local") if accumulation > 1 else ("sharded",)
    return [
        Zero(stage=stage, shard_within=degree, accumulate=way)
        for stage, degree, way in product((1, 2, 3), within, ways)
        if stage > 1 or way == "sharded"
    ]


def pairs_of_zeros(world: int) -> list[tuple[int, Zero]]:
    """Numbers of microbatches with layouts of ZeRO in which any two values meet."""
    factors = ((1, 3), (1, 2, 3), (None, 2) if world == 4 else (None,), WAYS)
    rows = cover_pairs(factors, lambda count, stage, within, way: way == "sharded" or (count > 1 and stage > 1))
    return [(count, Zero(stage=stage, shard_within=within, accumulate=way)) for count, stage, within, way in rows]


def few_layouts(precision: str, clip_norm: float | None, worlds: tuple[int, ...]) -> dict[str, Recipe]:
    return {
        f"{world} ranks, accumulation {count}, {zero}": small_recipe(
            precision, world, count, SEQUENCES, clip_norm, zero
        )
        for world in worlds
        for count, zero in pairs_of_zeros(world)
    }


def layouts(precision: str, clip_norm: float | None, worlds: tuple[int, ...]) -> dict[str, Recipe]:
    return {
        f"{world} ranks, accumulation {count}, {zero}": small_recipe(
            precision, world, count, SEQUENCES, clip_norm, zero
        )
        for world, count in product(worlds, (1, 3))
        for zero in zeros(world, count)
    }


# (precision, clip_norm, tied) -> numbers of ranks. Clipping knows nothing of ties nor of the number of ranks: pairs suffice.
# The two first have every value of each, and every stage and accumulation; make test has the first of them.
FIRST: dict[str, Ways] = {
    "gpt2": {("fp64", 0.05, True): (4,)},
    "mixtral": {("fp32", None, False): (3,)},
}
CORE = {("fp64", 0.05, True): (2, 4), ("fp32", None, False): (3,)}
MORE = {
    ("fp64", 0.05, False): (3,),
    ("fp64", None, True): (3,),
    ("fp64", None, False): (2, 4),
    ("fp32", 0.05, False): (2,),
    ("fp32", None, True): (3,),
}


@pytest.mark.parametrize(
    ("name", "ways", "lay_out"),
    [
        *(
            pytest.param(name, ways, few_layouts, marks=() if name == "gpt2" else pytest.mark.grid, id=name)
            for name, ways in FIRST.items()
        ),
        *(
            pytest.param(
                name,
                {way: worlds},
                layouts if name in FIRST else few_layouts,
                marks=pytest.mark.grid,
                id=f"{name} in the core's {way}",
            )
            for name, (way, worlds) in product(FLAGSHIPS, CORE.items())
        ),
        *(
            pytest.param(name, {way: worlds}, layouts, marks=pytest.mark.grid, id=f"{name} in {way}")
            for name, (way, worlds) in product(FIRST, MORE.items())
        ),
    ],
)
def test_any_stage_ranks_accumulation_clipping_and_ties_equal_one_process(
    pool: RankPool, name: str, ways: Ways, lay_out: Callable[..., dict[str, Recipe]]
) -> None:
    cases = [
        Case(
            f"{name} in {precision}, clipped at {clip}, {'tied' if tied else 'untied'}",
            family(name),
            lay_out(precision, clip, worlds),
            {"tie_word_embeddings": tied},
        )
        for (precision, clip, tied), worlds in ways.items()
    ]
    assert_equal(pool, 4, cases)


@pytest.mark.grid
@pytest.mark.parametrize("each", FAMILIES, ids=attrgetter("name"))
def test_every_family_at_stage_3_equals_one_process(pool: RankPool, each: Family) -> None:
    precision = "fp32" if each.name in WITHOUT_FP64 else "fp64"
    recipe = small_recipe(precision, 2, accumulation=2, sequences=4, clip_norm=0.05, zero=Zero(stage=3))
    assert_equal(pool, 2, [Case(f"{each.name} in {precision}", each, {"": recipe})])
