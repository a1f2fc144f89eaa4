"""Keep an fp64 model in fp64.

Hugging Face's models widen bf16 to fp32 where it matters: `.float()`, `.to(torch.float32)`, `dtype=torch.float32` in norms,
softmax and routers. In an fp64 model the same lines narrow, and a difference of 1e-16 between two orders of summation
becomes one of 6e-8 wherever it lies across a rounding border. Comparing to 1e-9 needs a model that stays in fp64.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def keep_double(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """While it is entered, casts from fp64 to fp32 do nothing; for another `dtype` of the model it does nothing itself."""
    return _KeepDouble() if dtype == torch.float64 else nullcontext()


class _KeepDouble(TorchDispatchMode):
    """Sees every operation in this thread, those of backward and of recomputed layers too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("dtype") == torch.float32 and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)
