"""Casts of a matmul's factors to fp8 (`model/fp8.py`), and the statistics and the gradient of logits (`model/loss.py`) in
Triton, in one pass each.

Numbers are rounded to fp8's before they are cast, so that they are those of torch's cast whatever the device's own does. Of
logits a program reads one row, a block of words after another, and rescales the sum when it meets a larger logit (Milakov and
Gimelshein 2018, arXiv 1805.02867).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# The numbers of a tile that a program has in registers.
TILE = {"ROWS": 64, "COLUMNS": 128}
NUM_WARPS = 8
# torchao's scale of a factor of zeros is that of this largest value.
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def _find_largest(
    x, largest, rows, columns, row_stride, column_stride,
    BY_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_in = (row < rows)[:, None] & (column < columns)[None, :]
    numbers = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=is_in, other=0.0)
    # Compare absolute values as integers: these have the same order, and NaN is the largest.
    words = numbers.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if BY_ROW:
        tl.atomic_max(largest + row, tl.max(words, 1), mask=row < rows)
    else:
        tl.atomic_max(largest, tl.max(tl.max(words, 1), 0))


@triton.jit
def _power_below(x):
    """The power of two at or below positive numbers."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _scale_of(largest, END: tl.constexpr):
    scale = _power_below(tl.div_rn(END + tl.zeros_like(largest), tl.maximum(largest, SMALLEST)))
    return tl.where(largest < float("inf"), scale, float("nan"))


@triton.jit
def _cast_tile(
    x, largest, scales, numbers, turned, rows, columns, row_stride, column_stride, width, height,
    BY_ROW: tl.constexpr, TURNS: tl.constexpr, END: tl.constexpr, SPACING: tl.constexpr, LEAST_SPACING: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_in = (row < rows)[:, None] & (column < columns)[None, :]
    wide = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=is_in, other=0.0)
    wide = wide.to(tl.float32)
    if BY_ROW:
        scale = _scale_of(tl.load(largest + row, mask=row < rows, other=1.0), END)
        if tl.program_id(1) == 0:
            tl.store(scales + row, scale, mask=row < rows)
        wide = wide * scale[:, None]
    else:
        scale = _scale_of(tl.load(largest), END)
        if tl.program_id(0) + tl.program_id(1) == 0:
            tl.store(scales, scale)
        wide = wide * scale
    # Not by `minimum`, which would make a number of NaN.
    wide = tl.where(wide > END, END, tl.where(wide < -END, -END, wide))
    # Beside a number that is 1.5 * 2^23 spacings large fp32 has whole spacings only, and rounds half to even.
    spacing = tl.maximum(_power_below(wide) * SPACING, LEAST_SPACING)
    whole = spacing * 12582912.0
    narrow = ((wide + whole) - whole).to(numbers.dtype.element_ty)
    tl.store(
        numbers + row[:, None] * width + column[None, :], narrow, mask=(row < rows)[:, None] & (column < width)[None, :]
    )
    if TURNS:
        is_turned = (column < columns)[:, None] & (row < height)[None, :]
        tl.store(turned + column[:, None] * height + row[None, :], tl.trans(narrow), mask=is_turned)


@dataclass(frozen=True)
class TritonCast:
    """`model.fp8.TorchCast` in Triton. alignment: of the columns of what it gives."""

    alignment: int

    def find_largest(self, x: Tensor, by_row: bool) -> Tensor:
        words = torch.zeros((x.shape[0], 1) if by_row else (), dtype=torch.int32, device=x.device)
        # One for the whole factor does not depend on its order: that of memory is read fastest.
        source = x if by_row or x.stride(1) == 1 else x.t()
        grid = tuple(triton.cdiv(size, tile) for size, tile in zip(source.shape, TILE.values(), strict=True))
        _find_largest[grid](source, words, *source.shape, *source.stride(), BY_ROW=by_row, **TILE, num_warps=NUM_WARPS)
        return words.view(torch.float32)

    def cast(self, x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        numbers, _, scale = self._cast(x, largest, dtype, turns=False)
        return numbers, scale

    def cast_both(self, x: Tensor, largest: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return self._cast(x, largest, dtype, turns=True)

    def _cast(self, x: Tensor, largest: Tensor, dtype: torch.dtype, turns: bool) -> tuple[Tensor, Tensor, Tensor]:
        rows, columns = x.shape
        width, height = (-(-size // self.alignment) * self.alignment for size in (columns, rows))
        numbers = torch.empty(rows, width, dtype=dtype, device=x.device)
        turned = torch.empty(columns, height, dtype=dtype, device=x.device) if turns else numbers
        scale = torch.empty_like(largest, dtype=torch.float32)
        info = torch.finfo(dtype)
        grid = triton.cdiv(height if turns else rows, TILE["ROWS"]), triton.cdiv(width, TILE["COLUMNS"])
        _cast_tile[grid](
            x, largest, scale, numbers, turned, rows, columns, *x.stride(), width, height,
            BY_ROW=largest.ndim > 0, TURNS=turns, END=info.max, SPACING=info.eps,
            LEAST_SPACING=info.smallest_normal * info.eps, **TILE, num_warps=NUM_WARPS,
        )  # fmt: skip
        return numbers, turned, scale


# Words that are in registers at a time: of bf16 8 KiB, 16 numbers for each of 256 threads.
WORDS_BLOCK = 4096


@triton.jit
def _read_row(logits, labels, maxima, sums, targets, stride, start, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * stride
    maximum, total = -float("inf"), 0.0
    for offset in range(0, VOCABULARY, BLOCK):
        words = offset + tl.arange(0, BLOCK)
        z = tl.load(first + words, mask=words < VOCABULARY, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(z, 0))
        # Nothing but -inf so far: the difference of two infinities is no number.
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(maximum - shift) + tl.sum(tl.exp(z - shift), 0)
        maximum = higher
    place = tl.load(labels + row) - start
    is_mine = (place >= 0) & (place < VOCABULARY)
    target = tl.load(first + place, mask=is_mine, other=0.0).to(tl.float32)
    tl.store(maxima + row, maximum)
    tl.store(sums + row, total)
    tl.store(targets + row, target)


@triton.jit
def _differentiate_block(
    logits,
    labels,
    log_sums,
    weights,
    scales,
    out,
    stride,
    out_stride,
    start,
    vocabulary,
    HAS_SCALES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = words < vocabulary
    z = tl.load(logits + row * stride + words, mask=is_word, other=0.0).to(tl.float32)
    onehot = (words == tl.load(labels + row) - start).to(tl.float32)
    probability = tl.exp(z - tl.load(log_sums + row))
    if HAS_SCALES:
        probability *= tl.load(scales + row)
    dz = (probability - onehot) * tl.load(weights + row)
    tl.store(out + row * out_stride + words, dz.to(out.dtype.element_ty), mask=is_word)


class TritonLoss:
    """`model.loss.TorchLoss` in Triton."""

    def read(self, logits: Tensor, labels: Tensor, start: int, sums: tuple[Tensor, Tensor, Tensor]) -> None:
        rows = _with_rows(logits)
        if len(rows):
            _read_row[(len(rows),)](
                rows,
                labels,
                *sums,
                rows.stride(0),
                start,
                VOCABULARY=rows.shape[1],
                BLOCK=WORDS_BLOCK,
                num_warps=NUM_WARPS,
            )

    def differentiate(
        self,
        logits: Tensor,
        labels: Tensor,
        start: int,
        log_sum: Tensor,
        weight: Tensor,
        out: Tensor,
        scale: Tensor | None = None,
    ) -> None:
        rows = _with_rows(logits)
        if out.numel():
            assert out.stride(1) == 1, out.stride()
            grid = len(rows), triton.cdiv(rows.shape[1], WORDS_BLOCK)
            _differentiate_block[grid](
                rows, labels, log_sum, weight.to(log_sum.dtype), log_sum if scale is None else scale, out,
                rows.stride(0), out.stride(0), start, rows.shape[1],
                HAS_SCALES=scale is not None, BLOCK=WORDS_BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip


def _with_rows(logits: Tensor) -> Tensor:
    assert logits.dtype != torch.float64, "statistics in fp32 of logits in fp64"
    return logits if logits.stride(1) == 1 else logits.contiguous()
