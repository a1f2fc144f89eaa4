"""AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): torch's fused kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from framework.optim.contract import Method, UpdateKind
from framework.recipe.schema import Optim

# Elements that each thread updates before it casts them: four fp32 tensors of so many fit a core's cache of 1 MiB. Of 2^14 the
# calls cost more than the cache saves, at 2^18 nothing is left in it (scripts/bench/offload.py; 2 MiB a core).
TILE = 1 << 16


class TiledAdamW(torch.optim.AdamW):
    """torch's fused AdamW; of what has a group's `casts`, tile by tile on a CPU: each is cast while its values are in the cache.

    Bit for bit the update of whole tensors: tiles begin at whole vectors of them. casts: for each of the group's parameters, a
    tensor of its shape that gets the updated values, or None.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter."""
        groups = self.param_groups
        if not any(cast is not None for group in groups for cast in group.get("casts", ())):
            return super().step(closure)
        assert closure is None, "a closure is for optimizers that ask twice"
        for group in groups:
            for value, cast in zip(group["params"], group["casts"], strict=True):
                self._update(value, cast, group)
        return None

    def _update(self, value: Tensor, cast: Tensor | None, group: dict[str, Any]) -> None:
        state, (beta1, beta2), scale = self.state[value], group["betas"], self.grad_scale
        assert value.grad is not None, tuple(value.shape)
        # On the host its value is there to be seen, and a kernel that divides by 1 would write every gradient back.
        scale = None if scale is not None and scale.item() == 1 else scale
        state["step"] += 1
        tensors = [value, value.grad, state["exp_avg"], state["exp_avg_sq"]]
        tiles = zip(*(each.split(TILE * torch.get_num_threads()) for each in tensors), strict=True)
        first = 0
        for tile in tiles:
            torch._fused_adamw_(
                [tile[0]], [tile[1]], [tile[2]], [tile[3]], [], [state["step"]],
                amsgrad=False, lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
                grad_scale=scale, found_inf=self.found_inf,
            )  # fmt: skip
            if cast is not None:
                cast[first : first + len(tile[0])].copy_(tile[0])
            first += len(tile[0])
        if self.found_inf is not None:
            state["step"] -= self.found_inf


def make(optim: Optim, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Over groups as torch's optimizers take them."""
    return TiledAdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


ADAMW = Method(
    UpdateKind.PER_ELEMENT,
    lambda optim: dict(zip(("exp_avg", "exp_avg_sq"), optim.betas, strict=True)),
    make,
    counts_updates=True,
    nonnegative=("exp_avg_sq",),
    casts=True,
)
