"""Tensor, sequence and vocabulary parallelism: a split model's loss and gradients are the whole one's, within 1e-9 in fp64."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING

from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.comm.objects import all_gather_object
from framework.errors import ModelError, TopologyError
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis, Topology
from framework.model.kept_outputs import KeptOutputs
from framework.model.load import build_meta
from framework.model.loss import TokenLoss
from framework.model.shrink import shrink
from framework.parallel.activation_checkpointing import CheckpointedForward
from framework.parallel.tensor import layers
from framework.parallel.tensor.layers import RowLinear
from tests.families import FAMILIES, Family, build_config, family
from tests.ranks.pool import RankPool
from tests.ranks.tensor_parity import (
    CPU,
    ROWS,
    TOKENS,
    TensorCase,
    build_split,
    build_whole,
    compare_cases,
    recipe_of,
    split,
)

TOLERANCE = 1e-9
# A broken rule must show far beyond the tolerance, not at its edge.
VISIBLE = 1e-4
ALONE = Communicator(Axis("kv", 1, 0))
# Stock code that has no fp64: xglm puts fp64's lowest number into an fp32 tensor.
WITHOUT_FP64 = ("xglm",)
# Where the tiny configuration's heads do not divide by 4.
CHANGES = {
    "falcon": {"hidden_size": 32, "num_attention_heads": 8},
    "codegen": {"n_head": 16, "n_embd": 64},
    "diffllama": {"num_attention_heads": 8},
    "qwen3_next": {"linear_num_key_heads": 4},
}
NUM_BATCHES = 6


def errors(pool: RankPool, cases: Sequence[TensorCase]) -> dict[str, float]:
    """The worst error of each case on any rank."""
    worst: dict[str, float] = {}
    for of_rank in pool.run(4, compare_cases, cases, timeout_s=300):
        for name, error in of_rank.items():
            worst[name] = max(error, worst.get(name, 0.0))
    assert len(worst) == len(cases)
    return worst


def assert_equal(pool: RankPool, cases: Sequence[TensorCase]) -> None:
    failed = {name: error for name, error in errors(pool, cases).items() if not error < TOLERANCE}
    assert not failed


@pytest.mark.grid
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_family_split_equals_whole(pool: RankPool, batch: int) -> None:
    families: list[Family] = [each for each in FAMILIES if each.name not in WITHOUT_FP64][batch::NUM_BATCHES]
    grid = ((2, False), (4, True))
    assert_equal(
        pool,
        [TensorCase(each, tp, sequence, CHANGES.get(each.name, {})) for each in families for tp, sequence in grid],
    )


def test_heads_ties_and_odd_sequences_equal_whole(pool: RankPool) -> None:
    """Of each thing that `test_heads_ties_and_odd_sequences_of_more_families_equal_whole` has, one."""
    cases = [
        TensorCase(family("qwen3"), 4, False, {"num_key_value_heads": 2, "tie_word_embeddings": False}),
        TensorCase(family("phi3"), 4, True, {"num_key_value_heads": 1}),
        TensorCase(family("falcon"), 4, True, CHANGES["falcon"] | {"multi_query": False, "alibi": True}),
        TensorCase(family("qwen3_moe"), 4, True, {"output_router_logits": True}, tokens=13),
        TensorCase(family("opt"), 4, False, {"pad_token_id": 96}),
    ]
    assert_equal(pool, cases)


@pytest.mark.grid
def test_heads_ties_and_odd_sequences_of_more_families_equal_whole(pool: RankPool) -> None:
    """One, two or four key-value heads on four ranks, alone and packed; alibi; norms per head; balanced experts."""
    cases = [
        TensorCase(family("qwen3"), 4, sequence, {"num_key_value_heads": kv, "tie_word_embeddings": tied})
        for kv, tied, sequence in ((1, True, True), (2, False, False), (4, True, False))
    ]
    cases += [TensorCase(family("olmo2"), 4, True, {"num_key_value_heads": kv}) for kv in (1, 4)]
    cases += [TensorCase(family("phi3"), 4, True, {"num_key_value_heads": kv}) for kv in (1, 4)]
    cases += [
        TensorCase(family("gpt_bigcode"), 4, False, {"multi_query": False}),
        TensorCase(family("falcon"), 4, True, CHANGES["falcon"] | {"multi_query": False, "alibi": True}),
        TensorCase(family("cohere"), 4, True, {"use_qk_norm": True}),
        TensorCase(family("opt"), 2, True, {"do_layer_norm_before": False}),
        TensorCase(family("mixtral"), 2, False, {"output_router_logits": True}),
        TensorCase(family("qwen3_moe"), 4, True, {"output_router_logits": True}),
        TensorCase(family("gpt2"), 2, True, {"pad_token_id": 60}),
        TensorCase(family("opt"), 4, False, {"pad_token_id": 96}),
    ]
    cases += [TensorCase(family(name), 4, True, tokens=13) for name in ("llama", "opt", "bloom", "mixtral")]
    cases.append(TensorCase(family("llama4_text"), 4, True, tokens=12))
    assert_equal(pool, cases)


# What is done with logits, and with whose head: capped, scaled, divided by a number; with a bias.
CHUNKED = (
    TensorCase(family("gemma2"), 4, True, chunk_tokens=5),
    TensorCase(family("gptj"), 2, True, chunk_tokens=4),  # whose head has a bias
    TensorCase(family("qwen2_moe"), 4, True, regathers=True, tokens=13),
)
MORE_CHUNKED = (
    TensorCase(family("cohere"), 2, False, chunk_tokens=7),
    TensorCase(family("granite"), 2, True, {"logits_scaling": 3.0}, chunk_tokens=5),
    TensorCase(family("gemma2"), 2, False, chunk_tokens=4),
    TensorCase(family("cohere2"), 2, True, chunk_tokens=3),
    TensorCase(family("granitemoe"), 2, False, {"logits_scaling": 3.0}, chunk_tokens=6),
    TensorCase(family("llama"), 2, True, regathers=True),
    TensorCase(family("deepseek_v3"), 4, True, regathers=True, chunk_tokens=1),
)


@pytest.mark.grid  # a few of each: test_chunked_loss.py, test_pipeline_tensor.py
@pytest.mark.parametrize("cases", [CHUNKED, MORE_CHUNKED], ids=["few", "more"])
def test_loss_in_chunks_and_gathering_again_equal_whole(pool: RankPool, cases: Sequence[TensorCase]) -> None:
    assert_equal(pool, cases)


# --- sabotage: each of these rules matters


def drop_partial(*words: str) -> Callable[[dict[str, Layout]], dict[str, Layout]]:
    """Gradients of the parameters with such a word in their name are taken to be whole."""
    return partial(_drop_partial, words)


def _drop_partial(words: Sequence[str], layouts: dict[str, Layout]) -> dict[str, Layout]:
    return {
        name: replace(layout, partial=()) if any(word in name for word in words) else layout
        for name, layout in layouts.items()
    }


def add_row_bias_on_every_rank() -> Any:
    """Before the sum over ranks."""

    whole = RowLinear.forward

    def forward(layer: RowLinear, x: Tensor) -> Tensor:
        return whole(layer, x) + (layer.region.axis.size - 1) * layer.bias

    return patch.object(RowLinear, "forward", forward)


def look_up_without_scale() -> Any:
    """The rows alone, as a plain embedding has them."""

    def look_up(whole: Any, start: int, stop: int, axis: Communicator, ids: Tensor) -> Tensor:
        return layers_look_up(partial(nn.Embedding.forward, whole.__self__), start, stop, axis, ids)

    layers_look_up = layers._look_up
    return patch.object(layers, "_look_up", look_up)


def count_copies_once_in_the_norm() -> Any:
    """The norm over all heads forgets that several ranks hold the same key-value heads."""
    whole = layers.SplitRMSNorm.__init__

    def init(
        norm: Any, weight: Any, eps: float, num_features: int, copies: int, before: bool, axis: Communicator
    ) -> None:
        whole(norm, weight, eps, num_features, 1, before, axis)

    return patch.object(layers.SplitRMSNorm, "__init__", init)


SABOTAGED = {
    "norms under sequence parallelism": TensorCase(
        family("llama"), 2, True, spoil=drop_partial("layernorm", "model.norm")
    ),
    "row biases under sequence parallelism": TensorCase(family("gpt2"), 2, True, spoil=drop_partial("c_proj.bias")),
    "key-value heads in groups": TensorCase(family("llama"), 4, False, spoil=drop_partial("k_proj", "v_proj")),
    "norms per head": TensorCase(family("qwen3"), 2, False, spoil=drop_partial("q_norm")),
    "routers": TensorCase(family("mixtral"), 2, False, spoil=drop_partial("mlp.gate")),
    "latent attention": TensorCase(family("deepseek_v3"), 2, False, spoil=drop_partial("kv_a_proj")),
    "row bias": TensorCase(family("phi"), 2, False, sabotage=add_row_bias_on_every_rank),
    "embedding scale": TensorCase(family("gemma"), 2, False, sabotage=look_up_without_scale),
    "norms over shared heads": TensorCase(family("olmo2"), 4, False, sabotage=count_copies_once_in_the_norm),
}


@pytest.mark.grid
def test_every_rule_shows_when_it_is_dropped(pool: RankPool) -> None:
    found = errors(pool, list(SABOTAGED.values()))
    unnoticed = {rule: found[case.name] for rule, case in SABOTAGED.items() if found[case.name] < VISIBLE}
    assert not unnoticed


# --- volume


def test_bytes_are_those_of_theory_and_no_logits_travel(pool: RankPool) -> None:
    for of_rank in pool.run(2, count_traffic):
        for label, (sent, expected) in of_rank.items():
            assert sent == expected, label


def count_traffic(rank: int, world: int, rendezvous: str) -> dict[str, tuple[int, int]]:
    """Body: bytes that a rank sends in one forward and backward, and what it should be.

    One all-reduce of A bytes sends 2 (n-1)/n A, a gather or a reduce-scatter half of that. Each layer has two regions, each
    with one all-reduce forward and one backward, or a gather and a reduce-scatter either way, and in backward one more gather
    of the row layer's gradient: the adjoint of its reduce-scatter. The embedding sums its rows; the head's input gradient is
    summed; the loss takes three numbers per token.
    """
    mesh = connect(Topology(tp=world), CPU, rendezvous, rank)
    tp, kv = mesh.axis("tp"), mesh.axis("kv")
    counts = {}
    ways = ((False, False), (True, False), (True, True))
    for (sequence, overlaps), num_layers in product(ways, (1, 3)):
        changes = {"num_hidden_layers": num_layers}
        case = TensorCase(family("llama"), world, sequence, changes, overlaps=overlaps)
        before = sum(tp.traffic.bytes.values())
        torch.manual_seed(0)
        whole = build_whole(case.config)
        model, _ = build_split(case, whole, tp, kv)
        ids = torch.randint(3, 97, (ROWS, TOKENS))
        TokenLoss(tp, 97)(model(input_ids=ids).logits, ids, torch.tensor(1)).backward()
        hidden = ROWS * TOKENS * 32 * 8
        once = 2 * (world - 1) * hidden // world
        embedding, head = once + (once // 2 if sequence else 0), once
        loss = 2 * (world - 1) * (3 * ROWS * TOKENS * 8) // world
        expected = embedding + head + loss + 2 * num_layers * 2 * once
        counts[case.name] = sum(tp.traffic.bytes.values()) - before, expected
    mesh.close()
    return counts


# --- random draws


def test_draws_are_alike_where_ranks_compute_alike(pool: RankPool) -> None:
    """Without sequence parallelism hidden states stay bitwise equal between ranks through dropout everywhere, while the ranks'
    own features are dropped differently; activation checkpointing draws the same again."""
    for states, inside, gradient, again in pool.run(2, draw_dropout):
        assert torch.equal(*states)
        assert not torch.equal(*inside)
        assert torch.equal(gradient, again)


def draw_dropout(rank: int, world: int, rendezvous: str) -> tuple[Any, ...]:
    """Body: last hidden states and a draw inside the first attention, of both ranks; a gradient without and with activation
    checkpointing. With sequence parallelism the same must hold of the gradient and the draw, and a draw in front of the head
    must be alike."""
    mesh = connect(Topology(tp=world), CPU, rendezvous, rank)
    (plain, again), (sharded, sharded_again) = (
        [drop(mesh.axis("tp"), sequence, checkpoints) for checkpoints in (False, True)] for sequence in (False, True)
    )
    mesh.close()
    assert torch.equal(sharded[2], sharded_again[2])
    assert not torch.equal(*sharded[1])
    assert torch.equal(*sharded[3])
    assert torch.equal(*plain[3])
    return plain[0], plain[1], plain[2], again[2]


def drop(tp: Communicator, sequence: bool, checkpoints: bool) -> tuple[Any, ...]:
    case = TensorCase(
        family("gpt2"), tp.size, sequence, dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.3)
    )
    torch.manual_seed(0)
    model, _ = build_split(case, build_whole(case.config), tp, ALONE)
    blocks = model.transformer.h
    states: list[Tensor] = []
    inside: list[Tensor] = []
    behind: list[Tensor] = []
    blocks[-1].register_forward_hook(lambda module, args, out: states.append(out.detach()))
    blocks[0].attn.c_proj.register_forward_pre_hook(lambda module, args: inside.append(F.dropout(torch.ones(64), 0.5)))
    model.lm_head.register_forward_pre_hook(lambda module, args: behind.append(F.dropout(torch.ones(64), 0.5)))
    for block in blocks if checkpoints else ():
        block.forward = CheckpointedForward(block.forward, KeptOutputs(), is_random=True)  # type: ignore[method-assign]
    torch.manual_seed(1)
    output = model(input_ids=torch.arange(TOKENS)[None] + 3).logits
    everywhere = list(zip(*all_gather_object((states[0], inside[0], behind[0]), tp), strict=True))
    output.sum().backward()
    return *everywhere[:2], blocks[0].mlp.c_fc.weight.grad, everywhere[2]


# --- bad input


def test_what_no_rule_knows_is_refused_by_name() -> None:
    axis = Communicator(Axis("tp", 2, 0))
    config = build_config(family("stablelm"), qk_layernorm=True)
    with pytest.raises(ModelError, match=r"(?s)layers.\*.self_attn.q_layernorm.norms.\* .*model.tp_plan"):
        split(build_meta(config), axis, ALONE, False)


def test_norms_of_what_is_still_in_parts_are_refused() -> None:
    """A.X-K1 normalises the output of its mixture of experts inside it, where each rank has a part of the sum."""
    config = shrink(CONFIG_MAPPING["axk1"]())
    with pytest.raises(ModelError, match=r"layers.1.mlp: a module .*parallel.expert_tp=1"):
        split(build_meta(config), Communicator(Axis("tp", 2, 0)), ALONE, False)


def test_degrees_that_heads_do_not_divide_by_are_refused_with_those_that_do() -> None:
    for name, tp, legal in (("llama", 3, r"\[1, 2, 4\]"), ("falcon", 2, r"\[1, 7\]"), ("diffllama", 4, r"\[1, 2\]")):
        with pytest.raises(TopologyError, match=rf"parallel.tp={tp} does not divide.*use parallel.tp in {legal}"):
            split(build_meta(build_config(family(name))), Communicator(Axis("tp", tp, 0)), ALONE, False)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"model.layers.*.mlp.upward": "column"}, "names no module"),
        ({"*.up_proj": "colwise"}, "is no role"),
    ],
)
def test_plans_of_the_user_that_mean_nothing_are_refused(plan: dict[str, str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        split(
            build_meta(build_config(family("llama"))),
            Communicator(Axis("tp", 2, 0)),
            ALONE,
            False,
            recipe=recipe_of(tp_plan=plan),
        )


def test_one_rank_changes_nothing() -> None:
    model = build_meta(build_config(family("gpt2")))
    modules = dict(model.named_modules())
    layouts = split(model, ALONE, ALONE, True)
    assert dict(model.named_modules()) == modules
    assert {name: layout.shape for name, layout in layouts.items()} == {
        name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)
    }
