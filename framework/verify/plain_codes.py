"""Rounding of what travels as codes, by the table of `docs/zero.md` in plain torch: parameters that are gathered so, gradients
that leave their node so, and rows on their way to experts."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.recipe.schema import Recipe
from framework.verify.plain import exponent_of, find_experts, power_of_two


class PlainCodes:
    """Rounding of numbers that travel as codes: the largest value of a block becomes the largest code, 127 of int8, 7 of int4, or
    at most fp8's 448 by a scale that is a power of two.

    Blocks are cut where ranks' shards are, so the oracle takes them from the layout. blocks: numbers of each tensor's elements by
    name, equal within a block, -1 where an element does not travel so.
    """

    def __init__(self, kind: str, blocks: Mapping[str, Tensor]):
        self._kind = kind
        self._blocks = {name: each.flatten().long() for name, each in blocks.items() if (each >= 0).any()}
        numbers = torch.cat([torch.empty(0, dtype=torch.int64), *self._blocks.values()])
        self._inverse = numbers.unique(return_inverse=True)[1]

    @torch.no_grad()
    def round(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values as which those of the tensors that travel as codes arrive, by name."""
        if not self._blocks:
            return {}
        values = torch.cat([tensors[name].detach().flatten() for name in self._blocks])
        inverse, is_int = self._inverse.to(values.device), self._kind != "fp8"
        largest = torch.zeros_like(values).scatter_reduce_(0, inverse, values.abs(), "amax").float()
        scales = (largest / {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[self._kind]).clamp(min=2.0**-126)
        if not is_int:
            exponent = exponent_of(scales.double())
            scales = power_of_two(exponent + (power_of_two(exponent) < scales.double())).float()
        scales = scales[inverse]
        codes = values * (1.0 / scales)
        codes = codes.round() if is_int else codes.float().to(torch.float8_e4m3fn)
        parts = (codes.float() * scales).to(values.dtype).split([len(each) for each in self._blocks.values()])
        return {name: part.view_as(tensors[name]) for name, part in zip(self._blocks, parts, strict=True)}


class PlainReduction:
    """Sums of gradients that leave their node as codes (`zero.quantize_reduce`): each rank's is rounded, then each node's sum.

    Microbatch i is that of rank i mod dp, and its gradients are summed at once unless ranks add up their own first. dp and nodes
    are the recipe's. blocks: as those of `PlainCodes`.
    """

    def __init__(self, recipe: Recipe, blocks: Mapping[str, Tensor]):
        launch, parallel, zero = recipe.launch, recipe.parallel, recipe.zero
        self._codes = PlainCodes(zero.quantize_reduce, blocks)
        self._dp = (launch.ranks or 1) // (parallel.tp * parallel.pp * parallel.cp)
        self._on_node = self._dp * (launch.ranks_per_node or 1) // (launch.ranks or 1)
        self._adds_first = zero.stage < 2 or zero.accumulate == "local"
        self._terms: dict[tuple[int, int], dict[str, Tensor]] = {}

    def add(self, number: int, name: str, gradient: Tensor) -> None:
        """Take the gradient of a microbatch, the `number`-th of the step."""
        turn, rank = (0 if self._adds_first else number // self._dp), number % self._dp
        of_rank = self._terms.setdefault((turn, rank), {})
        of_rank[name] = gradient + of_rank[name] if name in of_rank else gradient

    def take(self) -> dict[str, Tensor]:
        """The sums of the step by name, which ends."""
        of_nodes: dict[tuple[int, int], dict[str, Tensor]] = {}
        for (turn, rank), gradients in self._terms.items():
            _add_to(of_nodes.setdefault((turn, rank // self._on_node), {}), self._codes.round(gradients))
        total: dict[str, Tensor] = {}
        for gradients in of_nodes.values():
            _add_to(total, self._codes.round(gradients))
        self._terms = {}
        return total


# Numbers of a row with one scale.
ROW_BLOCK = 256


def round_rows_of_experts(model: PreTrainedModel) -> None:
    """Let experts read their rows, and the gradients of what they return, as they arrive where these travel as fp8 codes. The
    gradient of rows is that of the rounded ones."""
    known = find_experts(model)
    for path, module in model.named_modules():
        # llama4's are given rows alone, already scaled.
        down = getattr(module, "down_proj", None)
        if path in known or (isinstance(down, nn.Parameter) and down.ndim == 3):
            module.register_forward_pre_hook(_round_rows)
            module.register_forward_hook(_round_gradient)


def _round_rows(experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0] + (_round(args[0]) - args[0]).detach(), *args[1:]


def _round_gradient(_experts: nn.Module, _args: tuple[Any, ...], out: Tensor) -> None:
    if out.requires_grad:
        out.register_hook(_round)


def _round(x: Tensor) -> Tensor:
    """The numbers of fp8 codes of rows [T, H]."""
    rows, width = x.shape
    blocks = torch.arange(rows).unsqueeze(1) * (width // ROW_BLOCK + 1) + torch.arange(width) // ROW_BLOCK
    return PlainCodes("fp8", {"": blocks}).round({"": x})[""]


def _add_to(total: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    for name, each in terms.items():
        total[name] = total[name] + each if name in total else each
