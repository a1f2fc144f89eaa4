"""Linear layers whose three matmuls multiply fp8 numbers (Micikevicius et al. 2022, arXiv 2209.05433): torchao's scales, casts
and kernels behind our `Matmul`. Needs the optional dependency `torchao`, so it is imported where `precision.compute=fp8` only.

    Y = X W^T + b        X, W in e4m3
    dX = dY W            dY in e5m2, W in e4m3
    dW = dY^T X          dY in e5m2, X in e4m3, in the dtype of the main gradient

A factor is multiplied by a scale that takes its largest value to the end of fp8's range, cast, and the product divided by both
scales. Scales are powers of two, found anew for each matmul: one for the whole factor ("tensor"), or one for each row of the left
and each column of the right factor ("row"; then gradients are in e4m3 too). What stands between matmuls stays bf16.

Where the device has no kernel, products of the same fp8 numbers are computed in fp32: exact, and slower than bf16.
"""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8.float8_ops import addmm_float8_unwrapped
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from framework.model.matmul import Matmul

Scaling = Literal["tensor", "row"]
# Kernels sum over a multiple of so many products.
ALIGNMENT = 16
# The first NVIDIA GPUs with a kernel, by compute capability: Ada; for scales by row Hopper.
CAPABILITIES = {"tensor": (8, 9), "row": (9, 0)}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def has_kernel(device: torch.device, scaling: Scaling) -> bool:
    """Whether the device multiplies fp8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITIES[scaling]


class Fp8Matmul(Matmul):
    """The three matmuls of one linear layer in fp8. Takes and gives bf16; K and N are multiples of ALIGNMENT."""

    def __init__(self, layer: nn.Module, is_transposed: bool, scaling: Scaling) -> None:
        super().__init__(layer, is_transposed)
        self.scaling: Scaling = scaling
        self.gradient_dtype = E5M2 if scaling == "tensor" else E4M3

    def forward(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        y = multiply(_rows(x), self.matrix, (E4M3, E4M3), self.scaling, x.dtype, is_fast=True)
        return _deliver(y if bias is None else y + bias, x, out)

    def input_gradient(self, dy: Tensor, out: Tensor | None = None) -> Tensor:
        dx = multiply(_rows(dy), self.matrix.t(), (self.gradient_dtype, E4M3), self.scaling, dy.dtype)
        return _deliver(dx, dy, out)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor | None:
        x_rows, dy_rows = _rows(x), _rows(dy)
        dtypes = (self.gradient_dtype, E4M3)
        left, right = (x_rows, dy_rows) if self.is_transposed else (dy_rows, x_rows)
        dtypes = dtypes[::-1] if self.is_transposed else dtypes
        if self.grad_view is None:
            return multiply(left.t(), right.t(), dtypes, self.scaling, x.dtype)
        self.grad_view.add_matmul(left, right, partial(_accumulate, dtypes, self.scaling))
        return None


def multiply(
    left: Tensor,
    right: Tensor,
    dtypes: tuple[torch.dtype, torch.dtype],
    scaling: Scaling,
    out_dtype: torch.dtype,
    is_fast: bool = False,
) -> Tensor:
    """left right^T of both cast to fp8.  left: [M, K]; right: [N, K]; any strides -> [M, N].

    dtypes: of left and of right. is_fast: the kernel may add in less than fp32, as all do in forward.
    """
    if not left.numel() or not right.numel():  # no token, of which there is no largest value either
        return left.new_zeros(left.shape[0], right.shape[0], dtype=out_dtype)
    (a, a_scale), (b, b_scale) = (
        _quantize(each, dtype, scaling) for each, dtype in zip((left, right), dtypes, strict=True)
    )
    if not has_kernel(left.device, scaling):
        return F.linear(_dequantize(a, a_scale), _dequantize(b, b_scale)).to(out_dtype)
    return addmm_float8_unwrapped(a, a_scale, b.t(), b_scale.t(), out_dtype, use_fast_accum=is_fast)


def _quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """x in fp8, and the scale that it was multiplied by.  x: [R, K] -> [R, K rounded up], contiguous, and [] or [R, 1] fp32."""
    scale = scale_of(x.abs().amax(-1, keepdim=True) if scaling == "row" else x.abs().amax(), dtype)
    numbers = cast(x, scale, dtype).contiguous()
    missing = -x.shape[1] % ALIGNMENT  # of a microbatch's tokens, over which gradients of weights are summed
    return (F.pad(numbers.view(torch.uint8), (0, missing)).view(dtype) if missing else numbers), scale


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two, fp32, that takes these absolute values to the end of fp8's range, or half way there.

    Multiplying by it rounds nothing. A number that is cast by row and by column is the same but for the smallest ones.
    """
    return amax_to_scale(largest, dtype, round_scales_to_power_of_2=True)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in fp8."""
    return to_fp8_saturated(x.float() * scale, dtype)


def _dequantize(x: Tensor, scale: Tensor) -> Tensor:
    return x.float() / scale


def _accumulate(
    dtypes: tuple[torch.dtype, torch.dtype], scaling: Scaling, view: Tensor, left: Tensor, right: Tensor, is_first: bool
) -> None:
    """`accumulate_matmul` in fp8.  view: [M, N]; left: [K, M]; right: [K, N]."""
    gradient = multiply(left.t(), right.t(), dtypes, scaling, view.dtype)
    view.copy_(gradient) if is_first else view.add_(gradient)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _deliver(y: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    """y with the leading dims of `like`, in `out` if that is given.  y: [R, N]; like: [..., K]; out: [..., N]."""
    y = y.view(*like.shape[:-1], y.shape[-1])
    return y if out is None else out.copy_(y)
