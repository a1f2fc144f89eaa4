"""The oracle's adapters, from the papers' words: LoRA (Hu et al. 2021, arXiv 2106.09685), DoRA (Liu et al. 2024, arXiv
2402.09353), and the base of QLoRA in few bits (Dettmers et al. 2023, arXiv 2305.14314)."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise

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
        # Prefix of an adapter's names, by the name of its weight. Linear layers have one weight, stacks several.
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


def round_base(model: nn.Module, adapter: Adapter, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with those of frozen linear layers and experts rounded as `adapter.base` says. model: stock, on meta."""
    frozen = [
        (path, module)
        for path, module in model.named_modules()
        if re.search(r"\.\d+\.", path) and not any(path.endswith(f".{target}") for target in adapter.train)
    ]
    names = {
        f"{path}.weight"
        for path, module in frozen
        if isinstance(module, nn.Linear | Conv1D) and not path.endswith((".gate", ".router"))
    }
    names |= {
        f"{path}.{name}"
        for path, module in frozen
        for name, each in module.named_parameters(recurse=False)
        if each.ndim == 3 and path.endswith("experts") and "lora_" not in name
    }
    coded = names & weights.keys() if adapter.base != "bf16" else set()
    return {name: _round(each, adapter.base == "nf4") if name in coded else each for name, each in weights.items()}


def _round(weight: Tensor, is_nf4: bool) -> Tensor:
    """Block after block of 64 numbers in each row."""
    pieces = []
    for block in weight.to(torch.float32).split(64, -1):
        scale = block.abs().amax(-1, keepdim=True)
        ratio = block / scale.where(scale > 0, 1)
        if is_nf4:
            # The nearest number of the table: as many borders are below.
            table = _make_nf4()
            borders = [(low + high) / 2 for low, high in pairwise(table)]
            number = table[sum((ratio > border).long() for border in borders)]
        else:
            number = (ratio * 448).to(torch.float8_e4m3fn).to(torch.float32) / 448
        pieces.append(number * scale)
    return torch.cat(pieces, -1).to(weight.dtype)


def _make_nf4() -> Tensor:
    """Quantiles of a normal distribution at 8 places on its positive side and 7 on the negative, the largest 1; and 0. [16]"""
    above, below = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, n).double())[:-1] for n in (9, 8))
    quantiles = torch.cat([above, above.new_zeros(1), -below]).sort().values.float()
    return quantiles / quantiles.max()
