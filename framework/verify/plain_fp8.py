"""fp8 in plain terms: torchao's own layers in the stock model."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

# What torchao's layers take.
ALIGNMENT = 16


def multiply_in_fp8(model: PreTrainedModel, scaling: str, device: torch.device) -> None:
    """Replace the trained linear layers of the model's decoder layers by torchao's, emulated where the device has no fp8."""
    # torchao is an optional dependency, and takes two seconds to import.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    named = Float8LinearConfig.from_recipe_name(f"{scaling}wise")
    config = replace(named, round_scales_to_power_of_2=True, emulate=not _has_kernel(device))
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    # The decoder's layers: of a list of experts its layer has more.
    for layer in max(lists, key=lambda each: sum(one.numel() for one in each.parameters()), default=()):
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_taken)
        for parent in list(layer.modules()):
            for name, module in parent.named_children():
                if type(module) is Conv1D and _fits(module):
                    setattr(parent, name, _Fp8Conv1D(module, config))


class _Fp8Conv1D(nn.Module):
    """transformers' Conv1D, a linear layer whose weight [K, N] is transposed, by torchao's layer. Keeps the parameters' names."""

    def __init__(self, conv: Conv1D, config: Any) -> None:
        from torchao.float8.float8_linear import Float8Linear

        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        num_in, num_out = conv.weight.shape
        empty = nn.Linear(num_in, num_out, device="meta", dtype=conv.weight.dtype)
        # In a list: its own parameters are none of the model's.
        self._linear = [Float8Linear.from_float(empty, config)]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = functional_call(self._linear[0], {"weight": self.weight.t(), "bias": self.bias}, (x,))
        return found


def _is_taken(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear and _fits(module)


def _fits(module: nn.Module) -> bool:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.requires_grad and all(size % ALIGNMENT == 0 for size in weight.shape)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
