"""Layers between which a token has several streams of hidden states (hyper-connections): pipeline stages hand on all."""

from dataclasses import replace

import pytest
from transformers import CONFIG_MAPPING

from framework.comm.connect import connect
from framework.model.probe import find_streams
from framework.model.shrink import shrink
from framework.plan.cluster import ClusterRates, LinkSpan
from framework.plan.plan import make_plan
from framework.plan.time import TimeModel
from framework.plan.traffic import measure_traffic
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import Family, build_config, family
from tests.ranks.mixers import Way
from tests.ranks.parity import CPU, Case, assert_equal, topology_of
from tests.ranks.pool import RankPool

pytestmark = pytest.mark.skipif("deepseek_v4" not in CONFIG_MAPPING, reason="this transformers has no deepseek_v4")


def make_case() -> Case:
    values = shrink(CONFIG_MAPPING["deepseek_v4"](), 4).to_dict()
    way = Way("llama", pp=2, count=3, context=32)
    return Case("streams", Family("deepseek_v4", values), {"pp": way.recipe})


def test_streams_are_found() -> None:
    assert find_streams(build_config(family("llama"))) == ()
    assert find_streams(make_case().config) == (4,)


def test_the_forecast_of_a_message_has_them() -> None:
    case = make_case()
    (recipe,) = case.layouts.values()
    plan = make_plan(recipe, case.config)
    times = TimeModel(plan.shape, plan.recipe, replace(ClusterRates.from_recipe(plan.recipe), overhead_s=0.0))
    link = replace(times.cluster.links["send"], start_s=0.0, spans=(LinkSpan(1, 1.0, 0.0),), correction=None)
    times.cluster = replace(times.cluster, links={**times.cluster.links, "send": link})
    assert times.costs(plan.candidate).message == plan.candidate.tokens * plan.message_width * times.rates.itemsize


@pytest.mark.grid
def test_stages_of_several_streams_equal_one_process(pool: RankPool) -> None:
    assert_equal(pool, 2, [make_case()])


def count_sent(rank: int, world: int, rendezvous: str, case: Case) -> tuple[int, int]:
    """Body: bytes that a step sends over pp, and those of the plan."""
    (recipe,) = case.layouts.values()
    recipe = replace(recipe, optim=replace(recipe.optim, clip_norm=None))
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    plan = make_plan(recipe, case.config)
    train_step(build(plan, mesh), share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    found = sum(mesh.axis("pp").traffic.bytes.values())
    mesh.close()
    return found, measure_traffic(plan, rank)["pp"]


@pytest.mark.grid
def test_their_bytes_are_planned(pool: RankPool) -> None:
    for found, planned in pool.run(2, count_sent, make_case()):
        assert found == planned > 0
