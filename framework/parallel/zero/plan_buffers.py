"""Plan the buffers of a stage: which parameters share one, and which units have their states on the host or on a disk, as the
recipe's fractions say."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import torch

from framework.comm.codec import CODECS, REDUCE_CODECS, BlockCodec
from framework.comm.communicator import Communicator
from framework.errors import LayoutError
from framework.mesh.layout import Layout
from framework.mesh.topology import SHARING_AXES, Axis
from framework.model.units import Unit
from framework.parallel.zero.buffer_plan import (
    ALIGNED_SLOT,
    FROZEN,
    BufferAxes,
    BufferDtypes,
    BufferPlan,
    Home,
    Lifetimes,
    Slot,
)
from framework.parallel.zero.row_codes import ROW_CODES, RowCodec
from framework.recipe.schema import Offload


def shard_over_batch(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The layouts with the ZeRO axes of dense parameters: every rank of dp x cp computes with all of them, so their buffers are
    sharded over `shard` and replicated over `replica`. Layouts that name a shard axis already keep theirs."""
    # Both axes also where they have size 1 (stage 0 shards over one rank): then no stage needs an algorithm of its own.
    return {
        name: layout if layout.shard_axis else replace(layout, shard_axis="shard", replica_axis="replica")
        for name, layout in layouts.items()
    }


def plan_buffers(
    units: Iterable[Unit],
    layouts: Mapping[str, Layout],
    groups: Mapping[str, str],
    compute_dtypes: Mapping[str, torch.dtype],
    master_dtype: torch.dtype | None,
    lifetimes: Lifetimes,
    axes: Mapping[str, Communicator],
) -> list[BufferPlan]:
    """Buffers of all parameters, in order of computation.

    layouts, groups, compute_dtypes: by parameter name. layouts: with the names of their ZeRO axes; groups: the optimizer group,
    FROZEN if it is not trained. master_dtype: None is each buffer's compute dtype. axes: by name, all that layouts name. Within a
    buffer, groups keep the order in which they first appear in `groups`. Raises LayoutError for a layout without ZeRO axes.
    """
    # Orders of first appearance and never of a set, whose order differs between processes: a buffer is one collective, and
    # every rank has to find the same element at the same place of it.
    order = {group: index for index, group in enumerate(dict.fromkeys(groups.values()))}
    plans = []
    for unit in units:
        kinds = {name: _Kind.of(layouts[name], compute_dtypes[name], groups[name]) for name in unit.parameters}
        for kind in dict.fromkeys(kinds.values()):
            names = [name for name in unit.parameters if kinds[name] == kind]
            # Within a group odd sizes lie behind, so that what is before them begins at a wide load's address: without gaps,
            # for an optimizer's call reads all between its first and last element.
            names.sort(key=lambda name: (order[groups[name]], layouts[name].numel_local % ALIGNED_SLOT > 0))
            stops = accumulate(layouts[name].numel_local for name in names)
            slots = [
                Slot(name, layouts[name], stop - layouts[name].numel_local, stop, groups[name])
                for name, stop in zip(names, stops, strict=True)
            ]
            lived = kind.lifetimes(axes, lifetimes)
            own_axes = kind.axes(axes, lived)
            reduced = REDUCE_CODECS.get(kind.reduced_in)
            dtypes = BufferDtypes(kind.dtype, master_dtype or kind.dtype, *kind.travels(own_axes), reduced)
            plan = BufferPlan(unit.name, tuple(slots), dtypes, lived, own_axes)
            if (codes := ROW_CODES.get(kind.gathered_in)) is not None:
                codec = RowCodec(codes, tuple(slot.layout for slot in plan.slots), plan.numel_owned)
                plan = replace(plan, dtypes=replace(dtypes, codec=codec))
            plans.append(plan)
    return plans


@dataclass(frozen=True)
class _Kind:
    """The properties that all parameters of a buffer share: a flat tensor has one dtype, and a collective one axis."""

    dtype: torch.dtype
    is_frozen: bool
    shard_axis: str
    replica_axis: str
    replicated: tuple[str, ...]
    partial: tuple[str, ...]
    gathered_in: str
    reduced_in: str

    @classmethod
    def of(cls, layout: Layout, dtype: torch.dtype, group: str) -> "_Kind":
        if not (layout.shard_axis and layout.replica_axis):
            raise LayoutError(
                f"{layout} names no shard and replica axis: `shard_over_batch` or a transform before it has to"
            )
        zero_axes = layout.shard_axis, layout.replica_axis
        sums = layout.replicated, layout.partial
        return cls(dtype, group == FROZEN, *zero_axes, *sums, layout.gathered_in, layout.reduced_in)

    def lifetimes(self, axes: Mapping[str, Communicator], lifetimes: Lifetimes) -> Lifetimes:
        """The recipe's, but for experts of which this rank has the only shard: what is always unsharded need not come and go.
        Dense parameters are left as they are: on one rank they show what many do. Codes are decoded for each use."""
        if self.gathered_in in ROW_CODES:
            return replace(lifetimes, keeps_parameters=False, resident_parameters=False)
        if self.shard_axis != "expert_shard" or axes["expert_shard"].size > 1:
            return lifetimes
        return replace(lifetimes, keeps_gradients=True, keeps_parameters=True, resident_parameters=True)

    def axes(self, axes: Mapping[str, Communicator], lifetimes: Lifetimes) -> BufferAxes:
        """The axes of such a buffer. Where replicas divide the update each owns something else: they are no replicas of what is
        owned, and nothing is left to sum over them. Frozen parameters have no update to divide."""
        # Size 1 is the identity: the reduce-scatter over it is a copy onto itself, and no rank sends a byte.
        shard, replica, nobody_else = axes[self.shard_axis], axes[self.replica_axis], Communicator(Axis("update", 1, 0))
        replicated, partial = (tuple(axes[name] for name in names) for names in (self.replicated, self.partial))
        secondary = axes.get(self.shard_axis.replace("shard", "secondary"), nobody_else)
        if lifetimes.divides_updates and not self.is_frozen:
            # No replica left to read for, either: each reads what it alone owns.
            return BufferAxes(shard, replica, replicated, partial, nobody_else, secondary)
        return BufferAxes(shard, nobody_else, (replica, *replicated), (replica, *partial), replica, secondary)

    def travels(self, axes: BufferAxes) -> tuple[torch.dtype | None, BlockCodec | None]:
        """`gathered` and `codec` of such a buffer's dtypes. Of parameters that one rank owns alone nothing is sent."""
        if self.gathered_in == "fp8":
            return torch.float8_e4m3fn, None
        return None, CODECS.get(self.gathered_in) if axes.shard.size * axes.update.size > 1 else None


def choose_homes(buffers: Sequence[BufferPlan], offload: Offload) -> list[BufferPlan]:
    """The buffers of one stage with the homes of their master, moments and parameters.

    optimizer: of what is trained. parameters: of what is not resident; experts of which a rank has the only shard are.
    """
    updated = _choose_units(buffers, offload.optimizer, lambda each: _global_numel(each) * each.is_trained)
    unsharded = _choose_units(
        buffers,
        offload.parameters,
        lambda each: _global_numel(each) * each.dtypes.compute.itemsize * (not each.lifetimes.resident_parameters),
    )
    return [
        _place(
            each,
            Home(offload.home) if each.unit in updated and each.is_trained else Home.DEVICE,
            Home.HOST if each.unit in unsharded and not each.lifetimes.resident_parameters else Home.DEVICE,
        )
        for each in buffers
    ]


def _global_numel(buffer: BufferPlan) -> int:
    """Elements of its parameters on all ranks: alike on ranks of `tp` that hold uneven slices, so that they choose alike."""
    return sum(prod(slot.layout.shape) for slot in buffer.slots)


def _choose_units(buffers: Sequence[BufferPlan], fraction: float, size: Callable[[BufferPlan], int]) -> set[str]:
    """Units that have as near as may be `fraction` of the size so far, after every unit."""
    sizes: dict[str, int] = {}
    for buffer in buffers:
        sizes[buffer.unit] = sizes.get(buffer.unit, 0) + size(buffer)
    # Ranks that hold a parameter alike must update it alike, to the last bit, and a CPU rounds otherwise than a GPU: which units
    # the stage of the other rank chooses is not known here.
    stays = {buffer.unit for buffer in buffers if fraction < 1 and is_shared(buffer)}
    chosen, so_far, taken = set(), 0, 0
    for unit, num in sizes.items():
        so_far += num
        if unit not in stays and num and taken + num / 2 <= fraction * so_far:
            chosen.add(unit)
            taken += num
    return chosen


def is_shared(buffer: BufferPlan) -> bool:
    """Whether another stage has a parameter of the buffer: a tied one."""
    return any(axis in slot.layout.replicated for slot in buffer.slots for axis in SHARING_AXES)


def _place(buffer: BufferPlan, updated: Home, unsharded: Home) -> BufferPlan:
    homes = replace(buffer.lifetimes.homes, master=updated, parameters=unsharded)
    return replace(buffer, lifetimes=replace(buffer.lifetimes, homes=homes))
