"""Lion: the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675, Algorithm 2).

    c = b1 m + (1 - b1) g        p <- (1 - lr wd) p - lr sign(c)        m <- b2 m + (1 - b2) g

One moment instead of Adam's two; the decay is decoupled. `grad_scale` and `found_inf` mean what they mean to torch's
fused optimizers: 0-dim tensors, set as attributes before `step()`, so that clipping and skipping need no host sync.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from framework.optim.contract import Method, UpdateKind
from framework.recipe.schema import Optim


class Lion(torch.optim.Optimizer):
    """Updates one parameter after the other; state per parameter: `exp_avg`, in its dtype.

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


def make(optim: Optim, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Over groups as torch's optimizers take them."""
    return Lion(groups, lr=optim.lr, betas=optim.betas)


LION = Method(UpdateKind.PER_ELEMENT, lambda optim: {"exp_avg": optim.betas[1]}, make)
