"""A router's load-balancing loss over stages is Hugging Face's over the whole model, to nine digits.

By microbatch: the term is no sum over tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from framework.model.routers import RoutedTokens, Routers
from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from tests.laws.sabotage import Sabotage, errors_of
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool
from tests.ranks.test_pipeline import SCHEDULES, case_of

CHANGES = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
RECOMPUTES = Memory(activation_checkpointing="full", compile="never")


def recipe_of(
    schedule: str, pp: int = 2, tp: int = 1, sequence: bool = False, zero: int = 0, count: int = 4, **changes: Any
) -> Recipe:
    parallel = Parallel(pp=pp, tp=tp, sequence=sequence)
    recipe = small_recipe("fp64", pp * tp, count, 12, 0.05, Zero(stage=zero), parallel)
    return replace(recipe, pipeline=Pipeline(schedule=schedule), **changes)  # type: ignore[arg-type]


def balanced(name: str, layouts: dict[str, Recipe], **changes: Any) -> Case:
    return replace(case_of(name, layouts, **CHANGES, **changes), by_microbatch=True)


FEW = ("1f1b on 3",)  # tokens over tp: the control of a sabotage, below


@pytest.mark.parametrize("is_shown", [FEW.__contains__, pytest.param(bool, marks=pytest.mark.grid)], ids=["few", "all"])
def test_the_term_over_two_and_three_stages_equals_hugging_faces(
    pool: RankPool, is_shown: Callable[[str], bool]
) -> None:
    """Two of qwen3_moe's layers have no router: with three stages or more one of them has none."""
    layouts = {
        "1f1b on 3": recipe_of("1f1b", 3, zero=1),
        "zb_h1 on 2": recipe_of("zb_h1", zero=3),
        "zbv, recomputed": recipe_of("zbv", memory=RECOMPUTES),
        "tokens over tp, split backward": recipe_of("zb_h1", 2, 2, True),
    }
    shown = {label: recipe for label, recipe in layouts.items() if is_shown(label)}
    assert_equal(pool, 4, [balanced("qwen3_moe", shown, mlp_only_layers=[0, 1])])


@pytest.mark.grid
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "olmoe", "gpt_oss", "granitemoe", "minimax_m2"])
def test_families_balance_over_stages(pool: RankPool, name: str) -> None:
    layouts = {each: recipe_of(each, zero=index % 4) for index, each in enumerate(SCHEDULES)}
    layouts |= {"over tp": recipe_of("1f1b", 2, 2), "over tp, tokens, recomputed": recipe_of("zbv", 2, 2, True)}
    changes: dict[str, Any] = {}
    if name == "gpt_oss":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2
    if name == "qwen2_moe":
        changes["mlp_only_layers"] = [1]
    assert_equal(pool, 4, [balanced(name, layouts, **changes)])


# --- sabotage


def forget_the_layers_before() -> AbstractContextManager[Any]:
    """A stage hands on its own layers' sums only."""
    whole = Routers.end
    return patch.object(
        Routers, "end", lambda routers, before=None: whole(routers) + 0 * (0 if before is None else before)
    )


def count_every_copy() -> AbstractContextManager[Any]:
    """Each tensor-parallel rank's gradient of the term counts in full."""
    whole = Routers.end

    def end(routers: Routers, before: Tensor | None = None) -> Tensor:
        routers.tokens = RoutedTokens.of_one_rank()
        return whole(routers, before)

    return patch.object(Routers, "end", end)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("sabotage", "layout", "quantity"),
    [
        (forget_the_layers_before, recipe_of("1f1b", count=2), "loss"),
        (count_every_copy, recipe_of("1f1b", 2, 2, count=2), "gradient, step 1"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_dropped_rule_shows_and_the_whole_code_does_not(
    pool: RankPool, sabotage: Sabotage, layout: Recipe, quantity: str
) -> None:
    case = balanced("mixtral", {"": layout})
    errors = errors_of(pool, [sabotage], case)
    assert max(errors["whole"].values()) < case.tolerance
    assert errors[sabotage.__name__][quantity] > 1e-6
