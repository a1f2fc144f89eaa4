"""Context parallelism in a plan: bytes and times worked out by hand, which method wins where, and what the page says."""

from dataclasses import replace

import pytest

from framework.model.flops import attended
from framework.model.load import load_config
from framework.plan.cluster import Cluster
from framework.plan.context import AttentionShape, ContextCost, Links, Method, Passes, attention_shapes, find_methods
from framework.plan.context_page import describe_context
from framework.plan.page import describe_ranks
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Launch, Recipe

MIB = 2**20
# Of Llama 3.1 8B.
LLAMA = AttentionShape(heads=32, kv_heads=8, key_dim=128, value_dim=128, reach=131072)
RING, ULYSSES, GATHER, MIXED = Method(1, 8), Method(8, 1), Method(1, 8, gathers=True), Method(4, 2)
WORDS = ("model=llama3_1_8b", "launch.device=cuda", "launch.ranks=8", "batch.context=131072", "precision=bf16")
WORDS += ("batch.sequences_per_step=8", "batch.sequences_per_microbatch=1", "memory=full_checkpointing")


def cost_of(method, shape=LLAMA, context=131072, **values):
    return ContextCost(method, shape, 1, context, 2, **values)


def links_of(tp=1, ranks_per_node=8):
    return Links(Cluster.from_recipe(Recipe(launch=Launch(gres="gpu:h100"))), tp, ranks_per_node)


def plan_of(*words):
    recipe = compose([*WORDS, *words]).require()
    return make_plan(recipe, load_config(recipe.model))


def test_a_ring_sends_keys_and_values_and_in_backward_their_gradients_in_fp32():
    # 16,384 tokens, 8 heads of 128, keys and values, 2 bytes; 4 more for each gradient.
    assert cost_of(RING).step_bytes == (64 * MIB, 192 * MIB)
    for cost in (cost_of(RING), cost_of(GATHER)):
        assert cost.travelling_bytes == (7 * 64 * MIB, 7 * 192 * MIB)
        assert cost.sent(Passes(2, 2)) == 7 * (2 * 64 + 192) * MIB


def test_ulysses_sends_all_heads_of_a_share_of_the_tokens():
    # 16,384 tokens x 128 x 2 bytes x (32 + 8 + 8 heads in, 32 out), of which 7/8 are other ranks'.
    assert cost_of(ULYSSES).exchanged_bytes == (16384 * 128 * 2 * 80 * 7 // 8,) * 2
    # With fewer key-value heads than ranks each gets one: 16 times (2 + 1 + 1).
    assert cost_of(Method(16, 1)).exchanged_bytes == (8192 * 128 * 2 * (16 * 4 + 32) * 15 // 16,) * 2
    # The numbers of documents' first rows travel as well, in forward.
    assert cost_of(ULYSSES, packs=True).sent(Passes()) - cost_of(ULYSSES).sent(Passes()) == 7 * 16384 * 8


def test_a_mixture_of_both_sends_both():
    # In the ring 4 x 16,384 tokens of 2 key-value heads: as many bytes as with all heads of 16,384.
    assert cost_of(MIXED).step_bytes == (64 * MIB, 192 * MIB)
    exchanged = 16384 * 128 * 2 * 80 * 3 // 4
    assert cost_of(MIXED).sent(Passes(2, 2)) == 3 * exchanged + 2 * 64 * MIB + 192 * MIB
    # Where what attention gives is kept, heads are exchanged again and nothing else.
    assert cost_of(MIXED).sent(Passes(2, 1)) == 3 * exchanged + 64 * MIB + 192 * MIB


def test_behind_a_window_nothing_is_sent_by_a_ring_and_everything_by_a_gather():
    windowed = AttentionShape(32, 8, 128, 128, reach=4096, is_windowed=True)
    assert [cost_of(method, windowed).num_steps for method in (RING, Method(1, 2))] == [2, 1]
    assert cost_of(RING, windowed).travelling_bytes[0] == 2 * 64 * MIB
    assert cost_of(GATHER, windowed).travelling_bytes[0] == 7 * 64 * MIB


@pytest.mark.parametrize(("reach", "context"), [(7, 7), (3, 7), (1, 5)])
def test_pairs_are_those_that_a_causal_mask_leaves(reach, context):
    seen = sum(query - key < reach for query in range(context) for key in range(query + 1))
    assert AttentionShape(1, 1, 1, 1, reach).pairs(context) == seen


def test_the_flops_of_ranks_are_together_those_of_the_sequence_and_equal():
    one, eight = cost_of(Method(1, 1)).flops, cost_of(RING).flops
    assert one == tuple(8 * each for each in eight)
    # The causal half of PaLM's count, two FLOPs each, plus the diagonal.
    config = load_config(compose(["model=llama3_1_8b"]).require().model)
    assert one[0] == pytest.approx(attended(config, 131072)[0] * 131072, rel=1e-4)
    assert one[1] == 2.5 * one[0]


def test_a_step_is_hidden_from_the_stated_number_of_tokens_on():
    for method, links in ((RING, links_of()), (Method(4, 8), links_of()), (Method(1, 32), links_of(ranks_per_node=4))):
        cost = cost_of(method)
        tokens = cost.hidden_from(links)
        for factor, is_hidden in ((1.2, True), (0.8, False)):
            length = round(factor * tokens) * method.ulysses * method.ring
            near = cost_of(method, AttentionShape(32, 8, 128, 128, length), length)
            latency = links.of_ring(method).latency_s * near.portions[1]
            hidden = [message - latency <= block - links.cluster.overhead_s for message, block in near.step_s(links)]
            assert all(hidden) is is_hidden


def test_links_are_the_nodes_where_the_ranks_of_a_ring_are_in_one():
    links = links_of(tp=2)
    assert links.of_ring(Method(1, 4)) == links.of_ring(Method(2, 2)) == links.cluster.device_link(1)
    assert links.of_ring(Method(1, 8)) == links.cluster.device_link(2)
    # Of an exchange over 8 ranks, 4 in a node, 4/7 leaves it.
    seconds = links.exchange_s(Method(8, 1), 7e9)
    assert seconds == pytest.approx(4e9 / 46e9, rel=1e-3)


def test_methods_are_those_that_divide_the_heads_of_a_rank():
    assert [method.name for method in find_methods(8, 32)] == ["ring", "[2,4]", "[4,2]", "ulysses", "gather"]
    assert [method.name for method in find_methods(8, 12)] == ["ring", "[2,4]", "[4,2]", "gather"]
    assert [method.name for method in find_methods(6, 3)] == ["ring", "[3,2]", "gather"]


@pytest.mark.parametrize(
    ("context", "cp", "ranks_per_node", "heads", "best"),
    [
        (131072, 8, 8, 32, "ulysses"),  # in a node an exchange takes less than merging the blocks of a ring
        (1 << 20, 32, 8, 32, "[8,4]"),  # between nodes the ring is hidden, and an exchange would not be
        (4096, 2, 1, 32, "ring"),
        (131072, 8, 1, 5, "ring"),  # no degree divides the heads
        (512, 4, 8, 5, "gather"),  # one message in place of three, none of which a block hides
    ],
)
def test_which_method_wins(context, cp, ranks_per_node, heads, best):
    shape = AttentionShape(heads, heads if heads < 8 else 8, 128, 128, context)
    links = links_of(ranks_per_node=ranks_per_node)
    times = {
        method.name: cost_of(method, shape, context).times(links, Passes()).total_s
        for method in find_methods(cp, heads)
    }
    assert min(times, key=times.__getitem__) == best


def test_recomputation_sends_and_computes_a_forward_again():
    cost, links = cost_of(RING), links_of()
    once, twice, kept = (cost.times(links, Passes(*each)) for each in ((1, 1), (2, 2), (2, 1)))
    assert kept == once
    forward_s, backward_s = links.attention_s(cost.flops[0]), links.attention_s(cost.flops[1], backward=True)
    added = forward_s / (forward_s + backward_s)
    assert twice.attention_s / once.attention_s == pytest.approx(1 + added, rel=1e-3)
    plan = plan_of("parallel.cp=8")
    assert plan.traffic(0)["cp"] == 32 * 8 * (2 * 7 * 64 + 7 * 192) * MIB
    for memory in ("none", "selective_checkpointing"):  # which keeps what attention gives
        assert plan_of("parallel.cp=8", f"memory={memory}").traffic(0)["cp"] == 32 * 8 * (7 * 64 + 7 * 192) * MIB


def test_a_rank_keeps_its_part_of_the_tokens_and_computes_its_part_of_the_attention():
    one, eight = plan_of("memory.chunked_loss=true"), plan_of("memory.chunked_loss=true", "parallel.cp=8")
    assert one.activations.hidden_bytes == 8 * eight.activations.hidden_bytes
    assert one.activations.layer_bytes == 8 * eight.activations.layer_bytes
    # Of a token as many FLOPs, with the whole context as length: MFU counts a token once.
    assert one.flops_per_token == eight.flops_per_token
    assert one.activations.costs.flops((0, 1, 0, 0)) == eight.activations.costs.flops((0, 1, 0, 0))
    assert one.traffic(0)["cp"] == 0


def test_exchanged_heads_are_kept_and_gathered_keys_are_there_while_attention_computes():
    ring, ulysses, gather = (cost_of(method) for method in (RING, Method(16, 1), GATHER))
    assert ring.kept_bytes == 0
    # The output twice, and one key-value head of all tokens in place of 8 of 1/16.
    assert ulysses.kept_bytes == 8192 * 128 * 2 * (32 + 16 * 2 - 8 * 2)
    # In 16 messages: two of K/V and three of their sums, and of a gather those of all 8 ranks.
    assert ring.portions == gather.portions == (8, 16)
    assert gather.transient_bytes - ring.transient_bytes == (8 * 192 - 2 * 64 - 3 * 128) * MIB // 16
    # In fp32 sums take the place of what was gathered, and K/V are as wide as their sums.
    wide_ring, wide_gather = (replace(each, itemsize=4) for each in (ring, gather))
    assert wide_gather.transient_bytes - wide_ring.transient_bytes == (8 * 128 - 5 * 128) * MIB // 16
    plans = [plan_of("parallel.cp=8", f"parallel.context={name}").activations for name in ("ring", "gather")]
    # By then the mlp's are gone, which are more than what a ring has under way.
    assert plans[0].transient_bytes == 0
    assert plans[0].layer_bytes == plans[1].layer_bytes


def test_latent_attention_and_windows_have_shapes_of_their_own():
    deepseek = load_config(compose(["model=deepseek_v3"]).require().model)
    assert set(attention_shapes(deepseek, 8, 4096)) == {AttentionShape(16, 16, 192, 128, 4096)}
    gemma = load_config(compose(["model=gemma2_9b"]).require().model)
    assert {(each.reach, each.is_windowed) for each in attention_shapes(gemma, 1, 8192)} == {
        (4096, True),
        (8192, False),
    }
    assert attention_shapes(gemma, 16, 8192)[0].kv_heads == 1


def test_the_page_of_memory_names_the_tokens_of_a_rank():
    page = "\n".join(describe_ranks(plan_of("parallel.cp=8", "batch.context=131071")))
    assert "per microbatch for backward, of 16,384 of the 131,071 tokens of a sequence\n" in page
    assert "keys and values over cp\n" in page


def test_the_page_says_what_a_step_takes_and_which_method_is_fastest():
    page = "\n".join(describe_context(plan_of("parallel.cp=8", "launch.gres=gpu:h100")))
    assert "step of the ring  64 MiB in forward, 192 MiB in backward: " in page
    assert "of attention: hidden" in page
    assert "parallel.context=ulysses; exposed messages and copies: ulysses " in page
    assert "the 32 heads of a rank over at most 32 ranks, beyond 8 with copies" in page
    assert "of cluster=h100_ib: 346 TFLOP/s in attention, 370 GB/s in a node, 46 GB/s between nodes" in page
    assumed = "\n".join(describe_context(plan_of("parallel.cp=8", "parallel.context=ulysses")))
    assert "fastest           ulysses, as it is" in assumed
    assert "of cluster=h100_ib, which is assumed" in assumed
    assert list(describe_context(plan_of())) == []
