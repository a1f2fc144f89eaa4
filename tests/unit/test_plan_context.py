"""Context parallelism in a plan: bytes worked out by hand, which method wins where, and the printed lines."""

from dataclasses import replace

import pytest

from framework.model.load import load_config
from framework.plan.candidate import Candidate, method_of
from framework.plan.forecast_plan import forecast_plan, measure_traffic
from framework.plan.layer_widths import AttentionShape, attention_shapes
from framework.plan.messages import ContextCost, Passes, find_methods
from framework.plan.plan import make_plan
from framework.plan.plan_text import describe_plan, describe_ranks
from framework.recipe.compose import compose
from tests.grid import IN_TURN

pytestmark = IN_TURN

MIB = 2**20
# Of Llama 3.1 8B.
LLAMA = AttentionShape(heads=32, kv_heads=8, key_dim=128, value_dim=128, reach=131072)
RING, ULYSSES, GATHER, MIXED = (
    Candidate(cp=8),
    Candidate(cp=8, ulysses=8),
    Candidate(cp=8, is_gather=True),
    Candidate(cp=8, ulysses=4),
)
WORDS = ("model=llama3_1_8b", "launch.device=cuda", "launch.ranks=8", "batch.context=131072", "precision=bf16")
WORDS += ("batch.sequences_per_step=8", "batch.sequences_per_microbatch=1", "memory=full_checkpointing")


def cost_of(layout, shape=LLAMA, context=131072, **values):
    return ContextCost(replace(layout, context=context), shape, 2, **values)


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
    assert cost_of(Candidate(cp=16, ulysses=16)).exchanged_bytes == (8192 * 128 * 2 * (16 * 4 + 32) * 15 // 16,) * 2
    # The numbers of documents' first rows travel as well, in forward.


def test_a_mixture_of_both_sends_both():
    # In the ring 4 x 16,384 tokens of 2 key-value heads: as many bytes as with all heads of 16,384.
    assert cost_of(MIXED).step_bytes == (64 * MIB, 192 * MIB)
    exchanged = 16384 * 128 * 2 * 80 * 3 // 4
    assert cost_of(MIXED).sent(Passes(2, 2)) == 3 * exchanged + 2 * 64 * MIB + 192 * MIB
    # Where what attention gives is kept, heads are exchanged again and nothing else.
    assert cost_of(MIXED).sent(Passes(2, 1)) == 3 * exchanged + 64 * MIB + 192 * MIB


def test_behind_a_window_nothing_is_sent_by_a_ring_and_everything_by_a_gather():
    windowed = AttentionShape(32, 8, 128, 128, reach=4096, is_windowed=True)
    assert [cost_of(method, windowed).num_steps for method in (RING, Candidate(cp=2))] == [2, 1]
    assert cost_of(RING, windowed).travelling_bytes[0] == 2 * 64 * MIB
    assert cost_of(GATHER, windowed).travelling_bytes[0] == 7 * 64 * MIB


@pytest.mark.parametrize(("reach", "context"), [(7, 7), (3, 7), (1, 5)])
def test_pairs_are_those_that_a_causal_mask_leaves(reach, context):
    seen = sum(query - key < reach for query in range(context) for key in range(query + 1))
    assert AttentionShape(1, 1, 1, 1, reach).pairs(context) == seen


def test_methods_are_those_that_divide_the_heads_of_a_rank():
    def find(cp, heads):
        return [method_of(each) for each in find_methods(Candidate(cp=cp), heads)]

    assert find(8, 32) == ["ring", [2, 4], [4, 2], "ulysses", "gather"]
    assert find(8, 12) == ["ring", [2, 4], [4, 2], "gather"]
    assert find(6, 3) == ["ring", [3, 2], "gather"]


@pytest.mark.parametrize(
    ("context", "cp", "best"),
    [
        (131072, 8, "ulysses"),  # in a node an exchange takes less than merging the blocks of a ring
        (131072, 16, "[8,2]"),  # between nodes the ring is hidden, and an exchange would not be
        (1 << 20, 32, "[8,4]"),
    ],
)
def test_the_plan_names_the_fastest_method(context, cp, best):
    words = (f"parallel.cp={cp}", f"launch.ranks={cp}", f"batch.context={context}", "launch.gres=gpu:h100")
    nodes = ("launch.kind=slurm", "launch.ranks_per_node=8", f"model.config.max_position_embeddings={context}")
    found = forecast_plan(plan_of(*words, *nodes, "parallel.context=ring"))
    assert found.context_methods[0][0] == best
    seconds = dict(found.context_methods)
    assert seconds["ring"] == found.forecast.time.step_s > seconds[best]
    text = "\n".join(describe_plan(found, ()))
    assert f"context       step time by parallel.context, the fastest first: {best} " in text


def test_recomputation_sends_a_forward_again():
    plan = plan_of("parallel.cp=8")
    assert measure_traffic(plan, 0)["cp"] == 32 * 8 * (2 * 7 * 64 + 7 * 192) * MIB
    for memory in ("none", "selective_checkpointing"):  # which keeps what attention gives
        assert (
            measure_traffic(plan_of("parallel.cp=8", f"memory={memory}"), 0)["cp"] == 32 * 8 * (7 * 64 + 7 * 192) * MIB
        )


def test_a_rank_keeps_its_part_of_the_tokens_and_computes_its_part_of_the_attention():
    one, eight = plan_of("memory.chunked_loss=true"), plan_of("memory.chunked_loss=true", "parallel.cp=8")
    assert one.activations.hidden_bytes == 8 * eight.activations.hidden_bytes
    assert one.activations.layer_bytes == 8 * eight.activations.layer_bytes
    # Of a token as many FLOPs, with the whole context as length: MFU counts a token once.
    assert one.flops_per_token == eight.flops_per_token
    assert one.activations.costs.flops((0, 1, 0, 0)) == eight.activations.costs.flops((0, 1, 0, 0))
    assert measure_traffic(one, 0)["cp"] == 0


def test_exchanged_heads_are_kept_and_gathered_keys_are_there_while_attention_computes():
    ring, ulysses, gather = (cost_of(method) for method in (RING, Candidate(cp=16, ulysses=16), GATHER))
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


def test_ranks_say_what_their_method_sends():
    page = "\n".join(describe_ranks(plan_of("parallel.cp=8", "launch.gres=gpu:h100")))
    assert "context       7 steps of the ring, each: 64 MiB in forward, 192 MiB in backward" in page
    assert "the 32 heads of a rank over at most 32 ranks, beyond 8 with copies" in page
    assert "context  " not in "\n".join(describe_ranks(plan_of()))
