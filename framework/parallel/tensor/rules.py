"""Rules: what each module of a decoder layer is under tensor parallelism, as data.

A role is `column`, `row`, `replicated` or `norm` with the arrangement (`ARRANGEMENTS`) of the dim that is split:

    column:ARRANGEMENT   Y_r = X W_r^T + b_r       W, b split along the outputs; X is whole, Y_r this rank's features
    row:ARRANGEMENT      Y = sum_r X_r W_r^T + b   W split along the inputs; b added once
    sum:ARRANGEMENT      the same, not where a region ends: every rank goes on with Y in its own way
    norm:ARRANGEMENT     a norm over features that are split; its weight is split with them
    replicated           the same on all ranks, inside of a region
    outside              the same on all ranks, token by token, outside of regions: of this rank's tokens where these are divided

The language is the user's as well: `model.tp_plan` maps patterns of module names to roles.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from transformers import PretrainedConfig

from framework.model.units import CHANNEL_DELTA_RULE, CONVOLUTION, DELTA_RULE, STATE_OF_CHANNELS, STATE_OF_HEADS

# Words for what lies along a dim of a weight: see `partition`.
ARRANGEMENTS = (
    "", "pair", "triple", "heads", "kv_heads", "qkv", "per_head", "groups", "block_qvk",
    "linear_key_heads", "linear_value_heads", "linear_channels", "state_rows", "state_channels",
)  # fmt: skip
KINDS = ("column", "row", "sum", "replicated", "outside", "norm")


@dataclass(frozen=True)
class Role:
    """`kind`: one of KINDS; `arrangement`: one of ARRANGEMENTS."""

    kind: str
    arrangement: str = ""


def parse_role(text: str) -> Role | None:
    """The role that `text` names, None if it names none."""
    kind, _, arrangement = text.partition(":")
    return Role(kind, arrangement) if kind in KINDS and arrangement in ARRANGEMENTS else None


def holder(name: str) -> str:
    """The module that computes with a weight's layer: its parent, or the parent of the module that wraps it."""
    return name.removesuffix(".linear").rpartition(".")[0]


# Keyed by the last part of a module's name. A name means the same in all families that use it, but for FAMILIES.
ROLES: Mapping[str, str] = MappingProxyType({
    # attention
    "q_proj": "column:heads", "k_proj": "column:kv_heads", "v_proj": "column:kv_heads",
    "query": "column:heads", "key": "column:kv_heads", "value": "column:kv_heads",
    "o_proj": "row", "out_proj": "row", "dense": "row", "c_proj": "row",
    "attn_sub_norm": "norm:heads",
    # gates of an attention's output, one number for each head or for each of its features
    "g_proj": "column:heads",
    # latent attention: the down-projections serve all heads
    "q_a_proj": "replicated", "q_a_layernorm": "replicated", "q_b_proj": "column:heads",
    "kv_a_proj_with_mqa": "replicated", "kv_a_layernorm": "replicated", "kv_b_proj": "column:heads",
    # the choice of keys is the same for all heads
    "indexer": "replicated", "k_rope_only_layernorm": "replicated",
    # mlp
    "gate_proj": "column", "up_proj": "column", "down_proj": "row",
    "w1": "column", "w3": "column", "w2": "row",
    "gate_up_proj": "column:pair",
    "fc1": "column", "fc2": "row",
    "fc_in": "column", "fc_out": "row",
    "c_fc": "column",
    "dense_h_to_4h": "column", "dense_4h_to_h": "row",
    "ffn_sub_norm": "norm",
    "Wi": "column:pair", "Wo": "row",
    "act_fn": "replicated",
    # gemma's inputs of every layer, few features
    "per_layer_input_gate": "outside", "per_layer_projection": "outside", "altup": "outside", "laurel": "outside",
    # mixture of experts: the experts themselves are found by their attributes
    "gate": "replicated", "router": "replicated", "shared_expert_gate": "replicated",
})  # fmt: skip


def _falcon(config: PretrainedConfig) -> str:
    if config.new_decoder_architecture:
        return "column:groups"
    return "column:qkv" if config.multi_query else "column:per_head"


Choice = str | Callable[[PretrainedConfig], str]

# Exceptions of families: above all packed projections, whose arrangement no name tells.
FAMILIES: Mapping[str, Mapping[str, Choice]] = MappingProxyType({
    "gpt2": {"c_attn": "column:qkv"},
    "gpt_bigcode": {"c_attn": lambda config: "column:qkv" if config.multi_query else "column:per_head"},
    "gpt_neox": {"query_key_value": "column:per_head"},
    "bloom": {"query_key_value": "column:per_head"},
    "persimmon": {"query_key_value": "column:per_head"},
    "falcon": {"query_key_value": _falcon},
    "phi3": {"qkv_proj": "column:qkv"},
    "mpt": {"Wqkv": "column:qkv"},
    "codegen": {"qkv_proj": "column:block_qvk", "out_proj": "row:heads"},
    "granitemoeshared": {"input_linear": "column:pair", "output_linear": "row"},
    "granitemoehybrid": {"input_linear": "column:pair", "output_linear": "row"},
    "apertus": {"act_fn": "replicated"},
    # Its mlp keeps the largest of all its features.
    "gemma3n_text": {"mlp": "outside"},
    "openai-gpt": {"c_attn": "column:qkv"},
    "gpt_neox_japanese": {"query_key_value": "column:per_head"},
    "ctrl": {"Wq": "column:heads", "Wk": "column:heads", "Wv": "column:heads", "0": "column", "2": "row"},
    "phi4_multimodal": {"qkv_proj": "column:qkv"},
    # Mixers of the streams of a residual.
    "hy_v4": {"attn_hc": "outside", "ffn_hc": "outside"},
    "moshi": {"fc1": "column:pair"},
    "dbrx": {"Wqkv": "column:qkv"},
    # A norm of the mixture's output, which is in parts where experts are sliced.
    "axk1": {"post_mlp_layernorm": "outside"},
    "axk2": {"q_gate_proj": "column:heads"},
    # A gate in front of a branch of the residual; the layer multiplies by it.
    "gemma4_text": {"router": "outside"},
})  # fmt: skip

_KEYS, _VALUES, _CHANNELS = "column:linear_key_heads", "column:linear_value_heads", "column:linear_channels"
_NORM = "norm:linear_value_heads"
_DELTA: Mapping[str, str] = MappingProxyType({
    "in_proj_qkvz": _KEYS, "in_proj_ba": _KEYS,  # sorted by heads of keys, each with the values that it serves
    "in_proj_qkv": _CHANNELS, "in_proj_z": _VALUES, "in_proj_b": _VALUES, "in_proj_a": _VALUES,
    "q_proj": _KEYS, "k_proj": _KEYS, "v_proj": _VALUES, "g_proj": _VALUES, "a_proj": _VALUES, "b_proj": _VALUES,
    # gates of low rank: what leads to it serves all heads
    "f_a_proj": "replicated", "f_b_proj": _VALUES, "g_a_proj": "replicated", "g_b_proj": _VALUES,
    "conv1d": _CHANNELS,
    "norm": "replicated", "o_norm": "replicated",  # of one head
})  # fmt: skip
# Keyed by the form of a recurrent mixer, and the last part of the name of a module within: there names mean other things.
MIXERS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    DELTA_RULE: _DELTA,
    CHANNEL_DELTA_RULE: _DELTA,
    STATE_OF_HEADS: {"in_proj": "column:state_rows", "conv1d": "column:state_channels", "norm": _NORM},
    STATE_OF_CHANNELS: {
        "in_proj": "column:pair", "conv1d": _VALUES, "x_proj": "sum", "dt_proj": "column",
        "dt_layernorm": "replicated", "b_layernorm": "replicated", "c_layernorm": "replicated",
    },
    CONVOLUTION: {"in_proj": "column:triple", "conv": "column"},
})  # fmt: skip

# Into how many blocks an attention sorts its heads, where it is not one: CodeGen's packed projection has four, differential
# attention pairs heads of the first half with those of the second.
HEAD_BLOCKS: Mapping[str, int] = MappingProxyType({"codegen": 4, "diffllama": 2})

# Parameters that stand in an attention or a mixture of experts itself: the arrangement of dim 0, None if replicated.
PARAMETERS: Mapping[str, str | None] = MappingProxyType({
    "sinks": "heads",
    "gate_bias": "heads",
    "lambda_q1": None, "lambda_k1": None, "lambda_q2": None, "lambda_k2": None,
    "expert_bias": None,
    # Handed to the layer, which adds it.
    "dense_bias": "outside",
    "dt_bias": "linear_value_heads", "A_log": "linear_value_heads", "D": "linear_value_heads",
})  # fmt: skip

# Norms of queries and keys: over one head (replicated), over all heads (split), or one weight for each head (split).
HEAD_NORMS: Mapping[str, str] = MappingProxyType({
    "q_norm": "heads", "k_norm": "kv_heads",
    "q_layernorm": "heads", "k_layernorm": "kv_heads",
    "query_layernorm": "heads", "key_layernorm": "kv_heads",
})  # fmt: skip

# Families whose norm over all heads multiplies by its weight before it rounds to the model's dtype.
WEIGHT_BEFORE_CAST = frozenset({"olmo2", "olmo3", "olmo_hybrid"})

# Numbers that an attention's forward reads, by what they count.
HEAD_NUMBERS = frozenset({"num_heads", "num_attention_heads", "n_heads", "n_head"})
KV_NUMBERS = frozenset({"num_key_value_heads", "num_kv_heads", "kv_heads"})
# Widths of all heads together, divided if that is their value.
HEAD_WIDTHS = frozenset({"embed_dim", "hidden_size", "split_size", "all_head_size", "d_model_size"})
# Numbers that say how many features a head has.
HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "dim_head")
KV_WIDTHS = frozenset({"kv_dim"})
LINEAR_NUMBERS = frozenset({"num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim", "qkv_dim"})

# Arguments of layers with something for each token, [B, S, ...], beside hidden states: divided with them.
TOKEN_ARGUMENTS = ("per_layer_input",)

# Arguments of attentions with a bias for every head, [B * heads, ., .] or [B, heads, ., .]; beside them a mask may hold it, too.
HEAD_BIASES = ("alibi", "position_bias")
