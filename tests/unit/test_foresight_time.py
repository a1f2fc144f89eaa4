"""The seconds of a step: sums by hand on machines whose rates are round numbers, and what must hold of any layout."""

from dataclasses import replace
from functools import cache, partial
from math import log
from random import Random
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import Costs, simulate
from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates, Grid, Group, Link, LinkSpan, place_group
from framework.plan.exposure import Halves, place_groups
from framework.plan.forecast_plan import measure_imbalance
from framework.plan.profile import BACKWARD_PASSES, SCAN_FLOPS, Kernels, Profile
from framework.plan.shape import DEFAULT, ModelShape, make_shape
from framework.plan.sharding import RESTART_S, expected_goodput
from framework.plan.stage_times import find_length, least_length
from framework.plan.time import PARTS, TimeForecast, TimeModel
from framework.recipe import schema
from framework.recipe.machines import read_shipped
from framework.recipe.schema import Recipe
from tests.grid import IN_TURN

pytestmark = IN_TURN

TFLOPS, HUGE = 1e12, 1e30
NOTHING = Kernels(0, 0, 1)
# Matmuls, attention and messages alone, nothing hidden behind anything.
BARE = Profile(
    "bare",
    **dict.fromkeys(("norm", "rope", "activation", "residual", "merge", "loss", "loss_gradient"), NOTHING),
    gradient_bytes=0.0,
    hides_gathers=0.0,
    hides_reductions=0.0,
    hides_tp_gradient=0.0,
)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def machine(rate: float = HUGE, ranks_per_node: int = 8, **changes: Any) -> ClusterRates:
    """A cluster of 1 TFLOP/s in every matmul, whose links carry `rate` bytes a second without latency. No kernel takes time to
    launch, and memory none to read."""
    links: Any = {kind: Link(0.0, (LinkSpan(1, rate, 0.0),)) for kind in KINDS}
    values: dict[str, Any] = {
        "peak_flops": {"bf16": TFLOPS},
        "matmul_rate": {"bf16": TFLOPS},
        "attention_share": 1.0,
        "attention_backward_share": 1.0,
        "price_per_hour": 0.0,
        "failures_per_device_hour": 0.0,
    }
    values |= dict.fromkeys(("memory_rate", "host_rate", "disk_rate"), HUGE)
    values |= {"overhead_s": 0.0, "processors": 1, "tile": (1, 1), "ramp": 0, "attention_curves": {}}
    shipped = ClusterRates.from_group(read_shipped("h100_ib"))
    return replace(shipped, ranks_per_node=ranks_per_node, links=links, **(values | changes))


def forecast_time(
    shape: ModelShape, candidate: Candidate, settings: Recipe, cluster: ClusterRates, profile: Profile | None = None
) -> TimeForecast:
    return TimeModel(shape, settings, cluster, profile).forecast(candidate)


def llama(**changes: Any) -> PretrainedConfig:
    values = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model("llama", **(values | changes))


@cache
def shape() -> ModelShape:
    return make_shape(llama())


@cache
def mixture() -> ModelShape:
    return make_shape(
        AutoConfig.for_model(
            "mixtral",
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=8,
            num_experts_per_tok=2,
            vocab_size=512,
        )
    )


def of(candidate: Candidate, profile: Profile | None = BARE, **changes: Any) -> TimeForecast:
    return forecast_time(shape(), candidate, DEFAULT, machine(**changes), profile)


# Weights of a layer and of the head of `shape`.
LAYER, HEAD = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160, 64 * 512
T = 2 * 128
ONE = Candidate(sequences=2, context=128)


def test_biases_of_experts_are_added_to_all_rows() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=64, intermediate_size=96
    )
    model, cluster, kernels = make_shape(config), machine(memory_rate=1e9), Kernels(4, 4, 2)
    none = replace(BARE, first_bias=None, last_bias=None)
    spent = [
        forecast_time(model, ONE, DEFAULT, cluster, replace(none, **each)).parts["elementwise"]
        for each in ({}, {"first_bias": kernels}, {"last_bias": kernels})
    ]
    # Of 2 layers, in forward and twice as much in backward: T rows of 2 experts, of gate and up, and of hidden states.
    rows = 2 * (1 + BACKWARD_PASSES) * 2 * T
    assert [each - spent[0] for each in spent[1:]] == pytest.approx([rows * n * 4 * 2 / 1e9 for n in (2 * 96, 64)])


@pytest.mark.parametrize(("policy", "times"), [("none", 2), ("full", 3)])
def test_heads_that_are_repeated_are_copied_in_forward_backward_and_recomputation(policy: Any, times: int) -> None:
    """Of 4 layers, keys and values of 4 heads of 8 features are read and those of 8 written; one tp rank has half of them."""
    for tp in (1, 2):
        candidate = replace(ONE, checkpointing=policy, tp=tp)
        copied, shared = (of(candidate, replace(BARE, repeats_heads=each), memory_rate=1e9) for each in (True, False))
        spent = copied.step_s - shared.step_s
        assert spent == pytest.approx(4 * times * 2 * T * (4 + 8) * 8 * 2 / tp / 1e9, rel=1e-3)


def test_the_host_launches_each_expert_by_itself() -> None:
    spread, waits = replace(ONE, dp=4, ep=4), replace(BARE, mixture_s=1.0, expert_s=0.25)
    # Forward once and backward twice of 2 layers, with 8 experts and with 2 on a rank.
    for candidate, experts in ((ONE, 8), (spread, 2)):
        found = forecast_time(mixture(), candidate, DEFAULT, machine(), waits)
        assert found.step_s == pytest.approx(2 * 3 * (1 + 0.25 * experts), rel=1e-3)


def test_one_rank_by_hand() -> None:
    found = of(ONE)
    assert found.parts["matmuls"] == pytest.approx(3 * 2 * T * (4 * LAYER + HEAD) / TFLOPS)
    # 128 x 129 / 2 pairs of a sequence, a product and a sum of 8 heads of 8 features each, then five matmuls for two.
    pairs = 2 * 128 * 129 / 2
    assert found.parts["attention"] == pytest.approx(4 * 3.5 * 2 * pairs * 8 * (8 + 8) / TFLOPS)
    assert found.step_s == pytest.approx(found.parts["matmuls"] + found.parts["attention"])
    assert found.estimated == 0.0


def test_useful_flops_are_mfu() -> None:
    # The whole square of attention is useful by the definition, and half of it is computed.
    found = of(ONE)
    norms = (2 * 4 + 1) * 64  # a weight for each feature
    per_token = 6 * (4 * LAYER + HEAD + norms) + 6 * 4 * 2 * 64 * 128
    assert found.mfu == pytest.approx(per_token * T / found.step_s / TFLOPS)


@pytest.mark.parametrize(("policy", "layers"), [("none", 0.0), ("full", 1.0), ("sqrt", 1.5)])
def test_recomputation_by_hand(policy: Any, layers: float) -> None:
    # Four layers are two groups: of each one layer's input is kept, and one forward more brings back the other's.
    found = of(replace(ONE, checkpointing=policy))
    last, attention = 64 * 160, 4 * 128 * 129 * 8 * 8 / 2
    again = 2 * T * (4 * (LAYER - last)) + 4 * 2 * attention
    more = (layers - 1) * 4 * (2 * T * LAYER + 2 * attention) if policy == "sqrt" else 0.0
    assert found.parts["recomputation"] == pytest.approx((again * (layers > 0) + more) / TFLOPS)


def test_accumulation_repeats_a_microbatch() -> None:
    once, more = of(ONE), of(replace(ONE, accumulation=5))
    assert more.parts["matmuls"] == pytest.approx(5 * once.parts["matmuls"])
    assert more.tokens == 5 * once.tokens


@pytest.mark.parametrize("sequence", [False, True])
def test_tp_divides_matmuls_and_sends_hidden_states(sequence: bool) -> None:
    found = of(replace(ONE, tp=4, sequence=sequence), rate=1e9)
    assert found.parts["matmuls"] == pytest.approx(of(ONE).parts["matmuls"] / 4)
    # Of each layer two all-reduces, there and back, or as many gathers and scatters, of T x 64 values in bf16. The embedding's
    # sum and the head's gradient are one more, with tokens divided each a pair.
    passes = 4 * 2 * 2 + 2
    assert found.parts["tp"] == pytest.approx(passes * 2 * 3 / 4 * T * 64 * 2 / 1e9)


def test_weight_gradients_hide_the_sum_over_tp() -> None:
    candidate = replace(ONE, tp=4)
    shown, hidden = (of(candidate, replace(BARE, hides_tp_gradient=share), rate=1e12) for share in (0.0, 1.0))
    assert hidden.parts["tp"] < shown.parts["tp"]
    assert hidden.parts["tp"] + hidden.hidden["tp"] == pytest.approx(shown.parts["tp"])
    # A schedule that leaves weight gradients for later has nothing to hide it under.
    split = of(
        replace(candidate, schedule="zb_h1", pp=2, accumulation=4), replace(BARE, hides_tp_gradient=1.0), rate=1e12
    )
    assert split.hidden.get("tp", 0.0) < hidden.hidden["tp"]


def test_zero_gathers_and_reduces_by_hand() -> None:
    # Parameters of a rank: layers with two norms, the last norm, embedding and head.
    elements = 4 * (LAYER + 2 * 64) + 64 + 2 * HEAD
    size, part = 1e9, 7 / 8
    base = replace(ONE, dp=8, shard=8, accumulation=3)
    first, third = of(replace(base, zero=1), rate=size), of(replace(base, zero=3), rate=size)
    assert first.parts["gathers"] == pytest.approx(part * 2 * elements / size)
    assert first.parts["reductions"] == pytest.approx(part * 4 * elements / size)
    # Forward reads all units in each microbatch, backward the layers alone: the head is still there.
    again = 4 * (LAYER + 2 * 64)
    assert third.parts["gathers"] == pytest.approx(3 * part * 2 * (elements + again) / size)


def test_sums_that_travel_coded_go_in_two_hops() -> None:
    """By hand, four nodes of two: all of it among neighbours, a half of that among nodes, of which each sends 3/4."""
    elements, rate = 4 * (LAYER + 2 * 64) + 64 + 2 * HEAD, 1e9
    base = replace(ONE, dp=8, shard=8, zero=1, ranks_per_node=2)
    cluster = machine(rate, ranks_per_node=2)

    def reductions(zero: schema.Zero, reduce: str, candidate: Candidate = base) -> float:
        settings = replace(DEFAULT, zero=zero, precision=replace(DEFAULT.precision, reduce=reduce))  # type: ignore[arg-type]
        return forecast_time(shape(), candidate, settings, cluster, BARE).parts["reductions"]

    plain, bf16 = (reductions(schema.Zero(), each) for each in ("fp32", "bf16"))
    codes = [reductions(schema.Zero(quantize_reduce=kind), "bf16") for kind in ("int8", "int4")]
    near, across = 1 / 2 * elements / rate, 3 / 4 * elements / 2 / rate
    assert bf16 == pytest.approx(2 * (near + across))
    assert codes[0] / bf16 == pytest.approx((1 + 4 / 256) / 2)
    assert codes[1] / bf16 == pytest.approx((0.5 + 4 / 256) / 2)
    assert codes[1] < bf16 < plain
    # In a node nothing is coded but what precision.reduce says.
    alone = replace(base, ranks_per_node=8)
    assert reductions(schema.Zero(quantize_reduce="int4"), "fp32", alone) == reductions(schema.Zero(), "fp32", alone)


def test_without_shards_gradients_are_summed_over_replicas() -> None:
    elements = 4 * (LAYER + 2 * 64) + 64 + 2 * HEAD
    found = of(replace(ONE, dp=8), rate=1e9)
    assert found.parts["gathers"] == 0.0
    assert found.parts["reductions"] == pytest.approx(2 * 7 / 8 * 4 * elements / 1e9)


def test_hidden_messages_slow_computation() -> None:
    profile = replace(BARE, hides_gathers=1.0, hides_reductions=1.0, stolen=0.25)
    found = of(replace(ONE, dp=8, shard=8, zero=3), profile, rate=1e12)
    assert found.hidden["shard"] > 0
    assert found.parts["contention"] == pytest.approx(0.25 * found.hidden["shard"])


LAYOUTS = [
    ONE,
    replace(ONE, dp=4, shard=4, zero=3, checkpointing="selective"),
    replace(ONE, dp=2, shard=2, zero=1, tp=4, sequence=True, accumulation=4),
    replace(ONE, tp=2, pp=2, accumulation=8, schedule="1f1b"),
    replace(ONE, pp=2, virtual=2, accumulation=8, schedule="interleaved", dp=4, shard=4, zero=2),
    replace(ONE, pp=4, accumulation=16, schedule="zb_h1", tp=2, sequence=True),
    replace(ONE, cp=2, dp=4, shard=8, zero=1),
    replace(ONE, cp=4, ulysses=2, dp=2, shard=8, zero=3),
    replace(ONE, cp=2, ulysses=2, tp=4),
    replace(ONE, cp=2, is_gather=True, dp=8, shard=16, zero=1),
]


@pytest.mark.parametrize("candidate", LAYOUTS)
def test_what_must_hold_of_any_layout(candidate: Candidate) -> None:
    slow, fast = (of(candidate, None, rate=rate, memory_rate=1e12, overhead_s=1e-6) for rate in (1e10, 1e11))
    assert set(slow.parts) == set(PARTS)
    assert min(slow.parts.values()) >= 0.0
    assert slow.step_s >= fast.step_s  # more bandwidth is never slower
    slower_memory = of(candidate, None, rate=1e10, memory_rate=1e11, overhead_s=1e-6)
    assert slower_memory.step_s >= slow.step_s
    # One definition: MFU times step time depends on tokens and ranks alone.
    flops = shape().flops_per_token(128) * candidate.tokens_per_step
    assert slow.mfu * slow.step_s * slow.world * TFLOPS == pytest.approx(flops)


def test_an_equal_step_has_an_equal_mfu() -> None:
    found = [of(candidate, None, rate=1e10) for candidate in LAYOUTS]
    ratios = {round(each.mfu * each.step_s * each.world / each.tokens * 1e9, 6) for each in found}
    assert len(ratios) == 1


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"])
@pytest.mark.parametrize("num_microbatches", [8, 24, 77])
def test_lengths_are_the_simulators(name: str, num_microbatches: int) -> None:
    virtual = 1 if name in ("gpipe", "1f1b", "zb_h1") else 2
    stages = 4 * virtual
    # The last stage has a head besides; a message takes a tenth of a forward.
    costs = Costs(
        [1.0] * (stages - 1) + [1.25], [1.0] * (stages - 1) + [1.125], [1.0] * (stages - 1) + [1.25], message=0.125
    )
    schedule = make_schedule(name, 4, num_microbatches, virtual)
    exact = simulate(schedule, costs).length
    assert find_length(name, 4, num_microbatches, costs) == pytest.approx(exact, rel=0.01)
    alike = Costs(*[[1.0] * stages] * 3, message=0.125)  # type: ignore[misc]
    if num_microbatches == 8:  # nothing is rounded, nothing extrapolated
        assert find_length(name, 4, 8, alike) == pytest.approx(simulate(schedule, alike).length)
    uneven = Costs([0.97 * x for x in costs.forward], [1.04 * x for x in costs.input], costs.weight, 0.11)
    exact = simulate(schedule, uneven).length
    assert find_length(name, 4, num_microbatches, uneven) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"])
def test_no_timeline_is_shorter_than_its_bound(name: str) -> None:
    virtual = 1 if name in ("gpipe", "1f1b", "zb_h1") else 2
    random, shares = Random(name), []
    for num_microbatches in (8, 9, 16):
        for _ in range(4):
            uneven = [[random.uniform(0.2, 3.0) for _ in range(4 * virtual)] for _ in range(3)]
            costs = Costs(*uneven, message=random.choice((0.0, 0.5)))  # type: ignore[misc]
            schedule = make_schedule(name, 4, num_microbatches, virtual)
            least = least_length(name, schedule.rank_of_stage, num_microbatches, costs)
            shares.append(least / simulate(schedule, costs).length)
    assert max(shares) <= 1 + 1e-9
    assert sum(shares) / len(shares) > 0.7  # and it says much of it
    even = Costs(*[[1.0] * 4 * virtual] * 3)  # type: ignore[misc]
    schedule = make_schedule(name, 4, 8, virtual)
    if name in ("gpipe", "1f1b", "interleaved"):
        assert least_length(name, schedule.rank_of_stage, 8, even) == simulate(schedule, even).length


def test_a_rings_kernels_see_its_blocks_and_merge_them() -> None:
    # Twice as slow with half of the context: a ring's half of the work takes as long as one rank's whole.
    curve = Grid(((log(64), log(128)), (log(8),)), (0.25, 0.5))
    curves = {"attention_curves": {"bf16": (curve, curve)}, "overhead_s": 1e-6}
    whole, ring, ulysses = (
        of(replace(ONE, cp=cp, ulysses=ulysses), **curves) for cp, ulysses in ((1, 1), (2, 1), (2, 2))
    )
    launches = 2 * 4 * 1e-6  # of a layer's forward and backward
    assert ring.parts["attention"] - launches == pytest.approx(whole.parts["attention"] - launches)
    assert ulysses.parts["attention"] - launches == pytest.approx((whole.parts["attention"] - launches) / 2)
    # A rank's own chunks meet once, and each other rank's once: of 4 layers, backward as forward's passes.
    more = of(replace(ONE, cp=2), replace(BARE, merge=Kernels(1, 1, 5)), **curves)
    kernels = 4 * 2 * (1 + BACKWARD_PASSES)
    assert more.parts["elementwise"] - ring.parts["elementwise"] == pytest.approx(kernels * 5 * 1e-6)


def test_bubble_is_the_simulators() -> None:
    candidate = replace(ONE, pp=4, accumulation=8)
    found = of(candidate)
    stages = shape().stages(4, "1f1b", 1, 128)
    each = 2 * T * LAYER / TFLOPS
    attention = 2 * 128 * 129 * 8 * 16 / TFLOPS
    layers, head = [stage.stop - stage.start for stage in stages], 2 * T * HEAD / TFLOPS
    forward = [count * (each + attention) + head * stage.is_last for count, stage in zip(layers, stages, strict=True)]
    inputs = [
        count * (each + 2.5 * attention) + head * stage.is_last for count, stage in zip(layers, stages, strict=True)
    ]
    weights = [count * each + head * stage.is_last for count, stage in zip(layers, stages, strict=True)]
    timeline = simulate(make_schedule("1f1b", 4, 8), Costs(forward, inputs, weights))
    assert found.step_s == pytest.approx(timeline.length, rel=1e-6)
    busiest = max(sum(8 * part[stage] for part in (forward, inputs, weights)) for stage in range(4))
    assert found.parts["bubble"] == pytest.approx(timeline.length - busiest, rel=1e-6)


def test_experts_compute_what_is_routed_to_them() -> None:
    model = TimeModel(mixture(), DEFAULT, machine(rate=1e9), BARE)
    alone = model.forecast(ONE)
    attention, experts = 64 * (64 + 32 + 32 + 64), 2 * 3 * 64 * 96
    assert alone.parts["matmuls"] == pytest.approx(3 * 2 * T * (2 * (attention + experts) + HEAD) / TFLOPS, rel=0.02)
    spread = model.forecast(replace(ONE, dp=4, ep=4, expert_tp=1, shard=4, zero=1))
    # There and back in forward and in backward, of two layers: two rows of 64 bf16 values for each token, 3/4 of them away.
    assert spread.parts["ep"] == pytest.approx(2 * 4 * 3 / 4 * 2 * T * 64 * 2 / 1e9)
    assert spread.parts["matmuls"] == pytest.approx(alone.parts["matmuls"])
    halves = replace(DEFAULT, parallel=replace(DEFAULT.parallel, expert_overlap=True))
    overlapped = forecast_time(mixture(), replace(ONE, dp=4, ep=4), halves, machine(rate=1e11), BARE)
    waited = forecast_time(mixture(), replace(ONE, dp=4, ep=4), DEFAULT, machine(rate=1e11), BARE)
    assert overlapped.parts["ep"] < waited.parts["ep"]


def test_halves_hide_rows_under_the_turns_of_one_another() -> None:
    # What each half sends in its first two turns takes a second, under two of the other half; of half 1 the second is exposed.
    one_hop = Halves(3, 0)
    assert one_hop.order == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert one_hop.find_late([2.0, 2.0, 0.0], [(0, 1.0), (0, 1.0)], one_hop.order) == [1.0, 0.0]
    # Backward begins with it, and both halves' departs at once.
    assert one_hop.find_late([0.0, 2.0, 2.0], [(0, 1.0), (0, 1.0)], one_hop.reversed) == [1.0, 0.0]
    # One hop after the other, each under a turn, but for the last two of half 1.
    ahead = Halves(7, 1)
    assert ahead.order[:5] == [(0, 0), (0, 1), (1, 0), (0, 2), (1, 1)]
    ways = [(0, 0.0), (0, 2.0), (1, 1.0), (0, 0.0), (1, 1.0), (0, 2.0)]
    assert ahead.find_late([2.0, 2.0, 0.0, 2.0, 2.0, 0.0, 0.0], ways, ahead.order) == [2.0, 1.0]


def test_each_hop_is_forecast_by_itself() -> None:
    near, far = LinkSpan(1, 1e10, 0.0), LinkSpan(2, 1e9, 0.0)
    cluster = replace(machine(ranks_per_node=2), links={kind: Link(0.0, (near, far)) for kind in KINDS})  # type: ignore[misc]
    spread = replace(ONE, dp=4, ep=4, expert_tp=1, shard=4, zero=1, ranks_per_node=2)
    over_nodes = replace(DEFAULT, parallel=replace(DEFAULT.parallel, expert_hierarchical="node"))
    halves = replace(over_nodes, parallel=replace(over_nodes.parallel, expert_overlap=True))
    waited, hidden = (forecast_time(mixture(), spread, each, cluster, BARE) for each in (over_nodes, halves))
    for hop in ("ep_outer", "ep_inner"):
        assert 0.0 < hidden.parts[hop] < waited.parts[hop]
        assert hidden.parts[hop] + hidden.hidden[hop] == pytest.approx(waited.parts[hop])
    assert waited.parts["ep"] == 0.0


def test_a_gpt2_is_known_by_its_operators() -> None:
    found = make_shape(AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=512, n_positions=128))
    forecast = forecast_time(found, ONE, DEFAULT, machine(), BARE)
    assert forecast.estimated == 0.0
    assert forecast.parts["matmuls"] == pytest.approx(3 * 2 * T * (2 * 12 * 64 * 64 + HEAD) / TFLOPS)


def test_a_model_of_another_form_is_told_by_its_flops() -> None:
    config = AutoConfig.for_model("mamba", hidden_size=64, num_hidden_layers=2, vocab_size=512, state_size=8)
    found = make_shape(config)
    forecast = forecast_time(found, ONE, DEFAULT, machine(), BARE)
    assert forecast.step_s > 0
    assert 0.0 <= forecast.estimated < 1.0
    flops = 3 * T * sum(found.flops(128)[unit.name] for unit in found.units if unit.name != "embedding") / TFLOPS
    # The scan is as slow as eight times its FLOPs in attention, whose backward is 2.5 forwards.
    scanned = forecast.parts["attention"] / (SCAN_FLOPS * 3.5)
    assert scanned > 0
    assert forecast.parts["matmuls"] + 3 * scanned == pytest.approx(flops, rel=0.1)


def test_a_token_goes_once_to_each_node_and_rank_that_has_experts_of_it() -> None:
    """Four nodes of two ranks; the slower of both hops counts."""
    far, near = 1e9, 1e10
    spans = (LinkSpan(1, near, 0.0), LinkSpan(2, far, 0.0))
    cluster = replace(machine(ranks_per_node=2), links={kind: Link(0.0, spans) for kind in KINDS})  # type: ignore[misc]
    spread = replace(ONE, dp=8, ep=8, expert_tp=1, shard=8, zero=1, ranks_per_node=2)
    once, rows = (
        forecast_time(mixture(), spread, DEFAULT, cluster, replace(BARE, dispatch=each)).parts["ep"]
        for each in ("once", "rows")
    )
    # Two of eight experts leave a node that has two of them out with 15 of 28; 3/4 of nodes are others. As rows, 7/8 of both are.
    row, passes = T * 64 * 2, 2 * 4
    assert once == pytest.approx(passes * 4 * 13 / 28 * 3 / 4 * row / far)
    assert rows == pytest.approx(passes * 2 * 7 / 8 * row / far)
    local = replace(spread, dp=2, ep=2, shard=2)
    inside = forecast_time(mixture(), local, DEFAULT, cluster, replace(BARE, dispatch="once")).parts["ep"]
    assert inside == pytest.approx(passes * 2 * 22 / 28 / 2 * row / near)


def test_uneven_experts_are_waited_for() -> None:
    spread = replace(ONE, dp=4, ep=4, expert_tp=1, shard=4, zero=1)
    even, uneven = (TimeModel(mixture(), DEFAULT, machine(), BARE, each).forecast(spread) for each in (1.0, 1.5))
    experts = 2 * 2 * 3 * 64 * 96
    assert even.parts["imbalance"] == 0.0
    assert uneven.parts["matmuls"] == pytest.approx(even.parts["matmuls"])
    assert uneven.parts["imbalance"] == pytest.approx(0.5 * 3 * 2 * T * experts / TFLOPS, rel=0.02)
    # Two layers of four experts on two ranks: 30 rows of 40, and 20 of 40.
    assert measure_imbalance({"layers.0": [20, 10, 5, 5], "layers.1": [10, 10, 10, 10]}, 2) == pytest.approx(1.25)
    assert measure_imbalance({}, 2) == measure_imbalance({"layers.0": [0, 0]}, 2) == 1.0


def test_a_layer_takes_no_less_than_its_launches() -> None:
    free = of(ONE)
    bound = of(ONE, replace(BARE, layer_s=1.0))
    layers = 4 * 3 * 1.0
    computed = free.step_s - 3 * 2 * T * HEAD / TFLOPS
    assert bound.parts["host"] == pytest.approx(layers - computed)
    assert bound.step_s == pytest.approx(free.step_s + layers - computed)


def test_a_kernels_table_gives_attentions_rate_by_context_and_head() -> None:
    table = {"flash2": [[512, 64, 100, 50], [2048, 64, 200, 100]], "cudnn": [[512, 64, 400, 300]]}
    cluster = ClusterRates.from_group(replace(read_shipped("h100_ib"), attention=table, overhead_us=0.0))
    for kernel, context, rate, back in (("flash2", 512, 100, 50), ("flash2", 1024, 150, 75), ("cudnn", 9999, 400, 300)):
        seconds = partial(cluster.attention_seconds, 1e12, shape=(context, 64), kernel=kernel)
        assert seconds() == pytest.approx(1 / rate)
        assert seconds(backward=True) == pytest.approx(1 / back)
    # A kernel that the file does not have is as fast as it says of all.
    assert cluster.attention_seconds(1e12, shape=(512, 64), kernel="flash3") == pytest.approx(1 / (0.35 * 989.4))


def test_ranks_of_a_domain_are_neighbours_whatever_their_node() -> None:
    wide = ClusterRates.from_group(read_shipped("gb200_nvl72"))
    candidate = replace(ONE, dp=4, tp=8, pp=8, ranks_per_node=4)
    assert place_groups(candidate)["tp"].nodes == 2
    groups = TimeModel(shape(), DEFAULT, wide).groups(candidate)
    assert (groups["tp"].nodes, groups["pp"].nodes) == (1, 4)
    assert wide.collective("all_gather", 1e9, groups["tp"]) < wide.collective("all_gather", 1e9, Group(8, 2)) / 3


def test_axes_lie_where_the_mesh_puts_them() -> None:
    assert place_group(8, 1, 8, 64).nodes == 1
    assert place_group(16, 1, 8, 64).nodes == 2
    assert place_group(4, 8, 8, 64).nodes == 4
    assert place_group(4, 2, 8, 64).nodes == 1
    assert place_group(8, 2, 8, 8).nodes == 1
    groups = place_groups(Candidate(dp=4, tp=8, pp=2, shard=4, zero=1))
    assert [groups[axis].nodes for axis in ("tp", "shard", "pp")] == [1, 4, 2]


def test_update_saves_and_failures_by_hand() -> None:
    elements = 4 * (LAYER + 2 * 64) + 64 + 2 * HEAD
    saving = replace(DEFAULT, checkpoint=schema.Checkpoint(every_steps=10), train=schema.Train(steps=7200))
    cluster = machine(memory_rate=1e9, host_rate=1e8, price_per_hour=2.0, failures_per_device_hour=0.5)
    found = forecast_time(shape(), replace(ONE, dp=2, shard=2, zero=1), saving, cluster, BARE)
    # Norm: fp32 gradients once. Update: master and two moments twice, the gradient once, the bf16 parameter once.
    assert found.parts["optimizer"] == pytest.approx(elements / 2 * (4 + 30) / 1e9)
    # A save copies master and moments to the host, each tenth step.
    assert found.parts["checkpoint"] == pytest.approx(elements / 2 * 12 / 1e8 / 10)
    interval_s = 10 * (found.step_s - found.parts["checkpoint"])
    assert found.goodput == pytest.approx(1 / (1 + 2 * 0.5 / 3600 * (RESTART_S + interval_s / 2)))
    assert found.hours == pytest.approx(2 * found.step_s / found.goodput)
    assert found.cost == pytest.approx(found.hours * 2 * 2.0)


def test_no_failures_lose_nothing() -> None:
    assert expected_goodput(0.0, 3600.0) == 1.0


def test_offloaded_states_travel() -> None:
    here, away = (
        forecast_time(shape(), replace(ONE, offload=frozenset(names)), DEFAULT, machine(host_rate=1e9), BARE)
        for names in ((), ("optimizer",))
    )
    assert here.parts["offload"] == 0.0
    assert away.parts["offload"] > 0.0


def test_activations_on_the_host_travel_under_their_neighbours() -> None:
    away = replace(ONE, offload=frozenset({"activations"}))
    found = forecast_time(shape(), away, DEFAULT, machine(host_rate=1e12), BARE)
    assert found.parts["offload"] == 0.0 < found.hidden["offload"]
    slow = forecast_time(shape(), away, DEFAULT, machine(host_rate=1e9), BARE)
    assert slow.parts["offload"] + slow.hidden["offload"] == pytest.approx(1000 * found.hidden["offload"])


def test_a_chunked_loss_computes_the_head_again() -> None:
    chunked = replace(DEFAULT, memory=replace(DEFAULT.memory, chunked_loss=True))
    found = forecast_time(shape(), ONE, chunked, machine(), BARE)
    assert found.parts["recomputation"] == pytest.approx(2 * T * HEAD / TFLOPS)


def frozen(*patterns: str, **changes: float) -> TimeForecast:
    recipe = replace(DEFAULT, model=replace(DEFAULT.model, freeze=list(patterns)))
    c = Candidate(dp=4, context=128)
    return forecast_time(make_shape(llama(), recipe), c, recipe, machine(**{"rate": 1e9, **changes}), BARE)


def test_frozen_weights_are_neither_reduced_nor_updated_and_below_the_first_trained_unit_no_backward_comes() -> None:
    """Of four equal layers."""
    patterns = ((), (r"layers\.1\.",), ("embed_tokens", r"layers\.[01]\."))
    none, second, lower = (frozen(*each) for each in patterns)
    updates = [frozen(*each, rate=HUGE, memory_rate=1e9).parts["optimizer"] for each in patterns]
    model = make_shape(llama())
    of_layer = sum(model.whole.get_parameter(name).numel() for name in model.units[1].parameters)
    of_head = sum(each.numel() for each in model.whole.get_output_embeddings().parameters())
    embedding = 512 * 64
    cases = (second, updates[1], of_layer), (lower, updates[2], 2 * of_layer + embedding)
    for found, update_s, left_out in cases:
        share = 1 - left_out / model.size.total
        assert found.parts["reductions"] == pytest.approx(none.parts["reductions"] * share)
        assert update_s == pytest.approx(updates[0] * share)
    # A weight gradient of one layer; weight and input gradients of two.
    layer, head = (none.parts["matmuls"] - 3 * 2 * 128 * of_head / TFLOPS) / 4, 3 * 2 * 128 * of_head / TFLOPS
    assert second.parts["matmuls"] == pytest.approx(head + layer * (4 - 1 / 3))
    assert lower.parts["matmuls"] == pytest.approx(head + layer * (4 - 2 * 2 / 3))
    assert lower.parts["attention"] == pytest.approx(none.parts["attention"] * 4 / 6, rel=0.1)


def test_weights_travel_as_fp8_at_stage_3_with_one_scale_each_alone() -> None:
    def gathered(scaling: Any, stage: int) -> float:
        recipe = replace(DEFAULT, precision=schema.Precision(compute="fp8", fp8_scaling=scaling))
        rates = machine(
            rate=1e9, peak_flops={"bf16": TFLOPS, "fp8": TFLOPS}, matmul_rate={"bf16": TFLOPS, "fp8": TFLOPS}
        )
        c = Candidate(dp=4, shard=4, zero=stage, context=128)
        return forecast_time(make_shape(llama(), recipe), c, recipe, rates, BARE).parts["gathers"]

    assert gathered("tensor", 1) == gathered("row", 1)
    assert 0.5 < gathered("tensor", 3) / gathered("row", 3) < 0.8
