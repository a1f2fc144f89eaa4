"""The oracle's loss scale, as textbooks have it: a number of Python's, asked of the host in each step."""

from collections.abc import Iterable

from torch import Tensor

from framework.recipe.schema import Precision

INITIAL, GROWTH_STEPS = 65536.0, 2000


class PlainLossScale:
    """value: what the loss is multiplied by before backward; 1 in every dtype but fp16."""

    def __init__(self, precision: Precision):
        self._is_dynamic = precision.compute == "fp16" and precision.loss_scale in (None, "dynamic")
        self.value = INITIAL if self._is_dynamic else float(precision.loss_scale or 1.0)
        self._clean, self._is_finite = 0, True

    def unscale(self, masters: Iterable[Tensor]) -> None:
        """Divide the masters' gradients by the scale."""
        gradients = [master.grad for master in masters if master.grad is not None]
        for gradient in gradients:
            gradient /= self.value
        self._is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)

    def take(self) -> bool:
        """Whether the step updates; concludes it."""
        if self._is_dynamic:
            self._clean = self._clean + 1 if self._is_finite else 0
            if not self._is_finite:
                self.value /= 2
            elif self._clean == GROWTH_STEPS:
                self.value, self._clean = 2 * self.value, 0
        return self._is_finite
