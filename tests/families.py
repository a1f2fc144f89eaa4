"""Tiny causal language models of many families: every layout must train each of them exactly as one process does.

Sizes are odd on purpose: a vocabulary of 97 divides by nothing, three layers divide unevenly over two stages, key-value
heads are fewer than heads, experts per token fewer than experts, and a sliding window of 5 is shorter than a sequence.
Dropout is zero wherever the family has it, so that a forward pass is a function of its input.
All of them build and train in transformers 5.17 and 5.24.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import AutoConfig, PretrainedConfig

# Of a test, or a row of one: the oldest transformers that we run does not have the family, or is at fault.
needs_newer_transformers = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="of a family that transformers 5.17 has not, or otherwise",
)

VOCABULARY = 97
POSITIONS = 64


@dataclass(frozen=True)
class Family:
    """A tiny model: `config` holds the values of its Hugging Face config, `model_type` included."""

    name: str
    config: dict[str, Any]


def build_config(family: Family, **changes: Any) -> PretrainedConfig:
    """The family's Hugging Face config, with `changes` on top, such as tie_word_embeddings=True."""
    values = family.config | changes
    return AutoConfig.for_model(values.pop("model_type"), **values)


# One of each kind of layer, for tests that ask each family the same: attention plain, with soft-caps and windows, with sinks,
# with biases of distance, latent, linear; packed projections; layers in parallel; learnt positions; experts of each form.
KINDS = (
    "llama", "gemma2", "bloom", "deepseek_v3", "qwen3_next", "phi3", "falcon", "gpt2", "opt", "mixtral", "gpt_oss", "llama4_text",
)  # fmt: skip


def is_kind(each: Family) -> bool:
    """Whether `make test` has this family, where the grid has all."""
    return each.name in KINDS


def family(name: str) -> Family:
    return next(found for found in FAMILIES if found.name == name)


# What nearly all configs share: special tokens inside the vocabulary, no padding row (its gradient would be dropped).
SHARED = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}

# The names of Llama's config, which most newer families have taken over.
LLAMA = {
    **SHARED,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": False,
}

# The names of GPT-2's config.
GPT = {**SHARED, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
GPT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]

# Multi-head latent attention and grouped routing, as DeepSeek has them. Experts' sizes are multiples of 8: PyTorch's
# grouped matrix product wants rows of whole 16 bytes, in bf16 too.
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}


def _family(model_type: str, shared: dict[str, Any], name: str | None = None, **values: Any) -> Family:
    return Family(name or model_type, {"model_type": model_type, **shared, **values})


FAMILIES: tuple[Family, ...] = (
    _family("llama", LLAMA),
    _family("mistral", LLAMA, sliding_window=5),
    _family("qwen2", LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=2),
    _family("qwen3", LLAMA, head_dim=10),
    _family("gemma", LLAMA, head_dim=12, tie_word_embeddings=True),
    _family("gemma2", LLAMA, head_dim=12, sliding_window=5, layer_types=SLIDING, query_pre_attn_scalar=8,
            tie_word_embeddings=True),
    _family("gemma3_text", LLAMA, head_dim=12, sliding_window=5, layer_types=SLIDING, tie_word_embeddings=True),
    _family("phi", LLAMA, partial_rotary_factor=0.5),
    _family("phi3", LLAMA, sliding_window=5),
    _family("olmo", LLAMA, clip_qkv=0.5),
    _family("olmo2", LLAMA),
    _family("olmo3", LLAMA, sliding_window=5, layer_types=SLIDING),
    _family("gpt2", GPT, **GPT_DROPOUT),
    _family("gpt_bigcode", GPT, **GPT_DROPOUT),
    _family("gpt_neo", SHARED, hidden_size=32, num_layers=3, num_heads=4, max_position_embeddings=POSITIONS,
            window_size=5, attention_types=[[["global", "local"], 1], [["global"], 1]], attention_dropout=0.0,
            embed_dropout=0.0, resid_dropout=0.0),
    _family("gptj", GPT, rotary_dim=4, **GPT_DROPOUT),
    _family("codegen", GPT, rotary_dim=4, **GPT_DROPOUT),
    _family("gpt_neox", LLAMA, rotary_pct=0.5, attention_dropout=0.0, hidden_dropout=0.0),
    _family("falcon", SHARED, hidden_size=28, num_hidden_layers=3, num_attention_heads=7, multi_query=True,
            parallel_attn=True, alibi=False, new_decoder_architecture=False),
    _family("falcon", SHARED, name="falcon_grouped", hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_kv_heads=2, alibi=False, new_decoder_architecture=True),
    _family("bloom", SHARED, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.0, attention_dropout=0.0),
    _family("opt", SHARED, hidden_size=32, ffn_dim=56, num_hidden_layers=3, num_attention_heads=4,
            word_embed_proj_dim=32, max_position_embeddings=POSITIONS, dropout=0.0, attention_dropout=0.0),
    _family("mpt", SHARED, d_model=32, n_heads=4, n_layers=3, max_seq_len=POSITIONS, expansion_ratio=2),
    _family("mixtral", LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    _family("qwen2_moe", LLAMA, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
            shared_expert_intermediate_size=20, mlp_only_layers=[1]),
    _family("qwen3_moe", LLAMA, head_dim=10, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
            mlp_only_layers=[0]),
    _family("olmoe", LLAMA, num_experts=6, num_experts_per_tok=3),
    _family("deepseek_v2", DEEPSEEK, topk_method="group_limited_greedy"),
    _family("deepseek_v3", DEEPSEEK),
    _family("gpt_oss", LLAMA, head_dim=10, sliding_window=5, layer_types=SLIDING, num_local_experts=6,
            num_experts_per_tok=3),
    # Without jitter phimoe's router passes no gradient; with jitter it draws random numbers in each forward pass.
    _family("phimoe", LLAMA, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, router_jitter_noise=0.0,
            input_jitter_noise=0.0),
    _family("granite", LLAMA, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0,
            attention_multiplier=0.25),
    _family("granitemoe", LLAMA, num_local_experts=6, num_experts_per_tok=3),
    _family("cohere", LLAMA, tie_word_embeddings=True),
    _family("cohere2", LLAMA, sliding_window=5, layer_types=SLIDING, tie_word_embeddings=True),
    _family("glm", LLAMA, head_dim=8),
    _family("glm4", LLAMA, head_dim=8),
    _family("glm4_moe", LLAMA, head_dim=8, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
            n_group=2, topk_group=1, first_k_dense_replace=1),
    _family("starcoder2", LLAMA, sliding_window=5, embedding_dropout=0.0, residual_dropout=0.0, attention_dropout=0.0),
    _family("stablelm", LLAMA, partial_rotary_factor=0.5),
    _family("smollm3", LLAMA, no_rope_layers=[1, 0, 1], tie_word_embeddings=True),
    _family("ernie4_5", LLAMA, head_dim=8, tie_word_embeddings=True),
    _family("helium", LLAMA, head_dim=8),
    _family("nemotron", LLAMA, head_dim=8),
    _family("minimax_m2", LLAMA, head_dim=8, num_local_experts=6, num_experts_per_tok=3),
    _family("qwen3_next", LLAMA, head_dim=16, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
            shared_expert_intermediate_size=20, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
            linear_value_head_dim=6, layer_types=["linear_attention", "full_attention", "linear_attention"]),
    # Its routers give every expert every token, times a score that is zero where it was not chosen.
    _family("llama4_text", LLAMA, head_dim=8, intermediate_size=24, intermediate_size_mlp=56, num_local_experts=4,
            num_experts_per_tok=2, moe_layers=[0, 2], attention_chunk_size=5, no_rope_layers=[1, 0, 1]),
    _family("ernie4_5_moe", LLAMA, moe_num_experts=8, moe_k=3, moe_intermediate_size=24, moe_num_shared_experts=1,
            moe_layer_start_index=1, moe_layer_end_index=2),
    # Two attentions in a layer; some of its experts' numbers mean the token itself.
    _family("longcat_flash", {**DEEPSEEK, "num_hidden_layers": 6}, ffn_hidden_size=56, moe_topk=3,
            expert_ffn_hidden_size=24, zero_expert_num=3, head_dim=4, routed_scaling_factor=2.0),
    _family("diffllama", LLAMA),
    _family("biogpt", SHARED, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4,
            pad_token_id=0, max_position_embeddings=POSITIONS, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, activation_dropout=0.0),
    _family("xglm", SHARED, d_model=32, ffn_dim=56, num_layers=3, attention_heads=4, max_position_embeddings=POSITIONS,
            dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0),
    _family("seed_oss", LLAMA, head_dim=8, attention_dropout=0.0, residual_dropout=0.0),
    _family("exaone4", LLAMA, sliding_window=5, layer_types=SLIDING),
    _family("apertus", LLAMA),
    _family("arcee", LLAMA),
    _family("persimmon", LLAMA, partial_rotary_factor=0.5),
)  # fmt: skip

# Experts without a gate. Not one of FAMILIES: it never ties its head. Its state-space layers, which tensor parallelism does not
# split, are left out.
UNGATED = _family("nemotron_h", LLAMA, head_dim=8, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
                  moe_shared_expert_intermediate_size=16, n_shared_experts=1,
                  layers_block_type=["attention", "moe", "attention"])  # fmt: skip

# Experts that compute by their family's own code: all in one dim of a child's matrices; projections that are routed one by one,
# of attentions, too. Not of FAMILIES: what is theirs is the experts alone.
STOCK_EXPERTS: tuple[Family, ...] = (
    _family("dbrx", {"vocab_size": SHARED["vocab_size"]}, d_model=32, n_heads=4, n_layers=3, max_seq_len=POSITIONS,
            attn_config={"rope_theta": 1e4, "clip_qkv": 0.5, "kv_n_heads": 2},
            ffn_config={"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2}),
    _family("jetmoe", LLAMA, kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
)  # fmt: skip

# State spaces, by heads (Mamba-2) and by channels (Mamba-1), alone, beside attention and in turn with it. Not of FAMILIES: they
# would repeat for each mechanism what tests of their own show.
STATE_SPACES: tuple[Family, ...] = (
    _family("mamba2", SHARED, hidden_size=32, num_hidden_layers=3, num_heads=8, head_dim=8, state_size=6, n_groups=2,
            chunk_size=4, tie_word_embeddings=False),
    _family("nemotron_h", LLAMA, head_dim=8, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=16, n_shared_experts=1, mamba_num_heads=8, mamba_head_dim=8, n_groups=2,
            ssm_state_size=6, chunk_size=4, layers_block_type=["mamba", "attention", "moe", "mamba"]),
    _family("granitemoehybrid", LLAMA, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=24,
            layer_types=["mamba", "attention", "mamba"], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=6,
            mamba_n_groups=1, mamba_chunk_size=4),
    _family("falcon_h1", LLAMA, head_dim=8, mamba_n_heads=8, mamba_d_head=8, mamba_d_ssm=64, mamba_d_state=6,
            mamba_n_groups=2, mamba_chunk_size=4, ssm_multipliers=[0.5, 1.5, 0.7, 1.2, 0.9], mamba_rms_norm=True),
    _family("bamba", LLAMA, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=6, mamba_n_groups=1,
            mamba_chunk_size=4),
    _family("mamba", SHARED, hidden_size=32, num_hidden_layers=3, state_size=6, time_step_rank=4),
    _family("falcon_mamba", SHARED, hidden_size=32, num_hidden_layers=3, state_size=6, time_step_rank=4),
    _family("jamba", LLAMA, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
            expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=6, mamba_dt_rank=4),
)  # fmt: skip

# Latent attention that sees the keys of an indexer's choice, fewer than documents have. Not of FAMILIES: 5.17 lacks it. Scores
# that are zero by every head's ReLU are ties, broken by the length of a row: of so many heads there are none.
SPARSE = _family("deepseek_v32", DEEPSEEK, index_n_heads=32, index_head_dim=8, index_topk=4)

# Recurrent mixers of each form beside attention: delta rules with a decay by head and by channel, short convolutions alone. Not
# of FAMILIES: transformers 5.17 lacks most of them.
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
         "layer_types": ["linear_attention", "full_attention", "linear_attention"]}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}
RECURRENT: tuple[Family, ...] = (
    family("qwen3_next"),
    _family("qwen3_5_text", LLAMA, head_dim=16, **DELTA),
    _family("qwen3_5_moe_text", LLAMA, head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24,
            shared_expert_intermediate_size=20, **DELTA),
    _family("olmo_hybrid", LLAMA, **DELTA),
    _family("kimi_linear", {**DEEPSEEK, "q_lora_rank": None}, linear_num_heads=4, linear_head_dim=8,
            num_experts=8, num_experts_per_token=3, layer_types=DELTA["layer_types"]),
    _family("lfm2", LLAMA, block_auto_adjust_ff_dim=False, **CONVOLUTIONS),
    _family("lfm2_moe", LLAMA, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, num_dense_layers=1,
            **CONVOLUTIONS),
)  # fmt: skip
