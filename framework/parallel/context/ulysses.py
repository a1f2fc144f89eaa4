"""Ulysses: ranks exchange heads for tokens, attend with some of the heads, and exchange back (Jacobs et al. 2023).

    outside    [B, C, H, D]          all heads of this rank's tokens
    inside     [B, u C, H/u, D]      this rank's heads of all u ranks' tokens, in the order of rows

q, k and v are one message, the output is another; gradients travel the other way by the adjoint maps. With F elements of a token
in all heads of q, k and v, a rank sends (u-1)/u of B C F elements in and of B C H Dv out, and in backward as many.

Where key-value heads are fewer than ranks, or not divided by them, each rank gets those that its query heads use. Some then go to
several ranks, whose gradients are added up at home in fp32 at least.

    u ranks of `ulysses`; B sequences, C tokens of each on a rank, in 1 or 2 chunks; H heads
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Any

import torch
from torch import Tensor

from framework.comm.collectives import all_gather, all_to_all
from framework.comm.communicator import Communicator
from framework.mesh.context import Interval
from framework.model.block_attention import Scores
from framework.model.precision import sums_dtype

# The heads that a rank gets of each tensor; one for each rank.
Shares = Sequence[tuple[Interval, ...]]


class HeadExchange:
    """Exchanges heads for tokens along an axis; the identity on one rank. chunks: into which a rank's tokens are divided."""

    def __init__(self, axis: Communicator, chunks: int):
        self.axis, self.chunks = axis, chunks

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, C, .] -> [B, this rank's heads, u C, .], of one dtype; the heads of q stay a multiple of those of k and v.
        Raises AssertionError where the axis does not divide the heads of q."""
        if self.axis.size == 1:
            return q, k, v
        shares = share_heads(q.shape[1], k.shape[1], self.axis.size)
        index = _repeat_kv_heads(q.shape[1], k.shape[1], shares, self.axis)
        exchange = _Exchange(self.axis, self.chunks, shares)
        # Copied apart: with the tokens of a head a whole message's row apart, CPUs' flash attention takes 6% longer at 2k tokens.
        inside = _Enter.apply(exchange, *(x.transpose(1, 2) for x in (q, k, v)))
        q, k, v = (x.transpose(1, 2).contiguous() for x in inside)
        return q, _take_heads(k, index), _take_heads(v, index)

    def leave(self, out: Tensor) -> Tensor:
        """[B, u C, this rank's heads, Dv] -> [B, C, heads, Dv]."""
        if self.axis.size == 1:
            return out
        shares = [(heads,) for heads in divide_heads(out.shape[2] * self.axis.size, self.axis.size)]
        return _Leave.apply(_Exchange(self.axis, self.chunks, shares), out)

    def select_scores(self, scores: Scores) -> Scores:
        """The scores of this rank's heads."""
        return scores if scores.slopes is None else replace(scores, slopes=self.select(scores.slopes))

    def select(self, x: Tensor) -> Tensor:
        """This rank's heads of a vector [H]; the others' gradients are zero here."""
        start, stop = divide_heads(len(x), self.axis.size)[self.axis.rank]
        return x[start:stop]

    def gather_rows(self, x: Tensor) -> Tensor:
        """Numbers of tokens [B, C] -> [B, u C], in the order of rows. Sends x to u-1 ranks."""
        if self.axis.size == 1:
            return x
        everyone = x.new_empty(self.axis.size, *x.shape)
        all_gather(everyone, x.contiguous(), self.axis)
        return everyone.unflatten(2, (self.chunks, -1)).permute(1, 2, 0, 3).flatten(1)


def divide_heads(heads: int, size: int) -> list[Interval]:
    """Which heads each rank gets. Raises AssertionError where they are not equally many."""
    assert heads % size == 0, f"{size} ranks of ulysses do not divide {heads} heads"
    bounds = range(0, heads + 1, heads // size)
    return list(pairwise(bounds))


def share_heads(heads: int, kv_heads: int, size: int) -> list[tuple[Interval, Interval, Interval]]:
    """The heads of q, k and v that each rank gets: the key-value heads are those that its query heads use."""
    group = heads // kv_heads
    shares = []
    for start, stop in divide_heads(heads, size):
        kv = start // group, -(-stop // group)
        shares.append(((start, stop), kv, kv))
    return shares


def _repeat_kv_heads(heads: int, kv_heads: int, shares: Shares, axis: Communicator) -> list[int]:
    """The numbers, among a rank's key-value heads, of those that its query heads use in turn: each as often as needed so that all
    are used by equally many neighbours. [0, 1, ...] where heads divide evenly."""
    (start, stop), (first, _), _ = shares[axis.rank]
    group = heads // kv_heads
    return [head // group - first for head in range(start, stop, gcd(group, stop - start))]


def _take_heads(x: Tensor, index: list[int]) -> Tensor:
    """x: [B, n, C, D] -> [B, len(index), C, D]."""
    # Not index_select, whose gradient on CUDA is added up in no fixed order.
    return x if index == list(range(x.shape[1])) else torch.stack([x[:, number] for number in index], dim=1)


@dataclass(frozen=True)
class _Exchange:
    """Two maps that are each other's adjoint, of tensors whose heads are shared out as `shares` says."""

    axis: Communicator
    chunks: int
    shares: Shares

    def enter(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[B, C, heads, D] each -> [B, u C, this rank's heads, D]."""
        B, C = tensors[0].shape[:2]
        widths = [x.shape[3] for x in tensors]
        lengths = [B * C * self._width(intervals, widths) for intervals in self.shares]
        sent = tensors[0].new_empty(sum(lengths))
        # Tokens outside, tensors inside: so what arrives is in the order of rows at once, for one sequence and one chunk.
        for message, intervals in zip(sent.split(lengths), self.shares, strict=True):
            places = _columns(message.view(B, C, -1), intervals, widths)
            for place, x, (start, stop) in zip(places, tensors, intervals, strict=True):
                place.copy_(x[:, :, start:stop])
        own = self.shares[self.axis.rank]
        came = sent.new_empty(self.axis.size, B, self.chunks, C // self.chunks, self._width(own, widths))
        all_to_all(came.view(-1), sent, self.axis, [came[0].numel()] * self.axis.size, lengths)
        return _columns(came.permute(1, 2, 0, 3, 4).reshape(B, self.axis.size * C, -1), own, widths)

    def leave(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """[B, u C, this rank's heads, D] each -> [B, C, heads, D]; a head that several ranks have is the sum of theirs."""
        B, C = tensors[0].shape[0], tensors[0].shape[1] // self.axis.size
        widths, own = [x.shape[3] for x in tensors], self.shares[self.axis.rank]
        sent = tensors[0].new_empty(self.axis.size, B, self.chunks, C // self.chunks, self._width(own, widths))
        for place, x in zip(_columns(sent, own, widths), tensors, strict=True):
            place.copy_(x.unflatten(1, (self.chunks, self.axis.size, -1)).permute(2, 0, 1, 3, 4, 5))
        lengths = [B * C * self._width(intervals, widths) for intervals in self.shares]
        came = sent.new_empty(sum(lengths))
        all_to_all(came, sent.view(-1), self.axis, lengths, [sent[0].numel()] * self.axis.size)
        del sent  # before the heads are joined, when most is held
        messages = [
            _columns(message.view(B, C, -1), intervals, widths)
            for message, intervals in zip(came.split(lengths), self.shares, strict=True)
        ]
        return [
            _join_heads([message[number] for message in messages], [intervals[number] for intervals in self.shares])
            for number in range(len(tensors))
        ]

    @staticmethod
    def _width(intervals: Sequence[Interval], widths: Sequence[int]) -> int:
        """Elements of a token in these heads of all tensors."""
        return sum((stop - start) * width for (start, stop), width in zip(intervals, widths, strict=True))


def _columns(x: Tensor, intervals: Sequence[Interval], widths: Sequence[int]) -> list[Tensor]:
    """x: [..., elements of a token] -> for each tensor [..., its heads, D], views."""
    sizes = [(stop - start) * width for (start, stop), width in zip(intervals, widths, strict=True)]
    return [part.unflatten(-1, (-1, width)) for part, width in zip(x.split(sizes, dim=-1), widths, strict=True)]


def _join_heads(parts: Sequence[Tensor], intervals: Sequence[Interval]) -> Tensor:
    """parts: [B, C, n, D] of each interval of heads -> [B, C, heads, D], where intervals overlap their sum."""
    if all(before[1] == after[0] for before, after in pairwise(intervals)):
        return torch.cat(list(parts), dim=2)
    B, C, _, D = parts[0].shape
    total = parts[0].new_zeros(B, C, intervals[-1][1], D, dtype=sums_dtype(parts[0].dtype))
    for part, (start, stop) in zip(parts, intervals, strict=True):
        total[:, :, start:stop] += part
    return total.to(parts[0].dtype)


class _Enter(torch.autograd.Function):
    """`_Exchange.enter`. Nothing is saved: the map is linear."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(exchange.enter(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, *ctx.exchange.leave(gradients)


class _Leave(torch.autograd.Function):
    """`_Exchange.leave` of one tensor."""

    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, x: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.leave([x])[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.enter([gradient])[0]
