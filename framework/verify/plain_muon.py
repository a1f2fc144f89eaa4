"""The oracle's Muon: one matrix after the other in one process, from the papers' words. torch.optim.Muon takes weights of two
dims only, so stacked experts and packed projections need more; a test compares the two where both apply."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from framework.recipe.schema import Optim

# Returns the matrices packed in a weight as (dim, indices along it) each.
Pieces = list[tuple[int, Tensor]]
# Projections of queries, keys and values in one: one after another, or by head or by group of key-value heads.
IN_TURN, BY_HEAD = ("qkv_proj", "c_attn"), ("query_key_value",)


def find_matrices(model: nn.Module, config: PretrainedConfig, optim: Optim) -> dict[str, Pieces]:
    """The weights of layers that Muon updates, and the matrices in each. model: a stock one."""
    found = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        group = next((each for each in optim.groups.values() if re.search(each.pattern, name)), None)
        is_layer = re.search(r"\.\d+\.", name) and not isinstance(owner, nn.Embedding)
        is_weight = parameter.ndim == 2 or (parameter.ndim == 3 and "experts" in name)
        is_bias = re.search(r"(^|\.|_)bias$|(^|\.)(A_log|D)$", name)
        if is_layer and is_weight and not is_bias and (group is None or group.optimizer != "adamw"):
            found[name] = list(_pieces(name, parameter, owner, config.get_text_config()))
    return found


def _pieces(name: str, weight: Tensor, owner: Any, config: Any) -> Iterator[tuple[int, Tensor]]:
    last = name.removesuffix(".weight").rpartition(".")[2]
    outputs = weight.ndim - (1 if isinstance(owner, Conv1D) or getattr(owner, "is_transposed", False) else 2)
    size = weight.shape[outputs]
    heads = getattr(config, "num_attention_heads", 1)
    kv = getattr(config, "num_key_value_heads", None) or heads
    numbers = torch.arange(size)
    if last == "gate_up_proj":
        in_halves = getattr(owner, "is_concatenated", True)
        pieces = numbers.chunk(2) if in_halves else (numbers[::2], numbers[1::2])
    elif last in IN_TURN:
        unit = size // (heads + 2 * kv)
        pieces = numbers.split([heads * unit, kv * unit, kv * unit])
    elif last in BY_HEAD:
        pieces = tuple(each.flatten() for each in numbers.view(heads, 3, -1).unbind(1))
    else:
        pieces = (numbers,)
    for each in pieces:
        yield outputs, each


class PlainMuon(torch.optim.Optimizer):
    """Muon of the matrices of groups that say `pieces`, and AdamW of the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], optim: Optim):
        super().__init__(groups, {"pieces": None})
        self._optim, rest = optim, [dict(group) for group in self.param_groups if group["pieces"] is None]
        self._adamw = torch.optim.AdamW(rest, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update."""
        rest = (group for group in self.param_groups if group["pieces"] is None)
        for theirs, group in zip(self._adamw.param_groups, rest, strict=True):
            theirs["lr"] = group["lr"]
        self._adamw.step()
        for group in self.param_groups:
            for weight in group["params"] if group["pieces"] is not None else ():
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return None

    def _update(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        b = self._optim.momentum
        moment = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        moment.copy_(b * moment + (1 - b) * gradient)
        update = b * moment + (1 - b) * gradient
        weight *= 1 - group["lr"] * group["weight_decay"]
        experts = update.view(-1, *update.shape[-2:])
        for number, matrix in enumerate(experts):
            target = weight.view_as(experts)[number]
            for dim, indices in ((dim - update.ndim + 2, each.to(update.device)) for dim, each in group["pieces"]):
                piece = self._iterate(matrix.index_select(dim, indices))
                target.index_add_(dim, indices, piece.to(target.dtype), alpha=-group["lr"] * self._scale(piece))

    def _iterate(self, matrix: Tensor) -> Tensor:
        x = matrix.bfloat16() if self._optim.muon.dtype == "bf16" else matrix
        if x.shape[0] > x.shape[1]:
            return self._iterate(matrix.T).T
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(self._optim.muon.steps):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x

    def _scale(self, matrix: Tensor) -> float:
        rows, columns = matrix.shape
        return 0.2 * sqrt(max(rows, columns)) if self._optim.muon.scale == "adamw" else sqrt(max(1, rows / columns))
