"""Small copies of real models: they train, and every kind of layer and every proportion of the original is still there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.shrink import shrink
from framework.model.units import find_layers
from framework.recipe.compose import compose
from tests.families import FAMILIES, Family, build_config, is_kind
from tests.grid import few_of

RECIPES = sorted(path.stem for path in (Path(__file__).parents[2] / "recipes" / "model").glob("*.yaml"))

# Models with something that no shipped recipe has.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss_20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
        "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "eos_token_id": 200002, "pad_token_id": 199999,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                            "rope_theta": 150000.0},
    },
    "phi3_mini_128k": {
        "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072, "sliding_window": 262144,
        "original_max_position_embeddings": 4096, "resid_pdrop": 0.1,
        "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
                            "short_factor": [1.0] * 48, "long_factor": [float(pair + 1) for pair in range(48)]},
    },
    "falcon_7b": {
        "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "multi_query": True, "new_decoder_architecture": False,
    },
    "llama4_maverick": {
        "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "num_local_experts": 128, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192,
    },
    "qwen1_5_moe": {
        "model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_experts": 60,
        "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts_per_tok": 4, "decoder_sparse_step": 2,
    },
    "pythia_1b": {
        "model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "gemma3_1b": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152, "intermediate_size": 6912, "head_dim": 256,
        "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512,
    },
    "qwen3_next_80b": {"model_type": "qwen3_next"},
    "jamba": {"model_type": "jamba"},
    "gpt_neo_1_3b": {"model_type": "gpt_neo"},
}  # fmt: skip


def _full(name: str) -> PretrainedConfig:
    if name in OTHERS:
        return AutoConfig.for_model(**OTHERS[name])
    recipe = compose([f"model={name}"]).recipe
    assert recipe is not None
    return AutoConfig.for_model(recipe.model.family, **recipe.model.config)


def _meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _layer_kinds(model: PreTrainedModel) -> set[Any]:
    """Which modules, with which attention, the layers are made of."""
    found = find_layers(model)
    assert found is not None
    types = getattr(model.config, "layer_types", None) or [""] * len(found[1])
    return {
        (kind, *((name, type(module).__name__) for name, module in layer.named_modules()))
        for kind, layer in zip(types, found[1], strict=True)
    }


def _train_once(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    tokens = torch.randint(0, config.vocab_size, (2, 24))
    losses = [model(input_ids=tokens, labels=tokens, use_cache=False).loss for _ in range(2)]
    losses[0].backward()
    assert losses[0].isfinite()
    assert torch.equal(losses[0], losses[1]), "a random draw is left on"
    # The choice of an indexer (deepseek_v32) passes no gradient: in transformers it is not trained.
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad and ".indexer." not in name}
    assert all(each is not None and each.isfinite().all() for each in gradients.values())
    return model


@pytest.mark.parametrize(
    "name", few_of([*RECIPES, *OTHERS], lambda name: name in ("llama3_1_8b", "deepseek_v3", "gpt_oss_20b"))
)
def test_real_model_shrinks_to_one_that_trains_with_the_same_kinds_of_layers(name: str) -> None:
    full = _full(name)
    small = shrink(full)
    model = _train_once(small)
    assert sum(p.numel() for p in model.parameters()) < 1.2e6
    assert type(small) is type(full)
    assert 2 <= small.num_hidden_layers <= 5
    assert _layer_kinds(model) == _layer_kinds(_meta(full))
    assert small.vocab_size % 2 == full.vocab_size % 2
    assert small.tie_word_embeddings == full.tie_word_embeddings
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(small, name)
        assert (token is None) == (getattr(full, name) is None)
        assert all(0 <= one < small.vocab_size for one in (token if isinstance(token, list) else [token or 0]))


@pytest.mark.parametrize("family", few_of(FAMILIES, is_kind), ids=lambda family: family.name)
def test_tiny_model_stays_tiny_and_trains(family: Family) -> None:
    full = build_config(family)
    small = shrink(full)
    if family.name == "phimoe":  # its router passes no gradient without jitter
        assert _meta(small).num_parameters() < 2 * _meta(full).num_parameters()
        return
    assert _train_once(small).num_parameters() < 2 * _meta(full).num_parameters()


@pytest.mark.skipif("dots3_note_text" not in CONFIG_MAPPING, reason="transformers of before")
def test_values_of_single_layers_are_small_in_a_small_copy_of_a_small_copy_too() -> None:
    """Named by the layer's number, with as many digits as the last layer's: one, where the original has two."""
    small = shrink(CONFIG_MAPPING["dots3_note_text"]())
    assert small.to_dict()["per_layer_config"]
    assert shrink(small).to_dict() == small.to_dict()


def _small(name: str) -> PretrainedConfig:
    return shrink(_full(name))


def test_head_ratio_is_kept_up_to_8() -> None:
    for heads, heads_kv, expected in (
        (32, 8, (16, 4)),
        (64, 8, (32, 4)),
        (14, 2, (14, 2)),
        (9, 3, (9, 3)),
        (96, 6, (16, 2)),
    ):
        config = AutoConfig.for_model(
            "llama", hidden_size=heads * 64, num_attention_heads=heads, num_key_value_heads=heads_kv
        )
        small = shrink(config)
        assert (small.num_attention_heads, small.num_key_value_heads) == expected
        assert small.hidden_size == small.num_attention_heads * small.head_dim


def test_proportions_of_widths_are_kept() -> None:
    small = shrink(AutoConfig.for_model("gemma2", hidden_size=3584, intermediate_size=14336, num_attention_heads=16,
                                        num_key_value_heads=8, head_dim=256, query_pre_attn_scalar=256))  # fmt: skip
    assert small.intermediate_size == 4 * small.hidden_size
    assert small.hidden_size != small.num_attention_heads * small.head_dim
    assert small.query_pre_attn_scalar == small.head_dim


def test_dense_layers_before_sparse_ones_and_latent_attention_are_kept() -> None:
    small = shrink(CONFIG_MAPPING["deepseek_v3"]())
    assert (small.first_k_dense_replace, small.num_hidden_layers) == (1, 3)
    assert small.qk_nope_head_dim == 2 * small.qk_rope_head_dim == small.v_head_dim
    assert small.q_lora_rank == 3 * small.kv_lora_rank
    assert small.n_routed_experts % small.n_group == 0
    assert small.topk_group < small.n_group
    assert small.num_experts_per_tok <= small.topk_group * small.n_routed_experts // small.n_group


def test_sparse_step_becomes_a_list_of_dense_layers() -> None:
    small = _small("qwen1_5_moe")
    assert small.decoder_sparse_step == 1
    assert 0 < len(small.mlp_only_layers) < small.num_hidden_layers
    assert small.num_experts_per_tok < small.num_experts == 6


def test_windows_are_shorter_than_sequences_unless_they_never_were() -> None:
    assert _small("gpt_oss_20b").sliding_window == 8
    assert _small("llama4_maverick").attention_chunk_size == 8
    assert _small("phi3_mini_128k").sliding_window == 262144


def test_longrope_factors_fit_the_small_heads_and_span_the_same_range() -> None:
    small = _small("phi3_mini_128k")
    pairs = small.hidden_size // small.num_attention_heads // 2
    factors = small.rope_parameters["long_factor"]
    assert len(factors) == len(small.rope_parameters["short_factor"]) == pairs
    assert factors == sorted(set(factors))
    assert small.max_position_embeddings // small.original_max_position_embeddings == 32


def test_sections_of_multi_axis_rope_add_up() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [24, 20, 20]}
    small = shrink(
        AutoConfig.for_model("qwen3", hidden_size=4096, num_attention_heads=32, head_dim=128, rope_parameters=rope)
    )
    sections = small.rope_parameters["mrope_section"]
    assert sum(sections) == small.head_dim // 2
    assert min(sections) > 0


def test_config_is_left_alone_and_dropout_is_off() -> None:
    full = CONFIG_MAPPING["gpt2"]()
    before = full.to_dict()
    small = shrink(full)
    assert full.to_dict() == before
    assert small.resid_pdrop == small.embd_pdrop == small.attn_pdrop == 0.0
    assert (small.vocab_size, small.n_positions) == (97, 256)


def test_impossible_proportions_are_refused_by_name() -> None:
    config = AutoConfig.for_model("gpt_neox", hidden_size=1024, num_attention_heads=8, rotary_pct=0.01)
    with pytest.raises(ModelError, match="8 heads of 128, hidden 1024"):
        shrink(config)
