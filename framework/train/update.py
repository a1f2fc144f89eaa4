"""The update of a step: each unit where its master lives, and from there to the parameters that forward reads.

    device    all units at home there in one call, in the order of the device's stream
    host      unit after unit, in the order in which the next forward reads them: wait for its gradient, update, cast, start the
              upload, which runs beside the update of the next unit (ZeRO-Offload, Ren et al. 2021, section 4)
    disk      chunk after chunk of all units there, in the same order:
              read a chunk | copy its gradient to the host, update its master and moments, cast to parameters | write it

The host's update begins when the norm is known, because it may clip or skip: for that the host waits once a step. It runs on
`launch.threads_per_rank` threads. For the disk it has memory for the ring and the gradient of one chunk. Every chunk is updated
by torch's fused kernel over a part of a shard: bit for bit as over the shard, because parts begin at whole vectors of it. The
kernel computes the rest behind the last whole vector by other instructions, which round otherwise.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from framework.comm.connect import Mesh
from framework.comm.transfer import fetch, upload
from framework.optim.averages import AVERAGE, WeightAverages
from framework.optim.disk_ring import DiskStates, DiskTensor
from framework.optim.groups import GroupAssignment
from framework.optim.muon import MuonOptimizer
from framework.optim.optimizers import FlatOptimizer, Missed, preserving, scale_decay, state_names
from framework.optim.qk_clip import QkClip
from framework.optim.states import States
from framework.optim.update_clipping import ParameterPart, UpdateClipping
from framework.optim.update_rules import OPTIMIZERS, FlatShard, ShardGroup
from framework.parallel.zero.buffer_plan import GroupSpan
from framework.parallel.zero.buffers import StoredTensor, UnitBuffer
from framework.plan.plan import PlannedStage
from framework.plan.state_bytes import disk_shards, within_owned
from framework.recipe.schema import Optim, Recipe

HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class OwnedShard:
    """A shard of the optimizer and the place that it has: `span` of `buffer`."""

    buffer: UnitBuffer
    span: GroupSpan
    shard: FlatShard

    def parts(self) -> Iterator[ParameterPart]:
        """Its elements of each parameter that it has some of."""
        plan, first = self.buffer.plan, self.span.start
        for name, held in plan.held.items():
            if held.group == self.span.group and held.start < held.stop:
                counted = plan.counted[name]
                is_counted = counted.start < counted.stop and not self.buffer.is_copy
                own = slice(counted.start - first, counted.stop - first) if is_counted else slice(0, 0)
                yield ParameterPart(name, held.layout, self.shard, held.start - first, held.stop - first, own)


def own_shards(buffers: Iterable[UnitBuffer]) -> list[OwnedShard]:
    """The optimizer's shards: one flat run for each optimizer group of a trained buffer, in the order of computation, as views of
    the buffers' masters and reduced gradients, [n] each. The buffers have memory."""
    return [
        OwnedShard(buffer, span, _shard(buffer, span))
        for buffer in buffers
        if buffer.plan.is_trained
        for span in buffer.plan.spans
    ]


def find_parts(shards: Iterable[OwnedShard]) -> list[ParameterPart]:
    """The elements of each parameter in each of these shards."""
    return [part for each in shards for part in each.parts()]


def group_shards(shards: Sequence[OwnedShard], assignments: Iterable[GroupAssignment]) -> list[ShardGroup]:
    """The shards by optimizer group."""
    by_group = {each.key: each for each in assignments}
    return [
        ShardGroup(
            by_group[key].group,
            tuple(each.shard for each in shards if each.span.group == key),
            by_group[key].lr_ratio,
            by_group[key].weight_decay,
        )
        for key in dict.fromkeys(each.span.group for each in shards)
    ]


def find_copies(buffers: Sequence[UnitBuffer]) -> list[tuple[UnitBuffer, UnitBuffer]]:
    """Buffers of one parameter in two stages of this rank; the second of each pair counts nothing."""
    known: dict[str, UnitBuffer] = {}
    copies = []
    for buffer in buffers:
        first = known.setdefault(buffer.plan.slots[0].name, buffer)
        if first is not buffer:
            buffer.is_copy = True
            copies.append((first, buffer))
    return copies


def _shard(buffer: UnitBuffer, span: GroupSpan) -> FlatShard:
    where = slice(span.start - buffer.plan.start, span.stop - buffer.plan.start)
    held = {slot.name: buffer.plan.held[slot.name] for slot in buffer.slots if slot.group == span.group}
    layouts = {name: each.layout for name, each in held.items() if each.start < each.stop}
    return FlatShard(tuple(layouts.values()), buffer.master[where], buffer.delivered[where], tuple(layouts))


class UpdatedTogether:
    """Trained buffers whose masters live on `device`, the rank's or the host's, and are updated in one call of each optimizer.

    optimizers: between them they have all shards of the buffers. averages: of these weights, if there are any.
    clipping, qk_clip: of updates and of attention logits, if there is any.
    """

    def __init__(
        self,
        buffers: Sequence[UnitBuffer],
        optimizers: Sequence[FlatOptimizer],
        device: torch.device,
        averages: WeightAverages | None = None,
        clipping: UpdateClipping | None = None,
        qk_clip: QkClip | None = None,
    ):
        self.buffers, self.optimizers, self._device = buffers, optimizers, device
        self._averages, self._clipping, self._qk_clip = averages, clipping, qk_clip

    @property
    def shards(self) -> tuple[FlatShard, ...]:
        return tuple(shard for each in self.optimizers for shard in each.shards)

    def state(self, shard: FlatShard, name: str) -> Tensor:
        """A state of a shard, as `FlatOptimizer.state` returns it."""
        return self.optimizer_of(shard).state(shard, name)

    def optimizer_of(self, shard: FlatShard) -> FlatOptimizer:
        """The optimizer that updates a shard."""
        return next(each for each in self.optimizers if shard in each.shards)

    @property
    def num_updates(self) -> int:
        """Updates done so far, skipped ones not counted."""
        return max(each.num_updates for each in self.optimizers)

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        for each in self.optimizers:
            each.num_updates = count

    def update(self, lr: float, divisor: Tensor, skip: Tensor, step: int, missed: Iterable[Missed]) -> None:
        """Update the masters and cast them to the parameters. Arguments as of `FlatOptimizer.step`; missed: of these buffers."""
        for buffer in self.buffers:
            buffer.wait_for_delivery()
        here = [replace(each, is_reached=fetch(each.is_reached, self._device)) for each in missed]
        divisor, skip = fetch(divisor, self._device), fetch(skip, self._device)
        with self._clipping.clipping(lr, skip, here) if self._clipping is not None else nullcontext():
            for optimizer in self.optimizers:
                with optimizer.preserving([each for each in here if each.shard in optimizer.shards]):
                    optimizer.step(lr, divisor, skip, step)
        if self._qk_clip is not None:
            self._qk_clip.clip(self.shards, skip)
        if self._averages is not None:
            self._averages.update(self.shards, skip)
        for buffer in self.buffers:
            buffer.copy_master_to_params()


class DiskOptimizer:
    """The recipe's optimizer over shards whose states are in the file `states`, which has one shard for each of `buffers`, also
    for those of which this rank owns padding only. owned: the shards of these. `update` raises what `DiskStates`
    raises."""

    def __init__(
        self,
        optim: Optim,
        states: DiskStates,
        buffers: Sequence[UnitBuffer],
        owned: Sequence[OwnedShard],
        groups: Sequence[ShardGroup],
    ):
        self._optim, self._rule, self._states = optim, OPTIMIZERS[optim.name], states
        self._buffers = tuple(buffers)
        assert [each.plan.numel_owned for each in self._buffers] == [each.numel for each in states.shards]
        self._owned = {each.shard: each for each in owned}
        self._group_of = {shard: group for group in groups for shard in group.shards}
        self.num_updates = 0  # done so far; it stays 0 for an optimizer that does not count them

    @property
    def shards(self) -> tuple[FlatShard, ...]:
        return tuple(self._owned)

    def state(self, shard: FlatShard, name: str) -> DiskTensor:
        """A per-element state of a shard: [n], in its dtype."""
        owned = self._owned[shard]
        where = within_owned(owned.buffer.plan, owned.span)
        return self._states.tensor(self._buffers.index(owned.buffer), name)[where]

    def update(self, lr: float, divisor: Tensor, skip: Tensor, step: int, missed: Sequence[Missed]) -> None:
        """Update the masters and cast them to the parameters. Arguments as of `StepOptimizer.step`; missed: of these shards."""
        if fetch(skip, HOST):
            return  # neither read nor written
        here = [replace(each, is_reached=fetch(each.is_reached, HOST)) for each in missed]
        update_part = partial(self._update_part, lr, fetch(divisor, HOST), here)

        def update_chunk(index: int, where: slice, states: Mapping[str, Tensor]) -> None:
            buffer = self._buffers[index]
            for shard, owned in self._owned.items():
                span = within_owned(buffer.plan, owned.span)
                if owned.buffer is buffer and span.start <= where.start < span.stop:
                    update_part(shard, slice(where.start - span.start, where.stop - span.start), states)
            buffer.copy_to_params(where.start, (states["master"],))

        self._states.update(range(len(self._buffers)), update_chunk)
        self.num_updates += self._rule.counts_updates

    def _update_part(
        self,
        lr: float,
        divisor: Tensor,
        missed: Sequence[Missed],
        shard: FlatShard,
        where: slice,
        states: Mapping[str, Tensor],
    ) -> None:
        """Update elements `where` of a shard, whose states are given. missed: elements that perhaps no rank has reached."""
        group, master = self._group_of[shard], states["master"]
        master.grad = fetch(shard.gradient[where], HOST)
        decay = scale_decay(self._optim, group.weight_decay, lr)
        kernel = self._rule.make(self._optim, [{"params": [master], "weight_decay": decay}])
        kernel.param_groups[0]["lr"] = lr * group.lr_ratio
        kernel.state[master] |= {name: state for name, state in states.items() if name != "master"}
        if self._rule.counts_updates:
            kernel.state[master]["step"] = torch.tensor(float(self.num_updates))
        if master.dtype == torch.float32:
            kernel.grad_scale = divisor.float()  # type: ignore[attr-defined]
        else:  # the kernels read their divisor as fp32, which would round fp64 gradients
            master.grad.div_(divisor)
        kernel.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        bounds = [
            (max(each.start, where.start) - where.start, min(each.stop, where.stop) - where.start, each.is_reached)
            for each in missed
            if each.shard is shard
        ]
        kept = [
            (state[start:stop], reached) for state in states.values() for start, stop, reached in bounds if start < stop
        ]
        with preserving(kept):
            kernel.step()


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
        mesh: Mesh,
        disk: DiskStates | None = None,
        qk_clip: QkClip | None = None,
    ):
        settings = recipe.precision.moments, recipe.train.seed
        by_key = {each.key: each.optimizer for each in assignments}
        decay = recipe.train.ema
        self.averages = WeightAverages([each.shard for each in shards], decay) if decay is not None else None

        parts, limit = find_parts(shards), recipe.optim.clip_update
        clipping = UpdateClipping(recipe.optim, parts, assignments, mesh.axis("world")) if limit is not None else None

        def join(together: list[UnitBuffer], lives_on: torch.device) -> UpdatedTogether:
            own = [each for each in shards if each.buffer in together]
            groups = {
                name: group_shards([each for each in own if by_key[each.span.group] == name], assignments)
                for name in dict.fromkeys(by_key.values())
            }
            matrices = groups.pop("muon", None)
            optimizers = [FlatOptimizer(name, recipe.optim, each, lives_on, *settings) for name, each in groups.items()]
            if matrices is not None:
                plans = [buffer.plan for buffer in together]
                spans = {each.shard: (each.buffer.plan, each.span) for each in own}
                optimizers.append(MuonOptimizer(recipe.optim, matrices, plans, spans, assignments, mesh.axes, lives_on))
            return UpdatedTogether(together, optimizers, lives_on, self.averages, clipping, qk_clip)

        trained = [buffer for buffer in buffers if buffer.is_trained]
        at_home = [buffer for buffer in trained if not buffer.is_updated_on_host and buffer.stored is None]
        away = [buffer for buffer in trained if buffer.is_updated_on_host]
        units = dict.fromkeys(buffer.unit for buffer in away)
        # The device's first: its kernels run while the host updates.
        self._in_memory = [join(at_home, mesh.device)] + [
            join([buffer for buffer in away if buffer.unit == unit], HOST) for unit in units
        ]
        self.parts: list[UpdatedTogether | DiskOptimizer] = [*self._in_memory]
        if disk is not None:
            stored = [buffer for buffer in trained if buffer.stored is not None]
            owned = [each for each in shards if each.buffer.stored is not None]
            self.parts.append(DiskOptimizer(recipe.optim, disk, stored, owned, group_shards(owned, assignments)))
        self.name, self._qk_clip, self._owned = recipe.optim.name, qk_clip, tuple(shards)
        names = {each.key: state_names(recipe.optim, each.key) for each in assignments}
        kept = [AVERAGE] if self.averages is not None else []
        self.state_names = (*dict.fromkeys(name for each in names.values() for name in each), *kept)
        self._names = {each.shard: names[each.span.group] for each in shards}
        self._wait_for_readers: Callable[[], None] | None = None
        self._part_of = {shard: part for part in self.parts for shard in part.shards}

    @property
    def shards(self) -> tuple[FlatShard, ...]:
        return tuple(self._part_of)

    def hold(self, wait_for_readers: Callable[[], None]) -> None:
        """Have the next update first call this, which returns when no save reads the masters and states any more."""
        self._wait_for_readers = wait_for_readers

    def wait_for_readers(self) -> None:
        """Return when masters and states may be changed."""
        if self._wait_for_readers is not None:
            self._wait_for_readers()
            self._wait_for_readers = None

    def step(self, lr: float, divisor: Tensor, skip: Tensor, step: int, missed: Sequence[Missed] = ()) -> None:
        """Divide the gradients by `divisor` and update at learning rate `lr` all that some rank has reached; no effect where
        `skip` is 1. divisor, skip: scalars on the device. step: of the run. missed: elements that this rank's backward has not
        reached."""
        self.wait_for_readers()
        if self._qk_clip is not None:
            self._qk_clip.gather()
        for part in self.parts:
            part.update(lr, divisor, skip, step, [each for each in missed if self._part_of[each.shard] is part])
        if self._qk_clip is not None:
            self._qk_clip.forget()

    def states_of(self, shard: FlatShard) -> States:
        """The states of a shard that is in memory."""
        return next(part.optimizer_of(shard).states for part in self._in_memory if shard in part.shards)

    def has_state(self, shard: FlatShard, name: str) -> bool:
        """Whether the optimizer of a shard has a per-element state of this name."""
        return name == AVERAGE or name in self._names[shard]

    def open_states(self) -> None:
        """Make the tensors that `state` returns writable."""
        for each in (each for part in self._in_memory for each in part.optimizers):
            each.states.open()

    def close_states(self) -> None:
        """Take over the values written since `open_states`."""
        for each in (each for part in self._in_memory for each in part.optimizers):
            each.states.close()

    def state(self, shard: FlatShard, name: str) -> Tensor | StoredTensor:
        """A per-element state of a shard: [n], in its dtype, where its master lives."""
        if name == AVERAGE and self.averages is not None:
            return self.averages.of(shard)
        return self._part_of[shard].state(shard, name)

    def squared_norm(self, name: str, device: torch.device) -> Tensor:
        """This rank's share of the squared norm of a state that is in memory: a scalar in fp64 on `device`. Over all ranks every
        element is counted once."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for owned in self._owned:
            state = self.state(owned.shard, name)
            assert isinstance(state, Tensor), "track.noise_scale is refused beside states on a disk"
            for part in owned.parts():
                norm = torch.linalg.vector_norm(state[part.counted], dtype=torch.float64)
                total += norm.square() if state.device == device else upload(norm.square(), device)
        return total

    @property
    def num_updates(self) -> int:
        """Updates done so far, skipped ones not counted."""
        return max(part.num_updates for part in self.parts)

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        for part in self.parts:
            part.num_updates = count


def open_disk(
    recipe: Recipe, stages: Sequence[PlannedStage], rank: int, run_id: str | None
) -> tuple[DiskStates | None, list[DiskTensor]]:
    """The file of the rank's states that live on a disk, all zero, and the master of each buffer in it, in their order; None
    where no state does. run_id: of the file's folder; None: a new one. Raises as `DiskFile` does."""
    shards = disk_shards([each for stage in stages for each in stage.buffers], partial(state_names, recipe.optim))
    if not shards:
        return None, []
    folder = recipe.memory.offload.disk_path
    assert folder is not None, "memory.offload.home=disk without disk_path passed the check"
    disk = DiskStates(Path(folder) / (run_id or f"run-{uuid4().hex[:12]}"), f"rank-{rank}", shards)
    return disk, [disk.tensor(index, "master") for index in range(len(shards))]
