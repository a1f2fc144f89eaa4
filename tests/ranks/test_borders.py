"""Values that stages hand on beside hidden states, found in the model's own graph: streams, embeddings of ids, keys of earlier
layers, the first layer's input; and weights that layers of several stages share."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, PretrainedConfig

from framework.comm.connect import connect
from framework.errors import ModelError
from framework.model import borders
from framework.model.borders import message_dtype, message_width
from framework.model.probe import find_layer_calls
from framework.model.shrink import shrink
from framework.model.stage import refuse_sliced_values
from framework.plan.cluster import ClusterRates, LinkSpan
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan
from framework.plan.time import TimeModel
from framework.recipe.schema import Zero
from framework.train.build import build
from framework.train.replicas import check_replicas
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import Family, build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.mixers import Way
from tests.ranks.parity import CPU, Case, assert_equal, topology_of
from tests.ranks.pool import RankPool

pytestmark = [
    pytest.mark.skipif("deepseek_v4" not in CONFIG_MAPPING, reason="this transformers has no deepseek_v4"),
    IN_TURN,
]

# By family: layers of each stage, and how many of them the schedule gives a rank.
CASES = {
    "deepseek_v4": ((2, 2), 1),
    "gemma3n_text": ((1, 2, 2, 2), 2),  # keys of layers 2 and 3 pass the stages behind them
    "zamba": ((3, 1), 1),  # layers 2 and 3 share their attention
}


def small(model_type: str) -> PretrainedConfig:
    return shrink(CONFIG_MAPPING[model_type](), 4)


def make_case(model_type: str) -> Case:
    layers, virtual = CASES[model_type]
    recipe = Way("llama", pp=2, count=4, context=32, zero=Zero(stage=1)).recipe
    schedule = "interleaved" if virtual > 1 else "1f1b"
    pipeline = replace(recipe.pipeline, layers=list(layers), schedule=schedule, virtual_stages=virtual)
    recipe = replace(recipe, pipeline=pipeline, optim=replace(recipe.optim, clip_norm=None))
    return Case(model_type, Family(model_type, small(model_type).to_dict()), {"pp": recipe})


def test_values_are_found_with_their_forms() -> None:
    for config, streams in ((build_config(family("llama")), ()), (small("deepseek_v4"), (4,))):
        ((hidden,),) = find_layer_calls(config, [1]).borders.values()
        assert hidden.sizes == (*streams, config.hidden_size)
    config = small("gemma3n_text")
    hidden, *inputs, keys, values = find_layer_calls(config, [3]).borders[3]
    assert (hidden.rows, hidden.sizes) == ((1, 2), (4, config.hidden_size))
    assert {each.sizes for each in inputs} >= {(config.hidden_size_per_layer_input,)}
    assert message_width((hidden, keys, values)) == hidden.width + keys.width + values.width
    assert find_layer_calls(CONFIG_MAPPING["zamba"]()).borders == {}
    # Keys of a layer are handed to all behind it, of which none reads them.
    alone = find_layer_calls(CONFIG_MAPPING["gemma4_text"](num_hidden_layers=4, hidden_size_per_layer_input=0), [2])
    assert alone.is_plain
    assert [each.sizes for each in alone.borders[2]] == [(2304,)]


def test_a_message_has_the_dtype_of_hidden_states_that_stay_in_fp32() -> None:
    dtypes = {name: find_layer_calls(small(name), [1], torch.bfloat16).borders[1] for name in ("mamba", "qwen3")}
    assert {name: message_dtype(border) for name, border in dtypes.items()} == {
        "mamba": torch.float32,
        "qwen3": torch.bfloat16,
    }


def test_a_value_that_does_not_travel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the keys of earlier layers are left out, as a table of names would leave out those of a new family."""
    whole = borders.Trace.border
    monkeypatch.setattr(borders.Trace, "border", lambda self, start: (whole(self, start) or ())[:1])
    with pytest.raises(ModelError, match="gemma3n_text models cannot be cut"):
        find_layer_calls(small("gemma3n_text"))


def test_stages_that_do_not_all_have_shared_weights_are_refused() -> None:
    case = make_case("zamba")
    recipe = case.layouts["pp"]
    pipeline = replace(recipe.pipeline, layers=[2, 1, 1], virtual_stages=1)
    recipe = replace(
        recipe, pipeline=pipeline, parallel=replace(recipe.parallel, pp=3), launch=replace(recipe.launch, ranks=3)
    )
    with pytest.raises(
        ModelError, match=r"parallel\.pp with parallel\.tp=2: layers of zamba models take more than hidden states"
    ):
        refuse_sliced_values(case.config, 2)
    with pytest.raises(ModelError, match=r"zamba: layers \[2, 3\] share .*\[0, 1, 1\] of them: every stage needs one"):
        make_plan(recipe, case.config)


def test_the_forecast_of_a_message_has_them() -> None:
    case = make_case("deepseek_v4")
    (recipe,) = case.layouts.values()
    plan = make_plan(recipe, case.config)
    times = TimeModel(plan.shape, plan.recipe, replace(ClusterRates.from_recipe(plan.recipe), overhead_s=0.0))
    link = replace(times.cluster.links["send"], start_s=0.0, spans=(LinkSpan(1, 1.0, 0.0),), correction=None)
    times.cluster = replace(times.cluster, links={**times.cluster.links, "send": link})
    width = message_width(plan.borders[1])
    assert times.costs(plan.candidate, []).message == plan.candidate.tokens * width * times.rates.itemsize


@pytest.mark.parametrize("model_type", few_of(CASES, lambda name: name == "zamba"))
def test_stages_equal_one_process(pool: RankPool, model_type: str) -> None:
    assert_equal(pool, 2, [make_case(model_type)])


@pytest.mark.grid
def test_three_stages_of_a_rank_share_weights(pool: RankPool) -> None:
    case = make_case("zamba")
    recipe = case.layouts["pp"]
    pipeline = replace(recipe.pipeline, layers=[1] * 6, schedule="interleaved", virtual_stages=3)
    values = {**case.family.config, "num_hidden_layers": 6, "layers_block_type": ["hybrid"] * 6}
    assert_equal(pool, 2, [Case("zamba", Family("zamba", values), {"pp": replace(recipe, pipeline=pipeline)})])


def compare(rank: int, world: int, rendezvous: str, case: Case) -> None:
    """Body: replicas are compared behind a step."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    check_replicas(run, 1)
    mesh.close()


def test_stages_meet_shared_weights_in_other_orders(pool: RankPool) -> None:
    """Two blocks take turns over six layers: the second stage of three begins with the other one."""
    recipe = make_case("zamba").layouts["pp"]
    recipe = replace(recipe, pipeline=replace(recipe.pipeline, layers=[3, 3]))
    config = shrink(CONFIG_MAPPING["zamba2"](num_mem_blocks=2), 6)
    values = {**config.to_dict(), "layers_block_type": ["hybrid"] * 6, "hybrid_layer_ids": list(range(6))}
    pool.run(2, compare, Case("zamba2", Family("zamba2", values), {"pp": recipe}))


def count_sent(rank: int, world: int, rendezvous: str, case: Case) -> tuple[int, int]:
    """Body: bytes that a step sends from stage to stage, and those of the plan."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    plan = make_plan(recipe, case.config)
    train_step(build(plan, mesh), share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    found = sum(mesh.axis("pp").traffic.bytes.values())
    mesh.close()
    return found, measure_traffic(plan, rank)["pp"]


@pytest.mark.grid
@pytest.mark.parametrize("model_type", ["deepseek_v4", "gemma3n_text"])
def test_their_bytes_are_planned(pool: RankPool, model_type: str) -> None:
    for found, planned in pool.run(2, count_sent, make_case(model_type)):
        assert found == planned > 0
