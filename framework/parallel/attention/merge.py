"""Merge: one softmax over keys that come in blocks.

A block gives out_b = sum_j exp(s_j - l_b) v_j and l_b = log sum_j exp(s_j) over its keys. Over two blocks

    l = log(exp(l_a) + exp(l_b))          out = exp(l_a - l) out_a + exp(l_b - l) out_b
                                              = out_a + w (out_b - out_a),  w = exp(l_b - l) = sigmoid(l_b - l_a)

A sink is one more key with score `sink` and no value: l' = log(exp(l) + exp(sink)), out' = exp(l - l') out. Sums are kept in fp32
at least, whatever the blocks are computed in: each merge would round once more (TransformerEngine merges in the dtype of `out`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from framework.mesh.token_layout import Interval
from framework.model.precision import sums_dtype


def merge_softmax(out: Tensor, log_sum: Tensor, more: Tensor, log_sum_of_more: Tensor) -> None:
    """Merge `more` into out and log_sum, in place. All of one dtype.

    out, more: [..., n, Dv], sum over keys of probability and value; log_sum, log_sum_of_more: [..., n], log of the sum of
    exp(score), -inf where no key was seen.
    """
    out.lerp_(more, torch.sigmoid(log_sum_of_more - log_sum).unsqueeze(-1))
    torch.logaddexp(log_sum, log_sum_of_more, out=log_sum)


class ChunkSums:
    """Sums over blocks of tensors [B, H, C, D], kept apart for each of a rank's chunks: blocks cover one chunk of queries or all.

    The first block of a chunk is taken over as it is, in its dtype; others are added in one that is wide enough for sums.
    """

    def __init__(self, chunks: int, tokens: int, dtype: torch.dtype):
        self.length, self.dtype = tokens // chunks, sums_dtype(dtype)
        self.parts: list[Tensor | None] = [None] * chunks

    def add(self, queries: Interval, x: Tensor) -> None:
        """x: [B, H, n, D], of the queries (start, stop)."""
        for number, rows in self.cut(queries):
            # Taken over without a copy where dtypes agree: a block's results are nobody else's.
            # The only block of one rank is taken as it is: widened and rounded back it would be the same, after two passes.
            part, mine = self.parts[number], x[:, :, rows]
            self.parts[number] = mine if part is None else part.to(self.dtype).add_(mine)

    def cut(self, queries: Interval) -> Iterator[tuple[int, slice]]:
        """(chunk, its rows among the queries') of every chunk that a block has queries of."""
        first, last = queries[0] // self.length, queries[1] // self.length
        for number in range(first, last):
            yield number, slice((number - first) * self.length, (number + 1 - first) * self.length)

    def write(self, whole: Tensor | None, heads: slice, num_heads: int, dtype: torch.dtype) -> Tensor:
        """Write the sums into some heads of `whole`, [B, num_heads, C, D], made here if None, and return it. Its memory is in the
        order [B, C, heads, D], which is that of projections."""
        first = _filled(self.parts[0])
        B, H, _, D = first.shape
        if len(self.parts) == 1 and (H, first.dtype) == (num_heads, dtype):
            # All there is to write: kernels give this order, so that nothing is copied.
            return first.transpose(1, 2).contiguous().transpose(1, 2)
        if whole is None:
            whole = first.new_empty(B, self.length * len(self.parts), num_heads, D, dtype=dtype).transpose(1, 2)
        for number, part in enumerate(self.parts):
            self._rows(whole[:, heads], number).copy_(_filled(part))
        return whole

    def _rows(self, x: Tensor, number: int) -> Tensor:
        """A chunk's tokens of [B, H, C, ...]."""
        return x[:, :, number * self.length : (number + 1) * self.length]


class MergedOutput(ChunkSums):
    """Outputs [B, H, C, Dv] of blocks and their log-sum-exps [B, H, C], merged. A query's first block is one in which it sees a
    key."""

    def __init__(self, chunks: int, tokens: int, dtype: torch.dtype):
        super().__init__(chunks, tokens, dtype)
        self.log_sums: list[Tensor | None] = [None] * chunks

    def merge(self, queries: Interval, out: Tensor, log_sum: Tensor) -> None:
        """out: [B, H, n, Dv], log_sum: [B, H, n], of the queries (start, stop)."""
        for number, rows in self.cut(queries):
            part, sum_part = self.parts[number], self.log_sums[number]
            mine, sum_mine = out[:, :, rows], log_sum[:, :, rows].to(self.dtype)
            if part is None or sum_part is None:
                self.parts[number], self.log_sums[number] = mine, sum_mine
            else:
                self.parts[number] = wide = part.to(self.dtype)
                merge_softmax(wide, sum_part, mine.to(self.dtype), sum_mine)

    def add_sinks(self, sinks: Tensor) -> None:
        """One more key for every query. sinks: [H], scores."""
        scores = sinks.to(self.dtype)[:, None]
        for number, (part, log_sum) in enumerate(zip(self.parts, self.log_sums, strict=True)):
            # Outputs shrink by the probability that the sink takes: it has no value to add.
            with_sink = torch.logaddexp(_filled(log_sum), scores)
            share = torch.exp(_filled(log_sum) - with_sink).unsqueeze(-1)
            self.parts[number], self.log_sums[number] = _filled(part).to(self.dtype).mul_(share), with_sink

    def write_log_sums(self, out: Tensor) -> None:
        """Write the log-sum-exps into out, [B, H, C]."""
        for number, part in enumerate(self.log_sums):
            self._rows(out, number).copy_(_filled(part))


def sinks_gradient(sinks: Tensor, gradient: Tensor, out: Tensor, log_sum: Tensor) -> Tensor:
    """[H]: - sum over queries of p (gradient . out), where p = exp(sink - log_sum) is a sink's probability.

    gradient, out: [B, H, C, Dv]; log_sum: [B, H, C], sinks included.
    """
    # d out / d sink = -p out: the sink has no value, so all it does is to take probability from the others.
    delta = (gradient.to(log_sum.dtype) * out).sum(-1)
    return -(torch.exp(sinks.to(log_sum.dtype)[:, None] - log_sum) * delta).sum((0, 2)).to(sinks.dtype)


def _filled(part: Tensor | None) -> Tensor:
    assert part is not None, "a chunk of queries has met no block: each sees itself"
    return part
