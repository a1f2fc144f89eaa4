"""After an update: its clipping, parameter by parameter (`optim.clip_update`), and averages of the weights (`train.ema`).

    W <- B + min(1, c / rms(U)) lr U        B = (1 - lr_d wd) W, the decayed weight; lr U the optimizer's update of it
    E <- E + (1 - d) (W - E)                the average, which begins as W does

A parameter whose update is large for once, because its second moment lags behind its gradient, moves no farther than others
(Shazeer and Stern 2018, arXiv 1804.04235, section 5, for any optimizer). The mean square is that of the whole parameter: one
all-reduce of a number for each over the world.

Validation and export may read averages in place of the weights. An average lies where its masters do and is cut as they are, so
it sends nothing, and a checkpoint keeps it as a state of the optimizer. It is in the moments' dtype, at least fp32: in bf16 a
change of (1 - d) would be rounded away.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout
from framework.optim.groups import GroupAssignment, decay_rate
from framework.optim.optimizers import Missed
from framework.optim.update_rules import FlatShard
from framework.recipe.schema import Optim

# The kind of an average's entries in checkpoints.
AVERAGE = "ema"


@dataclass(frozen=True, eq=False)
class ParameterPart:
    """Elements [start, stop) of a shard, which are of one parameter: those of `layout`. counted: of the shard, the ones that no
    other rank counts."""

    name: str
    layout: Layout
    shard: FlatShard
    start: int
    stop: int
    counted: slice

    @property
    def value(self) -> Tensor:
        """Its elements, [n]: a view."""
        return self.shard.value[self.start : self.stop]


class UpdateClipping:
    """Clips updates of `parts`, all that this rank updates. assignments: of all parameters of the model."""

    def __init__(
        self, optim: Optim, parts: Sequence[ParameterPart], assignments: Sequence[GroupAssignment], world: Communicator
    ):
        self._optim, self._parts, self._world = optim, parts, world
        self._assignments = {each.parameter: each for each in assignments}
        self._index = {name: index for index, name in enumerate(self._assignments)}

    @contextmanager
    def clipping(self, lr: float, skip: Tensor, missed: Sequence[Missed]) -> Iterator[None]:
        """Clip the updates that are made within, at learning rate `lr`, unless `skip` is 1. missed: as of `StepOptimizer.step`.
        Collective over the world. Memory: a copy of the values."""
        assert self._optim.clip_update is not None, "no limit (optim.clip_update)"
        before = {shard: shard.value.clone() for shard in dict.fromkeys(each.shard for each in self._parts)}
        yield
        sums = torch.zeros(len(self._index), dtype=torch.float64, device=skip.device)
        taken = 1.0 - skip.double()
        reached = {(each.shard, each.start): each.is_reached for each in missed}
        for part in self._parts:
            base = before[part.shard][part.start : part.stop]
            is_updated = taken * reached.get((part.shard, part.start), taken)
            base.mul_(1 - is_updated * decay_rate(self._optim, lr) * self._decay_of(part.name))
            part.value.sub_(base)
            update = part.shard.value[part.counted]
            sums[self._index[part.name]] += torch.linalg.vector_norm(update, dtype=torch.float64).square()
        all_reduce(sums, self._world, label="updates")
        for part in self._parts:
            length = (
                self._optim.clip_update * lr * self._assignments[part.name].lr_ratio * prod(part.layout.shape) ** 0.5
            )
            factor = (length / sums[self._index[part.name]].sqrt()).nan_to_num(nan=1.0).clamp(max=1.0)
            base = before[part.shard][part.start : part.stop]
            part.value.mul_(factor.to(base.dtype)).add_(base)

    def _decay_of(self, name: str) -> float:
        """The factor of the learning rate in a parameter's decay. SGD's is a part of its update."""
        each = self._assignments[name]
        return 0.0 if self._optim.name == "sgd" else each.lr_ratio * each.weight_decay


class WeightAverages:
    """The averages of shards, which have their values. decay: d above, the share of an average that a step keeps."""

    def __init__(self, shards: Iterable[FlatShard], decay: float):
        self._decay = decay
        self._values = {shard: shard.value.detach().to(shard.gradient.dtype, copy=True) for shard in shards}

    def of(self, shard: FlatShard) -> Tensor:
        """The average of a shard, [n]."""
        return self._values[shard]

    def update(self, shards: Iterable[FlatShard], skip: Tensor) -> None:
        """Move the averages of shards that were updated; no effect where `skip`, a scalar on their device, is 1."""
        taken = 1.0 - skip.double()
        for shard in shards:
            average = self._values[shard]
            average.lerp_(shard.value.to(average.dtype), (taken * (1 - self._decay)).to(average.dtype))

    def restart(self, parts: Iterable[ParameterPart]) -> None:
        """Begin anew with the values that these parameters have now."""
        for part in parts:
            self._values[part.shard][part.start : part.stop].copy_(part.value)

    @contextmanager
    def in_place_of_values(self) -> Iterator[None]:
        """Have shards hold their averages for a while. Memory: a copy of the values."""
        kept = [shard.value.clone() for shard in self._values]
        for shard, average in self._values.items():
            shard.value.copy_(average)
        yield
        torch._foreach_copy_([shard.value for shard in self._values], kept)
