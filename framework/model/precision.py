"""Dtypes by their names in recipes."""

import re
from pathlib import Path

import torch

from framework.recipe.schema import Precision

DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,  # of the matmuls only: what goes in and comes out is bf16
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype of forward and backward; auto is bf16 where the device multiplies it natively."""
    if precision.compute != "auto":
        return DTYPES[precision.compute]
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        flags = Path("/proc/cpuinfo")
        native = flags.exists() and re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", flags.read_text()) is not None
    return torch.bfloat16 if native else torch.float32


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for partial sums of numbers of `dtype`, which would each be rounded once more: at least fp32."""
    return torch.promote_types(dtype, torch.float32)
