"""The loss scale of fp16: a factor of the loss before backward, so that small gradients do not become zero.

fp16 has nothing between 0 and 6e-8 and nothing beyond 65,504. Backward is linear, so it gets `scale` in place of 1 as the
gradient of the loss, and all gradients are `scale` times too large until the optimizer divides them, in the pass that clips:

    overflow anywhere (the world's sum is not finite)     the step is skipped, scale <- scale / 2
    GROWTH_STEPS steps without one                        scale <- 2 scale

A power of two changes no digit of a gradient within fp16's range. A number in `precision.loss_scale` stays as it is, and every
other dtype has the scale 1: the same path, in which 1 changes no bit.
"""

import torch
from torch import Tensor

from framework.recipe.schema import Precision

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
