"""Keep an fp64 model in fp64.

Hugging Face's models widen bf16 to fp32 where it matters: `.float()`, `.to(torch.float32)`, `dtype=torch.float32` in norms,
softmax and routers. In an fp64 model the same lines narrow, and a difference of 1e-16 between two orders of summation
becomes one of 6e-8 wherever it lies across a rounding border. Comparing to 1e-9 needs a model that stays in fp64.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def keep_double(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """While it is entered, casts from fp64 to fp32 do nothing; for another `dtype` of the model it does nothing itself."""
    return _KeepDouble() if dtype == torch.float64 else nullcontext()


class _KeepDouble(TorchFunctionMode):
    """Sees every call of torch's functions, forward and backward, in this thread."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in kwargs.items()}
        return func(*args, **kwargs)

    def _backward(self, loss: Tensor, gradient: Tensor | None = None, **options: Any) -> None:
        """Torch leaves a mode while it handles a call, and all of backward is one call: layers that are recomputed in it would
        be computed without."""
        with self:
            torch.autograd.backward(loss, gradient, **options)
