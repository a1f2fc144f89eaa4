"""Experiments with long sequences: a layout that fits GPUs of 80 GB on every number of nodes that their files promise."""

from pathlib import Path

import pytest

from framework.plan.check import check_layout, most_bytes
from framework.plan.forecast_plan import forecast_plan
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from tests.grid import few_of

BYTES = 80e9  # of a GPU
# Nodes of 8 GPUs, and planned GB of a GPU, as docs/context.md has them.
PLANNED = {
    ("llama3_1_8b_128k", 1): 39.7,
    ("llama3_1_8b_128k", 4): 26.5,
    ("llama3_1_8b_128k", 16): 23.1,
    ("llama3_1_8b_1m", 4): 40.0,
    ("llama3_1_8b_1m", 8): 38.0,
    ("llama3_1_8b_1m", 16): 36.9,
}
PAGE = (Path(__file__).parents[2] / "docs" / "context.md").read_text()


def compose_on(experiment, nodes, *words):
    words = ("data.sources.files.path=x.jsonl", "launch.gres=gpu:h100", *words)
    return compose([f"experiment={experiment}", f"launch.nodes={nodes}", *words]).require()


@pytest.mark.parametrize(("experiment", "nodes"), PLANNED)
def test_nodes_that_are_promised_divide_the_batch(experiment, nodes):
    recipe = compose_on(experiment, nodes)
    derived = derive(recipe)
    assert derived.world == 8 * nodes == derived.dp * derived.cp
    assert derived.context % (2 * derived.cp) == 0  # no padding
    assert derived.ulysses == derived.ranks_per_node  # heads are exchanged within a node
    assert recipe.model.config["rope_parameters"]["rope_type"] == "llama3"
    assert derived.context <= recipe.model.config["max_position_embeddings"]


@pytest.mark.parametrize(("experiment", "nodes"), few_of(list(PLANNED), lambda _, nodes: nodes in (1, 8)))
def test_a_rank_of_every_promised_layout_fits_a_gpu_of_80_gb_by_the_fastest_method(experiment, nodes):
    plan = check_layout(compose_on(experiment, nodes))
    assert most_bytes(plan) < BYTES
    assert round(most_bytes(plan) / 1e9, 1) == PLANNED[experiment, nodes]
    assert f"| `{experiment}` | {8 * nodes} | {PLANNED[experiment, nodes]} |" in PAGE
    assert plan.recipe.memory.chunked_loss is True
    found = forecast_plan(plan)
    (_, fastest_s), *_ = found.context_methods
    assert found.forecast.time.step_s == fastest_s
    # Context parallelism adds little to a step.
    assert found.forecast.time.parts["cp"] < 0.02 * fastest_s


def test_the_plan_says_where_there_are_too_few_gpus():
    plan = check_layout(compose_on("llama3_1_8b_1m", 1, "parallel.cp=8", "parallel.context=ulysses"))
    assert most_bytes(plan) > BYTES
