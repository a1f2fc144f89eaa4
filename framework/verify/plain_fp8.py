"""fp8 in plain terms: torchao's own layers in the stock model."""

from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from framework.model.units import find_layers

# What torchao's layers take.
ALIGNMENT = 16


def multiply_in_fp8(model: PreTrainedModel, scaling: str, device: torch.device) -> None:
    """Replace the trained linear layers of the model's decoder layers by torchao's, emulated where the device has no fp8."""
    # torchao is an optional dependency, and takes two seconds to import.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    named = Float8LinearConfig.from_recipe_name(f"{scaling}wise")
    config = replace(named, round_scales_to_power_of_2=True, emulate=not _has_kernel(device))
    found = find_layers(model)
    for layer in () if found is None else found[1]:
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_taken)


def _is_taken(module: nn.Module, name: str) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.requires_grad
        and all(size % ALIGNMENT == 0 for size in module.weight.shape)
    )


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
