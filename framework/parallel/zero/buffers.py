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

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from framework.comm.collectives import all_reduce
from framework.errors import LayoutError
from framework.mesh.layout import Layout, Run
from framework.model.matmul import accumulate_matmul
from framework.parallel.zero.plan_buffers import BufferPlan, Slot

# Calls that bring a unit's gradients to their grad_views, by the unit's name.
Deferred = dict[str, list[Callable[[], None]]]


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
    """The memory of one unit's parameters that share a lifetime, a dtype and their axes, as `plan` says. None until `allocate`.

    pool: of the stage, whose units take turns with their full gradients.
    """

    def __init__(self, plan: BufferPlan, pool: BufferPool):
        self.plan, self.pool = plan, pool
        self.parameters: dict[str, nn.Parameter] = {}
        self.grad_views: dict[str, GradView] = {}
        self.is_copy = False  # of a buffer of another stage on this rank, which counts its elements
        self.is_complete = False  # backward has left the unit: no gradient of this microbatch may come any more
        self.full = self.shard = self.master = self.gradient = self.summed = self.reduced = torch.empty(0)

    @property
    def unit(self) -> str:
        return self.plan.unit

    @property
    def slots(self) -> tuple[Slot, ...]:
        return self.plan.slots

    @property
    def is_trained(self) -> bool:
        return self.plan.is_trained

    def allocate(self, device: torch.device) -> None:
        """All memory that lives from now on. Values are set in `master`; `copy_master_to_params` and an unshard bring them to
        `full`."""
        # Released below where it does not stay: pages of a CPU that nobody touches take neither memory nor time.
        make = torch.zeros if self.plan.lifetimes.resident_parameters else torch.empty
        self.full = make(self.plan.numel_padded, dtype=self.plan.dtypes.compute, device=device)
        part_start = self.plan.part_start
        mine = self.full[part_start : part_start + self.plan.numel_part]
        self.shard = mine if self.plan.lifetimes.resident_parameters else torch.zeros_like(mine)
        for slot in self.slots:
            view = self.full[slot.start : slot.stop].view(slot.layout.shape_local)
            self.parameters[slot.name] = nn.Parameter(view, requires_grad=self.is_trained)
        if not self.plan.lifetimes.resident_parameters:
            self.full.untyped_storage().resize_(0)
        if not self.is_trained:
            self.master = self.shard
            return
        same = self.plan.dtypes.compute == self.plan.dtypes.master
        self.master = (
            self.owned(self.shard) if same else torch.zeros_like(self.owned(self.shard), dtype=self.plan.dtypes.master)
        )
        if self.plan.lifetimes.keeps_gradients:
            self.gradient = torch.zeros(self.plan.numel_padded, dtype=self.plan.dtypes.master, device=device)
            self.summed = self.gradient[part_start : part_start + self.plan.numel_part]
        else:
            self.summed = torch.zeros(self.plan.numel_part, dtype=self.plan.dtypes.master, device=device)
        self.reduced = self.owned(self.summed)
        self.grad_views = {slot.name: GradView(self, slot) for slot in self.slots}

    def owned(self, part: Tensor) -> Tensor:
        """What this rank owns of a tensor over its part: a view."""
        first = self.plan.axes.update.rank * self.plan.numel_owned
        return part[first : first + self.plan.numel_owned]

    def open_gradient(self) -> None:
        """Have memory for the full gradient, of any content: every place is written or zeroed before it is read."""
        if not self.gradient.numel():
            self.gradient = self.pool.take(self.plan.numel_padded, self.plan.dtypes.master, self.full.device)

    def close_gradient(self) -> Tensor:
        """Take the full gradient out, for a reduction that reads it; the next one is written afresh. Whoever took it gives
        it back to the pool, unless it is kept for the whole step."""
        taken = self.gradient
        for place in self.grad_views.values():
            place.is_written = False
        if not self.plan.lifetimes.keeps_gradients:
            self.gradient = taken[:0]
        return taken

    def copy_master_to_params(self) -> None:
        """Cast the updated master to the compute dtype, once a step; nothing to do where they are the same memory."""
        if self.is_trained and self.plan.dtypes.compute != self.plan.dtypes.master:
            self.owned(self.shard).copy_(self.master)

    def held(self, slot: Slot, values: Tensor, origin: int | None = None) -> tuple[Layout, Tensor]:
        """Of the slot, what this rank owns: its layout and its elements, flat.

        values: a tensor over what is owned, or over a span of it that begins at element `origin` of the buffer.
        """
        return self._cut(slot, values, origin, (self.plan.start, self.plan.stop))

    def counted(self, slot: Slot, values: Tensor, origin: int | None = None) -> tuple[Layout, Tensor]:
        """Of `held`, what this rank and no other counts in a norm and writes to a checkpoint."""
        return self._cut(slot, values, origin, (0, 0) if self.is_copy else self.plan.counted_bounds(slot))

    def read(self, slot: Slot, values: Tensor, origin: int | None = None) -> tuple[Layout, Tensor]:
        """Of `held`, this rank's share among those of `axes.reading`, who own the same: what it reads for all of them."""
        return self._cut(slot, values, origin, self.plan.read_bounds)

    def share_read(self, values: Tensor, origin: int | None = None) -> None:
        """Complete a tensor over what is owned, or a span of it as for `held`, of which each rank of `axes.reading` has a share.

        Collective over `axes.reading`: an all-reduce of the tensor's bytes. The others' parts are zero, and a sum of whole
        numbers keeps every bit, of NaN and of -0.0, too.
        """
        first = self.plan.start if origin is None else origin
        low, high = (min(max(bound - first, 0), values.numel()) for bound in self.plan.read_bounds)
        values[:low].zero_()
        values[high:].zero_()
        if values.numel():
            all_reduce(values.view(torch.uint8), self.plan.axes.reading, label=f"read {self.unit}")

    def counted_elements(self, values: Tensor) -> list[Tensor]:
        """All that this rank counts, of a tensor over what it owns; padding is nobody's."""
        first = self.plan.start
        return [] if self.is_copy else [values[low - first : high - first] for low, high in self.plan.counted_runs]

    def _cut(self, slot: Slot, values: Tensor, origin: int | None, bounds: Run) -> tuple[Layout, Tensor]:
        origin = self.plan.start if origin is None else origin
        low = min(max(bounds[0], slot.start), slot.stop)
        high = max(min(bounds[1], slot.stop), low)
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


def make_buffers(plans: Iterable[BufferPlan]) -> list[UnitBuffer]:
    """The buffers of one stage, which share a pool; without memory until each is allocated."""
    pool = BufferPool()
    return [UnitBuffer(plan, pool) for plan in plans]
