"""Mixtures of experts on a stock model, written plainly: capacity, correction biases of routers, and the loads that move them.

A dropped pair of a token and an expert has the weight zero.
"""

import inspect
from collections.abc import Mapping
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.recipe.schema import Model

CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")
# Weights of pairs are compared in these units: those that differ by rounding are equal.
UNIT = 2.0**-16


class PlainMixtures:
    """Counts loads from `start` to `take`, moves biases by them, and drops pairs beyond the capacity.

    context: tokens of a sequence. real: of a microbatch that is padded, which of its tokens are real, [rows * length] bool; None:
    all. Real tokens are those of whole sequences, one after another.
    """

    def __init__(self, model: PreTrainedModel, settings: Model, context: int):
        self._settings, self._context = settings, context
        self.real: Tensor | None = None
        self._experts = _find_experts(model)
        self._biases = {bias: path for path in self._experts if (bias := _find_bias(model, path))}
        self._loads: dict[str, Tensor] = {}
        for bias, path in self._biases.items():
            model.get_submodule(path).register_forward_pre_hook(partial(self._count, bias))
        if settings.expert_capacity is not None:
            for path in self._experts:
                model.get_submodule(path).register_forward_pre_hook(self._drop)

    def names(self) -> list[str]:
        """Full names of the biases, buffers or parameters."""
        return list(self._biases)

    def start(self) -> None:
        """Forget what was counted."""
        self._loads = {bias: torch.zeros(self._experts[path], dtype=torch.int64) for bias, path in self._biases.items()}

    def take(self) -> dict[str, Tensor]:
        """Counted tokens of each expert, [E] int64, by the bias's full name."""
        return self._loads

    def move(self, biases: Mapping[str, Tensor], loads: Mapping[str, Tensor]) -> None:
        """One step, in place. biases: by full name; loads: those of `take`."""
        for name in self._biases:
            load, bias = loads[name].to(torch.float64), biases[name]
            moved = self._settings.router_bias_rate * (load.mean() - load).sign()
            bias.data.add_(moved.to(bias).view_as(bias))

    def _count(self, bias: str, experts: nn.Module, args: tuple[Any, ...]) -> None:
        chosen = args[1] if self.real is None else args[1][self.real]
        self._loads[bias] += torch.bincount(chosen.flatten().cpu(), minlength=len(self._loads[bias]))

    def _drop(self, experts: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, ...]:
        hidden, index, weights = args
        real = torch.ones(len(index), dtype=torch.bool) if self.real is None else self.real
        tokens = real.nonzero().flatten().tolist()
        kept = weights.new_ones(weights.shape)
        for first in range(0, len(tokens), self._context):
            for token, slot in self._find_dropped(tokens[first : first + self._context], index, weights, experts):
                kept[token, slot] = 0
        return hidden, index, weights * kept

    def _find_dropped(
        self, tokens: list[int], index: Tensor, weights: Tensor, experts: nn.Module
    ) -> list[tuple[int, int]]:
        """The (token, slot) pairs of one sequence that find no room.  index, weights: [T, k]."""
        pairs = [(token, slot) for token in tokens for slot in range(index.shape[1])]
        if self._settings.expert_drop == "weight":  # of equal weights the first in the sequence: the sort is stable
            pairs.sort(key=lambda pair: -round(float(weights[pair].detach()) / UNIT))
        factor = self._settings.expert_capacity
        assert factor is not None, "a hook of a recipe with capacity"
        room = ceil(factor * len(pairs) / _count_experts(experts))
        taken: dict[int, int] = {}
        dropped = []
        for pair in pairs:
            expert = int(index[pair])
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] > room:
                dropped.append(pair)
        return dropped


def _find_experts(model: nn.Module) -> dict[str, int]:
    """Paths of the modules that are called with tokens, their experts and weights, and the number of experts of each."""
    return {
        path: _count_experts(module)
        for path, module in model.named_modules()
        if hasattr(
            module, "is_transposed"
        )  # set by `use_experts_implementation`; longcat_flash's are told by their arguments
        or ("top_k_index" in inspect.signature(type(module).forward).parameters and hasattr(module, "down_proj"))
    }


def _count_experts(experts: nn.Module) -> int:
    return len(experts.get_parameter("down_proj"))


def _find_bias(model: nn.Module, path: str) -> str:
    """The correction bias beside the experts at `path`, of one number for each; "" without."""
    block, count = f"{path.rpartition('.')[0]}.", _count_experts(model.get_submodule(path))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return next(
        (
            name
            for name, each in named.items()
            if name.startswith(block) and name.rpartition(".")[2] in CORRECTION_BIASES and each.numel() == count
        ),
        "",
    )
