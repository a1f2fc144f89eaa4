"""`BlockCodec` and the rows of frozen weights in Triton: codes are made, and read, in one pass over their numbers.

Bit for bit what torch's operations make: numbers are rounded by fp32's additions, half to even, before they are cast, and
products are not contracted with sums. Programs are in one dim: in others a launch has 65,535, and there are more rows of experts.
A program has one block of a message, or ELEMENTS numbers of rows.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

# Beside a number that is 1.5 * 2^23 spacings large fp32 has whole spacings only.
WHOLE, SMALLEST_SCALE = tl.constexpr(12582912.0), tl.constexpr(2.0**-126)
# Spacing of fp8 numbers relative to the power of two below them, and the smallest spacing.
SPACING, LEAST_SPACING = tl.constexpr(2.0**-3), tl.constexpr(2.0**-9)


@triton.jit
def _code(numbers, KIND: tl.constexpr):
    """Codes of scaled fp32 numbers, as int32 of which the low bits count."""
    if KIND == "fp8":
        words = numbers.to(tl.int32, bitcast=True)
        size = (words & 0x7FFFFFFF).to(tl.float32, bitcast=True)
        below = (words & 0x7F800000).to(tl.float32, bitcast=True)
        whole = tl.maximum(below * SPACING, LEAST_SPACING) * WHOLE
        rounded = ((size + whole) - whole).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        return rounded | ((words >> 24) & 0x80)  # the sign, of zeros too
    return ((numbers + WHOLE) - WHOLE).to(tl.int32)


@triton.jit
def _encode(
    x, message, n, blocks, width, x_stride, x_inner, message_stride, message_inner,
    LARGEST: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    x += row // width * x_stride + row % width * x_inner
    message += row // width * message_stride + row % width * message_inner
    # Numbers of even and of odd places, which int4 puts into one byte.
    places = block * BLOCK + 2 * tl.arange(0, BLOCK // 2)
    even = tl.load(x + places, mask=places < n, other=0.0).to(tl.float32)
    odd = tl.load(x + places + 1, mask=places + 1 < n, other=0.0).to(tl.float32)
    # Compare absolute values as integers: these have the same order, and NaN is the largest.
    words = tl.maximum(even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    largest = tl.max(words, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(largest, LARGEST), SMALLEST_SCALE)
    if KIND == "fp8":
        scale = ((scale.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    tl.store(message.to(tl.pointer_type(tl.float32)) + block, scale)
    inverse = tl.div_rn(1.0, scale)
    low, high, codes = _code(even * inverse, KIND), _code(odd * inverse, KIND), message + 4 * blocks
    if KIND == "int4":
        tl.store(codes + places // 2, ((low & 0xF) | ((high & 0xF) << 4)).to(tl.uint8), mask=places < n)
    else:
        tl.store(codes + places, (low & 0xFF).to(tl.uint8), mask=places < n)
        tl.store(codes + places + 1, (high & 0xFF).to(tl.uint8), mask=places + 1 < n)


@triton.jit
def _decode_sum(
    messages, out, n, blocks, width, ranks, rank_stride, message_stride, message_inner, out_stride, out_inner,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    messages += row // width * message_stride + row % width * message_inner
    out += row // width * out_stride + row % width * out_inner
    places = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    message = messages
    for _ in range(ranks):
        codes = message + 4 * blocks
        scale = tl.load(message.to(tl.pointer_type(tl.float32)) + block)
        if KIND == "int4":
            byte = tl.load(codes + places // 2, mask=places < n, other=0).to(tl.int32)
            code = (((byte >> (4 * (places % 2))) & 0xF) ^ 8) - 8
        else:
            byte = tl.load(codes + places, mask=places < n, other=0)
            code = byte.to(tl.float8e4nv, bitcast=True) if KIND == "fp8" else byte.to(tl.int8, bitcast=True)
        total += code.to(tl.float32) * scale
        message += rank_stride  # added, not multiplied: the product would exceed 32 bits
    tl.store(out + places, total.to(out.dtype.element_ty), mask=places < n)


class TritonCodes:
    """`codec.TorchCodes` in Triton, of at most 3 dims of fp32 or narrower numbers."""

    def encode(self, codec: Any, x: Tensor, message: Tensor) -> None:
        while x.ndim < 3:
            x, message = x[None], message[None]
        (a, b, n), blocks = x.shape, triton.cdiv(x.shape[2], codec.block)
        strides, options = (*x.stride()[:2], *message.stride()[:2]), (codec.largest, codec.kind, codec.block)
        _encode[(blocks * a * b,)](x, message, n, blocks, b, *strides, *options, enable_fp_fusion=False)

    def decode_sum(self, codec: Any, messages: Tensor, out: Tensor) -> None:
        while out.ndim < 3:
            messages, out = messages[:, None], out[None]
        (a, b, n), blocks = out.shape, triton.cdiv(out.shape[2], codec.block)
        strides, options = (*messages.stride()[:3], *out.stride()[:2]), (codec.kind, codec.block)
        _decode_sum[(blocks * a * b,)](
            messages, out, n, blocks, b, len(messages), *strides, *options, enable_fp_fusion=False
        )


# Numbers of a program, and of a launch: places within it are of 32 bits.
ELEMENTS, LARGEST_LAUNCH = 1024, 2**30
_WHERE = ["here", "count", "width", "numel"]


@triton.jit(do_not_specialize=_WHERE)
def _decode_rows(
    table, codes, scales, columns, out, here, count, width, numel, IS_NF4: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_in = element < numel
    place = here.to(tl.int64) + element
    if IS_NF4:
        pair = tl.load(codes + place // 2, mask=is_in, other=0).to(tl.int32)
        code = (pair >> (4 * (place % 2).to(tl.int32))) & 0xF
    else:
        code = tl.load(codes + place, mask=is_in, other=0).to(tl.int32)
    row = element // width
    within = tl.load(columns + element % width, mask=is_in, other=0) - tl.load(columns)
    scale = tl.load(scales + row.to(tl.int64) * count + within, mask=is_in, other=0.0)
    number = tl.load(table + code, mask=is_in, other=0.0) * scale
    if out.dtype.element_ty == tl.bfloat16:
        # Half to even by integers, as the interpreter has no such cast.
        words = number.to(tl.int32, bitcast=True)
        rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
        tl.store(out + element, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=is_in)
    else:
        tl.store(out + element, number.to(out.dtype.element_ty), mask=is_in)


class TritonRows:
    """`row_codes.TorchRows` of `parallel/zero` in Triton."""

    chunk = LARGEST_LAUNCH

    def decode(self, table: Tensor, codes: Tensor, here: int, scales: Tensor, columns: Tensor, out: Tensor) -> None:
        numel = out.numel()
        where = (here, scales.shape[1], out.shape[1], numel)
        _decode_rows[(triton.cdiv(numel, ELEMENTS),)](
            table, codes, scales, columns, out, *where, IS_NF4=len(table) == 16, ELEMENTS=ELEMENTS
        )
