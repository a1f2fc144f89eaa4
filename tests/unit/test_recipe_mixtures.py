"""Experiments with mixtures of experts: sizes as published, and a layout that fits GPUs of 80 GB on every number of nodes that
their files promise."""

from itertools import combinations
from math import comb

import pytest
from transformers import AutoConfig

from framework.errors import RecipeError
from framework.model.experts import Router
from framework.model.flops import measure_model
from framework.model.load import build_meta
from framework.output import show_bytes
from framework.plan.candidate import planned_candidate, topology_of
from framework.plan.check import check_layout, most_bytes
from framework.plan.forecast_plan import measure_traffic, sent_over_hops
from framework.plan.messages import TokenHops
from framework.plan.plan_text import describe_layouts, describe_ranks
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.recipe.machines import read_shipped
from framework.verify.prepare import VerifyOptions, shrink_recipe
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

# Of a GPU of 80 GB that ranks may use, as the verdict has it; what the plan counts includes what is not in tensors.
BYTES = (read_shipped("h100_ib").memory_gb or 0) * 2**30

# Active parameters per token, and as published: in billions, some count the embedding that is looked up and some do not.
ACTIVE = {
    "qwen3_30b_a3b": (3_353_032_704, 3_041_867_776, 3.3),
    "mixtral_8x7b": (12_879_925_248, 12_748_853_248, 12.9),
    "gpt_oss_20b": (4_187_440_704, 3_608_307_264, 3.61),
    "gpt_oss_120b": (5_711_982_912, 5_132_849_472, 5.13),
    "deepseek_v3": (37_552_282_624, 36_625_603_584, 37),
    "nemotron3_nano": (3_580_073_408, 3_227_751_872, 3.6),
}
# Nodes of 8 GPUs, from the fewest that are promised to 1,024 GPUs.
NODES = {
    "qwen3_30b_a3b": (1, 8, 128),
    "gpt_oss": (1, 8, 128),
    "mixtral_8x7b": (4, 8, 128),
    "gpt_oss_120b": (8, 128),
    "deepseek_v3": (32, 128),
}
LAYOUTS = [(experiment, nodes) for experiment, each in NODES.items() for nodes in each]
# Too many parameters for so few GPUs: what the plan then says is above what a GPU has.
TOO_FEW = [("mixtral_8x7b", 1), ("gpt_oss_120b", 4), ("deepseek_v3", 16)]


def compose_on(experiment, nodes):
    return compose([f"experiment={experiment}", f"launch.nodes={nodes}"]).require()


@pytest.mark.parametrize("model", ACTIVE)
def test_the_active_parameters_are_the_published_ones(model):
    active, multiplied, published = ACTIVE[model]
    recipe = compose([f"model={model}"]).require().model
    size = measure_model(build_meta(AutoConfig.for_model(recipe.family, **recipe.config), "auto"))
    assert (size.active, size.multiplied) == (active, multiplied)
    assert min(abs(number / 1e9 - published) for number in (active, multiplied)) < 0.02 * published


@pytest.mark.parametrize(("experiment", "nodes"), LAYOUTS)
def test_an_experiment_needs_no_more_than_its_nodes(experiment, nodes):
    recipe = compose_on(experiment, nodes)
    derived = derive(recipe)
    assert derived.world == 8 * nodes
    assert derived.ep == derived.ranks_per_node
    assert derived.accumulation >= recipe.parallel.pp


@pytest.mark.parametrize(("experiment", "nodes"), few_of(LAYOUTS, lambda _, nodes: nodes in (1, 4)))
def test_a_rank_of_every_promised_layout_fits_a_gpu_of_80_gb(experiment, nodes):
    plan = check_layout(compose_on(experiment, nodes))
    assert 0.1 * BYTES < most_bytes(plan) < BYTES


@pytest.mark.parametrize(("experiment", "nodes"), few_of(TOO_FEW, lambda experiment, _: experiment == "mixtral_8x7b"))
def test_the_plan_says_where_there_are_too_few_gpus(experiment, nodes):
    assert most_bytes(check_layout(compose_on(experiment, nodes))) > BYTES


def test_the_page_says_which_experts_a_rank_has_and_what_is_sent_to_them():
    plan = check_layout(compose_on("qwen3_30b_a3b", 4))
    page = "\n".join([*describe_ranks(plan), *describe_layouts(plan)])
    assert "experts       128 in each of 48 layers, 8 for a token; 16 on a rank, ep 8 x 4 copies, whole\n" in page
    # gate, up and down of 16 experts in 48 layers, two bytes each
    assert show_bytes(16 * 48 * 3 * 2048 * 768 * 2) == "6.8 GiB"
    assert "their parameters take at most 6.8 GiB of a rank" in page
    # 4 and with recomputation 2 more, x tokens x top-k x hidden x 2 bytes x 7/8, and before each forward 128 numbers of rows
    sent = 6 * 4096 * 8 * 2048 * 2 * 7 // 8 + 2 * 128 * 8 * 7 // 8
    assert f"a rank sends {show_bytes(sent)} per layer and microbatch" in page
    assert measure_traffic(plan, 0)["ep"] == 48 * plan.derived.accumulation * sent
    assert "mlp.experts.down_proj" in page
    assert "sharded over ep along dim 0" in page


@pytest.mark.parametrize(("expert_tp", "share"), [(1, 2), (2, 1)])
def test_ranks_of_tp_that_have_whole_experts_send_a_part_of_the_tokens_each(expert_tp, share):
    layout = ("parallel.tp=2", "parallel.ep=4", f"parallel.expert_tp={expert_tp}", "memory=none")
    plan = check_layout(compose(["experiment=qwen3_30b_a3b", *layout]).require())
    rows = 4096 * 8 // share
    assert sum(sent_over_hops(plan, plan.mixtures[0])) == (4 * rows * 2048 * 2 + 128 * 8) * 3 // 4


def test_two_hops_send_a_token_once_to_each_node():
    layout = ("parallel.expert_hierarchical=2", "parallel.expert_overlap=true", "memory=none")
    layout += ("batch.sequences_per_microbatch=2",)
    plan = check_layout(compose(["experiment=qwen3_30b_a3b", *layout]).require())
    # Four nodes of two ranks. Of 128 experts 8 are chosen, none of 32 with this probability:
    missed = comb(96, 8) / comb(128, 8)
    hidden, beside, gradient = 2048 * 2, 8 * (4 + 4), 8 * 4
    crossing = 2 * 4096 * 3 * (1 - missed) * (4 * hidden + beside + gradient) + 2 * 3 * (1 + 32) * 8
    within = 2 * 4096 * 8 // 2 * 4 * hidden + 2 * 16 * 8
    assert sent_over_hops(plan, plan.mixtures[0]) == (int(crossing), within)


def choose_by_hand(router: Router, nodes: int) -> float:
    """The share of choices that reach the first node, of all that the router can make, groups first."""
    size, own = router.experts // router.groups, range(router.experts // nodes)
    reached = [
        any(expert in own for expert in chosen)
        for groups in combinations(range(router.groups), router.kept)
        for chosen in combinations([group * size + each for group in groups for each in range(size)], router.top_k)
    ]
    return sum(reached) / len(reached)


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("router", [Router(8, 3), Router(8, 2, 4, 2), Router(16, 3, 4, 2), Router(16, 2, 2, 1)])
def test_the_share_of_tokens_that_reach_a_node_is_that_of_all_choices(router: Router, nodes: int):
    assert float(router.reach(nodes)) == pytest.approx(choose_by_hand(router, nodes))


def test_top_8_over_4_nodes_sends_less_than_half_of_what_pairs_would():
    hops = TokenHops(Router(128, 8), 4, 8, 4096, 2)
    assert float(hops.outer.all_of(2)) < 0.5 * 8 * 6 * 4096 * 2
    # DeepSeek's limit to 4 of 8 groups of experts, each on a node of its own.
    assert 8 * Router(256, 8, 8, 4).reach(8) < 4 < 8 * Router(256, 8).reach(8)


def test_too_few_ranks_for_the_stages_are_refused():
    with pytest.raises(RecipeError, match=r"launch\.ranks"):
        compose_on("deepseek_v3", 1)


def test_a_hybrid_of_state_spaces_is_planned_over_all_axes():
    """Nemotron 3 Nano on two nodes: its heads over tp, its states over cp, its experts over ep."""
    layout = ["parallel.tp=2", "parallel.cp=2", "parallel.ep=8", "zero.stage=3", "memory.activation_checkpointing=full"]
    batch = ["batch.sequences_per_step=64", "batch.context=8192", "data.pack=documents"]
    cluster = ["launch=slurm", "cluster=h100_ib", "launch.nodes=2"]
    plan = check_layout(compose(["model=nemotron3_nano", *cluster, *layout, *batch]).require())
    assert most_bytes(plan) < BYTES
    assert measure_traffic(plan, 0)["cp"] > 0


@pytest.mark.parametrize(("dtype", "dispatch"), [("fp64", "fp8"), ("fp32", "bf16")])
def test_verify_takes_the_two_hops_of_a_recipe_on_few_ranks(dtype: str, dispatch: str):
    layout = ["launch=slurm", "launch.nodes=2", "parallel.ep=16", "parallel.expert_dispatch=fp8"]
    recipe = compose(["experiment=qwen3_30b_a3b", *layout]).require()
    small, reasons = shrink_recipe(recipe, ["x"], 256, VerifyOptions(dtype=dtype), 8)  # type: ignore[arg-type]
    hops = topology_of(planned_candidate(small), hierarchical=small.parallel.expert_hierarchical)
    assert min(hops.size("ep_outer"), small.parallel.ep) > 1
    assert small.parallel.expert_dispatch == dispatch
    assert {"parallel.expert_hierarchical", "parallel.expert_dispatch"} <= reasons.keys()
