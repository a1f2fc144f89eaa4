"""The update of a step: each unit where its master lives, and from there to the parameters that forward reads.

    device    all units at home there in one call, in the order of the device's stream
    host      unit after unit, in the order in which the next forward reads them: wait for its gradient, update, cast, start the
              upload, which runs beside the update of the next unit (ZeRO-Offload, Ren et al. 2021, section 4)
    disk      chunk after chunk of all units there, in the same order                                  update_on_disk.py

The host's update begins when the norm is known, because it may clip or skip: for that the host waits once a step. It runs on
`launch.threads_per_rank` threads.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from framework.comm.transfer import fetch
from framework.optim.disk_ring import DiskStates
from framework.optim.groups import GroupAssignment
from framework.optim.optimizers import FlatOptimizer, Missed, state_names
from framework.optim.states import States
from framework.optim.update_rules import FlatShard
from framework.parallel.zero.buffers import StoredTensor, UnitBuffer
from framework.recipe.schema import Recipe
from framework.train.shards import OwnedShard, group_shards
from framework.train.update_on_disk import DiskOptimizer


@dataclass(eq=False)
class UpdatedTogether:
    """Trained buffers whose masters live on `device`, the rank's or the host's, and are updated in one call."""

    buffers: tuple[UnitBuffer, ...]
    optimizer: FlatOptimizer
    device: torch.device

    def update(self, lr: float, divisor: Tensor, skip: Tensor, step: int, missed: Iterable[Missed]) -> None:
        """One update, and the parameters that follow from it. As for `FlatOptimizer.step`; missed: of these buffers."""
        for buffer in self.buffers:
            buffer.wait_for_delivery()
        here = [replace(each, is_reached=fetch(each.is_reached, self.device)) for each in missed]
        with self.optimizer.preserving(here):
            self.optimizer.step(lr, fetch(divisor, self.device), fetch(skip, self.device), step)
        for buffer in self.buffers:
            buffer.copy_master_to_params()

    @property
    def shards(self) -> tuple[FlatShard, ...]:
        return self.optimizer.shards

    def state(self, shard: FlatShard, name: str) -> Tensor:
        """As that of `FlatOptimizer`."""
        return self.optimizer.state(shard, name)

    @property
    def num_updates(self) -> int:
        return self.optimizer.num_updates

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        self.optimizer.num_updates = count


class StepOptimizer:
    """The recipe's optimizer over all that a rank owns. shards: of `buffers`, which are in the order of computation. disk: the
    states of those that live there.

    Raises LayoutError as `FlatOptimizer` does.
    """

    def __init__(
        self,
        recipe: Recipe,
        buffers: Sequence[UnitBuffer],
        shards: Sequence[OwnedShard],
        assignments: Sequence[GroupAssignment],
        device: torch.device,
        disk: DiskStates | None = None,
    ):
        def join(together: list[UnitBuffer], lives_on: torch.device) -> UpdatedTogether:
            groups = group_shards([each for each in shards if each.buffer in together], assignments)
            moments, seed = recipe.precision.moments, recipe.train.seed
            optimizer = FlatOptimizer(recipe.optim, groups, lives_on, moments, seed)
            return UpdatedTogether(tuple(together), optimizer, lives_on)

        trained = [buffer for buffer in buffers if buffer.is_trained]
        at_home = [buffer for buffer in trained if not buffer.is_updated_on_host and buffer.stored is None]
        away = [buffer for buffer in trained if buffer.is_updated_on_host]
        units = dict.fromkeys(buffer.unit for buffer in away)
        # The device's first: its kernels run while the host updates.
        self._in_memory = [join(at_home, device)] + [
            join([buffer for buffer in away if buffer.unit == unit], torch.device("cpu")) for unit in units
        ]
        self.parts: list[UpdatedTogether | DiskOptimizer] = [*self._in_memory]
        if disk is not None:
            stored = [buffer for buffer in trained if buffer.stored is not None]
            owned = [each for each in shards if each.buffer.stored is not None]
            self.parts.append(DiskOptimizer(recipe.optim, disk, stored, owned, group_shards(owned, assignments)))
        self.state_names = state_names(recipe.optim)
        self._wait_for_readers: Callable[[], None] | None = None
        self._part_of = {shard: part for part in self.parts for shard in part.shards}

    @property
    def shards(self) -> tuple[FlatShard, ...]:
        return tuple(self._part_of)

    def hold(self, wait_for_readers: Callable[[], None]) -> None:
        """Have the next update first call this, which returns when nobody reads any more what it changes."""
        self._wait_for_readers = wait_for_readers

    def wait_for_readers(self) -> None:
        """Return when masters and states may be changed, by whomever."""
        if self._wait_for_readers is not None:
            self._wait_for_readers()
            self._wait_for_readers = None

    def step(self, lr: float, divisor: Tensor, skip: Tensor, step: int, missed: Sequence[Missed] = ()) -> None:
        """Divide the gradients by `divisor` and update at learning rate `lr`, but what nobody has reached; no effect where `skip`
        is 1. divisor, skip: scalars on the device; step: of the run; missed: what this rank's backward has not reached."""
        self.wait_for_readers()
        for part in self.parts:
            part.update(lr, divisor, skip, step, [each for each in missed if self._part_of[each.shard] is part])

    def states_of(self, shard: FlatShard) -> States:
        """What keeps the states of a shard that is in memory."""
        return next(part.optimizer.states for part in self._in_memory if shard in part.shards)

    def open_states(self) -> None:
        """Have `state` return what may be written."""
        for part in self._in_memory:
            part.optimizer.states.open()

    def close_states(self) -> None:
        """Take what was written since `open_states`."""
        for part in self._in_memory:
            part.optimizer.states.close()

    def state(self, shard: FlatShard, name: str) -> Tensor | StoredTensor:
        """A per-element state of a shard: [n], in its dtype, where its master lives."""
        return self._part_of[shard].state(shard, name)

    @property
    def num_updates(self) -> int:
        """Updates done so far, skipped ones not counted."""
        return max(part.num_updates for part in self.parts)

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        for part in self.parts:
            part.num_updates = count
