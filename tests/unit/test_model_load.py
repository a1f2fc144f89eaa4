"""From the recipe's words to a model on meta: every shipped model has its published size, mistakes name what is near."""

import json
import traceback
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from framework.errors import ModelError
from framework.model.flops import measure_model
from framework.model.initial import seed_rng
from framework.model.load import build_meta, load_config, load_config_file
from framework.model.probe import draw_tokens, small_copy
from framework.recipe.compose import compose
from framework.recipe.schema import Model
from tests.families import family
from tests.grid import IN_TURN
from tests.unit.test_recipe_shipped import PARAMETERS

pytestmark = IN_TURN


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_shipped_model_has_its_published_size(name: str) -> None:
    model = build_meta(load_config(compose([f"model={name}"]).require().model))
    assert measure_model(model).total == PARAMETERS[name]
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ModelError, match="nearest: mixtral"):
        load_config(Model("mixtrall"))


def test_unknown_config_values_name_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"model.config.hidden_sise .* nearest: hidden_size"):
        load_config(Model("llama", {"hidden_sise": 64, "num_hidden_layers": 2}))


def test_a_value_that_only_the_model_reads_is_known() -> None:
    """Qwen3's mixture reads head_dim, its config class does not declare it."""
    assert load_config(Model("qwen3_moe", {"head_dim": 24})).head_dim == 24


@pytest.mark.skipif(
    "gemma4_text" not in CONFIG_MAPPING, reason="this transformers has no layers with sizes of their own"
)
def test_uneven_heads_of_one_layer_are_refused() -> None:
    """The common config refuses to say what differs between layers."""
    values = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_attention_heads": 4}
    own = {1: {"num_attention_heads": 6, "num_key_value_heads": 2}}
    load_config(Model("gemma4_text", values | {"num_key_value_heads": 4, "per_layer_config": own}))
    own[1]["num_key_value_heads"] = 4
    with pytest.raises(ModelError, match=r"num_key_value_heads=4 does not divide model.config.num_attention_heads=6"):
        load_config(Model("gemma4_text", values | {"num_key_value_heads": 4, "per_layer_config": own}))


def test_soft_caps_are_computed_also_where_transformers_would_choose_sdpa() -> None:
    """sdpa leaves them out without a word, and transformers 5.17 chooses it for gemma 2."""
    values = family("gemma2").config | {"attn_logit_softcapping": 1e-3}
    config = load_config(Model(values.pop("model_type"), values))
    with small_copy(config) as capped, small_copy(config, attn_logit_softcapping=None) as free:
        tokens = draw_tokens(capped, 1, 12)
        assert build_meta(config).config._attn_implementation == capped.config._attn_implementation == "eager"
        assert (capped(tokens).logits - free(tokens).logits).abs().max() > 1e-4
    with pytest.raises(ModelError, match=r"sdpa would drop the soft caps of gemma2's scores: use .*eager"):
        build_meta(config, "sdpa")


def test_no_config_keeps_a_cache() -> None:
    """With one, positions that restart are ignored."""
    assert load_config(Model("llama", {"use_cache": True})).use_cache is False


def test_what_a_recipe_takes_back_of_a_rope_is_not_in_it() -> None:
    """The published model's positions are stretched behind pretraining; the experiment says null for what does that."""
    assert load_config(compose(["model=deepseek_v3"]).require().model).rope_parameters["factor"] == 40.0
    rope = load_config(compose(["experiment=deepseek_v3"]).require().model).rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 10000.0}


def test_any_config_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(family("mixtral").config))
    assert load_config_file(file).num_local_experts == family("mixtral").config["num_local_experts"]
    file.write_text('{"hidden_size": 3}')
    with pytest.raises(ModelError, match="model_type"):
        load_config_file(file)
    with pytest.raises(ModelError, match="there is no such config"):
        load_config_file(tmp_path / "nothing.json")


def test_draws_are_seeded_as_by_torch_and_note_no_stack(monkeypatch):
    torch.manual_seed(2**62 + 1)
    expected = torch.rand(3)
    monkeypatch.setattr(traceback, "format_stack", lambda *_: pytest.fail("the caller's stack was noted"))
    seed_rng(2**62 + 1)
    assert torch.equal(torch.rand(3), expected)
