"""One flat buffer per unit: its parameters are views of it, its gradients views of a second one.

    full      [ group A | group B | pad ]     [numel_padded], compute dtype; what forward and backward read; n equal parts
    shard     this rank's part of it          [numel_part], compute dtype; what other ranks all-gather from this one. Of
                                              parameters that travel as codes: the message of them, [kept_bytes] uint8
    secondary this rank's share of all parts  as they arrive, of the ranks of `axes.secondary`; if there is such a copy
    master    what it owns of its part        [numel_owned], master dtype; what the optimizer updates; memory of `shard` if
                                              the dtypes agree
    gradient  [ group A | group B | pad ]     [numel_padded], master dtype, at least fp32: the main gradient, that of backward
    summed    this rank's part of it          [numel_part], the same; the sum over the shard axis
    reduced   what it owns of that            [numel_owned], the same; the sum over all ranks
    delivered where the master lives          [numel_owned], the same; what the optimizer reads; `reduced` itself, or its
                                              copy on the host
    cast      a master of the host            [numel_owned], compute dtype, pinned there, on its way to a GPU

A rank owns its part; where the ranks that hold the same part divide its update, each owns an equal interval of it.
Parameters of one optimizer group lie side by side, so the optimizer is one fused call on a few flat tensors. Parts are equal
intervals of the buffer, so an all-gather lands in place, a reduce-scatter reads in place, and only the tail is padded. FSDP2
shards each parameter along dim 0 instead and pays for it with a copy into and out of a flat tensor for every collective.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from framework.comm.collectives import start_broadcast
from framework.comm.transfer import CopyStream, Download, fetch, start_copy, write_across, zeros_on_host
from framework.errors import LayoutError
from framework.mesh.layout import Layout
from framework.model.matmul import Accumulate, RowGroups, accumulate_matmul, accumulate_stacked_matmul
from framework.parallel.zero.buffer_plan import BufferPlan, Home, Slot
from framework.parallel.zero.row_codes import RowCodec

# Calls that add weight gradients which a backward has left for later, by the unit's name.
DeferredGradients = dict[str, list[Callable[[], None]]]


class StoredTensor(Protocol):
    """A flat tensor, [n], that is not in memory, such as one on a disk (`optim/disk_ring.py`). Slices are views of it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def numel(self) -> int: ...

    def __getitem__(self, where: slice, /) -> "StoredTensor": ...

    def pieces(self) -> Iterator[Tensor]:
        """The values from first to last in a few MiB at a time, each until the next is asked for."""

    def read(self) -> Tensor:
        """All values, in memory of their own."""

    def write(self, values: Tensor) -> None:
        """Set all values, [n]."""


# Elements of a buffer, in memory or not.
Values = TypeVar("Values", Tensor, StoredTensor)


class UnitBuffer:
    """The memory of one unit's parameters that share a lifetime, a dtype and their axes, as `plan` says. None until `allocate`.

    transfers: the stage's, to and from the host.
    """

    def __init__(self, plan: BufferPlan, transfers: CopyStream):
        self.plan, self.transfers = plan, transfers
        self.parameters: dict[str, nn.Parameter] = {}
        self.grad_views: dict[str, MainGradView] = {}
        # Another stage on this rank has the same parameters and counts them.
        self.is_copy = False
        # Backward has left the unit, so no gradient of this microbatch may come any more.
        self.is_complete = False
        self.full = self.shard = self.master = self.gradient = self.summed = self.reduced = self.delivered = (
            torch.empty(0)
        )
        self.cast: Tensor | None = None
        # The master where its home is a disk; `master` is then empty, but within `master_in_memory`.
        self.stored: StoredTensor | None = None
        self._delivery: Download | None = None
        self.secondary = torch.empty(0)
        # Whether `secondary` holds what the shards hold: not from an update to the next all-gather over the shard axis.
        self.has_secondary = False
        # Whether `full` does, or will when what is under way has come.
        self.has_full = False

    @property
    def unit(self) -> str:
        return self.plan.unit

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.plan.slots

    @property
    def is_trained(self) -> bool:
        return self.plan.is_trained

    @property
    def is_updated_on_host(self) -> bool:
        return self.plan.lifetimes.homes.master == Home.HOST

    @property
    def master_at_home(self) -> Tensor | StoredTensor:
        """The master, [numel_owned], where it lives."""
        return self.master if self.stored is None else self.stored

    @contextmanager
    def master_in_memory(self, is_changed: bool = False) -> Iterator[Tensor]:
        """The master, [numel_owned], in memory: that of the host where it lives on a disk, and the numbers of frozen parameters
        that are kept as codes. is_changed: it is written back."""
        if self.stored is None:
            codec = self.plan.dtypes.codec
            yield codec.decode_own(self.shard, self.plan.start) if isinstance(codec, RowCodec) else self.master
            return
        self.master = self.stored.read()
        yield self.master
        if is_changed:
            self.stored.write(self.master)
        # The host has memory for one unit's states at a time, not for all.
        self.master = self.master.new_empty(0)

    def allocate(self, device: torch.device) -> None:
        """Take all memory that lives for the whole run. Values are set in `master`; `copy_master_to_params` and an unshard bring
        them to `full`."""
        self._allocate_parameters(device)
        if self.is_trained:
            self._allocate_gradient(device)
            self._allocate_master(device)
        else:
            self.master = self.shard  # what there is of a frozen parameter: values are set in the same way for all

    def _allocate_parameters(self, device: torch.device) -> None:
        plan, is_resident = self.plan, self.plan.lifetimes.resident_parameters
        # Not zeroed where it goes back at once: pages of a CPU that nobody touches take neither memory nor time. Zeroed where
        # it stays, because no collective ever writes the padding, and it must be equal on all replicas.
        make = torch.zeros if is_resident else torch.empty
        self.full = make(plan.numel_padded, dtype=plan.dtypes.compute, device=device)
        kept = plan.dtypes.compute if plan.dtypes.codec is None else torch.uint8
        if is_resident and plan.dtypes.codec is None:
            self.shard = self.part(self.full)
        else:
            self.shard = self._at_home(plan.kept_bytes // kept.itemsize, kept, device)
        arrives = torch.uint8 if plan.is_decoded else kept
        self.secondary = self._at_home(plan.secondary_bytes // arrives.itemsize, arrives, device)
        for slot in self.slots:
            view = self.full[slot.start : slot.stop].view(slot.layout.shape_local)
            self.parameters[slot.name] = nn.Parameter(view, requires_grad=self.is_trained)
        if not is_resident:
            # The storage shrinks, the tensor stays: parameters are views of it for the whole run, and so are the views that
            # autograd keeps for backward. A new tensor for each unshard would leave them pointing at freed memory.
            self.full.untyped_storage().resize_(0)

    def _at_home(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        is_here = self.plan.lifetimes.homes.parameters == Home.DEVICE
        return torch.zeros(numel, dtype=dtype, device=device) if is_here else zeros_on_host(numel, dtype, device)

    def _allocate_master(self, device: torch.device) -> None:
        """The master, and memory of the host in which gradients come to one that lives there, and parameters leave it."""
        plan, dtypes = self.plan, self.plan.dtypes
        if plan.lifetimes.homes.master == Home.DISK:
            assert self.stored is not None, f"{self.unit}: nobody has given it its states on the disk"
            self.master = torch.empty(0, dtype=dtypes.master)
        elif plan.has_master:
            # Not pinned on the host: it is cast on its way, into memory that is.
            place = torch.device("cpu") if self.is_updated_on_host else device
            self.master = torch.zeros(plan.numel_owned, dtype=dtypes.master, device=place)
        else:
            self.master = self.owned(self.shard)
        self.delivered = self.reduced
        if self.is_updated_on_host:
            self.delivered = zeros_on_host(len(self.reduced), self.reduced.dtype, device)
            own = self.owned(self.shard)
            if (dtypes.compute != dtypes.master or dtypes.codec is not None) and self.shard.is_cuda:
                self.cast = zeros_on_host(len(own), own.dtype, device)

    def _allocate_gradient(self, device: torch.device) -> None:
        plan, dtype = self.plan, self.plan.dtypes.gradient
        if plan.lifetimes.keeps_gradients:
            # The sum lands in this rank's part of the full gradient itself: after the reduction nobody reads the rest.
            self.gradient = torch.zeros(plan.numel_padded, dtype=dtype, device=device)
            self.summed = self.part(self.gradient)
        else:
            self.summed = torch.zeros(plan.numel_part, dtype=dtype, device=device)
        self.reduced = self.owned(self.summed)
        self.grad_views = {slot.name: MainGradView(self, slot) for slot in self.slots}

    def part(self, full: Tensor) -> Tensor:
        """This rank's part, [numel_part], of a tensor over the whole buffer, [numel_padded]: a view. Of messages the same."""
        return full.view(self.plan.axes.shard.size, -1)[self.plan.axes.shard.rank]

    def owned(self, part: Tensor) -> Tensor:
        """The elements that this rank owns, [numel_owned], of a tensor over its part, [numel_part]: a view. Of messages the
        same."""
        return part.view(self.plan.axes.update.size, -1)[self.plan.axes.update.rank]

    def open_gradient(self) -> None:
        """Have memory for the full gradient, of any content: every view is written or zeroed before it is read."""
        if not self.gradient.numel():
            self.gradient = self.summed.new_empty(self.plan.numel_padded)

    def close_gradient(self) -> Tensor:
        """Take the full gradient, [numel_padded], out for a reduction that reads it; the next one is written afresh."""
        full = self.gradient
        for grad_view in self.grad_views.values():
            if grad_view.state is GradientState.WRITTEN:
                grad_view.state = GradientState.REDUCED
        if not self.plan.lifetimes.keeps_gradients:
            # The next microbatch's backward must not write where a reduction still reads: it gets other memory.
            self.gradient = full.new_empty(0)
        return full

    def start_delivery(self) -> None:
        """Start to bring `reduced`, of which nothing is left to be summed, to where the master lives. A second time it starts
        over; nothing to do where that is the same memory."""
        if self.delivered is not self.reduced:
            self._delivery = Download(self.reduced, self.delivered, self.transfers)

    def wait_for_delivery(self) -> None:
        """Return when the optimizer may read `delivered`."""
        if self._delivery is not None:
            self._delivery.wait()
            self._delivery = None

    def copy_master_to_params(self) -> None:
        """Cast the updated master to the compute dtype, where the parameters live, once a step; nothing to do where they are the
        same memory."""
        codec, own = self.plan.dtypes.codec, self.owned(self.shard)
        if isinstance(codec, RowCodec):
            return  # frozen, and written as codes when it was read
        if self.cast is not None:
            # In pinned memory, from which the copy runs beside the update of the next unit.
            self.cast.copy_(self.master) if codec is None else codec.encode(self.master, self.cast)
            start_copy(own, self.cast)
        elif codec is not None:
            # Once an update, and never of what has been rounded before. Not in pieces: a block would be cut.
            write_across(own, codec.encode(self.master))
        elif self.is_trained and self.plan.has_master:
            self.copy_to_params(0, self.stored.pieces() if self.stored is not None else (self.master,))

    def copy_to_params(self, first: int, pieces: Iterable[Tensor]) -> None:
        """Cast pieces [n] of the updated master, from its element `first` on, to the compute dtype, where the parameters live.
        Each is read before the next is asked for."""
        for piece in pieces:
            write_across(self.owned(self.shard)[first : first + len(piece)], piece)
            first += len(piece)

    def held(self, slot: Slot, values: Values, origin: int | None = None) -> tuple[Layout, Values]:
        """Layout and elements, flat, of what this rank owns of the slot: a view.

        values: a tensor over what is owned, [numel_owned], or over a span of it that begins at element `origin` of the buffer.
        """
        return self._slice(self.plan.held[slot.name], values, origin)

    def counted(self, slot: Slot, values: Values, origin: int | None = None) -> tuple[Layout, Values]:
        """The elements of `held`, [n], that this rank and no other counts in a norm and writes to a checkpoint."""
        assert not self.is_copy, f"{self.unit}: another stage on this rank counts it"
        return self._slice(self.plan.counted[slot.name], values, origin)

    def read(self, slot: Slot, values: Values, origin: int | None = None) -> tuple[Layout, Values]:
        """The elements of `held`, [n], that this rank reads for all ranks of `axes.reading`, which own the same."""
        return self._slice(self.plan.read[slot.name], values, origin)

    def share_read(self, values: Tensor, origin: int | None = None) -> None:
        """Complete a tensor over what is owned, [numel_owned], or a span of it as for `held`, of which each rank of
        `axes.reading` has a share.

        Collective over `axes.reading`: each rank broadcasts its share, so it sends that, gets the others', and both in place.
        """
        axis = self.plan.axes.reading
        if axis.size == 1 or not values.numel():
            return
        # Ranks send between devices: what lives on the host goes there and back.
        here = fetch(values, self.full.device)
        first = self.plan.start if origin is None else origin
        arriving = []
        for reader in range(axis.size):
            low, high = (min(max(bound - first, 0), len(here)) for bound in self.plan.read_bounds_of(reader))
            if low < high:
                share = here[low:high].view(torch.uint8)
                arriving.append(start_broadcast(share, axis, reader, label=f"read {self.unit}"))
        for each in arriving:
            each.wait()
        values.copy_(here)

    def counted_elements(self, values: Tensor) -> list[Tensor]:
        """The elements that this rank counts of a tensor over what it owns, [numel_owned]: views. Padding is nobody's."""
        first = self.plan.start
        return [] if self.is_copy else [values[low - first : high - first] for low, high in self.plan.counted_runs]

    def _slice(self, interval: Slot, values: Values, origin: int | None) -> tuple[Layout, Values]:
        first = self.plan.start if origin is None else origin
        # An empty interval may lie outside of what is owned, where an index would count from the tensor's end.
        if interval.start == interval.stop:
            return interval.layout, values[:0]
        return interval.layout, values[interval.start - first : interval.stop - first]


class GradientState(Enum):
    """The content of a parameter's main gradient in a step."""

    UNREACHED = "no gradient of this step has come"
    REDUCED = "gradients have come and been reduced: the next one is written"
    WRITTEN = "gradients have come since the last reduction: the next one is added"


class MainGradView:
    """One parameter's view of its buffer's main gradient: written first, then added to.

    deferred: while it is set, gradients do not come here but, as calls that add them, into the list of their unit: a backward
    that leaves weights for later.
    """

    def __init__(self, buffer: UnitBuffer, slot: Slot):
        self.parameter = buffer.parameters[slot.name]
        self.state = GradientState.UNREACHED
        self.deferred: DeferredGradients | None = None
        self._buffer, self._slot = buffer, slot
        self._shape = slot.layout.shape_local
        self._kept = self._make_view() if buffer.plan.lifetimes.keeps_gradients else None

    @property
    def view(self) -> Tensor:
        """The parameter's gradient, [its local shape], master dtype."""
        return self._make_view() if self._kept is None else self._kept

    def _make_view(self) -> Tensor:
        return self._buffer.gradient[self._slot.start : self._slot.stop].view(self._shape)

    @property
    def is_reached(self) -> bool:
        """Whether a gradient has come in this step."""
        return self.state is not GradientState.UNREACHED

    @property
    def is_deferred(self) -> bool:
        """Whether gradients of this backward come later."""
        return self.deferred is not None

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the parameter's local shape, cast to the master dtype. This and the others raise LayoutError after
        the unit's reduction."""
        self._write(lambda view, is_first: view.copy_(gradient) if is_first else view.add_(gradient))

    def add_matmul(self, left: Tensor, right: Tensor, accumulate: Accumulate = accumulate_matmul) -> None:
        """Add left^T @ right. left: [k, m], right: [k, n], compute dtype, any strides; the parameter's local shape: [m, n].
        accumulate: computes it."""
        left, right = left.detach(), right.detach()
        self._write(lambda view, is_first: accumulate(view, left, right, is_first))

    def add_stacked_matmul(self, left: Tensor, right: Tensor, groups: RowGroups) -> None:
        """Add left^T @ right of each group's rows. left: [R, m], right: [R, n], compute dtype; the parameter's local shape:
        [E, m, n]."""
        left, right = left.detach(), right.detach()
        self._write(lambda view, is_first: accumulate_stacked_matmul(view, left, right, groups, is_first))

    def add_rows(self, ids: Tensor, rows: Tensor) -> None:
        """Add rows to those of the gradient that `ids` name. ids: [n], some perhaps more than once; rows: [n, k]."""
        rows = rows.detach()
        self._write(lambda view, is_first: _add_rows(view, ids, rows, is_first))

    def _write(self, write: Callable[[Tensor, bool], Any]) -> None:
        """Write to the view now, or leave it to the backward of weights. write: takes the view, and whether this is the first."""
        if self.deferred is None:
            write(*self._open())
        else:
            self.deferred.setdefault(self._buffer.unit, []).append(partial(self._write, write))

    def _open(self) -> tuple[Tensor, bool]:
        """The view, and whether what it gets is the first: if not, it is added to."""
        if self._buffer.is_complete:
            # The reduce-scatter has begun to read: on this rank the gradient would be lost or counted half, without a word.
            raise LayoutError(
                f"{self._slot.name} received a gradient after backward had left its unit, {self._buffer.unit}, and reduced it:"
                " the model computes with it elsewhere than its modules and ties tell"
            )
        is_first = self.state is not GradientState.WRITTEN
        self.state = GradientState.WRITTEN
        if self._kept is not None:
            return self._kept, is_first
        self._buffer.open_gradient()
        return self._make_view(), is_first


def _add_rows(view: Tensor, ids: Tensor, rows: Tensor, is_first: bool) -> None:
    if is_first:
        view.zero_()
    if view.is_cuda:
        # There index_add_ adds in whatever order threads come, and two equal runs would differ in their last bits.
        view.index_put_((ids,), rows.to(view.dtype), accumulate=True)
    else:
        view.index_add_(0, ids, rows.to(view.dtype))


def make_buffers(plans: Iterable[BufferPlan]) -> list[UnitBuffer]:
    """The buffers of one stage; without memory until each is allocated."""
    # One for both directions, so PCIe carries one at a time: a gradient that has come down is behind each earlier upload; the
    # update that reads it does not write to a pinned shard that is still on its way up.
    transfers = CopyStream()
    return [UnitBuffer(plan, transfers) for plan in plans]
