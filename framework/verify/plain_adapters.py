"""The oracle's adapters, from the papers' words: LoRA (Hu et al. 2021, arXiv 2106.09685) and DoRA (Liu et al. 2024, arXiv
2402.09353)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.recipe.schema import Adapter


class PlainAdapters:
    """Adapters as their papers state them: the model computes with merged weights, whose gradients the chain rule takes to A, B
    and the magnitudes. masters: by name, with those of adapters."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter, masters: Mapping[str, nn.Parameter]):
        self._scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.rank_stabilized else adapter.rank)
        self._masters = masters
        # By the name of a weight, what the names of its adapter begin with. Linear layers have one weight, stacks several.
        prefixes = [name.removesuffix("lora_A") for name in masters if name.endswith("lora_A")]
        self._prefixes = {f"{each}weight" if each.endswith(".") else each[:-1]: each for each in prefixes}
        holders = {name: model.get_submodule(name.rpartition(".")[0]) for name in self._prefixes}
        self._transposed = {name for name, holder in holders.items() if self._is_transposed(holder)}
        self._merged: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        """The weights that are merged."""
        return list(self._prefixes)

    def merge(self) -> dict[str, Tensor]:
        """The merged weights, in the masters' dtype; `accumulate` goes back from these."""
        self._merged = {name: self._merge(name, prefix) for name, prefix in self._prefixes.items()}
        return self._merged

    def accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the masters' gradients those that follow from the gradients of merged weights."""
        found = [name for name in self._merged if name in gradients]
        torch.autograd.backward(
            [self._merged[name] for name in found], [gradients[name] for name in found], retain_graph=True
        )

    def _merge(self, name: str, prefix: str) -> Tensor:
        weight = self._masters[name].detach()
        weight = weight.mT if name in self._transposed else weight
        merged = weight + self._scale * self._masters[f"{prefix}lora_B"] @ self._masters[f"{prefix}lora_A"]
        if (magnitude := self._masters.get(f"{prefix}lora_magnitude_vector")) is not None:
            merged = (magnitude / merged.detach().norm(dim=1))[:, None] * merged
        return merged.mT if name in self._transposed else merged

    @staticmethod
    def _is_transposed(module: nn.Module) -> bool:
        return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))
