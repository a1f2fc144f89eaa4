"""Modules that mix tokens by code of their own, in models whose sequences ranks divide: the training run of one process."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices
from framework.model.shrink import shrink
from framework.parallel.attention import find_whole, hook
from framework.parallel.attention.whole_tokens import WholeTokens, tokens_of
from framework.plan.forecast_plan import forecast_plan
from framework.plan.plan import make_plan
from framework.plan.space import ModelRules
from tests.families import build_config, family
from tests.ranks.mixers import RECOMPUTES, Way
from tests.ranks.parity import Case, assert_equal, run_cases
from tests.ranks.pool import RankPool

# Biases of distance; windows, and code that reads the shape of the sequence behind the layers.
SHOWN = (Way("bloom", 2), Way("gpt_neo", 2, "ulysses", packs=True, memory=RECOMPUTES))
MORE = (Way("gpt_neo", 2, pp=2, count=3), Way("bloom", 2, tp=2, sequence=False), Way("mpt", 4, [2, 2], context=10))


def test_mixers_of_their_own_equal_one_process(pool: RankPool) -> None:
    assert_equal(pool, 2, [way.case() for way in SHOWN])


@pytest.mark.grid
@pytest.mark.parametrize("name", ["xlstm", "deepseek_v4"])
def test_states_of_mixers_and_ids_for_routers_are_told_from_tokens(name: str, pool: RankPool) -> None:
    """xlstm's mixers hand on a state; deepseek_v4 chooses experts by the ids of tokens."""
    own = replace(family("bloom"), name=name, config=shrink(AutoConfig.for_model(name)).to_dict())
    case = replace(Way("bloom", 2).case(), family=own)
    assert_equal(pool, 2, [case])


@pytest.mark.grid
def test_mixers_of_their_own_beside_other_axes_equal_one_process(pool: RankPool) -> None:
    assert_equal(pool, 4, [way.case() for way in MORE])


def test_what_is_divided_by_our_attention_is_not_gathered() -> None:
    for name, expected in (("bloom", {"BloomAttention"}), ("llama", set())):
        assert find_whole(build_config(family(name)), Way(name, 2).recipe) == expected


def test_tokens_divided_over_tp_are_refused() -> None:
    way = Way("bloom", 2, tp=2)
    with pytest.raises(ModelError, match=r"BloomAttention of bloom models .* set parallel\.sequence=false"):
        make_plan(way.recipe, way.case().config)
    plan = make_plan(replace(way, sequence=False).recipe, way.case().config)
    refused = plan.candidate.changed({"sequence": True})
    assert "set parallel.sequence=false" in str(ModelRules(plan.shape).refuse(refused))


def test_a_forecast_says_what_is_not_divided() -> None:
    way = Way("bloom", 2)
    cautions = forecast_plan(make_plan(way.recipe, way.case().config)).cautions
    assert any("BloomAttention compute on the tokens of all ranks of cp" in each for each in cautions)


def test_a_dropout_of_attention_is_refused() -> None:
    config = build_config(family("bloom"), attention_dropout=0.1)
    with pytest.raises(ModelError, match="cannot divide the sequences of bloom"):
        make_plan(Way("bloom", 2).recipe, config)


def miss_tokens(rank: int, world: int, rendezvous: str, cases: list[Case]) -> Any:
    """Body: runs whose mixers get zeros for the tokens of other ranks."""

    def own_alone(slices: ContextSlices, cp: Communicator) -> WholeTokens:
        tokens = tokens_of(slices, cp)
        return replace(tokens, gather=lambda x: tokens.place(x) if x.is_floating_point() else tokens.gather(x))

    hook.tokens_of = own_alone  # type: ignore[attr-defined]
    try:
        return run_cases(rank, world, rendezvous, cases)
    finally:
        hook.tokens_of = tokens_of  # type: ignore[attr-defined]


@pytest.mark.grid
def test_tokens_that_are_not_gathered_are_missed(pool: RankPool) -> None:
    with pytest.raises(AssertionError, match="gradient"):
        assert_equal(pool, 2, [Way("bloom", 2).case()], miss_tokens)
