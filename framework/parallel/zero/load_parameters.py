"""Initial values of unit buffers: cut from a unit that was drawn whole, or read from a folder of pretrained weights, of which a
rank reads only the boxes that it owns."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from framework.mesh.layout import Box, Layout
from framework.model.adapters import MAGNITUDE, holds_transposed, is_adapter, measure_rows, weight_of
from framework.model.initial import persistent_buffers
from framework.model.weights import read_weights
from framework.parallel.zero.buffers import StoredTensor, UnitBuffer
from framework.parallel.zero.plan_buffers import Slot
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
