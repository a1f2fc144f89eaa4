"""Tensor-parallel layouts of the whole training step: with ZeRO, data parallelism, accumulation and clipping they are the run
of stock Hugging Face and torch in one process: losses, norms, gradients, weights. `test_tensor.py` splits each family alone."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from operator import attrgetter
from typing import Any

import pytest

from framework.recipe.schema import Memory, Parallel, Recipe, Zero
from tests.families import FAMILIES, Family, family
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool
from tests.ranks.test_parity import WITHOUT_FP64
from tests.ranks.test_tensor import CHANGES

pytestmark = IN_TURN

SEQUENCES = 4
NAMES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "olmo", "olmo2", "gpt2", "gpt_neox",
    "gpt_bigcode", "falcon", "falcon_grouped", "bloom", "opt", "mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss",
)  # fmt: skip
# (tp, dp, sequence, stage) of four ranks at most. A family's split knows nothing of ZeRO: each meets every value once or more.
PAIRS = ((2, 2, True, 3), (2, 2, False, 1), (2, 1, True, 0), (4, 1, True, 3))
CROSS = tuple((2, dp, sequence, stage) for dp, sequence, stage in product((1, 2), (True, False), (0, 1, 3)))
CROSS_PAIRS = cover_pairs(((2,), (1, 2), (True, False), (0, 1, 3)), lambda *row: True)
TIES = (("llama", False), ("llama", True), ("gpt2", True))


def layout(precision: str, tp: int, dp: int, sequence: bool, stage: int) -> Recipe:
    parallel = Parallel(tp=tp, sequence=sequence)
    return small_recipe(precision, tp * dp, 2, SEQUENCES, 0.05, Zero(stage=stage), parallel)


def layouts(precision: str, ways: Iterable[tuple[Any, ...]]) -> dict[str, Recipe]:
    return {
        f"tp {tp}, dp {dp}, sequence {sequence}, stage {stage}": layout(precision, tp, dp, sequence, stage)
        for tp, dp, sequence, stage in ways
    }


SHOWN = ((2, 2, True, 3),)


@pytest.mark.parametrize("ways", [SHOWN, pytest.param(CROSS_PAIRS, marks=pytest.mark.grid)], ids=["few", "pairs"])
def test_data_parallelism_sequence_and_stage_equal_one_process(pool: RankPool, ways: Iterable[tuple[Any, ...]]) -> None:
    changes = {"tie_word_embeddings": True}
    cases = [Case("llama", family("llama"), layouts("fp64", ways), changes)]
    if ways is not SHOWN:
        cases.append(Case("llama in fp32", family("llama"), layouts("fp32", PAIRS[-1:]), changes))
    assert_equal(pool, 4, cases)


@pytest.mark.parametrize("regathers", [False, True])
def test_a_head_behind_layers_without_a_final_norm_equals_one_process(pool: RankPool, regathers: bool) -> None:
    """Its weight's gradient would be computed under a sum in the last layer's backward, behind the head's reduction."""
    memory = Memory(compile="never", gathered_inputs="regather" if regathers else "keep")
    shown = {label: replace(recipe, memory=memory) for label, recipe in layouts("fp64", SHOWN).items()}
    changes = {"do_layer_norm_before": False, "tie_word_embeddings": False}
    assert_equal(pool, 4, [Case("opt", family("opt"), shown, changes)])


@pytest.mark.grid
@pytest.mark.parametrize("tied", [True, False])
def test_every_combination_with_zero_equals_one_process(pool: RankPool, tied: bool) -> None:
    changes = {"tie_word_embeddings": tied}
    cases = [Case("llama", family("llama"), layouts("fp64", CROSS), changes)]
    cases.append(Case("llama in fp32", family("llama"), layouts("fp32", PAIRS), changes))
    assert_equal(pool, 4, cases)


@pytest.mark.parametrize(
    ("name", "tied", "stage"),
    few_of(((*tie, stage) for tie in TIES for stage in (0, 3)), lambda *row: row == ("gpt2", True, 3)),
)
def test_stages_of_split_layers_equal_one_process(pool: RankPool, name: str, tied: bool, stage: int) -> None:
    """tp 2 under pp 2, tied across the stages and untied."""
    parallel = Parallel(tp=2, pp=2, sequence=False)
    layouts = {"": small_recipe("fp64", 4, 2, SEQUENCES, 0.05, Zero(stage=stage), parallel)}
    assert_equal(pool, 4, [Case(f"{name} {tied}", family(name), layouts, {"tie_word_embeddings": tied})])


@pytest.mark.grid
@pytest.mark.parametrize(
    "each",
    [each for each in FAMILIES if each.name in NAMES and each.name not in WITHOUT_FP64],
    ids=attrgetter("name"),
)
def test_every_family_equals_one_process(pool: RankPool, each: Family) -> None:
    assert_equal(pool, 4, [Case(each.name, each, layouts("fp64", PAIRS), CHANGES.get(each.name, {}))])


@pytest.mark.grid
def test_four_of_eight_ranks_hold_a_layer() -> None:
    """tp 4 x dp 2: dense, and experts beside grouped heads."""
    eight = RankPool(8)
    ways = ((4, 2, True, 3), (4, 2, False, 1), (4, 2, True, 0))
    try:
        assert_equal(eight, 8, [Case(name, family(name), layouts("fp64", ways)) for name in ("llama", "qwen3_moe")])
    finally:
        eight.close()
