"""Configs of the models of published runs, by the names that the runs have in their file."""

from collections.abc import Callable
from typing import Any

from transformers import AutoConfig, PretrainedConfig

# llm-foundry's yamls: features, heads, layers. 4 features inside the MLP for each hidden one, no biases, learned positions.
MPT = {
    "MPT-125m": (768, 12, 12),
    "MPT-350m": (1024, 16, 24),
    "MPT-760m": (1536, 12, 24),
    "MPT-1b": (2048, 16, 24),
    "MPT-3b": (2560, 20, 32),
    "MPT-7b": (4096, 32, 32),
    "MPT-13b": (5120, 40, 40),
    "MPT-30b": (7168, 56, 48),
    "MPT-70b": (8192, 64, 80),
}
# Layers, hidden features, features inside the MLP, heads.
LLAMA = {
    "LLAMA3_8B": (32, 4096, 14336, 32),
    "LLAMA3_70B": (80, 8192, 28672, 64),
    "LLAMA3.1_405B": (126, 16384, 53248, 128),
    "Llama3 70B": (80, 8192, 28672, 64),
    "Llama3 70B 2-node": (80, 8192, 28672, 64),
}


def make_config(model: str, context: int) -> PretrainedConfig:
    """The config of a model of the file, for sequences of `context` tokens."""
    if model in MPT:
        hidden, heads, layers = MPT[model]
        return _of("mpt", d_model=hidden, n_heads=heads, n_layers=layers, vocab_size=50368, max_seq_len=context)
    if model in LLAMA:
        return llama(*LLAMA[model])
    return MIXTURES[model]()


def _of(family: str, **values: Any) -> PretrainedConfig:
    return AutoConfig.for_model(family, **values)


def _decoder(
    family: str, vocabulary: int, layers: int, hidden: int, heads: int, kv_heads: int, **values: Any
) -> PretrainedConfig:
    """An untied decoder."""
    return _of(
        family,
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
        **values,
    )


def llama(layers: int, hidden: int, inner: int, heads: int) -> PretrainedConfig:
    """A Llama 3 of one of its sizes."""
    return _decoder("llama", 128256, layers, hidden, heads, 8, intermediate_size=inner)


def qwen3(layers: int, hidden: int, heads: int, inner: int) -> PretrainedConfig:
    """A Qwen3 mixture: 128 experts, of which a token meets 8."""
    experts = {"moe_intermediate_size": inner, "num_experts": 128, "num_experts_per_tok": 8}
    sparse = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return _decoder("qwen3_moe", 151936, layers, hidden, heads, 4, head_dim=128, **experts, **sparse)


def deepseek(
    heads: int, experts: int, dense: int, vocabulary: int, second_token: bool, groups: int = 1, chosen: int = 1
) -> PretrainedConfig:
    """DeepSeek-V3 and Kimi K2. second_token: with the module that predicts a second token, a layer and once more the head.
    A token's experts are of the `chosen` best groups."""
    return _decoder(
        "deepseek_v3",
        *(vocabulary * (1 + second_token), 61 + second_token, 7168, heads, heads),
        intermediate_size=18432,
        moe_intermediate_size=2048,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=dense,
        n_routed_experts=experts,
        n_shared_experts=1,
        num_experts_per_tok=8,
        n_group=groups,
        topk_group=chosen,
    )


def gpt_oss(layers: int, experts: int) -> PretrainedConfig:
    """A gpt-oss: windows of 128 tokens in every second layer."""
    return _of("gpt_oss", num_hidden_layers=layers, num_local_experts=experts, num_experts_per_tok=4)


# Layers (M a Mamba-2 layer, E a mixture, * attention), hidden features, heads of attention, heads of Mamba, experts, experts of a
# token, features inside an expert, features of the latent space in which experts are.
NEMOTRON = {
    "Nano 30B-A3B": ("MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 2688, 32, 64, 128, 6, 1856, None),
    "Super 120B-A12B": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
        *(4096, 32, 128, 512, 22, 2688, 1024),
    ),
    "Ultra 550B-A55B": (
        "MEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*E",
        *(8192, 64, 256, 512, 22, 5120, 2048),
    ),
}


def nemotron(size: str, more: int = 0) -> PretrainedConfig:
    """A Nemotron 3 hybrid. more: tokens that it predicts beyond the next, each by an attention, a mixture and the head."""
    kinds = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
    pattern, hidden, heads, mamba_heads, experts, chosen, inner, latent = NEMOTRON[size]
    return _of(
        "nemotron_h",
        layers_block_type=[kinds[each] for each in pattern + "*E" * more],
        vocab_size=131072 * (1 + more),
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=128,
        mamba_num_heads=mamba_heads,
        mamba_head_dim=64,
        n_groups=8,
        ssm_state_size=128,
        n_routed_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=inner,
        moe_latent_size=latent,
        moe_shared_expert_intermediate_size=2 * inner,
        tie_word_embeddings=False,
    )


MIXTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "Qwen3_30B_a3B": lambda: qwen3(48, 2048, 32, 768),
    "Qwen3 MoE 30B": lambda: qwen3(48, 2048, 32, 768),
    "Qwen3_235B_a22B": lambda: qwen3(94, 4096, 64, 1536),
    "DeepSeekV3": lambda: deepseek(128, 256, 3, 129280, True),
    "Kimi_K2": lambda: deepseek(64, 384, 1, 163840, False),
    "Kimi K2": lambda: deepseek(64, 384, 1, 163840, False),
    "GPT OSS 120B": lambda: gpt_oss(36, 128),
    "GPT-OSS 120B": lambda: gpt_oss(36, 128),
    "GPT-OSS 20B": lambda: gpt_oss(24, 32),
    "Nemotron_3_Nano": lambda: nemotron("Nano 30B-A3B"),
    "Nemotron_3_5_Lightning": lambda: nemotron("Nano 30B-A3B", 2),
    "Nemotron V3 Nano 30B (26.02)": lambda: nemotron("Nano 30B-A3B"),
    "Nemotron_3_Super": lambda: nemotron("Super 120B-A12B", 2),
    "Nemotron_3_Ultra": lambda: nemotron("Ultra 550B-A55B", 2),
    "Nemotron V3 Ultra 550B (26.04)": lambda: nemotron("Ultra 550B-A55B"),
}
