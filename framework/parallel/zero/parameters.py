"""Parameters: their initial values, cut from a unit that was drawn whole, or read from a folder of pretrained weights, of which a
rank reads only the boxes that it owns; unsharded unit by unit just before their use, and resharded when the use is over.

A unit's parameters are views of one flat tensor for the whole run, and autograd keeps some of these views for backward. So
the memory of a resharded unit goes back by shrinking the tensor's storage to nothing, and comes again in place (as in FSDP,
Zhao et al. 2023): every view stays true. The all-gather lands in the tensor itself; nothing is copied out, where
FSDP2 gathers a group of parameters into one tensor and copies each of them out of it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from framework.comm.algorithms import ExposedCommunication, Pending, then
from framework.comm.collectives import all_reduce, start_all_gather
from framework.comm.communicator import Communicator
from framework.comm.transfer import Arrival, fetch, start_copy, write_across
from framework.mesh.layout import Box, Layout
from framework.model.adapters import MAGNITUDE, holds_transposed, is_adapter, measure_rows, weight_of
from framework.model.initial import persistent_buffers
from framework.model.weights import read_weights
from framework.parallel.zero.buffer_plan import Home, Slot
from framework.parallel.zero.buffers import StoredTensor, UnitBuffer
from framework.parallel.zero.row_codes import RowCodec, widen

# Write a box's values to where this rank keeps them.
Write = Callable[[Tensor], Any]

UNSCALED: Mapping[str, float] = MappingProxyType({})


def initialize_parameters(
    buffers: Sequence[UnitBuffer], drawn: Iterable[Mapping[str, Tensor]], scales: Mapping[str, float] = UNSCALED
) -> None:
    """Copy this rank's elements of what is drawn, whole parameters by name, to the masters of the buffers that hold them. scales:
    factors of some of them."""
    for values in drawn:
        for buffer in buffers:
            for slot in (slot for slot in buffer.slots if slot.name in values):
                whole = values[slot.name] * scales.get(slot.name, 1.0)
                for box, write in _find_places(buffer, slot, buffer.master_at_home):
                    write(whole[box.slices()])
        del values  # or it would live on while the next one is drawn


def _find_places(buffer: UnitBuffer, slot: Slot, master: Tensor | StoredTensor) -> Iterator[tuple[Box, Write]]:
    """The boxes that are read of a parameter, and what writes each: to the flat master, in the order of boxes, or as codes, for
    which whole blocks are read."""
    codec, held = buffer.plan.dtypes.codec, buffer.plan.held[slot.name]
    first = held.start
    for box in held.layout.boxes():
        if isinstance(codec, RowCodec):
            wide = widen(box, slot.layout.shape)
            yield wide, partial(codec.write, buffer.shard, buffer.plan.start, first, box, slot.layout)
        else:
            low = first - buffer.plan.start
            yield box, partial(_copy_flat, master[low : low + box.numel])
        first += box.numel


def _copy_flat(target: Tensor | StoredTensor, values: Tensor) -> None:
    if isinstance(target, Tensor):
        target.copy_(values.flatten())
    else:
        target.write(values.flatten().cpu())


def load_pretrained(
    stock: PreTrainedModel, buffer_values: Mapping[str, Tensor], buffers: Sequence[UnitBuffer], folder: Path
) -> None:
    """Read the unit buffers' masters, only the boxes that this rank owns, and the persistent buffers of `stock` into
    `buffer_values`. Masters on a disk are read one by one, through memory for one. Raises what `read_weights` raises."""
    _load(stock, buffer_values, [buffer for buffer in buffers if buffer.stored is None], folder)
    for buffer in (buffer for buffer in buffers if buffer.stored is not None):
        with buffer.master_in_memory(is_changed=True):
            _load(stock, {}, [buffer], folder)


def _load(
    stock: PreTrainedModel, buffer_values: Mapping[str, Tensor], buffers: Sequence[UnitBuffer], folder: Path
) -> None:
    places: dict[str, dict[Box, list[Write]]] = defaultdict(lambda: defaultdict(list))
    for buffer in buffers:
        for slot in buffer.slots:
            for box, write in _find_places(buffer, slot, buffer.master):
                if slot.name.endswith(MAGNITUDE):
                    # Magnitudes start as lengths of whole rows of their weights, which are read for that.
                    weight, dtype = weight_of(slot.name), buffer.master.dtype
                    measure = partial(_write_lengths, write, _is_transposed(stock, weight), dtype)
                    places[weight][_whole_rows(stock, weight, box)].append(measure)
                elif not is_adapter(slot.name):  # no folder has adapters
                    places[slot.name][box].append(write)
    for name in persistent_buffers(stock).keys() & buffer_values.keys():
        tensor = buffer_values[name]
        for box in Layout(tuple(tensor.shape)).boxes():
            places[name][box].append(partial(_copy_flat, tensor.view(-1)))
    wanted = {name: list(boxes) for name, boxes in places.items()}
    for name, box, values in read_weights(folder, stock, wanted):
        # Into the master and not the parameter: a file in fp32 keeps its bits where forward reads bf16.
        for write in places[name][box]:
            write(values)


def _write_lengths(write: Write, is_transposed: bool, dtype: torch.dtype, values: Tensor) -> None:
    write(measure_rows(values.to(dtype), is_transposed))


def _whole_rows(stock: PreTrainedModel, weight: str, rows: Box) -> Box:
    """The box of whole rows of a weight.  rows: of its outputs, [N]."""
    (start,), (count,) = rows.offsets, rows.sizes
    first, second = stock.get_parameter(weight).shape
    if _is_transposed(stock, weight):
        return Box((0, start), (first, count))
    return Box((start, 0), (count, second))


def _is_transposed(stock: PreTrainedModel, weight: str) -> bool:
    return holds_transposed(stock.get_submodule(weight.rpartition(".")[0]))


class ParameterSync:
    """The full parameters of one stage's units, which are named by their index.

    unsharded: units that are there or on their way; always those of which this rank owns all. transient: those of them whose
    lifetime ends with their use. forget: called when values are about to change, for what was found of them.
    """

    def __init__(
        self,
        units: Sequence[Sequence[UnitBuffer]],
        exposed: ExposedCommunication,
        forget: Sequence[Callable[[], None]] = (),
    ):
        self.units = units
        self._forget = forget
        # Units that need no message are never asked for: at stage 0 that is every unit, several times in each microbatch.
        self._whole = {index for index, unit in enumerate(units) if all(buffer.plan.is_whole for buffer in unit)}
        self.unsharded: set[int] = set(self._whole)
        self.transient: set[int] = set()
        self._exposed = exposed
        self._unshards: dict[int, list[Pending]] = {}
        self._has_old_parts = True  # where replicas divide the update, each has updated only what it owns
        self._part_updates: dict[int, list[Pending]] = {}
        coded = [buffer for unit in units for buffer in unit if buffer.plan.dtypes.gathered is not None]
        self._fp8 = Fp8Gather(coded) if coded else None

    def start_unshard(self, index: int) -> None:
        """Start to unshard a unit that is not there and not on its way: (n-1)/n of its bytes from each rank of the shard
        axis."""
        if index in self.unsharded:
            return
        self._start_part_updates()
        self.unsharded.add(index)
        if not all(buffer.plan.lifetimes.keeps_parameters for buffer in self.units[index]):
            self.transient.add(index)
        # The other ranks of the shard axis read this rank's part: what its replicas have updated must have arrived in it.
        self._exposed.wait(self._part_updates.pop(index, ()))
        # Beside parameters that are decoded for each use there may be others that are resident: those stay.
        old = [buffer for buffer in self.units[index] if not buffer.has_full]
        for buffer in old:
            buffer.has_full = True
        self._unshards[index] = [_start_unshard(buffer, self._fp8) for buffer in old]

    def unshard(self, index: int) -> None:
        """Return when the unit's parameters can be read."""
        if index not in self.unsharded:
            self.start_unshard(index)
        self._wait_for_unshard(index)

    def _wait_for_unshard(self, index: int) -> None:
        self._exposed.wait(self._unshards.pop(index, ()))

    def wait_for_unshards(self) -> None:
        """Wait for units that are on their way, also where nobody has asked for them."""
        for index in list(self._unshards):
            self._wait_for_unshard(index)

    @contextmanager
    def unsharded_for(self, index: int) -> Iterator[None]:
        """A context in which a unit is read out of turn, in the middle of another's use: afterwards it is as it was."""
        was_there = index in self.unsharded
        self.unshard(index)
        yield
        if not was_there and index in self.transient:
            self.reshard(index)

    def reshard(self, index: int) -> None:
        """Give an unsharded unit's memory back, where it is not resident."""
        # A unit that was prefetched and never used may still be on its way: the all-gather must not write into freed memory.
        self._wait_for_unshard(index)
        self.unsharded.remove(index)
        self.transient.discard(index)
        for buffer in self.units[index]:
            if not buffer.plan.lifetimes.resident_parameters:
                buffer.has_full = False
                # Safe on CUDA while kernels that read it still run: the allocator gives a block that was freed on the
                # compute stream to later work of that stream only, and the next all-gather waits for that stream.
                buffer.full.untyped_storage().resize_(0)

    def reshard_transient(self) -> None:
        """Give back what is unsharded for one use at a time."""
        for index in list(self.transient):
            self.reshard(index)

    def invalidate(self) -> None:
        """Invalidate unsharded parameters before an update: the next use unshards again, also where memory is resident."""
        self._has_old_parts = True
        for forget in self._forget:
            forget()
        for index in self.unsharded - self._whole:
            self.reshard(index)
        for buffer in (buffer for unit in self.units for buffer in unit):
            buffer.has_secondary = buffer.has_full = False

    def _start_part_updates(self) -> None:
        """At the first unshard after an update, start to bring each rank's part together over the update axis, of all units in
        their order. In place, so it takes no memory; a unit's own unshard waits for its own part alone."""
        if self._has_old_parts:
            self._has_old_parts = False
            if self._fp8 is not None:
                self._fp8.find_scales()
            self._part_updates = {
                index: [_start_part_update(buffer) for buffer in unit if buffer.plan.axes.update.size > 1]
                for index, unit in enumerate(self.units)
            }


def _start_part_update(buffer: UnitBuffer) -> Pending:
    """All-gather over the update axis: [numel_owned] of each rank into [numel_part], in place."""
    if buffer.plan.lifetimes.homes.parameters != Home.DEVICE:
        # Not before it is waited for: all units' parts at once are what the device has no room for.
        return Pending(finish=partial(_update_part_at_home, buffer))
    part = _unversioned(buffer.shard)
    return _gather_part(buffer, part)


def _update_part_at_home(buffer: UnitBuffer) -> Pending:
    """The same for a part that lives on the host, through the device."""
    here = fetch(buffer.shard, buffer.full.device)
    return then(_gather_part(buffer, here), partial(write_across, buffer.shard, here))


def _gather_part(buffer: UnitBuffer, part: Tensor) -> Pending:
    return start_all_gather(part, buffer.owned(part), buffer.plan.axes.update, f"updated part of {buffer.unit}")


def _find_source(buffer: UnitBuffer) -> tuple[Tensor, Communicator]:
    """This rank's share of an all-gather, as it keeps it, and the axis over which it goes: that of the second copy, if there is
    one that is not old, else the shard axis. The same on all ranks of that axis."""
    axes = buffer.plan.axes
    return (buffer.secondary, axes.secondary) if buffer.has_secondary else (buffer.shard, axes.shard)


def _keep_secondary(buffer: UnitBuffer, arrived: Tensor) -> None:
    """Keep this rank's share of what has come over the shard axis, [n] in the order of ranks, as the second copy: the very
    bits that were sent."""
    axis = buffer.plan.axes.secondary
    if axis.size > 1 and not buffer.has_secondary:
        write_across(buffer.secondary, arrived.view(axis.size, -1)[axis.rank])
        buffer.has_secondary = True


def _take_full(buffer: UnitBuffer) -> Tensor:
    """The full parameters, [numel_padded], with memory again: of any content, because the all-gather writes all of it."""
    storage = buffer.full.untyped_storage()
    num_bytes = buffer.plan.numel_padded * buffer.full.element_size()
    if storage.nbytes() < num_bytes:
        storage.resize_(num_bytes)
    return _unversioned(buffer.full)


def _start_unshard(buffer: UnitBuffer, fp8: "Fp8Gather | None") -> Pending:
    """All-gather over the shard axis, or over that of the second copy: the share of each rank into [numel_padded], in place
    where parameters travel as they are read; codes arrive in other memory, from which they are decoded."""
    full, plan, (held, axis) = _take_full(buffer), buffer.plan, _find_source(buffer)
    arriving = full.new_empty(plan.arriving_bytes, dtype=torch.uint8) if plan.is_decoded else full
    share, label = arriving.view(axis.size, -1)[axis.rank], f"parameters of {buffer.unit}"
    if plan.dtypes.gathered is not None and fp8 is not None and not buffer.has_secondary:
        pending = start_all_gather(arriving, fp8.encode(buffer), axis, label)
    elif plan.lifetimes.homes.parameters != Home.DEVICE:
        pending = _start_gather_from_home(buffer, arriving, share, held, axis, label)
    else:
        pending = start_all_gather(arriving, held, axis, label)
    return then(pending, partial(_finish_unshard, buffer, arriving, full, fp8))


def _finish_unshard(buffer: UnitBuffer, arrived: Tensor, full: Tensor, fp8: "Fp8Gather | None") -> None:
    """Decode what has come, if it is codes, and keep the second copy, if there is to be one."""
    _keep_secondary(buffer, arrived)
    plan = buffer.plan
    if plan.dtypes.codec is not None:
        plan.dtypes.codec.decode(arrived.view(plan.num_owners, -1), full.view(plan.num_owners, -1))
    elif plan.dtypes.gathered is not None and fp8 is not None:
        fp8.decode(buffer, arrived, full)


def _start_gather_from_home(
    buffer: UnitBuffer, arriving: Tensor, share: Tensor, held: Tensor, axis: Communicator, label: str
) -> Pending:
    """Upload this rank's share to its place in what arrives, and all-gather in place. held: the share on the host."""
    # Beside what is computed now: the all-gather waits for the upload, and computation for both when it needs the unit.
    with buffer.transfers.queue(arriving.device):
        start_copy(share, held)
        pending = start_all_gather(arriving, share, axis, label)
        arrival = Arrival(arriving.device)
    return then(pending, arrival.wait)


def _unversioned(tensor: Tensor) -> Tensor:
    """The same memory with a version counter of its own. Autograd compares versions to find out whether a tensor that it keeps
    for backward has been changed; the unshard before backward brings the very values that forward has read, so it must not
    count as a change."""
    return tensor.data


class Fp8Gather:
    """All-gathers of the buffers of one stage whose weights travel as fp8: half the bytes, and not one bit of the run changes.

    What multiplies the weights casts them to fp8 anyway, with one scale for the whole weight (`model/fp8.py`). Here each rank
    casts its part before the all-gather, with that same scale, for which the ranks agree on the largest absolute value, once
    after each update. Scales are powers of two, so what arrives is exact in bf16, and its own cast gives the same fp8 numbers
    again.

    buffers: all on the same axes.
    """

    def __init__(self, buffers: Sequence[UnitBuffer]):
        self._buffers = buffers
        self._scales: dict[int, Tensor] = {}

    def find_scales(self) -> None:
        """Agree on the scale of each weight, from what each rank owns of it: an all-reduce of a number for each weight. After
        each update, before the first `encode`."""
        # torchao is an optional dependency, and takes two seconds to import.
        from framework.model.fp8 import scale_of

        views = [buffer.held(slot, buffer.owned(buffer.shard))[1] for buffer in self._buffers for slot in buffer.slots]
        device = self._buffers[0].full.device
        filled = [view for view in views if view.numel()]
        found, zero = iter(torch._foreach_norm(filled, float("inf")) if filled else ()), torch.zeros((), device=device)
        largest = torch.stack([fetch(next(found), device).float() if view.numel() else zero for view in views])
        axes = self._buffers[0].plan.axes
        for axis in (axes.update, axes.shard):
            all_reduce(largest, axis, "max", label="scales of fp8")
        scales = scale_of(largest, torch.float8_e4m3fn)
        counts = [len(buffer.slots) for buffer in self._buffers]
        self._scales = dict(zip(map(id, self._buffers), scales.split(counts), strict=True))

    def encode(self, buffer: UnitBuffer) -> Tensor:
        """This rank's part as it travels: [numel_part] uint8, on the device."""
        from framework.model.fp8 import cast

        plan, scales, part = buffer.plan, self._scales[id(buffer)], fetch(buffer.shard, buffer.full.device)
        sent = torch.zeros(plan.numel_part, dtype=torch.uint8, device=part.device)
        for index, slot in enumerate(plan.slots):
            low, high = _clip(slot, plan.part_start, plan.numel_part)
            sent.view(torch.float8_e4m3fn)[low:high] = cast(part[low:high], scales[index], torch.float8_e4m3fn)
        return sent

    def decode(self, buffer: UnitBuffer, arrived: Tensor, full: Tensor) -> None:
        """Write the parts that have come.  arrived: [numel_padded] uint8; full: [numel_padded] bf16."""
        scales, numbers = self._scales[id(buffer)], arrived.view(torch.float8_e4m3fn)
        for index, slot in enumerate(buffer.slots):
            of_slot = slice(slot.start, slot.stop)
            torch.div(numbers[of_slot].to(full.dtype), scales[index], out=full[of_slot])


def _clip(slot: Slot, start: int, length: int) -> tuple[int, int]:
    """The slot's elements within [start, start + length), as a range that counts from `start`."""
    low, high = max(slot.start, start) - start, min(slot.stop, start + length) - start
    return low, max(low, high)
