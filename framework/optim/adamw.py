"""AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): torch's fused kernel."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.optim.contract import Method, UpdateKind
from framework.recipe.schema import Optim

# Elements that each thread updates before it casts them: four fp32 tensors of so many fit a core's cache of 1 MiB. Of 2^14 the
# calls cost more than the cache saves, at 2^18 nothing is left in it (scripts/bench/offload.py; 2 MiB a core).
TILE = 1 << 16


class _Part(NamedTuple):
    """What one call of the kernel updates: values of one dtype, each with its gradient, moments and count of updates. casts: what
    each of them is cast to; none, or one for each."""

    values: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    counts: list[Tensor]
    casts: Sequence[Tensor] = ()


class TiledAdamW(torch.optim.AdamW):
    """torch's fused AdamW; where every group has `casts`, tile by tile on a CPU: each is cast while its values are in the cache.

    Bit for bit the update of whole tensors: tiles begin at whole vectors of them. casts: for each of the group's parameters, a
    tensor of its shape that gets the updated values. Gradients and states are there before the first step and stay where they
    are; parameters that are updated together may share one `step`.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **settings: Any):
        super().__init__(groups, **settings)
        # Lists and views, made once: torch's own step gathers them anew, which is half the time of a small model's update.
        self._parts: list[list[_Part]] = []
        self._counts: list[Tensor] = []
        self._is_tiled = False

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter."""
        assert closure is None, "a closure is for optimizers that ask twice"
        if not self._parts:
            self._prepare()
        scale, found_inf = self.grad_scale, self.found_inf
        # Casts are on the host, where the value is there to be seen; a kernel that divides by 1 would write every gradient back.
        scale = None if self._is_tiled and scale is not None and scale.item() == 1 else scale
        for count in self._counts:
            count += 1
        for group, parts in zip(self.param_groups, self._parts, strict=True):
            settings: dict[str, Any] = {
                name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")
            }
            settings |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            settings |= {"grad_scale": scale, "found_inf": found_inf}
            for values, gradients, means, squares, counts, casts in parts:
                torch._fused_adamw_(values, gradients, means, squares, [], counts, **settings)
                for value, cast in zip(values, casts, strict=False):
                    cast.copy_(value)
        if found_inf is not None:
            for count in self._counts:
                count -= found_inf
        return None

    def _prepare(self) -> None:
        casts = [group.get("casts", [None]) for group in self.param_groups]
        self._is_tiled = all(each is not None for of_group in casts for each in of_group)
        cut = self._cut if self._is_tiled else self._join
        self._parts = [list(cut(group)) for group in self.param_groups]
        counts = [count for parts in self._parts for part in parts for count in part.counts]
        self._counts = list({id(count): count for count in counts}.values())

    def _join(self, group: dict[str, Any]) -> Iterator[_Part]:
        """The group's parameters, all of a dtype together."""
        for dtype in dict.fromkeys(value.dtype for value in group["params"]):
            values = [value for value in group["params"] if value.dtype == dtype]
            yield _Part(*(list(each) for each in zip(*map(self._tensors_of, values), strict=True)))

    def _cut(self, group: dict[str, Any]) -> Iterator[_Part]:
        """Tiles of each of the group's parameters."""
        size = TILE * torch.get_num_threads()
        for value, cast in zip(group["params"], group["casts"], strict=True):
            *tensors, count = self._tensors_of(value)
            for *tiles, target in zip(*(each.split(size) for each in (*tensors, cast)), strict=True):
                tile, gradient, mean, square = tiles
                yield _Part([tile], [gradient], [mean], [square], [count], [target])

    def _tensors_of(self, value: Tensor) -> tuple[Tensor, ...]:
        """A parameter's value, gradient, moments and count."""
        assert value.grad is not None, tuple(value.shape)
        state = self.state[value]
        return value, value.grad, state["exp_avg"], state["exp_avg_sq"], state["step"]


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
