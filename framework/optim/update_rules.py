"""Update rules of `optim.name`, and the shards that they update. A new rule is an entry of OPTIMIZERS."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from framework.mesh.layout import Layout
from framework.recipe.schema import Optim


@dataclass(frozen=True, eq=False)
class FlatShard:
    """Elements of one or several parameters that this rank updates. value, gradient: [n] in the master dtype; value is updated in
    place. layouts: the elements of each parameter, one after another; parameters: their names."""

    layouts: tuple[Layout, ...]
    value: Tensor
    gradient: Tensor
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardGroup:
    """Shards that are updated alike."""

    name: str
    shards: tuple[FlatShard, ...]
    lr_ratio: float
    weight_decay: float


@dataclass(frozen=True)
class UpdateRule:
    """The update rule of an optimizer.

    make: torch's optimizer over parameter groups of one tensor each. As torch's fused ones do, it divides gradients by
    `grad_scale` and does nothing where `found_inf` is 1.
    """

    # States per element, which a checkpoint keeps: by name, the share of it that an update retains.
    states: Callable[[Optim], dict[str, float]]
    make: Callable[[Optim, list[dict[str, Any]]], torch.optim.Optimizer]
    # Whether it keeps a state `step` on the device.
    counts_updates: bool = False
    # States that are never below zero.
    nonnegative: tuple[str, ...] = ()


class Lion(torch.optim.Optimizer):
    """Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2): the sign of an interpolated momentum.

        c = b1 m + (1 - b1) g        p <- (1 - lr wd) p - lr sign(c)        m <- b2 m + (1 - b2) g

    One moment instead of Adam's two; the decay is decoupled. Parameters are updated one after the other; each has the state
    `exp_avg`, in its dtype. `grad_scale` and `found_inf` are 0-dim tensors, as in torch's fused optimizers, set before `step()`,
    so that clipping and skipping need no host sync.

    grad_scale: gradients are divided by it, in place. found_inf: 1.0 leaves parameters and moments as they were.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                # One by one: what an update allocates for a while is of one parameter's size, not of a group's.
                if param.grad is not None:
                    self._update(param, param.grad, group["lr"], group["betas"], group["weight_decay"])
        return loss

    def _update(self, param: Tensor, grad: Tensor, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        moment = self._moment(param)
        # 1 or 0; a tensor where found_inf is set, so the host never asks which. fp64: 1 - b2 must not round to fp32.
        taken: Tensor | float = 1.0
        if self.grad_scale is not None:
            grad.div_(self.grad_scale)
        if self.found_inf is not None:
            taken = 1.0 - self.found_inf.double()
            grad.masked_fill_(self.found_inf > 0, 0.0)  # 0 * inf would be NaN below
        sign = moment.lerp(grad, 1 - betas[0]).sign_().mul_(taken * lr)
        param.mul_(1 - taken * (lr * weight_decay)).sub_(sign)
        del sign  # one transient copy of the parameter at a time
        moment.add_((grad - moment).mul_(taken * (1 - betas[1])))

    def _moment(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state["exp_avg"]


class MovingAverage(torch.optim.Optimizer):
    """The momentum of Muon (`muon.py`), in place: M <- M + (1 - b) (G - M). Parameters stay.

    Each parameter has the state `momentum_buffer`. `grad_scale` and `found_inf` as of `Lion`.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], lr: float, momentum: float):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every momentum."""
        for group in self.param_groups:
            weight: Tensor | float = 1 - group["momentum"]
            for param in group["params"]:
                grad, moment = param.grad, self.state[param]["momentum_buffer"]
                if self.grad_scale is not None:
                    grad.div_(self.grad_scale)
                if self.found_inf is not None:
                    grad.masked_fill_(self.found_inf > 0, 0.0)  # 0 * inf would be NaN below
                    weight = (1.0 - self.found_inf.double()) * (1 - group["momentum"])
                moment.add_((grad - moment).mul_(weight))
        return None


# (value, gradient, states by name, learning rate, weight decay, settings) -> value and states after an update: a pure function of
# single elements, each tensor [n] in the master dtype.
ElementRule = Callable[[Tensor, Tensor, dict[str, Tensor], float, float, Optim], tuple[Tensor, dict[str, Tensor]]]


class ElementOptimizer(torch.optim.Optimizer):
    """The optimizer of an `ElementRule`. `grad_scale` and `found_inf` as of `Lion`: the rule knows of neither."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], rule: ElementRule, optim: Optim):
        super().__init__(params, {"lr": optim.lr, "weight_decay": 0.0})
        self._rule, self._optim, self._names = rule, optim, tuple(OPTIMIZERS[optim.name].states(optim))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        is_skipped = None if self.found_inf is None else self.found_inf > 0
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                gradient, states = param.grad, self.state[param]
                if self.grad_scale is not None:
                    gradient.div_(self.grad_scale)
                for name in self._names:
                    states.setdefault(name, torch.zeros_like(param))
                old = {name: states[name] for name in self._names}
                value, new = self._rule(param, gradient, old, group["lr"], group["weight_decay"], self._optim)
                for tensor, updated in ((param, value), *((old[name], new[name]) for name in self._names)):
                    # Chosen on the device, so the host never asks whether the step is skipped.
                    tensor.copy_(updated if is_skipped is None else torch.where(is_skipped, tensor, updated))
        return None


# By the name of an optimizer; of Muon the elementwise part (`muon.py`). torch's own with its fused kernels, each over all tensors
# of a parameter group.
OPTIMIZERS: dict[str, UpdateRule] = {
    "adamw": UpdateRule(
        states=lambda optim: dict(zip(("exp_avg", "exp_avg_sq"), optim.betas, strict=True)),
        make=lambda optim, groups: torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True),
        counts_updates=True,
        nonnegative=("exp_avg_sq",),
    ),
    "lion": UpdateRule(
        states=lambda optim: {"exp_avg": optim.betas[1]},
        make=lambda optim, groups: Lion(groups, lr=optim.lr, betas=optim.betas),
    ),
    "muon": UpdateRule(
        states=lambda optim: {"momentum_buffer": optim.momentum},
        make=lambda optim, groups: MovingAverage(groups, lr=optim.lr, momentum=optim.momentum),
    ),
    "sgd": UpdateRule(
        states=lambda optim: {"momentum_buffer": optim.momentum} if optim.momentum else {},
        make=lambda optim, groups: torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True),
    ),
}
