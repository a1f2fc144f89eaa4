"""Which list of a model is the decoder's layers."""

import torch
from transformers import AutoModelForCausalLM, Gemma3Config

from framework.model.units import find_layers, find_units
from tests.families import build_config, family


def test_a_vision_tower_of_as_many_layers_is_not_the_decoder() -> None:
    """Even if it is the larger one."""
    text = build_config(family("gemma3_text")).to_dict()
    vision = {
        "hidden_size": 64,
        "intermediate_size": 512,
        "num_hidden_layers": text["num_hidden_layers"],
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 8,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma3Config(text_config=text, vision_config=vision))
    found = find_layers(model)
    assert found is not None
    assert found[0] == "model.language_model.layers"
    tower = sum(p.numel() for name, p in model.named_parameters() if "vision_tower" in name)
    assert tower > sum(p.numel() for p in found[1].parameters())
    layers = [unit for unit in find_units(model) if unit.is_layer]
    assert all(name.startswith("model.language_model.layers.") for unit in layers for name in unit.parameters)
