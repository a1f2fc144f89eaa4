"""Activations of a decoder layer, in closed form: what it keeps for backward, and what it sends over `tp`.

Korthikanti et al. 2022 count 34 sbh bytes for GPT's layer in 16 bits, of which tensor and sequence parallelism leave 1/t. The
layer that most models have now keeps other tensors. For T tokens on t ranks, of which each holds T' outside of attention and mlp
(T/t with parallel.sequence, else T), hidden size h, q and k features of all queries and of all keys on a rank, a heads on a
rank, i features of the mlp on a rank, e bytes of an activation:

    two RMS norms       2 T' (h (4 + e) + 4)   the input in fp32, what it was normalised to, 1/rms
    inputs of regions   2 T h e                gathered; T' h e each with memory.gathered_inputs=regather
    attention           T (2 q + 2 k) e        queries and keys after rope, values, and what the output projection reads
                        T 4 a                  the logarithm of each softmax's sum, in fp32
    mlp                 T 4 i e                gate, silu(gate), up, and what the down projection reads

An activation-checkpointed layer keeps its input, T' h e. What stands behind the last layer keeps, for v words on a rank:

    norm and head       T' (h (4 + e) + 4) + T h e
    logits              T v e with a divided vocabulary or memory.chunked_loss, else T v 4: logarithms of softmax in fp32
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from framework.model.units import find_layers

if TYPE_CHECKING:
    from framework.plan.plan import Plan

# ActivationSpec values that a layer of another form is taken to keep: GPT's in 16 bits, without the matrix of its attention
# (Korthikanti et al. 2022, section 4: 34 s b h bytes).
ESTIMATED_VALUES = 17

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class LayerWidths:
    """Features of a whole layer of Llama's form. kv_heads: of key-value heads."""

    hidden: int
    q: int
    kv: int
    heads: int
    kv_heads: int
    inner: int


def layer_widths(model: PreTrainedModel) -> LayerWidths | None:
    """From the shapes of the first layer; None if it is not two RMS norms, a softmax attention and a gated mlp."""
    found = find_layers(model)
    if found is None:
        return None
    parts = {
        name: module
        for name, module in found[1][0].named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    linears = {name.rpartition(".")[2]: module for name, module in parts.items() if isinstance(module, nn.Linear)}
    norms = [type(module).__name__ for name, module in parts.items() if not isinstance(module, nn.Linear)]
    if set(linears) != ATTENTION | MLP or len(norms) != 2 or not all("RMSNorm" in norm for norm in norms):
        return None
    config = model.config.get_text_config()
    outputs = {name: linear.out_features for name, linear in linears.items()}
    return LayerWidths(
        hidden=linears["q_proj"].in_features,
        q=outputs["q_proj"],
        kv=outputs["k_proj"],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        inner=outputs["up_proj"],
    )


def layer_activations(plan: Plan) -> int:
    """Bytes that a rank keeps of one microbatch for the backward of one layer."""
    hidden = hidden_bytes(plan)
    if plan.recipe.memory.activation_checkpointing == "full":
        return hidden
    return _all_activations(plan)


def stage_activations(plan: Plan) -> tuple[list[int], int]:
    """Bytes that a rank keeps of one microbatch for the backward of each stage, and those that it has beside them while a
    checkpointed layer is computed again. An estimate where layers have a form without a formula."""
    layer, head = layer_activations(plan), _head_activations(plan)
    kept = [layer * (bounds.stop - bounds.start) + head * bounds.is_last for bounds in plan.pipeline.stages]
    is_checkpointed = plan.recipe.memory.activation_checkpointing == "full"
    return kept, _all_activations(plan) if is_checkpointed else 0


def hidden_bytes(plan: Plan) -> int:
    """Bytes of a rank's hidden states of one microbatch between two layers."""
    tokens = plan.token_layout(0)
    return prod(tokens.hidden_shape(_width(plan))) * plan.compute_dtype.itemsize


def bytes_sent_per_layer(plan: Plan) -> int:
    """What a rank sends over `tp` for one layer and one microbatch.

    With A bytes of hidden states and n ranks, each of two regions (attention and mlp) moves 2 (n-1)/n A in forward and again
    in backward: an all-reduce, or with parallel.sequence a gather and a reduce-scatter, which are the same bytes.
    """
    tokens = plan.token_layout(0)
    whole = tokens.sequences * tokens.context * _width(plan) * plan.compute_dtype.itemsize
    return 2 * 2 * 2 * (plan.derived.tp - 1) * whole // plan.derived.tp


def _all_activations(plan: Plan) -> int:
    """Bytes of a layer that keeps everything."""
    widths = layer_widths(plan.whole)
    if widths is None:
        return hidden_bytes(plan) * ESTIMATED_VALUES
    layout, e, t = plan.token_layout(0), plan.compute_dtype.itemsize, plan.derived.tp
    tokens, shard = layout.sequences * layout.context, layout.sequences * layout.tokens_local
    norms = 2 * shard * (widths.hidden * (4 + e) + 4)
    regathers = plan.recipe.memory.gathered_inputs == "regather"
    inputs = 2 * (shard if regathers else tokens) * widths.hidden * e
    kv = widths.kv // min(t, widths.kv_heads)
    attention = tokens * (2 * (widths.q // t + kv) * e + 4 * widths.heads // t)
    mlp = tokens * 4 * -(-widths.inner // t) * e
    return norms + inputs + attention + mlp


def _head_activations(plan: Plan) -> int:
    layout, e, t = plan.token_layout(0), plan.compute_dtype.itemsize, plan.derived.tp
    tokens, shard = layout.sequences * layout.context, layout.sequences * layout.tokens_local
    kept_logit = e if t > 1 or plan.recipe.memory.chunked_loss else max(e, 4)
    hidden = shard * (_width(plan) * (4 + e) + 4) + tokens * _width(plan) * e
    return hidden + tokens * -(-plan.config.get_text_config().vocab_size // t) * kept_logit


def _width(plan: Plan) -> int:
    return plan.config.get_text_config().hidden_size
