"""Linear layers whose three matmuls multiply fp8 numbers (Micikevicius et al. 2022, arXiv 2209.05433): torchao's scales, casts
and kernels behind our `Matmul`. Needs the optional dependency `torchao`, so it is imported where `precision.compute=fp8` only.

    Y = X W^T + b        X, W in e4m3
    dX = dY W            dY in e5m2, W in e4m3
    dW = dY^T X          dY in e5m2, X in e4m3, in the dtype of the main gradient

A factor is multiplied by a scale that takes its largest value to the end of fp8's range, cast, and the product divided by both
scales. Scales are powers of two, found anew for each matmul: one for the whole factor ("tensor"), or one for each row of the left
and each column of the right factor ("row"; then gradients are in e4m3 too). What stands between matmuls stays bf16.

The largest value of a weight is found once after each update. GPUs find it in one pass and cast in another (`CASTS`), which
gives a gradient for both of its matmuls at once.

Where the device has no kernel, products of the same fp8 numbers are computed in fp32: exact, and slower than bf16.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchao.float8.float8_ops import addmm_float8_unwrapped
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from framework.comm.fused import FP8_CAPABILITY, Fused
from framework.model.matmul import Matmul

Scaling = Literal["tensor", "row"]
# fp8 numbers [R, K rounded up to ALIGNMENT], contiguous, and the scale that they were multiplied by, [] or [R, 1] fp32.
Factor = tuple[Tensor, Tensor]
# Kernels sum over a multiple of so many products.
ALIGNMENT = 16
# The first NVIDIA GPUs with a kernel, by compute capability: Ada; for scales by row Hopper.
CAPABILITIES = {"tensor": FP8_CAPABILITY, "row": (9, 0)}
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
        # The weight's largest values: of all, or by row and by column.
        self._largest: dict[bool, Tensor] = {}
        # The gradient of the output that was cast last, and dY^T as a factor.
        self._cast: tuple[Tensor, Factor] | None = None

    def invalidate(self) -> None:
        self._largest.clear()

    def forward(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not x.numel() or not self.matrix.numel():
            return super().forward(x, bias, out)
        y = multiply_factors(
            quantize(_rows(x), E4M3, self.scaling), self._quantize_weight(False), x.dtype, is_fast=True
        )
        return _deliver(y if bias is None else y + bias, x, out)

    def input_gradient(self, dy: Tensor, out: Tensor | None = None) -> Tensor:
        if not dy.numel() or not self.matrix.numel():
            return super().input_gradient(dy, out)
        dx = multiply_factors(self._quantize_gradient(dy), self._quantize_weight(True), dy.dtype)
        return _deliver(dx, dy, out)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor | None:
        # Cast already, if the input's gradient was computed just now.
        given = self._cast[1] if self._cast is not None and self._cast[0] is dy else None
        self._cast = None
        compute = partial(self._multiply_gradients, given)
        left, right = (_rows(x), _rows(dy)) if self.is_transposed else (_rows(dy), _rows(x))
        if self.grad_view is None:
            return compute(left, right, x.dtype)
        self.grad_view.add_matmul(left, right, partial(_accumulate, compute))
        return None

    def _quantize_weight(self, is_turned: bool) -> Factor:
        """W, or W^T. Called in forward and backward of each microbatch, while the weight stays as it is."""
        matrix, kernel = self.matrix.t() if is_turned else self.matrix, CASTS.on(self.matrix.device)
        of = is_turned and self.scaling == "row"
        if of not in self._largest:
            self._largest[of] = kernel.find_largest(matrix, self.scaling == "row")
        return kernel.cast(matrix, self._largest[of], E4M3)

    def _quantize_gradient(self, dy: Tensor) -> Factor:
        """dY; and dY^T, of the same scale, where the weight's gradient is computed next."""
        rows, kernel = _rows(dy), CASTS.on(dy.device)
        largest = kernel.find_largest(rows, self.scaling == "row")
        if self.scaling == "row" or self.grad_view is None or self.grad_view.is_deferred:
            return kernel.cast(rows, largest, self.gradient_dtype)
        numbers, turned, scale = kernel.cast_both(rows, largest, self.gradient_dtype)
        self._cast = dy, (turned, scale)
        return numbers, scale

    def _multiply_gradients(self, given: Factor | None, left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
        """left^T right.  left: [R, M]; right: [R, N]: gradients and inputs. given: the gradients' factor if it is known."""
        if not left.numel() or not right.numel():  # no token, of which there is no largest value either
            return left.new_zeros(left.shape[1], right.shape[1], dtype=dtype)
        x, dy = (left, right) if self.is_transposed else (right, left)
        of_dy = quantize(dy.t(), self.gradient_dtype, self.scaling) if given is None else given
        of_x = quantize(x.t(), E4M3, self.scaling)
        return multiply_factors(*((of_x, of_dy) if self.is_transposed else (of_dy, of_x)), dtype)


def multiply_factors(left: Factor, right: Factor, out_dtype: torch.dtype, is_fast: bool = False) -> Tensor:
    """left right^T.  left: of [M, K]; right: of [N, K] -> [M, N]. is_fast: the kernel may add in less than fp32, as all do in
    forward."""
    (a, a_scale), (b, b_scale) = left, right
    if not has_kernel(a.device, "row" if a_scale.ndim else "tensor"):
        return F.linear(_dequantize(a, a_scale), _dequantize(b, b_scale)).to(out_dtype)
    return addmm_float8_unwrapped(a, a_scale, b.t(), b_scale.t(), out_dtype, use_fast_accum=is_fast)


def quantize(x: Tensor, dtype: torch.dtype, scaling: Scaling) -> Factor:
    """x as a factor.  x: [R, K], any strides."""
    kernel = CASTS.on(x.device)
    return kernel.cast(x, kernel.find_largest(x, scaling == "row"), dtype)


class TorchCast:
    """The passes over a factor [R, K], of any strides, that is cast to fp8, by torch's operations."""

    def find_largest(self, x: Tensor, by_row: bool) -> Tensor:
        """The largest absolute value: [], or [R, 1]."""
        return x.abs().amax(-1, keepdim=True) if by_row else x.abs().amax()

    def cast(self, x: Tensor, largest: Tensor, dtype: torch.dtype) -> Factor:
        """x as a factor, of the scale that belongs to the largest value."""
        scale = scale_of(largest, dtype)
        return _align(cast(x, scale, dtype)), scale

    def cast_both(self, x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The numbers of x, those of x^T, [K, R rounded up], and the one scale of both."""
        scale = scale_of(largest, dtype)
        numbers = cast(x, scale, dtype)
        return _align(numbers), _align(numbers.t()), scale


def _align(numbers: Tensor) -> Tensor:
    """[R, K] -> [R, K rounded up], contiguous."""
    missing = -numbers.shape[1] % ALIGNMENT  # of a microbatch's tokens, over which gradients of weights are summed
    words = numbers.contiguous().view(torch.uint8)
    return (F.pad(words, (0, missing)) if missing else words).view(numbers.dtype)


def _load_triton() -> Any:
    from framework.model.triton_kernels import TritonCast

    return TritonCast(ALIGNMENT)


def _compute_example(kernel: TorchCast, device: torch.device) -> list[Tensor]:
    """Factors of numbers over all of fp8's range and below it, as they lie and turned, with scales of both kinds."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.exp2(-24 * torch.rand(70, 37, generator=generator))
    x = (sizes * torch.randn(70, 37, generator=generator)).to(device, torch.bfloat16)
    found = []
    for dtype in (E4M3, E5M2):
        for each in (x, x.t()):
            found += [*kernel.cast_both(each, kernel.find_largest(each, False), dtype)]
            found += [*kernel.cast(each, kernel.find_largest(each, True), dtype)]
    return [each.float() for each in found]


CASTS = Fused("fp8's casts", TorchCast(), _load_triton, _compute_example, True, FP8_CAPABILITY)


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
    compute: Callable[[Tensor, Tensor, torch.dtype], Tensor], view: Tensor, left: Tensor, right: Tensor, is_first: bool
) -> None:
    """`accumulate_matmul` in fp8.  view: [M, N]; left: [K, M]; right: [K, N]."""
    gradient = compute(left, right, view.dtype)
    view.copy_(gradient) if is_first else view.add_(gradient)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _deliver(y: Tensor, like: Tensor, out: Tensor | None) -> Tensor:
    """y with the leading dims of `like`, in `out` if that is given.  y: [R, N]; like: [..., K]; out: [..., N]."""
    y = y.view(*like.shape[:-1], y.shape[-1])
    return y if out is None else out.copy_(y)
