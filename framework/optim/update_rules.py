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


# (parameter, gradient, states by name, settings of its group, 1 or 0: whether it is updated at all) -> None. All in place, and
# finite where the last is 0.
InPlaceRule = Callable[[Tensor, Tensor, dict[str, Tensor], dict[str, Any], Tensor | float], None]


class RuleOptimizer(torch.optim.Optimizer):
    """The optimizer of a rule for which torch has no fused kernel. states: names of tensors like the parameter, zeros at first;
    settings: of groups that do not state them.

    grad_scale: gradients are divided by it, in place. found_inf: 1.0 leaves parameters and states as they were. Both are 0-dim
    tensors, as in torch's fused optimizers, set before `step()`, so that clipping and skipping need no host sync.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Any], rule: InPlaceRule, states: Iterable[str], **settings: Any):
        super().__init__(params, {"weight_decay": 0.0, **settings})
        self._rule, self._names = rule, tuple(states)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient: one by one, so that what an update allocates for a while is of one
        parameter's size, not of a group's."""
        # A tensor where found_inf is set, so the host never asks which. fp64: 1 - beta must not round to fp32.
        taken = 1.0 if self.found_inf is None else 1.0 - self.found_inf.double()
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                if self.grad_scale is not None:
                    param.grad.div_(self.grad_scale)
                if self.found_inf is not None:
                    param.grad.masked_fill_(self.found_inf > 0, 0.0)  # 0 * inf would be NaN below
                states = self.state[param]
                states |= {name: torch.zeros_like(param) for name in self._names if name not in states}
                self._rule(param, param.grad, states, group, taken)


def update_lion(
    param: Tensor, grad: Tensor, states: dict[str, Tensor], group: dict[str, Any], taken: Tensor | float
) -> None:
    """Lion (Chen et al. 2023, arXiv 2302.06675, Algorithm 2): the sign of an interpolated momentum.

        c = b1 m + (1 - b1) g        p <- (1 - lr wd) p - lr sign(c)        m <- b2 m + (1 - b2) g

    One moment instead of Adam's two; the decay is decoupled."""
    moment, lr, betas = states["exp_avg"], group["lr"], group["betas"]
    sign = moment.lerp(grad, 1 - betas[0]).sign_().mul_(taken * lr)
    param.mul_(1 - taken * (lr * group["weight_decay"])).sub_(sign)
    del sign  # one transient copy of the parameter at a time
    moment.add_((grad - moment).mul_(taken * (1 - betas[1])))


def update_momentum(
    param: Tensor, grad: Tensor, states: dict[str, Tensor], group: dict[str, Any], taken: Tensor | float
) -> None:
    """The momentum of Muon (`muon.py`): M <- M + (1 - b) (G - M). Parameters stay."""
    moment = states["momentum_buffer"]
    moment.add_((grad - moment).mul_(taken * (1 - group["momentum"])))


# (value, gradient, states by name, learning rate, weight decay, settings) -> value and states after an update: a pure function of
# single elements, each tensor [n] in the master dtype. It knows of no skipped steps.
ElementRule = Callable[[Tensor, Tensor, dict[str, Tensor], float, float, Optim], tuple[Tensor, dict[str, Tensor]]]


def update_in_place(rule: ElementRule, optim: Optim) -> InPlaceRule:
    """The rule of a pure function."""

    def update(
        param: Tensor, grad: Tensor, states: dict[str, Tensor], group: dict[str, Any], taken: Tensor | float
    ) -> None:
        value, new = rule(param, grad, dict(states), group["lr"], group["weight_decay"], optim)
        for tensor, updated in ((param, value), *((states[name], new[name]) for name in states)):
            tensor.copy_(updated if isinstance(taken, float) else torch.where(taken > 0, updated, tensor))

    return update


# Keyed by an optimizer's name; for Muon the elementwise part (`muon.py`). torch's with its fused kernels, each over all tensors
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
        make=lambda optim, groups: RuleOptimizer(groups, update_lion, ("exp_avg",), lr=optim.lr, betas=optim.betas),
    ),
    "muon": UpdateRule(
        states=lambda optim: {"momentum_buffer": optim.momentum},
        make=lambda optim, groups: RuleOptimizer(
            groups, update_momentum, ("momentum_buffer",), lr=optim.lr, momentum=optim.momentum
        ),
    ),
    "sgd": UpdateRule(
        states=lambda optim: {"momentum_buffer": optim.momentum} if optim.momentum else {},
        make=lambda optim, groups: torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True),
    ),
}
