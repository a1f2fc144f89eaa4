"""Blocks: which queries of a rank attend to which keys of a rank, in as few calls as possible; and the passes over them, forward
and backward.

A rank of `ring` holds one or two chunks of a sequence, as many rows each (`ContextSlices.chunk_intervals`). With zig-zag chunks i
and 2 ring - 1 - i, a rank's queries against the keys of a rank p are

    p = own rank   both chunks against themselves, under the diagonal, and the later against the earlier, wholly
    p before it    both chunks against the earlier one of p, wholly
    p behind it    the later chunk against both of p, wholly                        one call

which are 2 L^2 pairs each for chunks of L rows: equal work on all ranks in every step. A window leaves fewer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from framework.mesh.token_layout import ContextSlices, Interval
from framework.model.precision import sums_dtype
from framework.parallel.attention.block_attention import AttentionBlock, BlockAttention
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.kernels import Heads, Result
from framework.parallel.attention.key_values import (
    Contribution,
    HeadGroup,
    KeyValues,
    Portion,
    RingRoute,
    count_portions,
    group_heads,
)
from framework.parallel.attention.merge import ChunkSums, MergedOutput
from framework.parallel.attention.visible_rows import Scores


@dataclass(frozen=True)
class Block:
    """Queries and keys for one call, as rows."""

    queries: Interval
    """(start, stop) of tokens as this rank holds them."""
    keys: Interval
    """(start, stop) of tokens as the message holds them."""
    q_rows: Interval
    """The queries' rows of the sequence."""
    k_rows: Interval
    is_whole: bool
    """Every query sees every key, as far as order and window go."""

    @property
    def is_diagonal(self) -> bool:
        """Whether queries see themselves."""
        return self.q_rows == self.k_rows


@dataclass(frozen=True)
class RankBlocks:
    """The blocks of one rank's queries with the keys of any rank of the ring."""

    slices: ContextSlices
    scores: Scores
    documents: Documents | None

    def cut(self, q: Tensor, held: KeyValues, portion: Portion, source: int) -> list[tuple[Block, AttentionBlock]]:
        """The blocks with a portion of another rank's keys, and views of their tensors.

        q: [B, H, C, D], in the query heads of the portion; held: the portion, from the rank at index `source` of the ring.
        """
        return [(block, self._view(block, q, held)) for block in self.plan(portion, source)]

    def plan(self, portion: Portion, source: int) -> list[Block]:
        """The blocks with a portion of the keys of the rank at index `source` of the ring."""
        start, stop = portion.tokens
        chunks = self.slices.of_rank(source * self.slices.ulysses).chunk_intervals
        keys = [(first + start, first + stop) for first, _ in chunks]
        # A document begins at a row of keys, so with documents a block's keys have to be one interval of rows.
        return plan_blocks(self.slices.chunk_intervals, keys, self.scores.window, joins_keys=self.documents is None)

    def route(self, own: KeyValues) -> RingRoute:
        """The messages of this rank's keys and values, and the steps of the ring that they go."""
        steps = find_steps(self.slices, self.scores.window)
        num_portions = count_portions(own.k.shape[2]) if self.slices.ring > 1 else 1
        groups = group_heads(own, self.slices.chunks, num_portions)
        return RingRoute(groups, steps, self.slices.chunks)

    def whole(self, group: HeadGroup) -> Portion:
        """All keys of a rank in some heads."""
        return Portion(group.heads, (0, self.slices.part * self.slices.ulysses))

    def _view(self, block: Block, q: Tensor, held: KeyValues) -> AttentionBlock:
        queries, keys = slice(*block.queries), slice(*block.keys)
        heads = Heads(q[:, :, queries], held.k[:, :, keys], held.v[:, :, keys])
        # A window that leaves out nothing would have kernels compute a mask.
        scores = replace(self.scores, window=None) if block.is_whole else self.scores
        chosen = None if self.documents is None or self.documents.chosen is None else self.documents.chosen[:, queries]
        return AttentionBlock(heads, block.q_rows, block.k_rows, scores, self.documents, chosen)


def plan_blocks(
    queries: Sequence[Interval], keys: Sequence[Interval], window: int | None, joins_keys: bool
) -> list[Block]:
    """Blocks of queries that see some of the keys, diagonal ones first. queries, keys: rows of the chunks that two ranks
    hold, in their order. joins_keys: whether one block may have keys of two chunks, whose rows are no interval."""
    pairs = [
        Block(_tokens(queries, i), _tokens(keys, j), q_rows, k_rows, _sees_all(q_rows, k_rows, window))
        for i, q_rows in enumerate(queries)
        for j, k_rows in enumerate(keys)
        if _sees_some(q_rows, k_rows, window)
    ]
    # Every query sees itself, so whatever is merged behind a diagonal block finds a finite sum.
    pairs.sort(key=lambda block: not block.is_diagonal)
    return _join_keys(pairs) if joins_keys else pairs


def find_steps(slices: ContextSlices, window: int | None) -> tuple[int, ...]:
    """The steps s > 0 of a ring for which some rank has queries that see keys of the rank s before it; equal on all ranks."""
    if window is None:
        return tuple(range(1, slices.ring))
    chunks = [slices.of_rank(index * slices.ulysses).chunk_intervals for index in range(slices.ring)]
    # Over all ranks and not this one alone: every rank sends in every step that any of them needs.
    return tuple(
        step
        for step in range(1, slices.ring)
        if any(
            _sees_some(q_rows, k_rows, window)
            for index in range(slices.ring)
            for q_rows in chunks[index]
            for k_rows in chunks[index - step]
        )
    )


def _tokens(chunks: Sequence[Interval], number: int) -> Interval:
    """Where a chunk lies among a rank's tokens."""
    length = chunks[0][1] - chunks[0][0]
    return number * length, (number + 1) * length


def _sees_some(q_rows: Interval, k_rows: Interval, window: int | None) -> bool:
    """Whether any of these queries sees any of these keys. The first query sees the oldest keys."""
    return k_rows[0] < q_rows[1] and (window is None or k_rows[1] > q_rows[0] - window + 1)


def _sees_all(q_rows: Interval, k_rows: Interval, window: int | None) -> bool:
    """Whether each of these queries sees all these keys. The last query's window begins last."""
    return k_rows[1] <= q_rows[0] + 1 and (window is None or k_rows[0] >= q_rows[1] - window)


def _join_keys(pairs: list[Block]) -> list[Block]:
    """Two blocks of the same queries, which see both wholly, become one: the rows of keys do not matter then."""
    if len(pairs) != 2 or not all(block.is_whole and not block.is_diagonal for block in pairs):
        return pairs
    first, last = pairs
    if first.queries != last.queries:
        # The same keys: each call's results would be as large as both chunks' together, and nothing is saved but a call.
        return pairs
    keys = first.keys[0], last.keys[1]
    # Rows of keys in front of the queries, as if they were one chunk: all of them are seen, so only their number matters.
    rows = first.q_rows[0] - (keys[1] - keys[0]), first.q_rows[0]
    return [Block(first.queries, keys, first.q_rows, rows, True)]


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
