"""The matrix product of a linear layer, in the fastest form that the device has."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# Below this many multiplications a product is too small for another kernel to matter.
SMALL_MATMUL = 2**20


def _is_intel() -> bool:
    """Whose processor this is; torch does not tell."""
    described = Path("/proc/cpuinfo")
    return described.exists() and "GenuineIntel" in described.read_text()


# torch's own fp32 product is MKL's, which takes its fast path on Intel's processors only.
MKL_IS_FAST = _is_intel()


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b.  x: [..., K]; weight: [N, K], any strides; bias: [N]; y: [..., N]. Not differentiable.

    torch sends fp32 products on CPUs to MKL, which runs at half speed or less on processors that are not Intel's: 110
    against 235 GFLOP/s on one core of an AMD EPYC with AVX-512, 2026-11-21, scripts/bench/matmul.py. oneDNN's kernel, the
    one that torch.compile emits, computes the same IEEE products. On a Xeon it is the slower one, by 30% for gradients of
    weights; other dtypes and devices have one good kernel already.
    """
    if _has_faster_kernel(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def matmul_into(place: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """place = x W^T + b.  place: [..., N], rows of a larger tensor; the rest as in `matmul`.

    In the place itself where torch's kernel makes the product and rows follow one another.
    """
    if not place.is_contiguous() or _has_faster_kernel(x, weight):
        place.copy_(matmul(x, weight, bias))
        return
    rows, out = x.reshape(-1, x.shape[-1]), place.view(-1, place.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def accumulate_matmul(place: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """place = left right^T if it is the first, else place += left right^T.  left: [M, K]; right: [N, K]; any strides.

    In the place itself where torch's kernel makes the product, without a tensor between.
    """
    if left.dtype != place.dtype or _has_faster_kernel(left, right):
        product = matmul(left, right)
        place.copy_(product) if is_first else place.add_(product)
    elif is_first:
        torch.mm(left, right.t(), out=place)
    else:
        place.addmm_(left, right.t())


def _has_faster_kernel(x: Tensor, weight: Tensor) -> bool:
    return (
        not MKL_IS_FAST
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() * weight.shape[0] >= SMALL_MATMUL
        and torch.backends.mkldnn.is_available()
    )
