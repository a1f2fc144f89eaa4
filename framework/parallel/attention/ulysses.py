"""Ulysses: ranks exchange heads for tokens, attend with some of the heads, and exchange back (Jacobs et al. 2023).

    outside    [B, C, H, D]          all heads of this rank's tokens
    inside     [B, u C, H/u, D]      this rank's heads of all u ranks' tokens, in the order of rows

q, k and v are exchanged together, the output behind them; gradients travel the other way by the adjoint maps. With F elements
of a token in all heads of q, k and v, a rank sends (u-1)/u of B C F elements in and of B C H Dv out, and in backward as many.
What stays on a rank is copied to its place and is in no message. Messages of many tokens are cut in up to 4 pieces: while one
travels, the next is packed and the one before is copied to its place, and no more than two are held.

Where key-value heads are fewer than ranks, or not divided by them, each rank gets those that its query heads use. Some then go to
several ranks, whose gradients are added up at home in fp32 at least.

    u ranks of `ulysses`; B sequences, C tokens of each on a rank, in 1 or 2 chunks; H heads
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import gcd

import torch
from torch import Tensor

from framework.comm.collectives import all_gather, start_all_to_all
from framework.comm.communicator import Communicator
from framework.mesh.token_layout import Interval
from framework.model.opaque import apply_map
from framework.model.precision import sums_dtype

# A message costs a GPU's host some copies for each rank, so it is cut where attention takes milliseconds: by the tokens of a
# rank, squared, as attention's work grows.
PIECE_PAIRS = 2**22
MOST_PIECES = 4

# For each rank the heads that it gets of each tensor.
Shares = Sequence[tuple[Interval, ...]]
# Keyed by rank and tensor [B, chunks, n, heads, D]: n tokens of each chunk, in the heads that one of two ranks has.
Views = Sequence[Sequence[Tensor]]


class HeadExchange:
    """Exchanges heads for tokens along an axis; the identity on one rank. chunks: into which a rank's tokens are divided."""

    def __init__(self, axis: Communicator, chunks: int):
        self.axis, self.chunks = axis, chunks
        # The number under which operators of compiled layers find it; a tensor, so given once there is memory.
        self.number: Tensor | None = None

    def enter(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, heads, C, .] -> [B, this rank's heads, u C, .], contiguous, of one dtype; the heads of q stay a multiple of those
        of k and v. Raises AssertionError where the axis does not divide the heads of q."""
        if self.axis.size == 1:
            return q, k, v
        # Computed on every rank for all ranks: who sends what is known without asking.
        shares = share_heads(q.shape[1], k.shape[1], self.axis.size)
        index = _repeat_kv_heads(q.shape[1], k.shape[1], shares, self.axis)
        # Memory head by head, and each tensor apart: with the tokens of a head a whole message's row apart, CPUs' flash attention
        # takes 6% longer at 2k tokens.
        shapes = [
            (x.shape[0], stop - start, self.axis.size * x.shape[2], x.shape[3])
            for x, (start, stop) in zip((q, k, v), shares[self.axis.rank], strict=True)
        ]
        q, k, v = apply_map(self, [x.transpose(1, 2) for x in (q, k, v)], shapes)
        return q, _take_heads(k, index), _take_heads(v, index)

    def leave(self, out: Tensor) -> Tensor:
        """[B, u C, this rank's heads, Dv] -> [B, C, heads, Dv]."""
        if self.axis.size == 1:
            return out
        B, tokens, heads, Dv = out.shape
        return apply_map(self, [out], [(B, tokens // self.axis.size, heads * self.axis.size, Dv)])[0]

    def map(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], is_adjoint: bool) -> list[Tensor]:
        """`enter` of q, k and v, [B, C, heads, .], or `leave` of the output alone; or the adjoint."""
        made = [x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True)]
        leaves, enters = len(tensors) == 1, (len(tensors) == 1) == is_adjoint
        outside, inside = (tensors, made) if enters else (made, tensors)
        heads = [x.shape[2] for x in outside]
        shares: Shares = [(each,) for each in divide_heads(heads[0], self.axis.size)]
        if not leaves:
            shares, inside = share_heads(heads[0], heads[1], self.axis.size), [x.transpose(1, 2) for x in inside]
        exchange = _Exchange(self.axis, self.chunks, shares)
        exchange.enter(outside, inside) if enters else exchange.leave(inside, outside)
        return made

    def gather(self, x: Tensor) -> Tensor:
        """The same of the tokens of all ranks, in the order of rows: [B, C, k] -> [B, u C, k]. Not differentiable."""
        if self.axis.size == 1:
            return x
        parts = x.new_empty(self.axis.size, *x.shape)
        all_gather(parts, x.contiguous(), self.axis)
        return parts.unflatten(2, (self.chunks, -1)).movedim(0, 2).flatten(1, 3)

    def select(self, x: Tensor) -> Tensor:
        """This rank's heads of a vector [H]; the others' gradients are zero here."""
        start, stop = divide_heads(len(x), self.axis.size)[self.axis.rank]
        return x[start:stop]


def divide_heads(heads: int, size: int) -> list[Interval]:
    """The heads of each rank. Raises AssertionError where they are not equally many."""
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


def cut_tokens(tokens: int, chunks: int) -> list[Interval]:
    """The pieces in which a rank's tokens are exchanged: (start, stop) of the tokens of every chunk."""
    length = tokens // chunks
    parts = max(1, min(MOST_PIECES, tokens**2 // PIECE_PAIRS, length))
    return list(pairwise(length * number // parts for number in range(parts + 1)))


@dataclass(frozen=True)
class _Exchange:
    """Two maps that are each other's adjoint, of tensors whose heads are shared out as `shares` says.

    outside: of each tensor [B, C, heads, D]; inside: [B, u C, this rank's heads, D]; in any memory order.
    """

    axis: Communicator
    chunks: int
    shares: Shares

    def enter(self, outside: Sequence[Tensor], inside: Sequence[Tensor]) -> None:
        """Write `inside`, [B, u C, this rank's heads, D] of each tensor, from `outside`, [B, C, heads, D]."""
        self._move(outside[0].shape[1], partial(self._by_heads, outside), partial(self._by_tokens, inside), _copy_views)

    def leave(self, inside: Sequence[Tensor], outside: Sequence[Tensor]) -> None:
        """Write `outside`, [B, C, heads, D] of each tensor, from `inside`, [B, u C, this rank's heads, D]; a head that several
        ranks have becomes the sum of theirs."""
        # Only where ranks share key-value heads is there anything to add; else views are copied to their places.
        apart = all(_are_apart([heads[number] for heads in self.shares]) for number in range(len(outside)))
        land = _copy_views if apart else partial(_sum_views, shares=self.shares)
        self._move(outside[0].shape[1], partial(self._by_tokens, inside), partial(self._by_heads, outside), land)

    def _move(
        self,
        tokens: int,
        find_sent: Callable[[Interval], Views],
        find_places: Callable[[Interval], Views],
        land: Callable[[Views, Views], None],
    ) -> None:
        """Send each rank its views of every piece of this rank's tokens, and have what comes in their stead put in its places."""
        coming: _Message | None = None
        for piece in cut_tokens(tokens, self.chunks):
            # Started before the one under way is landed: two messages are held, no more.
            following = _Message(find_sent(piece), find_places(piece), self.axis)
            if coming is not None:
                land(coming.arrive(), coming.places)
            coming = following
        assert coming is not None
        land(coming.arrive(), coming.places)

    def _by_heads(self, outside: Sequence[Tensor], piece: Interval) -> Views:
        """A piece of this rank's tokens, in each rank's heads."""
        tokens = [x.unflatten(1, (self.chunks, -1))[:, :, slice(*piece)] for x in outside]
        return [[x[..., slice(*own), :] for x, own in zip(tokens, heads, strict=True)] for heads in self.shares]

    def _by_tokens(self, inside: Sequence[Tensor], piece: Interval) -> Views:
        """A piece of each rank's tokens, in this rank's heads."""
        tokens = [x.unflatten(1, (self.chunks, self.axis.size, -1))[:, :, :, slice(*piece)] for x in inside]
        return [[x[:, :, rank] for x in tokens] for rank in range(self.axis.size)]


class _Message:
    """One piece under way, from every rank to every other. places: where what comes belongs, and the shapes of that."""

    def __init__(self, sent: Views, places: Views, axis: Communicator):
        self.places, self._own, self._rank = places, sent[axis.rank], axis.rank
        lengths, coming = _count_elements(sent, axis.rank), _count_elements(places, axis.rank)
        message = sent[0][0].new_empty(sum(lengths))
        for rank, (part, views) in enumerate(zip(message.split(lengths), sent, strict=True)):
            if rank != axis.rank:
                _copy_each(_view_as(part, views), views)
        came = message.new_empty(sum(coming))
        self._parts = came.split(coming)
        self._pending = start_all_to_all(came, message, axis, coming, lengths, "heads")

    def arrive(self) -> Views:
        """The views that have come, in the shapes of their places; this rank's own are those it was to send."""
        self._pending.wait()
        parts, self._parts = self._parts, ()
        return [
            self._own if rank == self._rank else _view_as(part, places)
            for rank, (part, places) in enumerate(zip(parts, self.places, strict=True))
        ]


def _count_elements(of: Views, rank: int) -> list[int]:
    """Elements of each rank's views, none of this rank's."""
    return [0 if number == rank else sum(x.numel() for x in views) for number, views in enumerate(of)]


def _view_as(part: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """A part of a message as tensors of these shapes."""
    return [x.view(y.shape) for x, y in zip(part.split([y.numel() for y in like]), like, strict=True)]


def _copy_each(places: Sequence[Tensor], views: Sequence[Tensor]) -> None:
    for place, x in zip(places, views, strict=True):
        place.copy_(x)


def _copy_views(came: Views, places: Views) -> None:
    for views, own in zip(came, places, strict=True):
        _copy_each(own, views)


def _are_apart(intervals: Sequence[Interval]) -> bool:
    """Whether each head is in one of them only."""
    return all(before[1] == after[0] for before, after in pairwise(intervals))


def _sum_views(came: Views, places: Views, shares: Shares) -> None:
    """Places of neighbouring ranks overlap where these have the same heads."""
    for number, intervals in enumerate(zip(*shares, strict=True)):
        own = [views[number] for views in places]
        total = own[0].new_zeros(*own[0].shape[:3], intervals[-1][1], own[0].shape[4], dtype=sums_dtype(own[0].dtype))
        for views, heads in zip(came, intervals, strict=True):
            total[..., slice(*heads), :] += views[number]
        for place, heads in zip(own, intervals, strict=True):
            place.copy_(total[..., slice(*heads), :])
