"""Weights that travel as fp8 numbers: an all-gather of half the bytes, with which not one bit of the run changes.

What multiplies them casts them to fp8 anyway, with one scale for the whole weight (`model/fp8.py`). Here each rank casts its part
of the weight before the all-gather, with that same scale, for which the ranks agree on the largest absolute value, once after
each update. Scales are powers of two, so what arrives is exact in bf16, and its own cast gives the same fp8 numbers again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.transfer import fetch
from framework.model.fp8 import E4M3, cast, scale_of
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.plan_buffers import Slot


class Fp8Gather:
    """All-gathers of the buffers of one stage whose weights travel as fp8. buffers: all on the same axes."""

    def __init__(self, buffers: Sequence[UnitBuffer]):
        self._buffers = buffers
        self._scales: dict[int, Tensor] = {}

    def find_scales(self) -> None:
        """Agree on the scale of each weight, from what each rank owns of it: an all-reduce of a number for each weight. After
        each update, before the first `encode`."""
        views = [buffer.held(slot, buffer.owned(buffer.shard))[1] for buffer in self._buffers for slot in buffer.slots]
        device = self._buffers[0].full.device
        largest = torch.zeros(len(views), device=device)
        filled = [index for index, view in enumerate(views) if view.numel()]
        if filled:
            found = torch._foreach_norm([views[index] for index in filled], float("inf"))
            largest[filled] = torch.stack([fetch(each, device) for each in found]).float()
        axes = self._buffers[0].plan.axes
        for axis in (axes.update, axes.shard):
            all_reduce(largest, axis, "max", label="scales of fp8")
        scales = scale_of(largest, E4M3)
        counts = [len(buffer.slots) for buffer in self._buffers]
        self._scales = dict(zip(map(id, self._buffers), scales.split(counts), strict=True))

    def encode(self, buffer: UnitBuffer) -> Tensor:
        """This rank's part as it travels: [numel_part] uint8, on the device."""
        plan, scales, part = buffer.plan, self._scales[id(buffer)], fetch(buffer.shard, buffer.full.device)
        sent = torch.zeros(plan.numel_part, dtype=torch.uint8, device=part.device)
        for index, slot in enumerate(plan.slots):
            low, high = _clip(slot, plan.part_start, plan.numel_part)
            sent.view(E4M3)[low:high] = cast(part[low:high], scales[index], E4M3)
        return sent

    def decode(self, buffer: UnitBuffer, arrived: Tensor, full: Tensor) -> None:
        """Write the parts that have come.  arrived: [numel_padded] uint8; full: [numel_padded] bf16."""
        scales, numbers = self._scales[id(buffer)], arrived.view(E4M3)
        for index, slot in enumerate(buffer.slots):
            of_slot = slice(slot.start, slot.stop)
            torch.div(numbers[of_slot].to(full.dtype), scales[index], out=full[of_slot])


def _clip(slot: Slot, start: int, length: int) -> tuple[int, int]:
    """The slot's elements within [start, start + length), as a range that counts from `start`."""
    low, high = max(slot.start, start) - start, min(slot.stop, start + length) - start
    return low, max(low, high)
