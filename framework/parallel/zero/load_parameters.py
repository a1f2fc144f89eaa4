"""Values of unit buffers: drawn, or read from a folder of pretrained weights. A rank draws and reads the boxes that it holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from framework.mesh.box import Box
from framework.mesh.layout import Layout
from framework.model.initial import Program
from framework.model.materialize import persistent_buffers
from framework.model.weights import read_weights
from framework.parallel.zero.buffers import UnitBuffer


def initialize_parameters(buffer: UnitBuffer, programs: Mapping[str, Program]) -> None:
    """Draw what the buffer's master holds of those of its parameters that are among `programs`, where the master lives."""
    for slot in buffer.slots:
        if slot.name in programs:
            layout, held = buffer.held(slot, buffer.master)
            programs[slot.name].write(layout.boxes(), held)


def load_pretrained(stock: PreTrainedModel, buffers: Sequence[UnitBuffer], folder: Path) -> None:
    """Read the buffers' parameters, and the persistent buffers of `stock`: only the boxes that this rank holds. Every element
    must be found."""
    grad_views = {slot.name: _places(*buffer.held(slot, buffer.master)) for buffer in buffers for slot in buffer.slots}
    for name, tensor in persistent_buffers(stock).items():
        grad_views[name] = {box: tensor.view(-1) for box in Layout(tuple(tensor.shape)).boxes()}
    wanted = {name: list(boxes) for name, boxes in grad_views.items() if boxes}
    for name, box, values in read_weights(folder, stock, wanted):
        grad_views[name][box].copy_(values.flatten())


def _places(layout: Layout, held: Tensor) -> dict[Box, Tensor]:
    """The flat piece of `held` that is each box of its layout."""
    boxes = layout.boxes()
    return dict(zip(boxes, held.split([box.numel for box in boxes]), strict=True)) if boxes else {}
