"""The one way to the optimizers: groups of shards in, one update in place. A new optimizer is a file and a line of OPTIMIZERS.

The clipping divisor and the skip flag go into the kernel, so that clipping costs no pass over memory and a step with
infinite or NaN gradients is skipped without asking the device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.errors import LayoutError
from framework.optim.adamw import ADAMW
from framework.optim.contract import FlatShard, Method, ShardGroup
from framework.optim.lion import LION
from framework.optim.sgd import SGD
from framework.recipe.schema import Optim

# By `optim.name` of a recipe.
OPTIMIZERS: dict[str, Method] = {"adamw": ADAMW, "lion": LION, "sgd": SGD}


@dataclass(frozen=True)
class Missed:
    """Elements [start, stop) of a shard that this rank's backward did not reach. is_reached: by another's; on the device."""

    shard: FlatShard
    start: int
    stop: int
    is_reached: Tensor


def state_names(optim: Optim) -> tuple[str, ...]:
    """The per-element states of the recipe's optimizer, which a checkpoint keeps."""
    return OPTIMIZERS[optim.name].state_names(optim)


class FlatOptimizer:
    """The recipe's optimizer over flat shards. LayoutError where it updates what the shards of a group do not hold whole."""

    def __init__(self, optim: Optim, groups: Sequence[ShardGroup], device: torch.device):
        method = OPTIMIZERS[optim.name]
        check_kinds(optim.name, method, groups)
        # A rank whose stages are frozen counts updates as the others do.
        nothing = FlatShard((), torch.zeros(0, device=device), torch.zeros(0, device=device))
        filled = [group for group in groups if group.shards] or [ShardGroup("nothing", (nothing,), 1.0, 0.0)]
        self.shards = tuple(shard for group in filled for shard in group.shards)
        self.state_names = method.state_names(optim)
        self._lr_ratios = [group.lr_ratio for group in filled]
        self._kernel_divides = all(shard.gradient.dtype == torch.float32 for shard in self.shards)
        # One call for all shards of a group: each call of a fused kernel costs the host as much as four layers' norms.
        settings = [
            {"params": [shard.value for shard in group.shards], "weight_decay": group.weight_decay} for group in filled
        ]
        self._inner = method.make(optim, settings)
        for shard in self.shards:
            state = self._inner.state[shard.value]
            state |= {name: torch.zeros_like(shard.value) for name in self.state_names}
            if method.counts_updates:
                state["step"] = torch.zeros((), dtype=torch.float32, device=shard.value.device)
            shard.value.grad = shard.gradient

    def step(self, lr: float, divisor: Tensor, skip: Tensor) -> None:
        """Divide the gradients by `divisor` and update at learning rate `lr`; no effect where `skip` (scalar) is 1."""
        for settings, lr_ratio in zip(self._inner.param_groups, self._lr_ratios, strict=True):
            settings["lr"] = lr * lr_ratio
        if self._kernel_divides:
            self._inner.grad_scale = divisor.float()  # type: ignore[attr-defined]
        else:  # the kernels read their divisor as fp32, which would round fp64 gradients
            torch._foreach_div_([shard.gradient for shard in self.shards], divisor)
        self._inner.found_inf = skip.float()  # type: ignore[attr-defined]
        self._inner.step()

    def state(self, shard: FlatShard, name: str) -> Tensor:
        """A per-element state of a shard: [n], in its dtype."""
        return self._inner.state[shard.value][name]

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
            for tensor in (each.shard.value, *(self.state(each.shard, name) for name in self.state_names))
        ]
        saved = [view.clone() for view, _ in views]
        yield
        for (view, is_reached), old in zip(views, saved, strict=True):
            torch.where(is_reached, view, old, out=view)


def check_kinds(name: str, method: Method, groups: Sequence[ShardGroup]) -> None:
    """LayoutError that names the optimizer and a group whose shards hold something else than it updates."""
    for group in groups:
        if group.kind is not method.kind:
            raise LayoutError(
                f"optim.name={name} updates {method.kind.value}, and the ranks divide the parameters of group {group.name!r}"
                f" into {group.kind.value}: choose another optim.name"
            )
