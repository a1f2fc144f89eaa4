"""The oracle's correction biases of routers: loads counted over whole batches on a stock model, and one line of update."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.model.mixtures import Mixture, find_mixtures
from framework.model.units import find_units


class PlainBiases:
    """Counts loads from `start` to `take`, and moves biases by them. rate: of one step, 0 for never."""

    def __init__(self, model: PreTrainedModel, rate: float):
        self._rate = rate
        self._mixtures = [each for each in find_mixtures(model, find_units(model)) if each.bias]
        self._loads: dict[str, Tensor] = {}
        for mixture in self._mixtures:
            model.get_submodule(mixture.experts).register_forward_pre_hook(partial(self._count, mixture))

    def names(self) -> list[str]:
        """Full names of the biases, buffers or parameters."""
        return [each.bias for each in self._mixtures]

    def start(self) -> None:
        """Forget what was counted."""
        self._loads = {each.bias: torch.zeros(each.num_experts, dtype=torch.int64) for each in self._mixtures}

    def take(self) -> dict[str, Tensor]:
        """What was counted: tokens of each expert, [E] int64, by the bias's full name."""
        return self._loads

    def move(self, biases: Mapping[str, Tensor], loads: Mapping[str, Tensor]) -> None:
        """One step, in place. biases: by full name; loads: those of `take`."""
        for mixture in self._mixtures:
            load, bias = loads[mixture.bias].to(torch.float64), biases[mixture.bias]
            bias.data.add_((self._rate * (load.mean() - load).sign()).to(bias).view_as(bias))

    def _count(self, mixture: Mixture, experts: nn.Module, args: tuple[Any, ...]) -> None:
        self._loads[mixture.bias] += torch.bincount(args[1].flatten().cpu(), minlength=mixture.num_experts)
