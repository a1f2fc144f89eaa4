"""The update of what lives on a disk: chunk after chunk through the ring, each from its gradient to its parameters.

    read a chunk | copy its gradient to the host, update its master and moments, cast it to the parameters | write the chunk

The host has the ring and the gradient of one chunk; gradients and parameters stay where they are. Every update is torch's fused
kernel over a part of a shard: bit for bit that over the shard, because parts begin at whole vectors of it. The kernel computes
the rest behind the last whole vector in other instructions, which round otherwise.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from framework.comm.transfer import fetch
from framework.optim.disk_ring import DiskStates, DiskTensor
from framework.optim.optimizers import Missed, check_kinds, state_names
from framework.optim.update_rules import OPTIMIZERS, FlatShard, ShardGroup
from framework.parallel.zero.buffers import UnitBuffer
from framework.plan.memory import disk_shards, within_owned
from framework.plan.stage import PlannedStage
from framework.recipe.schema import Optim, Recipe
from framework.train.shards import OwnedShard

HOST = torch.device("cpu")


def open_disk(
    recipe: Recipe, stages: Sequence[PlannedStage], rank: int, run_id: str | None
) -> tuple[DiskStates | None, list[DiskTensor]]:
    """The file of those of a rank's states that live on a disk, all zero, and the master of each buffer in it, in their order;
    None where no state does. run_id: None: one that nobody else has. Raises what `DiskFile` raises."""
    shards = disk_shards([each for stage in stages for each in stage.buffers], state_names(recipe.optim))
    if not shards:
        return None, []
    folder = recipe.memory.offload.disk_path
    assert folder is not None, "memory.offload.home=disk without disk_path passed the check"
    disk = DiskStates(Path(folder) / (run_id or f"run-{uuid4().hex[:12]}"), f"rank-{rank}", shards)
    return disk, [disk.tensor(index, "master") for index in range(len(shards))]


@dataclass(frozen=True)
class _Update:
    """An update of a step, on the host. missed: elements that nobody may have reached."""

    lr: float
    divisor: Tensor
    missed: Sequence[Missed]


class DiskOptimizer:
    """The recipe's optimizer over shards whose states are in the file `states`, which has one shard for each of `buffers`, also
    for those of which this rank owns padding only. owned: the shards of these. Raises LayoutError as `FlatOptimizer` does, and
    from `update` what `DiskStates` raises."""

    def __init__(
        self,
        optim: Optim,
        states: DiskStates,
        buffers: Sequence[UnitBuffer],
        owned: Sequence[OwnedShard],
        groups: Sequence[ShardGroup],
    ):
        self._optim, self._rule, self._states = optim, OPTIMIZERS[optim.name], states
        check_kinds(optim.name, self._rule, groups)
        self._buffers = tuple(buffers)
        assert [each.plan.numel_owned for each in self._buffers] == [each.numel for each in states.shards]
        self._owned = {each.shard: each for each in owned}
        self._group_of = {shard: group for group in groups for shard in group.shards}
        self._num_updates = 0

    @property
    def num_updates(self) -> int:
        """As of `FlatOptimizer`: 0 for an optimizer that does not count."""
        return self._num_updates

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        self._num_updates = count * self._rule.counts_updates

    @property
    def shards(self) -> tuple[FlatShard, ...]:
        return tuple(self._owned)

    def state(self, shard: FlatShard, name: str) -> DiskTensor:
        """A per-element state of a shard: [n], in its dtype."""
        owned = self._owned[shard]
        where = within_owned(owned.buffer.plan, owned.span)
        return self._states.tensor(self._buffers.index(owned.buffer), name)[where]

    def update(self, lr: float, divisor: Tensor, skip: Tensor, step: int, missed: Sequence[Missed]) -> None:
        """One update, and the parameters that follow from it. As for `StepOptimizer.step`; missed: of these shards."""
        if fetch(skip, HOST):
            return  # neither read nor written
        here = [replace(each, is_reached=fetch(each.is_reached, HOST)) for each in missed]
        update = _Update(lr, fetch(divisor, HOST), here)
        self._states.update(range(len(self._buffers)), partial(self._update_chunk, update))
        self.num_updates += 1

    def _update_chunk(self, update: _Update, index: int, where: slice, states: Mapping[str, Tensor]) -> None:
        buffer = self._buffers[index]
        for shard, owned in self._owned.items():
            span = within_owned(buffer.plan, owned.span)
            if owned.buffer is buffer and span.start <= where.start < span.stop:
                self._update_part(update, shard, slice(where.start - span.start, where.stop - span.start), states)
        buffer.copy_to_params(where.start, (states["master"],))

    def _update_part(self, update: _Update, shard: FlatShard, where: slice, states: Mapping[str, Tensor]) -> None:
        """Update elements `where` of a shard, whose states are given."""
        group, master = self._group_of[shard], states["master"]
        master.grad = fetch(shard.gradient[where], HOST)
        kernel = self._rule.make(self._optim, [{"params": [master], "weight_decay": group.weight_decay}])
        kernel.param_groups[0]["lr"] = update.lr * group.lr_ratio
        kernel.state[master] |= {name: state for name, state in states.items() if name != "master"}
        if self._rule.counts_updates:
            kernel.state[master]["step"] = torch.tensor(float(self.num_updates))
        if master.dtype == torch.float32:
            kernel.grad_scale = update.divisor.float()  # type: ignore[attr-defined]
        else:  # the kernels read their divisor as fp32, which would round fp64 gradients
            master.grad.div_(update.divisor)
        kernel.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        with _preserving(states.values(), [each for each in update.missed if each.shard is shard], where):
            kernel.step()


@contextmanager
def _preserving(states: Iterable[Tensor], missed: Iterable[Missed], where: slice) -> Iterator[None]:
    """Leave what nobody has reached, and its states, as they are. states: of the elements `where` of the shard."""
    bounds = [(max(each.start, where.start), min(each.stop, where.stop), each.is_reached) for each in missed]
    views = [
        (state[start - where.start : stop - where.start], is_reached)
        for state in states
        for start, stop, is_reached in bounds
        if start < stop
    ]
    saved = [view.clone() for view, _ in views]
    yield
    for (view, is_reached), old in zip(views, saved, strict=True):
        torch.where(is_reached, view, old, out=view)
