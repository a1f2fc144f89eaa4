"""FLOPs per token against numbers worked out by hand."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from framework.model.flops import (
    LOCAL_ATTENTIONS,
    NO_ATTENTION,
    attended,
    attention_reach,
    flops_per_token,
    measure_model,
)
from framework.model.units import find_units

# hidden 8, 2 heads of 4, 1 kv head, 3 layers, intermediate 10, vocabulary 97
SMALL = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3,
         "intermediate_size": 10, "vocab_size": 97, "max_position_embeddings": 64}  # fmt: skip
ATTENTION, MLP, NORMS = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8, 3 * 8 * 10, 2 * 8


def build(family, **values):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **values))


def test_a_lookup_costs_nothing_and_a_head_does():
    size = measure_model(build("llama", tie_word_embeddings=False, **SMALL))
    layers = 3 * (ATTENTION + MLP + NORMS) + 8
    assert (size.total, size.active, size.multiplied) == (layers + 2 * 97 * 8, layers + 2 * 97 * 8, layers + 97 * 8)


def test_a_tied_embedding_counts_once_and_is_multiplied_as_the_head():
    size = measure_model(build("llama", tie_word_embeddings=True, **SMALL))
    assert size.total == size.multiplied == 3 * (ATTENTION + MLP + NORMS) + 8 + 97 * 8


def test_flops_per_token_are_palms_formula():
    model = build("llama", tie_word_embeddings=False, **SMALL)
    weights = measure_model(model).multiplied
    assert flops_per_token(model, context=32) == 6 * weights + 12 * 3 * 2 * 4 * 32


def test_a_token_meets_its_share_of_the_experts():
    values = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    size = measure_model(build("mixtral", **values))
    all_experts = 3 * 4 * 3 * 8 * 10
    assert size.total - size.active == all_experts // 2


def test_a_token_meets_its_share_of_the_experts_biases():
    values = {**SMALL, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    size = measure_model(build("gpt_oss", **values))
    one_expert = 8 * 2 * 10 + 2 * 10 + 10 * 8 + 8
    assert size.total - size.active == 3 * (4 - 2) * one_expert


def test_latent_attention_has_its_own_widths_for_keys_and_values():
    values = {**SMALL, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 5,
              "num_key_value_heads": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
              "moe_intermediate_size": 4, "first_k_dense_replace": 3}  # fmt: skip
    model = build("deepseek_v3", **values)
    extra = flops_per_token(model, context=32) - 6 * measure_model(model).multiplied
    assert extra == 6 * 3 * 2 * (6 + 2 + 5) * 32


def test_windows_and_layers_without_attention_shorten_the_reach():
    gemma = AutoConfig.for_model("gemma2", num_hidden_layers=4, sliding_window=16)
    assert sorted(attention_reach(gemma, 64)) == [16, 16, 64, 64]
    assert attention_reach(AutoConfig.for_model("mistral", num_hidden_layers=2, sliding_window=16), 64) == [16, 16]
    hybrid = AutoConfig.for_model("qwen3_next", num_hidden_layers=4)
    assert sum(attention_reach(hybrid, 64)) == 64


# Kinds whose layers attend to the whole context, sparse ones too: all tiles are computed.
WHOLE = {"full_attention", "hybrid", "reference_sliding_attention", "indexed_attention", "minimax_m3_sparse",
         "compressed_sparse_attention", "heavily_compressed_attention"}  # fmt: skip


def test_kinds_of_layers_that_transformers_knows_are_known_here():
    """A new kind would be taken for attention to the whole context."""
    known = WHOLE | set(LOCAL_ATTENTIONS) | set(NO_ATTENTION)
    # window_attention: of images.
    assert set(ALLOWED_ATTN_LAYER_TYPES) - {"window_attention"} <= known
    found = {kind for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES for kind in default_kinds(family)}
    assert "indexed_attention" in found
    assert found <= known, found - known


def default_kinds(family):
    try:
        config = CONFIG_MAPPING[family]().get_text_config()
    except (
        TypeError,
        ValueError,
        AttributeError,
        StrictDataclassError,
    ):  # needs values, or the config of another model
        return ()
    return getattr(config, "layer_types", None) or ()


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "deepseek_v4"])
def test_sparse_attention_costs_all_tiles_that_are_computed(family):
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = AutoConfig.for_model(family).get_text_config()
    reaches = attention_reach(config, 4096)
    of_whole = [reach for reach, kind in zip(reaches, config.layer_types, strict=True) if kind in WHOLE]
    assert set(of_whole) == {4096}
    assert all(attended(config, 4096))


@pytest.mark.skipif("inkling_text" not in CONFIG_MAPPING, reason="this transformers has no hybrid windows")
def test_windows_beside_a_state_shorten_the_reach():
    config = AutoConfig.for_model("inkling_text")
    expected = {"hybrid_sliding": config.sliding_window, "hybrid": 4096}
    assert attention_reach(config, 4096) == [expected[kind] for kind in config.layer_types]


def test_a_model_without_attention_costs_its_weights_and_states():
    model = build("mamba", hidden_size=8, num_hidden_layers=2, vocab_size=97, state_size=4)
    # In each of two layers a state of 16 channels by 4, which decays, is added to, and read.
    assert flops_per_token(model, context=64) == 6 * (measure_model(model).multiplied + 2 * 3 * 16 * 4)


@pytest.mark.skipif(
    "gemma4_text" not in CONFIG_MAPPING, reason="this transformers has no layers with sizes of their own"
)
def test_layers_with_heads_of_their_own_are_counted_by_layer():
    """The config of gemma4_unified refuses to say a head width, which differs between its layers (transformers 5.23)."""
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=4,
        num_attention_heads=2, head_dim=8, per_layer_config={1: {"head_dim": 16}},
    )  # fmt: skip
    assert attended(config, context=10) == [2 * 2 * 8 * 4, 2 * 2 * 16 * 10]


def test_frozen_weights_have_no_gradient_and_below_the_first_trained_unit_no_backward_comes():
    for tied in (False, True):
        model = build("llama", tie_word_embeddings=tied, **SMALL)
        units, names = find_units(model), [name for name, _ in model.named_parameters()]
        whole, layer = flops_per_token(model, 32), ATTENTION + MLP + NORMS
        assert flops_per_token(model, 32, units, names) == whole
        second = [name for name in names if "layers.1." not in name]
        assert whole - flops_per_token(model, 32, units, second) == 2 * layer
    # The first two layers and the embedding: neither gradient of a weight, nor any in attention.
    upper = [name for name in names if "layers.2." in name or name.startswith(("model.norm", "lm_head"))]
    model = build("llama", tie_word_embeddings=False, **SMALL)
    attention = 2 * 2 * 4 * 32
    assert whole - flops_per_token(model, 32, find_units(model), [*upper, "lm_head.weight"]) == 2 * 4 * (
        layer + attention
    )
