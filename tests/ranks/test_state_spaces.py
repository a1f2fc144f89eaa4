"""State-space mixers, whatever ranks divide their heads or channels: the training run of stock transformers in one process."""

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from framework.parallel.tensor import layers
from framework.recipe.schema import Zero
from tests.families import STATE_SPACES
from tests.grid import IN_TURN, few_of
from tests.ranks.mixers import RECOMPUTES, Way, find
from tests.ranks.parity import assert_equal
from tests.ranks.pool import RankPool
from tests.ranks.tensor_parity import TensorCase, compare_cases

pytestmark = IN_TURN

NAMES = tuple(each.name for each in STATE_SPACES)


def assert_ways_equal(pool: RankPool, *ways: Way) -> None:
    assert_equal(pool, max(way.world for way in ways), [way.case(clips=False) for way in ways])


@pytest.mark.parametrize("name", few_of(NAMES, lambda name: name in ("granitemoehybrid", "jamba")))
def test_heads_and_channels_over_tp(pool: RankPool, name: str) -> None:
    assert_ways_equal(pool, Way(name, tp=2))


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_heads_and_channels_over_tp_otherwise(pool: RankPool, name: str) -> None:
    """On more ranks than groups; tokens not divided; with shards of ZeRO-3 beside, and recomputed."""
    plain, sharded = Way(name, tp=2, sequence=False), Way(name, tp=2, dp=2, zero=Zero(stage=3), memory=RECOMPUTES)
    assert_ways_equal(pool, plain, sharded, Way(name, tp=4))


@pytest.mark.parametrize("name", few_of(NAMES, lambda name: name == "nemotron_h"))
def test_stages_of_layers_of_several_kinds(pool: RankPool, name: str) -> None:
    assert_ways_equal(pool, Way(name, pp=2, count=3))


@pytest.mark.parametrize("name", few_of(NAMES, lambda name: name in ("bamba", "mamba")))
def test_states_and_windows_over_cp(pool: RankPool, name: str) -> None:
    """With documents that span ranks."""
    assert_ways_equal(pool, Way(name, cp=2, packs=True))


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_states_and_windows_over_cp_otherwise(pool: RankPool, name: str) -> None:
    """Without documents; on more ranks, where pieces are shorter than windows; by Ulysses, recomputed; on one rank; beside tp."""
    assert_ways_equal(
        pool,
        Way(name, cp=2),
        Way(name, cp=4, context=10, packs=True),
        Way(name, cp=2, method="ulysses", memory=RECOMPUTES, packs=True),
        Way(name, packs=True),
        Way(name, cp=2, tp=2, packs=True, zero=Zero(stage=3)),
    )


# --- sabotage


def share_without_a_sum() -> AbstractContextManager[Any]:
    """Ranks keep their own part of the gradient of a convolution that they share."""

    def share(x: Tensor, sizes: Any, own: Any, tp: Any) -> Tensor:
        divided, shared = x.split([sizes[0], sum(sizes[1:])])
        return layers.torch.cat([divided, layers._select(shared, sizes[1:], own, dim=0)])

    return patch.object(layers, "_share_channels", share)


def norm_each_for_itself() -> AbstractContextManager[Any]:
    """The gated norm's mean is over a rank's own features."""
    return patch.object(layers.duals, "reduce_from", lambda x, axis: x * axis.size)


@pytest.mark.grid
@pytest.mark.parametrize("sabotage", [share_without_a_sum, norm_each_for_itself])
def test_each_sum_over_tp_matters(pool: RankPool, sabotage: Any) -> None:
    cases = [TensorCase(find("bamba"), 2, True, sabotage=each) for each in (None, sabotage)]
    found = [compare_and_take_worst(pool, case) for case in cases]
    assert found[0] < 1e-9
    assert found[1] > 1e-4


def compare_and_take_worst(pool: RankPool, case: TensorCase) -> float:
    return max(error for of_rank in pool.run(2, compare_cases, [case]) for error in of_rank.values())
