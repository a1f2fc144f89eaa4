"""Moments in bf16 and int8 in every kind of layout: the same run as a stock optimizer whose moments one process rounds alike."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from framework.recipe.schema import Optim, Parallel, Recipe, Zero
from tests.families import family
from tests.grid import IN_TURN
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# On 4 ranks, but for the first.
DEGREES: dict[str, dict[str, int]] = {"dp": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}}
ZEROS = {
    "0": Zero(stage=0),
    "1": Zero(stage=1),
    "2": Zero(stage=2),
    "3": Zero(stage=3),
    "HSDP all": Zero(stage=2, shard_within=2, optimizer_within="all"),
}
OPTIMIZERS = {
    "adamw": Optim(lr=1e-2, eps=1e-8, clip_norm=0.05),
    "lion": Optim(name="lion", lr=1e-3, clip_norm=0.05),
    "sgd": Optim(name="sgd", lr=1e-1, momentum=0.9, clip_norm=0.05),
}


def make(degree: str, zero: str, optim: str, moments: Any) -> Recipe:
    recipe = small_recipe("fp64", 4, 1, zero=ZEROS[zero], parallel=Parallel(**DEGREES[degree]))  # type: ignore[arg-type]
    return replace(recipe, optim=OPTIMIZERS[optim], precision=replace(recipe.precision, moments=moments))


def cases(rows: Iterator[tuple[Any, ...]]) -> list[Case]:
    """One for each row: blocks of int8 are a layout's own, and Lion's oracle follows one layout."""
    return [
        Case(f"{' '.join(row)}", family("mixtral" if row[0] == "ep" else "llama"), {"": make(*row)}) for row in rows
    ]


def is_legal(degree: str, zero: str, optim: str, moments: str) -> bool:
    fits = zero != "HSDP all" or degree in ("dp", "ep")
    return fits and not (optim == "lion" and moments == "int8")


# Each way to hold moments once; in the grid other optimizers.
FEW = (("dp", "HSDP all", "adamw", "int8"), ("ep", "3", "adamw", "bf16"))
MORE = (
    ("tp", "3", "adamw", "int8"),
    ("pp", "2", "lion", "bf16"),
    ("dp", "3", "sgd", "bf16"),
    ("pp", "1", "adamw", "int8"),
    ("ep", "2", "adamw", "int8"),
    ("tp", "0", "adamw", "bf16"),
)


@pytest.mark.parametrize("rows", [FEW, pytest.param(MORE, marks=pytest.mark.grid)], ids=["few", "more"])
def test_low_bit_moments_train_as_one_process_does(pool: RankPool, rows: tuple[tuple[str, ...], ...]) -> None:
    assert_equal(pool, 4, cases(iter(rows)))


@pytest.mark.grid
def test_any_two_of_degrees_stages_optimizers_and_moments(pool: RankPool) -> None:
    factors = (list(DEGREES), list(ZEROS), list(OPTIMIZERS), ["bf16", "int8"])
    assert_equal(pool, 4, cases(iter(cover_pairs(factors, is_legal))))
