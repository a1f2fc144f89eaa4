"""Values that a step moves beside the optimizer's: the loss scale of fp16, and the biases by which routers balance their load.

fp16 has nothing between 0 and 6e-8 and nothing beyond 65,504. Backward is linear, so it gets `scale` in place of 1 as the
gradient of the loss, and all gradients are `scale` times too large until the optimizer divides them, in the pass that clips:

    overflow anywhere (the world's sum is not finite)     the step is skipped, scale <- scale / 2
    GROWTH_STEPS steps without one                        scale <- 2 scale

A power of two changes no digit of a gradient within fp16's range. A number in `precision.loss_scale` stays as it is, and every
other dtype has the scale 1: the same path, in which 1 changes no bit.

Load balancing without an auxiliary loss: after each step the bias that corrects a router's choice of experts goes up for experts
with less than the mean load, and down for experts with more (DeepSeek-V3, section 2.1.2):

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
from framework.recipe.schema import Precision
from framework.train.stage import RankStage

# The values of torch.amp.GradScaler: the first steps find the largest power of two that does not overflow.
INITIAL = 2.0**16
GROWTH_STEPS = 2000
# Where all gradients are zero the scale would grow until it is infinite, and 0 * inf is NaN.
LARGEST = 2.0**40


class LossScale:
    """The scale of one run, equal on all ranks: it follows from sums over the world alone.

    dtype: of the loss. The scale and the steps since it changed live on the device: no step waits for them.
    """

    def __init__(self, precision: Precision, dtype: torch.dtype, device: torch.device):
        self._is_dynamic = precision.is_scale_dynamic
        fixed = precision.loss_scale if isinstance(precision.loss_scale, float) else 1.0
        self._scale = torch.full((), INITIAL if self._is_dynamic else fixed, dtype=dtype, device=device)
        self._clean = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def value(self) -> Tensor:
        """The scale of this step, a scalar on the device, until `update`."""
        return self._scale

    def update(self, is_finite: Tensor) -> None:
        """Conclude a step. is_finite: bool scalar on the device, equal on all ranks. Waits for nothing."""
        if not self._is_dynamic:
            return
        self._clean.add_(1).mul_(is_finite)
        grows = self._clean == GROWTH_STEPS
        self._scale.mul_(torch.where(is_finite, 1.0 + grows.to(self._scale.dtype), 0.5)).clamp_(max=LARGEST)
        self._clean.masked_fill_(grows, 0)

    def read(self) -> tuple[float | None, int]:
        """(scale, steps since it last changed) for a checkpoint; (None, 0) where it never does. Waits for the device."""
        return (self._scale.item(), int(self._clean)) if self._is_dynamic else (None, 0)

    def restore(self, scale: float, clean_steps: int) -> None:
        """Set the values that `read` has returned, of a scale that changes."""
        if self._is_dynamic:
            self._scale.fill_(scale)
            self._clean.fill_(clean_steps)


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
