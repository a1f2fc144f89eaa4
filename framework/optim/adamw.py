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
    """torch's fused AdamW; where every group has `casts`, tile by tile on a CPU: each is cast while its values are in the cache.

    Bit for bit the update of whole tensors: tiles begin at whole vectors of them. casts: for each of the group's parameters, a
    tensor of its shape that gets the updated values.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **settings: Any):
        super().__init__(groups, **settings)
        # Views, made once: 5 us for each tile of 100.
        self._tiles: dict[Tensor, list[tuple[Tensor, ...]]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter."""
        casts = [cast for group in self.param_groups for cast in group.get("casts", (None,))]
        if any(cast is None for cast in casts):
            return super().step(closure)
        assert closure is None, "a closure is for optimizers that ask twice"
        for group in self.param_groups:
            for value, cast in zip(group["params"], group["casts"], strict=True):
                self._update(value, cast, group)
        return None

    def _update(self, value: Tensor, cast: Tensor, group: dict[str, Any]) -> None:
        count, scale = self.state[value]["step"], self.grad_scale
        settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
        settings |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        # On the host its value is there to be seen, and a kernel that divides by 1 would write every gradient back.
        settings["grad_scale"] = None if scale is not None and scale.item() == 1 else scale
        count += 1
        for part, gradient, mean, square, target in self._cut(value, cast):
            torch._fused_adamw_([part], [gradient], [mean], [square], [], [count], found_inf=self.found_inf, **settings)
            target.copy_(part)
        if self.found_inf is not None:
            count -= self.found_inf

    def _cut(self, value: Tensor, cast: Tensor) -> list[tuple[Tensor, ...]]:
        """Tiles of a parameter: of its value, gradient, moments and cast."""
        if value not in self._tiles:
            assert value.grad is not None, tuple(value.shape)
            state, size = self.state[value], TILE * torch.get_num_threads()
            tensors = (value, value.grad, state["exp_avg"], state["exp_avg_sq"], cast)
            self._tiles[value] = list(zip(*(each.split(size) for each in tensors), strict=True))
        return self._tiles[value]


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
