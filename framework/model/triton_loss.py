"""Softmax statistics and the gradient of logits in one pass each over logits of any floating dtype up to fp32 (`model/loss.py`).

A program reads one row, a block of words after another, and rescales the sum when it meets a larger logit (Milakov and Gimelshein
2018, arXiv 1805.02867).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Words that are in registers at a time: of bf16 8 KiB, 16 numbers for each of 256 threads.
BLOCK = 4096
NUM_WARPS = 8


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
                rows, labels, *sums, rows.stride(0), start, VOCABULARY=rows.shape[1], BLOCK=BLOCK, num_warps=NUM_WARPS
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
            grid = len(rows), triton.cdiv(rows.shape[1], BLOCK)
            _differentiate_block[grid](
                rows, labels, log_sum, weight.to(log_sum.dtype), log_sum if scale is None else scale, out,
                rows.stride(0), out.stride(0), start, rows.shape[1],
                HAS_SCALES=scale is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip


def _with_rows(logits: Tensor) -> Tensor:
    assert logits.dtype != torch.float64, "statistics in fp32 of logits in fp64"
    return logits if logits.stride(1) == 1 else logits.contiguous()
