"""Any recipe of any family on any ranks is the training run of one process: random layouts, in fp64."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.recipe.schema import LearningRateSchedule, Memory, Model, Optim, ParameterGroup, Recipe, Zero
from tests.families import FAMILIES, Family
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool
from tests.ranks.test_parity import WITHOUT_FP64

TRAINABLE = [each for each in FAMILIES if each.name not in WITHOUT_FP64]
# By name, so that every family has some of each. A group that takes nothing is an error, hence "." last.
FREEZES = ([], [r"\.0\."], ["embed|wte|wpe"], ["bias|norm|ln"])
GROUPS = ([], ["."], [r"\.0\.", "."], ["bias|norm|ln", "."])


@st.composite
def zeros(draw: st.DrawFn, world: int) -> Zero:
    stage = draw(st.integers(0, 3))
    degrees = [None, *(degree for degree in range(1, world + 1) if world % degree == 0)]
    return Zero(
        stage=stage,
        shard_within=draw(st.sampled_from(degrees)) if stage else None,
        accumulate=draw(st.sampled_from(["sharded", "local"])) if stage > 1 else "sharded",
        keep_gathered=draw(st.booleans()) if stage == 3 else False,
        prefetch_units=draw(st.integers(0, 3)),
    )


@st.composite
def optims(draw: st.DrawFn) -> Optim:
    ratios = st.sampled_from([0.3, 1.0, 2.0])
    return Optim(
        name=draw(st.sampled_from(["adamw", "lion", "sgd"])),
        lr=draw(st.sampled_from([1e-3, 1e-2])),
        weight_decay=draw(st.sampled_from([0.0, 0.3])),
        clip_norm=draw(st.sampled_from([None, 1e-3])),
        groups={pattern: ParameterGroup(pattern, draw(ratios)) for pattern in draw(st.sampled_from(GROUPS))},
        schedule=LearningRateSchedule(draw(st.sampled_from(["constant", "linear", "cosine", "wsd"]))),
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    world, accumulation, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return replace(
        small_recipe("fp64", world, accumulation, world * accumulation * rows),
        zero=draw(zeros(world)),
        optim=draw(optims()),
        memory=Memory(draw(st.sampled_from(["none", "full"])), compile="never"),
        model=Model(freeze=draw(st.sampled_from(FREEZES))),
    )


@pytest.mark.grid
@settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(family=st.sampled_from(TRAINABLE), recipe=recipes(), tied=st.booleans())
def test_a_random_layout_equals_one_process(pool: RankPool, family: Family, recipe: Recipe, tied: bool) -> None:
    case = Case(family.name, family, {"": recipe}, {"tie_word_embeddings": tied})
    assert_equal(pool, recipe.launch.ranks, [case])
