"""One door to the optimizers: a few flat tensors in, one fused update out.

The clipping divisor and the skip flag go into the kernel, so that clipping costs no pass over memory and a step with
infinite or NaN gradients is skipped without asking the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.optim.lion import Lion
from framework.recipe.schema import Optim

# Per-element states that a checkpoint keeps, by optimizer.
STATE_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}


@dataclass(frozen=True)
class FlatSpan:
    """A flat run of parameters with equal hyperparameters: values [n] and gradient [n] in the master dtype."""

    values: Tensor
    gradient: Tensor
    lr_ratio: float
    weight_decay: float


@dataclass(frozen=True)
class Missed:
    """Elements [start, stop) of a span that this rank's backward did not reach. is_reached: by another's; on the device."""

    span: int
    start: int
    stop: int
    is_reached: Tensor


def state_names(optim: Optim) -> tuple[str, ...]:
    """The per-element states of the recipe's optimizer."""
    return STATE_NAMES[optim.name] if optim.name != "sgd" or optim.momentum else ()


class FlatOptimizer:
    """AdamW (Loshchilov & Hutter 2019), Lion (Chen et al. 2023) or SGD with momentum over flat spans."""

    def __init__(self, optim: Optim, spans: Sequence[FlatSpan]):
        self.spans = spans
        self.state_names = state_names(optim)
        groups = [{"params": [span.values], "weight_decay": span.weight_decay} for span in spans]
        self._inner = _build(optim, groups)
        for span in spans:
            state = self._inner.state[span.values]
            state |= {name: torch.zeros_like(span.values) for name in self.state_names}
            if optim.name == "adamw":
                state["step"] = torch.zeros((), dtype=torch.float32, device=span.values.device)
            span.values.grad = span.gradient

    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Divide the gradients by `divisor` and update at learning rate `lr`; no effect where `skip` (scalar) is 1."""
        for group, span in zip(self._inner.param_groups, self.spans, strict=True):
            group["lr"] = lr * span.lr_ratio
        if all(span.gradient.dtype == torch.float32 for span in self.spans):
            self._inner.grad_scale = divisor.float()  # type: ignore[attr-defined]
        else:  # the kernels read their divisor as fp32, which would round fp64 gradients
            torch._foreach_div_([span.gradient for span in self.spans], divisor)
        self._inner.found_inf = skip.float()  # type: ignore[attr-defined]
        self._inner.step()

    def state(self, index: int, name: str) -> Tensor:
        """A per-element state of a span, flat."""
        return self._inner.state[self.spans[index].values][name]

    @property
    def num_updates(self) -> int:
        """Updates done so far, skipped ones not counted: Adam's bias correction depends on it."""
        counts = [int(state["step"]) for state in self._inner.state.values() if "step" in state]
        return max(counts, default=0)

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        for state in self._inner.state.values():
            if "step" in state:
                state["step"].fill_(count)

    @contextmanager
    def preserving(self, missed: Sequence[Missed]) -> Iterator[None]:
        """Leave what nobody has reached, and its states, as they are. The device decides: the host does not wait to know."""
        views = [
            (tensor[each.start : each.stop], each.is_reached)
            for each in missed
            for tensor in (
                self.spans[each.span].values,
                *(self.state(each.span, name) for name in self.state_names),
            )
        ]
        saved = [view.clone() for view, _ in views]
        yield
        for (view, is_reached), old in zip(views, saved, strict=True):
            torch.where(is_reached, view, old, out=view)


def _build(optim: Optim, groups: list[dict]) -> torch.optim.Optimizer:
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
        case "lion":
            return Lion(groups, lr=optim.lr, betas=optim.betas)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)
