"""Initial values of unit buffers: cut from a unit that was drawn whole, or read from a folder of pretrained weights, of which a
rank reads only the boxes that it owns."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from torch import Tensor
from transformers import PreTrainedModel

from framework.mesh.box import Box
from framework.mesh.layout import Layout
from framework.model.adapters import MAGNITUDE, holds_transposed, is_adapter, measure_rows, weight_of
from framework.model.initial import persistent_buffers
from framework.model.weights import read_weights
from framework.parallel.zero.buffers import StoredTensor, UnitBuffer

UNSCALED: Mapping[str, float] = MappingProxyType({})


def initialize_parameters(
    buffers: Sequence[UnitBuffer], drawn: Iterable[Mapping[str, Tensor]], scales: Mapping[str, float] = UNSCALED
) -> None:
    """Copy this rank's elements of what is drawn, whole parameters by name, to the masters of the buffers that hold them. scales:
    factors of some of them."""
    for values in drawn:
        for buffer in buffers:
            for slot in (slot for slot in buffer.slots if slot.name in values):
                whole = values[slot.name]
                if scales.get(slot.name, 1.0) != 1.0:
                    whole = whole * scales[slot.name]
                if buffer.stored is None:
                    _copy_boxes(whole, *buffer.held(slot, buffer.master))
                else:
                    _copy_boxes(whole, *buffer.held(slot, buffer.stored))
        del values  # or it would live on while the next one is drawn


def _copy_boxes(whole: Tensor, layout: Layout, held: Tensor | StoredTensor) -> None:
    """Copy the boxes of a layout to its elements, [n]; those on a disk are written box by box, without memory for all."""
    first = 0
    for box in layout.boxes():
        place, values = held[first : first + box.numel], whole[box.slices()].flatten()
        place.copy_(values) if isinstance(place, Tensor) else place.write(values.cpu())
        first += box.numel


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
    views = {slot.name: _view_boxes(*buffer.held(slot, buffer.master)) for buffer in buffers for slot in buffer.slots}
    for name in persistent_buffers(stock).keys() & buffer_values.keys():
        tensor = buffer_values[name]
        views[name] = {box: tensor.view(-1) for box in Layout(tuple(tensor.shape)).boxes()}
    # No folder has adapters. Magnitudes start as lengths of whole rows of their weights, which are read for that.
    of_adapters = {name: views.pop(name) for name in list(views) if is_adapter(name)}
    lengths = {
        weight_of(name): {_whole_rows(stock, weight_of(name), box): place for box, place in boxes.items()}
        for name, boxes in of_adapters.items()
        if name.endswith(MAGNITUDE)
    }
    wanted = {name: [*views.get(name, ()), *lengths.get(name, ())] for name in {**views, **lengths}}
    for name, box, values in read_weights(folder, stock, {name: boxes for name, boxes in wanted.items() if boxes}):
        # Into the master and not the parameter: a file in fp32 keeps its bits where forward reads bf16.
        if box in views.get(name, ()):
            views[name][box].copy_(values.flatten())
        if box in lengths.get(name, ()):
            place = lengths[name][box]
            place.copy_(measure_rows(values.to(place.dtype), _is_transposed(stock, name)))


def _whole_rows(stock: PreTrainedModel, weight: str, rows: Box) -> Box:
    """The box of whole rows of a weight.  rows: of its outputs, [N]."""
    (start,), (count,) = rows.offsets, rows.sizes
    first, second = stock.get_parameter(weight).shape
    if _is_transposed(stock, weight):
        return Box((0, start), (first, count))
    return Box((start, 0), (count, second))


def _is_transposed(stock: PreTrainedModel, weight: str) -> bool:
    return holds_transposed(stock.get_submodule(weight.rpartition(".")[0]))


def _view_boxes(layout: Layout, held: Tensor) -> dict[Box, Tensor]:
    """The flat piece of `held` that is each box of its layout."""
    boxes = layout.boxes()
    # Boxes come in the order of the interval's elements, so their pieces lie one after the other.
    return dict(zip(boxes, held.split([box.numel for box in boxes]), strict=True)) if boxes else {}
