"""BufferPlan: a unit buffer before it has memory: which parameters share a flat tensor, which of its elements are whose, and
how long each state lives where.

    full  [ group A | group B | pad ]     one element after the other; n equal parts, n = size of the shard axis
            ^ part of shard rank 0 ^ part of shard rank 1 ...
            ^ a part is what one rank owns, or, where replicas divide the update, an equal interval of it for each of them

All numbers here follow from layouts, axes and dtypes, so they can be had for any rank of any mesh on a laptop.

ZeRO is a table (Rajbhandari et al. 2020, section 5) of which memory of a unit lives how long, and where; nothing else.

    stage | full parameters            | full gradients        | optimizer state and master
    0     | always                     | the whole step        | full
    1     | always                     | the whole step        | shard
    2     | always                     | one unit's backward   | shard
    3     | one unit's forward, again  | one unit's backward   | shard
          | its backward               |                       |

Stage 0 needs no algorithm of its own: it shards over one rank and has all ranks as replicas. Stage 3 is what FSDP (Zhao et al.
2023, section 3.2) calls full sharding; HSDP is any stage with fewer shards than ranks.

Where a state lives between its uses is offload: a home and not an algorithm (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity,
Rajbhandari et al. 2021).
"""

from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

import torch

from framework.comm.codec import BlockCodec, Rounding, Wire
from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout, Run, part
from framework.mesh.topology import ZERO_AXES
from framework.parallel.zero.row_codes import ROW_CODES, RowCodec
from framework.recipe.schema import Zero


class Home(Enum):
    """The memory in which a state lives between its uses."""

    DEVICE = "device"
    HOST = "host"  # pinned memory of the CPU
    DISK = "disk"


@dataclass(frozen=True)
class Homes:
    """The homes of a unit's states. Gradients and activations have theirs on the device."""

    parameters: Home = Home.DEVICE
    """Shards, or full parameters where these are resident; never on a disk."""
    master: Home = Home.DEVICE
    """The master, and the optimizer's moments: one update reads both, in one memory."""


@dataclass(frozen=True)
class Lifetimes:
    """One row of the table, with the recipe's choices."""

    keeps_gradients: bool
    """The full gradients of all units live for the whole step and are reduced once, in its last backward; else a unit's gradients
    are reduced into the shard after every backward of the unit."""
    keeps_parameters: bool
    """A unit's unsharded parameters live until the optimizer's update; else until their use is over."""
    resident_parameters: bool
    """Their memory is never given back, so an update goes into it in place."""
    divides_updates: bool
    """Ranks that hold the same part divide its optimizer state and its update, and all-gather the updated part."""
    homes: Homes = Homes()
    prefetch_units: int = 1
    """Units that are unsharded ahead of the one in use."""


def lifetimes_of(zero: Zero) -> Lifetimes:
    """The row of the table for the recipe's stage."""
    return Lifetimes(
        # "local": over k microbatches one reduction instead of k, for the memory of full gradients.
        keeps_gradients=zero.stage < 2 or zero.accumulate == "local",
        # Not the same as resident: kept parameters of stage 3 give their memory back before the update, others never do.
        keeps_parameters=zero.stage < 3 or zero.keep_gathered,
        resident_parameters=zero.stage < 3,
        divides_updates=zero.optimizer_within == "all",
        prefetch_units=zero.prefetch_units,
    )


# The optimizer group of parameters that no optimizer updates.
FROZEN = ""


@dataclass(frozen=True)
class Slot:
    """One parameter's elements [start, stop) of its buffer. `layout`: of the local tensor before ZeRO divides the buffer; its
    interval is what this rank counts of elements that others hold, too. `group`: its optimizer group, FROZEN for none."""

    name: str
    layout: Layout
    start: int
    stop: int
    group: str


@dataclass(frozen=True)
class GroupSpan:
    """Elements [start, stop) of a buffer that this rank owns and that are in one optimizer group."""

    group: str
    start: int
    stop: int


@dataclass(frozen=True)
class BufferDtypes:
    """Dtypes of a buffer. compute: of the parameters that forward and backward read; master: of what the optimizer updates.
    codec: of the message that a rank keeps in the place of its part; None: the part is kept in the compute dtype. gathered: in
    which parts travel, by scales that ranks agree on; None: as they are kept. reduced: codes as which gradients leave a node;
    None: as they travel within it."""

    compute: torch.dtype
    master: torch.dtype
    gathered: torch.dtype | None = None
    codec: BlockCodec | RowCodec | None = None
    reduced: BlockCodec | None = None

    @property
    def gradient(self) -> torch.dtype:
        """The dtype of gradients, their sums and the optimizer's moments: the master's, but at least fp32. In bf16 a sum would
        stand still once it is 256 times as large as what is added."""
        return torch.promote_types(self.master, torch.float32)

    def kept_bytes(self, numel: int) -> int:
        """Bytes of a part of the parameters, as a rank keeps it for the others."""
        return numel * self.compute.itemsize if self.codec is None else self.codec.message_bytes(numel)

    def sent_bytes(self, numel: int) -> int:
        """Bytes of a part of the parameters in an all-gather."""
        return self.kept_bytes(numel) if self.gathered is None else numel * self.gathered.itemsize

    def reduce_wire(self, axis: Communicator, reduce_dtype: torch.dtype) -> Wire | None:
        """The form in which a gradient travels over an axis; None: as it is. Codes where an axis of ZeRO spans nodes, on both of
        its levels; elsewhere they would cost more than they save."""
        if self.reduced is not None and axis.nodes > 1 and axis.name in ZERO_AXES:
            return self.reduced
        return None if reduce_dtype == self.gradient else Rounding(reduce_dtype)


# Wide loads of NCCL and of fused kernels want addresses at multiples of 16 bytes. In elements, of any dtype of 2 bytes and more:
# what a rank owns is a multiple of ALIGNED_PART where it is at least LEAST_ALIGNED; parameters of such sizes lie at multiples of
# ALIGNED_SLOT.
ALIGNED_PART, LEAST_ALIGNED, ALIGNED_SLOT = 64, 8192, 8


@dataclass(frozen=True)
class BufferAxes:
    """Axes of a buffer as one rank sees them."""

    shard: Communicator
    """The ranks that hold its parts."""
    update: Communicator
    """The ranks that divide the update of one part; of size 1 where each holder makes all of it."""
    replicas: tuple[Communicator, ...]
    """Axes over which every rank owns the same elements, outermost first."""
    partial: tuple[Communicator, ...]
    """Axes over which the gradient is still a sum to be made after the reduce-scatters over shard and update."""
    reading: Communicator
    """The ranks that divide the reading of what all of them own; of size 1 where each owns something else."""
    secondary: Communicator
    """The inner part of `shard`, whose ranks keep a second copy of all parts among themselves; of size 1 without one."""


@dataclass(frozen=True)
class BufferPlan:
    """A unit buffer without memory: its parameters, and what this rank holds, owns and counts of their elements.

    slots: at least one, side by side from element 0. A rank *holds* a part, *owns* elements [start, stop) of it and *counts*
    those of them that no other rank counts.
    """

    unit: str
    slots: tuple[Slot, ...]
    dtypes: BufferDtypes
    lifetimes: Lifetimes
    axes: BufferAxes

    @property
    def is_trained(self) -> bool:
        return self.slots[0].group != FROZEN

    @property
    def is_whole(self) -> bool:
        """Whether this rank owns all of the buffer, and keeps it: nothing is ever unsharded, nothing scattered."""
        return self.lifetimes.resident_parameters and self.axes.shard.size == self.axes.update.size == 1

    @property
    def is_decoded(self) -> bool:
        """Whether an all-gather brings something else than the parameters as they are read."""
        return self.dtypes.gathered is not None or self.dtypes.codec is not None

    @property
    def num_owners(self) -> int:
        """Ranks that own different elements of the buffer."""
        return self.axes.shard.size * self.axes.update.size

    @property
    def kept_bytes(self) -> int:
        """Bytes of this rank's part, as it keeps it for the others; equal on all."""
        return self.dtypes.kept_bytes(self.numel_owned) * self.axes.update.size

    @property
    def arriving_bytes(self) -> int:
        """Bytes that an all-gather brings to a rank, its own among them."""
        return self.dtypes.sent_bytes(self.numel_owned) * self.num_owners

    @property
    def secondary_bytes(self) -> int:
        """Bytes of the second copy that the rank keeps."""
        size = self.axes.secondary.size
        return self.arriving_bytes // size if size > 1 else 0

    @cached_property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return self.slots[-1].stop

    @cached_property
    def numel_owned(self) -> int:
        """Elements that one rank owns, padding included: equal on all ranks."""
        # Rounded up: collectives need equal parts, so the last ranks own some padding, or nothing else in a small buffer.
        # FSDP2 pads every parameter's dim 0 instead, which leaves whole ranks empty where a norm has fewer rows than ranks.
        numel = -(-self.numel // self.num_owners)
        # Small parts are left as they are: of few elements the last ranks would have none.
        is_aligned = self.num_owners > 1 and numel >= LEAST_ALIGNED
        # Two codes of 4 bits are a byte.
        unit = ALIGNED_PART if is_aligned else 2 if self.slots[0].layout.gathered_in in ROW_CODES else 1
        return -(-numel // unit) * unit

    @cached_property
    def numel_part(self) -> int:
        """Elements of one part, padding included."""
        return self.numel_owned * self.axes.update.size

    @cached_property
    def numel_padded(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.numel_part * self.axes.shard.size

    @cached_property
    def part_start(self) -> int:
        """The first element of this rank's part."""
        return self.axes.shard.rank * self.numel_part

    @cached_property
    def start(self) -> int:
        """The first element that this rank owns."""
        return self.part_start + self.axes.update.rank * self.numel_owned

    @cached_property
    def stop(self) -> int:
        """After the last element that this rank owns."""
        return self.start + self.numel_owned

    @cached_property
    def spans(self) -> tuple[GroupSpan, ...]:
        """The elements that this rank owns of each optimizer group, without empty ones."""
        # One span for a group, because its slots lie side by side: the optimizer is one fused call on each.
        bounds: dict[str, Run] = {}
        for slot in self.slots:
            bounds[slot.group] = (bounds.get(slot.group, (slot.start, 0))[0], slot.stop)
        clipped = [
            GroupSpan(group, max(low, self.start), min(high, self.stop)) for group, (low, high) in bounds.items()
        ]
        return tuple(span for span in clipped if span.start < span.stop)

    def read_bounds_of(self, reader: int) -> Run:
        """Elements of the buffer that the rank at index `reader` of `axes.reading` reads from a checkpoint for all of them."""
        low, high = part(self.numel_owned, reader, self.axes.reading.size)
        return self.start + low, self.start + high

    @cached_property
    def held(self) -> dict[str, Slot]:
        """The elements that this rank owns of each parameter, by name."""
        return {slot.name: _clip(slot, (self.start, self.stop)) for slot in self.slots}

    @cached_property
    def counted(self) -> dict[str, Slot]:
        """The elements of `held` that this rank and no other counts: those that the parameter's layout gives to this rank, within
        its share among the ranks that own the same."""
        low, high = self._counted_share
        counted = {}
        for slot in self.slots:
            first, last = slot.layout.interval or (0, slot.layout.numel_local)
            counted[slot.name] = _clip(slot, (max(low, slot.start + first), min(high, slot.start + last)))
        return counted

    @cached_property
    def read(self) -> dict[str, Slot]:
        """The elements of `held` that this rank reads from a checkpoint for all ranks of `axes.reading`."""
        return {slot.name: _clip(slot, self.read_bounds_of(self.axes.reading.rank)) for slot in self.slots}

    @cached_property
    def counted_runs(self) -> tuple[Run, ...]:
        """All elements of the buffer that this rank counts, in order, adjacent ones in one run; padding is nobody's.

        Computed once: the gradient norm asks in every step."""
        runs: list[Run] = []
        for each in self.counted.values():
            if each.start < each.stop:
                runs.append((runs.pop()[0] if runs and runs[-1][1] == each.start else each.start, each.stop))
        return tuple(runs)

    @property
    def has_master(self) -> bool:
        """Whether the master is memory of its own; else it is a view of `shard`: the optimizer writes into what forward reads."""
        homes = self.lifetimes.homes
        is_other = self.dtypes.compute != self.dtypes.master or self.dtypes.codec is not None
        return self.is_trained and (is_other or homes.parameters != homes.master)

    def held_bytes(self, num_moments: int, home: Home = Home.DEVICE) -> dict[str, int]:
        """Bytes that live at `home` for the whole run, padding included: parameters, gradients, master and moments, which are
        `num_moments` elements. A master that is the parameters' own memory counts as those. Where the
        master lives elsewhere than gradients do, a copy of what this rank owns of these is there as well."""
        dtypes = self.dtypes
        compute, master, wide = (each.itemsize for each in (dtypes.compute, dtypes.master, dtypes.gradient))
        trained, homes = int(self.is_trained), self.lifetimes.homes
        is_resident = self.lifetimes.resident_parameters
        # The part of resident parameters is a view, except for a message, which has its own memory.
        part = self.kept_bytes * (not is_resident or self.dtypes.codec is not None)
        kept = self.numel_padded if self.lifetimes.keeps_gradients else self.numel_part
        owned = self.numel_owned * trained
        held = [
            ("parameters", homes.parameters, part + self.secondary_bytes),
            ("parameters", Home.DEVICE, self.numel_padded * compute * is_resident),
            ("gradients", Home.DEVICE, kept * wide * trained),
            ("gradients", homes.master, owned * wide * (homes.master == Home.HOST)),
            ("master", homes.master, owned * master * self.has_master),
            ("moments", homes.master, wide * num_moments * trained),
        ]
        total = dict.fromkeys((state for state, _, _ in held), 0)
        for state, lives_at, num_bytes in held:
            total[state] += num_bytes * (lives_at == home)
        return total

    @property
    def unsharded_bytes(self) -> int:
        """Bytes that come and go with the full parameters, if these are not resident, and of what arrives beside them to be
        decoded."""
        full = self.numel_padded * self.dtypes.compute.itemsize * (not self.lifetimes.resident_parameters)
        return full + self.arriving_bytes * self.is_decoded

    @property
    def unreduced_bytes(self) -> int:
        """Bytes that come and go with the full gradient, if it does not live for the whole step, and with codes of it."""
        codec, is_sent = self.dtypes.reduced, self.is_trained and self.axes.shard.nodes > 1
        codes = 0 if codec is None or not is_sent else 2 * codec.message_bytes(self.numel_padded)
        if self.lifetimes.keeps_gradients or not self.is_trained:
            return codes
        return self.numel_padded * self.dtypes.gradient.itemsize + codes

    @cached_property
    def _counted_share(self) -> Run:
        """This rank's even share of what several ranks own alike: whoever owns an element, one of them counts it."""
        # Divided, not counted by all and then divided by their number: that would need to know how many own each element, and
        # would round. So ranks also share the writing of a checkpoint.
        index, count = 0, 1
        for axis in self.axes.replicas:
            index, count = index * axis.size + axis.rank, count * axis.size
        low, high = part(self.numel_owned, index, count)
        return self.start + low, self.start + high


def _clip(slot: Slot, bounds: Run) -> Slot:
    """The slot's elements within `bounds`; none where these lie elsewhere or end before they start."""
    # Kept within the slot even if empty: the interval of a layout that owns nothing still lies inside its local tensor.
    low = min(max(bounds[0], slot.start), slot.stop)
    high = max(min(bounds[1], slot.stop), low)
    layout = replace(slot.layout, interval=(low - slot.start, high - slot.start))
    return replace(slot, layout=layout, start=low, stop=high)
