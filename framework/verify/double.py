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

CASTS = (Tensor.to, Tensor.type, Tensor.type_as)


def keep_double(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """A context in which casts from fp64 to fp32 do nothing, for a model of dtype fp64; else a context without effect."""
    return _KeepDouble() if dtype == torch.float64 else nullcontext()


class _KeepDouble(TorchFunctionMode):
    """Intercepts every call of torch that Python makes in this thread, which is where models cast.

    A mode below autograd would see backward's operations as well, and take longer than they do. torch disables function modes
    inside `Tensor.backward`; where layers are recomputed there, call `torch.autograd.backward`, as `train/stage.py` does.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if len(args) == 1 and not kwargs and func is not Tensor.float:  # most calls: somebody reads a shape
            return func(*args)
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float or (func in CASTS and len(args) > 1 and _dtype_of(args[1]) is torch.float32):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        if func is torch.full and "dtype" not in kwargs and isinstance(args[1], float):
            kwargs = kwargs | {"dtype": torch.float64}  # xglm's least score, which fp32 does not have
        return func(*args, **kwargs)


def _dtype_of(word: Any) -> Any:
    """The dtype of a cast's argument, if it is a tensor whose dtype the cast takes over."""
    return word.dtype if isinstance(word, Tensor) else None
