"""Optimizer states in few bits: random words, codes and roundings, in one pass each (`optim/bit_kernels.py`).

The integer arithmetic of `optim/low_bit.py` and `optim/stochastic_rounding.py`, with equal results, bit for bit.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from framework.mesh.layout import Box
from framework.optim.low_bit import BLOCK, CodeRange
from framework.optim.stochastic_rounding import (
    FACTORS,
    SHIFTS,
    Key,
    find_strides,
    first_number,
    hash_boxes,
    signed,
)

# Elements of a program; of codes so many blocks.
ELEMENTS, BLOCKS = 1024, 32
# Dims of a box that a program takes apart.
MOST_DIMS = 3


@triton.jit
def _fold(words, SHIFT: tl.constexpr):
    return words ^ (words >> SHIFT)


@triton.jit(do_not_specialize=["first", "word_0", "word_1", "word_2"])
def _draw_box(
    out, numel, first, inner, innermost, stride_0, stride_1, stride_2, word_0, word_1, word_2,
    FACTOR_0: tl.constexpr, FACTOR_1: tl.constexpr, FACTOR_2: tl.constexpr,
    SHIFT_0: tl.constexpr, SHIFT_1: tl.constexpr, SHIFT_2: tl.constexpr, SHIFT_3: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    # Words wrap around: products and sums of the low 32 bits are all that is asked for.
    number = first + (element // inner) * stride_0
    number += (element % inner // innermost) * stride_1 + (element % innermost) * stride_2
    words = number.to(tl.uint32) + word_0.to(tl.uint32)
    words = _fold(words, SHIFT_0) * FACTOR_0 + word_1.to(tl.uint32)
    words = _fold(words, SHIFT_1) * FACTOR_1 + word_2.to(tl.uint32)
    words = _fold(words, SHIFT_2) * FACTOR_2
    tl.store(out + element, _fold(words, SHIFT_3).to(tl.int32, bitcast=True), mask=element < numel)


@triton.jit
def _round_elements(values, bits, out, numel, shift, ELEMENTS: tl.constexpr):
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_in = element < numel
    value = tl.load(values + element, mask=is_in, other=0.0).to(tl.float32)
    chance = (tl.load(bits + element, mask=is_in, other=0) >> shift) & 0xFFFF
    words = (value.to(tl.int32, bitcast=True) + chance) >> 16
    tl.store(out + element, words.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=is_in)


@triton.jit
def _base_of(exponents, COUNT: tl.constexpr, MANTISSA: tl.constexpr):
    return tl.maximum(((exponents + 1) << MANTISSA) - COUNT, 0)


@triton.jit
def _encode_blocks(
    values, bits, codes, exponents, num_blocks, shift,
    SIGNED: tl.constexpr, COUNT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = (block < num_blocks)[:, None]
    words = tl.load(values + element, mask=is_in, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    chance = (tl.load(bits + element, mask=is_in, other=0) >> shift) & 0xFFFF
    magnitudes = words & 0x7FFFFFFF
    rounded = (magnitudes + (chance << (7 - MANTISSA))) >> (23 - MANTISSA)
    exponent = tl.max(rounded, 1) >> MANTISSA
    tl.store(exponents + block, exponent.to(tl.uint8), mask=block < num_blocks)
    base = _base_of(exponent, COUNT, MANTISSA)[:, None]
    found = rounded - base
    if SIGNED:
        smallest = (base + 1) << (23 - MANTISSA)
        limit = chance.to(tl.float32) * (smallest.to(tl.float32, bitcast=True) * 0.0000152587890625)
        is_kept = limit.to(tl.int32, bitcast=True) < magnitudes
        found = tl.where(magnitudes < smallest, is_kept.to(tl.int32), found)
        found = tl.where(words < 0, -found, found).to(tl.int8)
    else:
        found = tl.where(magnitudes > 0, tl.maximum(found, 1), 0).to(tl.uint8)
    tl.store(codes + element, found, mask=is_in)


@triton.jit
def _decode_blocks(
    codes, exponents, out, num_blocks,
    COUNT: tl.constexpr, MANTISSA: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = (block < num_blocks)[:, None]
    code = tl.load(codes + element, mask=is_in, other=0).to(tl.int32)
    exponent = tl.load(exponents + block, mask=block < num_blocks, other=0).to(tl.int32)
    magnitudes = tl.abs(code)
    words = (magnitudes + _base_of(exponent, COUNT, MANTISSA)[:, None]) << (23 - MANTISSA)
    value = tl.where(magnitudes > 0, words, 0).to(tl.float32, bitcast=True)
    tl.store(out + element, tl.where(code < 0, -value, value).to(out.dtype.element_ty), mask=is_in)


class TritonBits:
    """`optim.bit_kernels.TorchBits` in Triton."""

    def draw(self, key: Key, boxes: Sequence[Box], shape: Sequence[int], out: Tensor) -> None:
        strides, start = find_strides(shape), 0
        for words, group in hash_boxes(key, boxes, strides):
            for box in group:
                if box.numel:
                    dims = _merge_dims(box, strides)
                    _draw(dims, first_number(box, strides), words, out[start : start + box.numel])
                start += box.numel
        assert start == len(out), (start, len(out))

    def round(self, values: Tensor, bits: Tensor, shift: int, out: Tensor) -> None:
        if len(out):
            grid = (triton.cdiv(len(out), ELEMENTS),)
            _round_elements[grid](values, bits, out, len(out), shift, ELEMENTS=ELEMENTS)

    def encode(
        self, values: Tensor, bits: Tensor, shift: int, codes: Tensor, exponents: Tensor, kind: CodeRange
    ) -> None:
        if len(exponents):
            _encode_blocks[(triton.cdiv(len(exponents), BLOCKS),)](
                values, bits, codes, exponents, len(exponents), shift,
                SIGNED=codes.dtype.is_signed, COUNT=kind.count, MANTISSA=kind.mantissa_bits, BLOCK=BLOCK, BLOCKS=BLOCKS,
            )  # fmt: skip

    def decode(self, codes: Tensor, exponents: Tensor, kind: CodeRange, out: Tensor) -> None:
        if len(exponents):
            _decode_blocks[(triton.cdiv(len(exponents), BLOCKS),)](
                codes, exponents, out, len(exponents),
                COUNT=kind.count, MANTISSA=kind.mantissa_bits, BLOCK=BLOCK, BLOCKS=BLOCKS,
            )  # fmt: skip


def _draw(dims: Sequence[tuple[int, int]], first: int, words: Sequence[int], out: Tensor) -> None:
    """Words of a box's elements, of which `first` is the number of the first one. dims: (size, stride) of each."""
    if len(dims) > MOST_DIMS:
        size, stride = dims[0]
        for index, part in enumerate(out.view(size, -1)):
            _draw(dims[1:], first + index * stride, words, part)
        return
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = [*[(1, 0)] * (MOST_DIMS - len(dims)), *dims]
    strides = map(signed, (stride_0, stride_1, stride_2))
    _draw_box[(triton.cdiv(len(out), ELEMENTS),)](
        out, len(out), signed(first), size_1 * size_2, size_2, *strides, *map(signed, words),
        *FACTORS, *SHIFTS, ELEMENTS=ELEMENTS,
    )  # fmt: skip


def _merge_dims(box: Box, strides: Sequence[int]) -> list[tuple[int, int]]:
    """(size, stride) of a box's dims, of which those are one that elements run through without a gap."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(box.sizes, strides, strict=True):
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        elif size > 1:
            merged.append((size, stride))
    return merged
