"""Load balancing without an auxiliary loss: after each step the bias that corrects a router's choice of experts goes up for
experts with less than the mean load, and down for experts with more (DeepSeek-V3, section 2.1.2).

    bias_e += rate * sign(mean load - load_e)

Loads are of the whole batch and equal on all ranks, so the bias is, too. It is a buffer of the model's state dict, or in some
families a parameter that no gradient reaches; then each rank moves what it owns of the master.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.comm.transfer import upload_values
from framework.model.mixtures import Mixture, chosen_tokens
from framework.train.stage import RankStage


@dataclass(frozen=True)
class BiasPart:
    """Elements [start, start + n) of the bias of the mixture in row `row`. values: [n], where they live."""

    row: int
    start: int
    values: Tensor


class RouterBiases:
    """The correction biases of this rank's stages. rate: of one step; 0 leaves them as they are."""

    def __init__(
        self, rate: float, mixtures: tuple[Mixture, ...], stages: Mapping[int, RankStage], device: torch.device
    ):
        self._rate = rate
        self._parts = [part for stage in stages.values() for part in _find_parts(mixtures, stage)] if rate else []
        self._num_experts = upload_values([each.num_experts for each in mixtures], torch.float64, device).view(-1, 1)

    def update(self, sums: Tensor | None, is_finite: Tensor) -> None:
        """Move the biases by one step. sums: of `ExpertLoad.sum_over_ranks`; is_finite: bool scalar on the device, whether the
        step updates. Does not wait for the device."""
        if sums is None or not self._parts:
            return
        loads = chosen_tokens(sums)
        # Whole numbers on both sides, so an expert with exactly the mean stays where it is, on every machine.
        signs = (loads.sum(1, keepdim=True) - loads * self._num_experts).sign() * is_finite
        # Whole numbers, which are the same in any dtype; the rate is rounded to that of the bias, whatever else is computed in.
        small = signs.to(torch.int8)
        own = [small[each.row, each.start : each.start + len(each.values)] for each in self._parts]
        torch._foreach_add_(
            [each.values for each in self._parts],
            [sign.to(each.values) for sign, each in zip(own, self._parts, strict=True)],
            alpha=self._rate,
        )


def _find_parts(mixtures: tuple[Mixture, ...], stage: RankStage) -> list[BiasPart]:
    buffers = dict(stage.model.model.named_buffers())
    parts = [BiasPart(row, 0, buffers[each.bias].view(-1)) for row, each in enumerate(mixtures) if each.bias in buffers]
    rows = {each.bias: row for row, each in enumerate(mixtures) if each.bias}
    for buffer in stage.buffers:
        for slot in (slot for slot in buffer.slots if slot.name in rows):
            layout, values = buffer.held(slot, buffer.master)
            assert layout.interval is not None, "a buffer says what it owns of a slot"
            parts.append(BiasPart(rows[slot.name], layout.interval[0], values))
    return parts
