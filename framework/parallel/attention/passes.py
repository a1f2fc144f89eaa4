"""Passes over the keys and values that a transport brings, forward and backward: one softmax over keys that come in blocks.

A block gives out_b = sum_j exp(s_j - l_b) v_j and l_b = log sum_j exp(s_j) over its keys. Over two blocks

    l = log(exp(l_a) + exp(l_b))          out = exp(l_a - l) out_a + exp(l_b - l) out_b
                                              = out_a + w (out_b - out_a),  w = exp(l_b - l) = sigmoid(l_b - l_a)

A sink is one more key with score `sink` and no value: l' = log(exp(l) + exp(sink)), out' = exp(l - l') out. Sums are kept in fp32
at least, whatever the blocks are computed in: each merge would round once more (TransformerEngine merges in the dtype of `out`).
"""

from collections.abc import Iterator
from math import inf

import torch
from torch import Tensor

from framework.mesh.token_layout import Interval
from framework.model.precision import sums_dtype
from framework.parallel.attention.block_attention import BlockAttention
from framework.parallel.attention.blocks import Contribution, HeadGroup, KeyValues, Portion, RankBlocks
from framework.parallel.attention.kernels import Result, merge_softmax


class ForwardPass:
    """Attends to keys as a transport brings them, one group of heads after another. q: [B, H, C, D]; out: [B, H, C, Dv]; log_sum:
    [B, H, C]; largest: logits, [H], if they are counted."""

    def __init__(
        self,
        q: Tensor,
        own: KeyValues,
        sinks: Tensor | None,
        blocks: RankBlocks,
        attention: BlockAttention,
        counts: bool = False,
    ):
        self.largest = q.new_full((q.shape[1],), -inf, dtype=sums_dtype(q.dtype)) if counts else None
        self.q, self.own, self.sinks, self.blocks, self.attention = q, own, sinks, blocks, attention
        self.out: Tensor | None = None
        self.log_sum = q.new_empty(q.shape[:3], dtype=sums_dtype(q.dtype))

    def start(self, group: HeadGroup) -> None:
        """Attend to this rank's own keys."""
        # This rank's own keys first: every query sees itself, so what is merged later finds a finite sum; and the first message
        # is on its way meanwhile.
        self.merged = MergedOutput(self.blocks.slices.chunks, self.q.shape[2], self.q.dtype)
        self.attend(self.blocks.whole(group), self.blocks.slices.ring_index, _select_heads(self.own, group.heads))

    def attend(self, portion: Portion, source: int, held: KeyValues) -> None:
        """Attend to a portion of the keys of the rank at index `source`."""
        heads = _query_heads(portion.heads, self.q, self.own)
        q = self.q[:, heads]
        for block, tensors in self.blocks.cut(q, held, portion, source):
            if self.largest is not None:
                own = self.attention.find_largest(tensors, self.blocks.slices.context)
                self.largest[heads] = self.largest[heads].maximum(own)
            # None where the window or the documents of these sequences leave no pair, which no plan of blocks knows.
            found = self.attention.forward(tensors)
            if found is not None:
                self.merged.merge(block.queries, *found)

    def finish(self, group: HeadGroup) -> None:
        """All keys have come."""
        heads = _query_heads(group.heads, self.q, self.own)
        # Last, once for each query: a sink in every block would count once for each block.
        if self.sinks is not None:
            self.merged.add_sinks(self.sinks[heads])
        self.out = self.merged.write(self.out, heads, self.q.shape[1], self.q.dtype)
        self.merged.write_log_sums(self.log_sum[:, heads])


class BackwardPass:
    """Differentiates by keys and values as a transport brings them, one group of heads after another.

    q: [B, H, C, D]; result: out and its gradient [B, H, C, Dv], log-sum-exp [B, H, C]; dq: [B, H, C, D]; total: of this rank's K
    and V.
    """

    def __init__(self, q: Tensor, result: Result, own: KeyValues, blocks: RankBlocks, attention: BlockAttention):
        self.q, self.result, self.own, self.blocks, self.attention = q, result, own, blocks, attention
        self.dq: Tensor | None = None
        self.total: KeyValues | None = None

    def start(self, group: HeadGroup) -> None:
        """Sums are zero."""
        self.dq_sums = ChunkSums(self.blocks.slices.chunks, self.q.shape[2], self.q.dtype)
        self.sums: KeyValues | None = None

    def differentiate(self, portion: Portion, source: int, held: KeyValues) -> list[Contribution]:
        """The gradients of a portion of the K/V of the rank at index `source`, by this rank's queries."""
        return list(self._contributions(portion, source, held))

    def differentiate_own(self, group: HeadGroup) -> None:
        """Add what this rank's queries give to its own K/V."""
        own = _select_heads(self.own, group.heads)
        contributions = self._contributions(self.blocks.whole(group), self.blocks.slices.ring_index, own)
        # Where others' sums have come home already, own ones are added to them.
        if self.sums is not None:
            self.sums.add(contributions)
        elif self.blocks.slices.chunks == 1:
            # One chunk of queries and one of keys: one block.
            ((_, dk, dv),) = contributions
            self.sums = KeyValues(dk, dv)
        else:
            self.sums = self._new_sums(group.heads)
            self.sums.set(contributions)

    def _contributions(self, portion: Portion, source: int, held: KeyValues) -> Iterator[Contribution]:
        """One at a time, so that no more than one need be held."""
        heads = _query_heads(portion.heads, self.q, self.own)
        for block, tensors in self.blocks.cut(self.q[:, heads], held, portion, source):
            # Results over all keys, not of this block: then the block's part of the gradient needs no other block.
            of = self.result
            result = Result(*(x[:, heads, slice(*block.queries)] for x in (of.out, of.log_sum, of.gradient)))
            found = self.attention.backward(tensors, result)
            if found is not None:
                self.dq_sums.add(block.queries, found[0])
                contribution = block.keys, found[1], found[2]
                # The consumer adds it up and drops it before the next block's is computed.
                del found
                yield contribution
                del contribution

    def add(self, portion: Portion, sums: KeyValues) -> None:
        """Add what others' queries give to a portion of this rank's K/V."""
        if self.sums is None:
            self.sums = self._new_sums(portion.heads)
            self.sums.set([])
        # A portion has the same tokens of every chunk, which lie apart in the rank's own order.
        chunks, tokens = self.blocks.slices.chunks, slice(*portion.tokens)
        for total, given in ((self.sums.k, sums.k), (self.sums.v, sums.v)):
            total.unflatten(2, (chunks, -1))[:, :, :, tokens] += given.unflatten(2, (chunks, -1))

    def finish(self, group: HeadGroup) -> None:
        """All has been added."""
        heads = _query_heads(group.heads, self.q, self.own)
        self.dq = self.dq_sums.write(self.dq, heads, self.q.shape[1], self.q.dtype)
        assert self.sums is not None
        # Rounded to the dtype of K and V once, here: sums over blocks and ranks are in fp32 at least.
        if group.heads == self._all_heads:
            self.total = KeyValues(self.sums.k.to(self.own.k.dtype), self.sums.v.to(self.own.v.dtype))
        elif self.total is not None and self.sums.k.dtype != self.total.k.dtype:
            place = _select_heads(self.total, group.heads)
            place.k.copy_(self.sums.k)
            place.v.copy_(self.sums.v)

    @property
    def _all_heads(self) -> Interval:
        return 0, self.own.k.shape[1]

    def _new_sums(self, heads: Interval) -> KeyValues:
        """For gradients of this rank's K/V in some heads; values are not set."""
        dtype = self.own.k.dtype
        # The whole is made with the first group: later ones are written beside it.
        if heads != self._all_heads and self.total is None:
            self.total = self._new_heads(self._all_heads, dtype)
        if self.total is not None and dtype == sums_dtype(dtype):
            # Summed where they are to be.
            return _select_heads(self.total, heads)
        return self._new_heads(heads, sums_dtype(dtype))

    def _new_heads(self, heads: Interval, dtype: torch.dtype) -> KeyValues:
        return KeyValues(*(_new_heads(x, heads, dtype) for x in (self.own.k, self.own.v)))


def _query_heads(heads: Interval, q: Tensor, own: KeyValues) -> slice:
    """The query heads that use some key-value heads."""
    group = q.shape[1] // own.k.shape[1]
    return slice(heads[0] * group, heads[1] * group)


def _select_heads(of: KeyValues, heads: Interval) -> KeyValues:
    return KeyValues(of.k[:, slice(*heads)], of.v[:, slice(*heads)])


def _new_heads(like: Tensor, heads: Interval, dtype: torch.dtype) -> Tensor:
    """like: [B, H, C, D] -> [B, heads, C, D], memory in the order [B, C, heads, D], which is that of projections."""
    B, _, C, D = like.shape
    return like.new_empty(B, C, heads[1] - heads[0], D, dtype=dtype).transpose(1, 2)


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
