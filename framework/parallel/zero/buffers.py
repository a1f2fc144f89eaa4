"""One flat buffer per unit: its parameters are views of it, its gradients views of a second one.

    full      [ group A | group B | pad ]     compute dtype; what forward and backward read; n equal parts
    shard     my part of it                   compute dtype; what the others gather from me
    master    what I own of my part           master dtype; what the optimizer updates; memory of `shard` if the dtypes agree
    gradient  [ group A | group B | pad ]     master dtype; what backward writes
    summed    my part of it                   master dtype; the sum over those who share the buffer
    reduced   what I own of that              master dtype; the sum over all ranks

A rank owns its part; where the ranks that hold the same part divide its update, each owns an equal interval of it.
Parameters of one optimizer group lie side by side, so the optimizer is one fused call on a few flat tensors. Parts are equal
intervals of the buffer, so an all-gather and a reduce-scatter work in place and only the tail is padded. All parameters of a
buffer share their compute dtype, the axes over which they are replicated and those over which their gradient is partial, and
are all trained or all frozen; these have neither master nor gradient.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.errors import LayoutError
from framework.mesh.axis import Axis
from framework.mesh.layout import Layout, part
from framework.model.matmul import accumulate_matmul
from framework.model.units import Unit
from framework.parallel.zero.lifetimes import Lifetimes

FROZEN = ""

# Calls that bring a unit's gradients to their grad_views, by the unit's name.
Deferred = dict[str, list[Callable[[], None]]]


@dataclass(frozen=True)
class Slot:
    """A parameter's place: elements [start, stop) of its buffer. `layout`: of the local tensor before ZeRO, its interval what
    this rank counts of what others hold in part; `group`: its optimizer group, FROZEN for none."""

    name: str
    layout: Layout
    start: int
    stop: int
    group: str


@dataclass(frozen=True)
class Span:
    """Elements [start, stop) of a buffer that are one optimizer group's and in this rank's part."""

    group: str
    start: int
    stop: int


# A buffer serves a need of at least half its size: embedding and head share one, a shard never takes a whole unit's.
LARGEST_WASTE = 2


class BufferPool:
    """Flat tensors that outlive their use, so that units take turns in the same memory. num_bytes: of all that it made.

    New memory would cost a page fault every 4 KiB on CPUs.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of any content that nobody else holds until it is given back."""
        fits = [
            i
            for i, each in enumerate(self._idle)
            if each.dtype == dtype and numel <= each.numel() < LARGEST_WASTE * numel
        ]
        if fits:
            return self._idle.pop(min(fits, key=lambda i: self._idle[i].numel()))[:numel]
        made = torch.zeros(numel, dtype=dtype, device=device)
        self.num_bytes += made.nbytes
        return made

    def give_back(self, tensor: Tensor) -> None:
        """The whole of what `take` found goes back, not only what was asked for."""
        self._idle.append(tensor.new_empty(0).set_(tensor.untyped_storage()))


class UnitBuffer:
    """The parameters of one unit that share a lifetime, a dtype and their axes.

    Plans without memory; `allocate` owns it. shard_axis: who holds the parts; update_axis: who divides the update of a part, of
    size 1 where each holder makes all of it; replica_axes: who owns the same; partial_axes: those of them over which the
    gradient is a sum still to be made. Elements [start, stop) are owned.
    """

    def __init__(
        self,
        unit: str,
        slots: tuple[Slot, ...],
        compute_dtype: torch.dtype,
        master_dtype: torch.dtype,
        lifetimes: Lifetimes,
        shard_axis: Communicator,
        update_axis: Communicator,
        replica_axes: Sequence[Communicator],
        partial_axes: Sequence[Communicator],
        pool: "BufferPool",
    ):
        self.unit, self.slots = unit, slots
        self.is_trained = slots[0].group != FROZEN
        self.compute_dtype, self.master_dtype = compute_dtype, master_dtype
        self.lifetimes, self.shard_axis, self.update_axis = lifetimes, shard_axis, update_axis
        self.replica_axes, self.partial_axes = tuple(replica_axes), tuple(partial_axes)
        self.numel = slots[-1].stop
        self.numel_owned = -(-self.numel // (shard_axis.size * update_axis.size))
        self.numel_part = self.numel_owned * update_axis.size
        self.numel_padded = self.numel_part * shard_axis.size
        self.start = shard_axis.rank * self.numel_part + update_axis.rank * self.numel_owned
        self.stop = self.start + self.numel_owned
        self.pool = pool
        self.parameters: dict[str, nn.Parameter] = {}
        self.grad_views: dict[str, GradView] = {}
        self.is_copy = False  # of a buffer of another stage on this rank, which counts its elements
        self.is_complete = False  # backward has left the unit: no gradient of this microbatch may come any more
        self.full = self.shard = self.master = self.gradient = self.summed = self.reduced = torch.empty(0)

    @property
    def spans(self) -> list[Span]:
        """What this rank owns of each optimizer group, without empty ones."""
        bounds: dict[str, tuple[int, int]] = {}
        for slot in self.slots:
            bounds[slot.group] = (bounds.get(slot.group, (slot.start, 0))[0], slot.stop)
        clipped = [Span(group, max(low, self.start), min(high, self.stop)) for group, (low, high) in bounds.items()]
        return [span for span in clipped if span.start < span.stop]

    def allocate(self, device: torch.device) -> None:
        """All memory that lives from now on. Values are set in `master`; `copy_master_to_params` and an unshard bring them to
        `full`."""
        # Released below where it does not stay: pages of a CPU that nobody touches take neither memory nor time.
        make = torch.zeros if self.lifetimes.resident_parameters else torch.empty
        self.full = make(self.numel_padded, dtype=self.compute_dtype, device=device)
        part_start = self.shard_axis.rank * self.numel_part
        mine = self.full[part_start : part_start + self.numel_part]
        self.shard = mine if self.lifetimes.resident_parameters else torch.zeros_like(mine)
        for slot in self.slots:
            view = self.full[slot.start : slot.stop].view(slot.layout.shape_local)
            self.parameters[slot.name] = nn.Parameter(view, requires_grad=self.is_trained)
        if not self.lifetimes.resident_parameters:
            self.full.untyped_storage().resize_(0)
        if not self.is_trained:
            self.master = self.shard
            return
        same = self.compute_dtype == self.master_dtype
        self.master = (
            self.owned(self.shard) if same else torch.zeros_like(self.owned(self.shard), dtype=self.master_dtype)
        )
        if self.lifetimes.keeps_gradients:
            self.gradient = torch.zeros(self.numel_padded, dtype=self.master_dtype, device=device)
            self.summed = self.gradient[part_start : part_start + self.numel_part]
        else:
            self.summed = torch.zeros(self.numel_part, dtype=self.master_dtype, device=device)
        self.reduced = self.owned(self.summed)
        self.grad_views = {slot.name: GradView(self, slot) for slot in self.slots}

    def owned(self, part: Tensor) -> Tensor:
        """What this rank owns of a tensor over its part: a view."""
        first = self.update_axis.rank * self.numel_owned
        return part[first : first + self.numel_owned]

    def open_gradient(self) -> None:
        """Have memory for the full gradient, of any content: every place is written or zeroed before it is read."""
        if not self.gradient.numel():
            self.gradient = self.pool.take(self.numel_padded, self.master_dtype, self.full.device)

    def close_gradient(self) -> Tensor:
        """Take the full gradient out, for a reduction that reads it; the next one is written afresh. Whoever took it gives
        it back to the pool, unless it is kept for the whole step."""
        taken = self.gradient
        for place in self.grad_views.values():
            place.is_written = False
        if not self.lifetimes.keeps_gradients:
            self.gradient = taken[:0]
        return taken

    def copy_master_to_params(self) -> None:
        """Cast the updated master to the compute dtype, once a step; nothing to do where they are the same memory."""
        if self.is_trained and self.compute_dtype != self.master_dtype:
            self.owned(self.shard).copy_(self.master)

    def held(self, slot: Slot, values: Tensor, origin: int | None = None) -> tuple[Layout, Tensor]:
        """Of the slot, what this rank owns: its layout and its elements, flat.

        values: a tensor over what is owned, or over a span of it that begins at element `origin` of the buffer.
        """
        return self._cut(slot, values, origin, self.start, self.stop)

    def counted(self, slot: Slot, values: Tensor, origin: int | None = None) -> tuple[Layout, Tensor]:
        """Of `held`, what this rank and no other counts in a norm and writes to a checkpoint."""
        return self._cut(slot, values, origin, *self._counted(slot))

    def read(self, slot: Slot, values: Tensor, origin: int | None = None) -> tuple[Layout, Tensor]:
        """Of `held`, this rank's share among those of `replica` who own the same: what it reads for all of them."""
        return self._cut(slot, values, origin, *self._read_part())

    def share_read(self, values: Tensor, origin: int | None = None) -> None:
        """Complete a tensor over what is owned, or a span of it as for `held`, of which each rank of `replica` has its share.

        Collective over `replica`: an all-reduce of the tensor's bytes. The others' parts are zero, and a sum of whole numbers
        keeps every bit, of NaN and of -0.0, too.
        """
        first = self.start if origin is None else origin
        low, high = (min(max(bound - first, 0), values.numel()) for bound in self._read_part())
        values[:low].zero_()
        values[high:].zero_()
        if values.numel():
            all_reduce(values.view(torch.uint8), self._reading_axis(), label=f"read {self.unit}")

    def counted_elements(self, values: Tensor) -> list[Tensor]:
        """All that this rank counts, of a tensor over what it owns; padding is nobody's."""
        runs: list[tuple[int, int]] = []
        for start, stop in (self._counted(slot) for slot in self.slots):
            if start < stop:
                runs.append((runs.pop()[0] if runs and runs[-1][1] == start else start, stop))
        return [values[start - self.start : stop - self.start] for start, stop in runs]

    def _reading_axis(self) -> Communicator:
        """Who divides the reading of what all of them own; of size 1 where each owns something else."""
        return next((each for each in self.replica_axes if each.name == "replica"), Communicator(Axis("replica", 1, 0)))

    def _read_part(self) -> tuple[int, int]:
        axis = self._reading_axis()
        low, high = part(self.numel_owned, axis.rank, axis.size)
        return self.start + low, self.start + high

    def _counted(self, slot: Slot) -> tuple[int, int]:
        """Of the slot, elements of the buffer: what its layout gives to this rank, in the part that the replicas do."""
        low, high = self._counted_part()
        first, last = slot.layout.interval or (0, slot.layout.numel_local)
        return max(self.start + low, slot.start + first), min(self.start + high, slot.start + last)

    def _counted_part(self) -> tuple[int, int]:
        """Those who own the same divide it evenly: whoever holds an element, one of them counts it."""
        if self.is_copy:
            return 0, 0
        index, count = 0, 1
        for axis in self.replica_axes:
            index, count = index * axis.size + axis.rank, count * axis.size
        return part(self.numel_owned, index, count)

    def _cut(self, slot: Slot, values: Tensor, origin: int | None, start: int, stop: int) -> tuple[Layout, Tensor]:
        origin = self.start if origin is None else origin
        low = min(max(start, slot.start), slot.stop)
        high = max(min(stop, slot.stop), low)
        layout = replace(slot.layout, interval=(low - slot.start, high - slot.start))
        return layout, values[low - origin : high - origin] if low < high else values[:0]


class GradView:
    """Where one parameter's gradient is collected: a view of its buffer's gradient, written first, then added to.

    is_written: since the buffer was last started afresh; is_reached: in this step. deferred: while it is set, gradients do not
    come here but, as calls that bring them, into the list of their unit: a backward that leaves weights for later.
    """

    def __init__(self, buffer: UnitBuffer, slot: Slot):
        self.parameter = buffer.parameters[slot.name]
        self.is_written = self.is_reached = False
        self.deferred: Deferred | None = None
        self._buffer, self._slot = buffer, slot

    @property
    def view(self) -> Tensor:
        """The place in the buffer's gradient of the moment."""
        return self._buffer.gradient[self._slot.start : self._slot.stop].view(self._slot.layout.shape_local)

    def add(self, gradient: Tensor) -> None:
        """Add a gradient, cast to the master dtype. LayoutError if it comes after its unit's reduction."""
        if self.deferred is not None:
            self.deferred.setdefault(self._buffer.unit, []).append(partial(self.add, gradient))
            return
        place, is_first = self._open()
        place.copy_(gradient) if is_first else place.add_(gradient)

    def add_matmul(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right^T. left: [m, k], right: [n, k], any strides; the place: [m, n]."""
        if self.deferred is not None:
            self.deferred.setdefault(self._buffer.unit, []).append(
                partial(self.add_matmul, left.detach(), right.detach())
            )
            return
        place, is_first = self._open()
        accumulate_matmul(place, left, right, is_first)

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows to those of the place that `ids` name. ids: [n], some perhaps more than once; rows: [n, k]."""
        if self.deferred is not None:
            self.deferred.setdefault(self._buffer.unit, []).append(partial(self.add_rows, ids, rows.detach()))
            return
        place, is_first = self._open()
        if is_first:
            place.zero_()
        if place.is_cuda:  # there index_add_ adds in whatever order threads come
            place.index_put_((ids,), rows.to(place.dtype), accumulate=True)
        else:
            place.index_add_(0, ids, rows.to(place.dtype))

    def _open(self) -> tuple[Tensor, bool]:
        """The place, and whether what it gets is the first: if not, it is added to."""
        if self._buffer.is_complete:
            raise LayoutError(
                f"{self._slot.name} received a gradient after backward had left its unit, {self._buffer.unit}, and reduced it:"
                " the model computes with it elsewhere than its modules and ties tell"
            )
        self._buffer.open_gradient()
        is_first = not self.is_written
        self.is_written = self.is_reached = True
        return self.view, is_first


def plan_buffers(
    units: Iterable[Unit],
    layouts: Mapping[str, Layout],
    groups: Mapping[str, str],
    compute_dtypes: Mapping[str, torch.dtype],
    master_dtype: torch.dtype,
    lifetimes: Lifetimes,
    axes: Mapping[str, Communicator],
) -> list[UnitBuffer]:
    """Buffers in order of computation. layouts: of each parameter before ZeRO, which shards over `shard` and replicates over
    `replica`, or divides the update over it; groups: optimizer group by parameter name, FROZEN if it is not trained. Within a
    buffer, groups keep the order in which they first appear in `groups`."""
    order = {group: index for index, group in enumerate(dict.fromkeys(groups.values()))}
    pool = BufferPool()
    buffers = []
    for unit in units:
        kinds = {
            name: (compute_dtypes[name], groups[name] == FROZEN, layouts[name].replicated, layouts[name].partial)
            for name in unit.parameters
        }
        for kind in dict.fromkeys(kinds.values()):
            names = [name for name in unit.parameters if kinds[name] == kind]
            slots, end = [], 0
            for name in sorted(names, key=lambda name: order[groups[name]]):
                slots.append(Slot(name, layouts[name], end, end + layouts[name].numel_local, groups[name]))
                end = slots[-1].stop
            dtype, _, replicated, summed = kind
            divides = lifetimes.divides_updates and groups[names[0]] != FROZEN
            update_axis = axes["replica"] if divides else Communicator(Axis("update", 1, 0))
            outer = () if divides else ("replica",)
            replicas, partials = ([axes[name] for name in (*outer, *names)] for names in (replicated, summed))
            buffers.append(
                UnitBuffer(
                    unit.name,
                    tuple(slots),
                    dtype,
                    master_dtype,
                    lifetimes,
                    axes["shard"],
                    update_axis,
                    replicas,
                    partials,
                    pool,
                )
            )
    return buffers
