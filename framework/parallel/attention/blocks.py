"""Blocks: which queries of a rank attend to which keys of a rank, in as few calls as possible; and the keys and values of
ranks, in the portions that travel as one message each.

A rank of `ring` holds one or two chunks of a sequence, as many rows each (`ContextSlices.chunk_intervals`). With zig-zag
chunks i and 2 ring - 1 - i, a rank's queries against the keys of a rank p are

    p = own rank   both chunks against themselves, under the diagonal, and the later against the earlier, wholly
    p before it    both chunks against the earlier one of p, wholly
    p behind it    the later chunk against both of p, wholly                        one call

which are 2 L^2 pairs each for chunks of L rows: equal work on all ranks in every step. A window leaves fewer. `passes`
computes them, forward and backward.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from framework.mesh.token_layout import ContextSlices, Interval
from framework.parallel.attention.block_attention import AttentionBlock
from framework.parallel.attention.kernels import Heads
from framework.parallel.attention.visible_rows import Documents, Scores

# Buffers are as large as a message, so a rank's K/V travel in several. A message is worth its cost if enough is computed with it:
# 2^20 pairs of a query and a key, and no more than 16 messages, so that blocks of long sequences are large enough for a GPU.
PORTION_PAIRS = 2**20
MOST_PORTIONS = 16

# (tokens, gradient of their keys [B, Hk, n, D], of their values [B, Hk, n, Dv]): what one block adds.
Contribution = tuple[Interval, Tensor, Tensor]


@dataclass(frozen=True)
class KeyValues:
    """k: [B, Hk, n, D], v: [B, Hk, n, Dv], of one dtype. message: [elements of both], contiguous, of which they are views; None
    where they are not."""

    k: Tensor
    v: Tensor
    message: Tensor | None = None

    def add(self, contributions: Iterable[Contribution]) -> None:
        """Add what blocks give to the gradients of some of these tokens."""
        for (start, stop), dk, dv in contributions:
            self.k[:, :, start:stop] += dk
            self.v[:, :, start:stop] += dv
            del dk, dv  # before the next are computed

    def set(self, contributions: Iterable[Contribution]) -> None:
        """Become the sums of what blocks give, zero where none gives anything. Two blocks are of the same tokens or of others."""
        seen: set[Interval] = set()
        for tokens, dk, dv in contributions:
            # The first are written, not added to zeros: that would write most of it twice.
            if tokens in seen:
                self.add([(tokens, dk, dv)])
            else:
                self.k[:, :, slice(*tokens)] = dk
                self.v[:, :, slice(*tokens)] = dv
            seen.add(tokens)
            del dk, dv
        # The intervals between those that blocks have written: nobody has set them.
        ends = [0, *(end for tokens in sorted(seen) for end in tokens), self.k.shape[2]]
        for start, stop in zip(ends[::2], ends[1::2], strict=True):
            self.k[:, :, start:stop] = 0
            self.v[:, :, start:stop] = 0

    def new_message(self, dtype: torch.dtype | None = None) -> "KeyValues":
        """A message of these shapes, of this dtype unless another is given. Its values are not set."""
        return self.view(self.k.new_empty(self.k.numel() + self.v.numel(), dtype=dtype))

    def view(self, message: Tensor) -> "KeyValues":
        """A message, [elements of k and v], as tensors of these shapes."""
        keys, values = message.split([self.k.numel(), self.v.numel()])
        return KeyValues(keys.view(self.k.shape), values.view(self.v.shape), message)


@dataclass(frozen=True)
class Portion:
    """One message: the tokens (start, stop) of every chunk, in the key-value heads (start, stop)."""

    heads: Interval
    tokens: Interval

    def select(self, of: KeyValues, chunks: int) -> KeyValues:
        """Views of them: [B, heads, chunks, tokens, D] of the k and v [B, Hk, chunks * L, D]."""
        k, v = (x[:, slice(*self.heads)].unflatten(2, (chunks, -1))[:, :, :, slice(*self.tokens)] for x in (of.k, of.v))
        return KeyValues(k, v)

    def pack(self, of: KeyValues, chunks: int, message: Tensor | None = None) -> KeyValues:
        """A copy of them as a message, in new memory if none is given: k and v [B, heads, chunks * tokens, D]."""
        views = self.select(of, chunks)
        packed = views.new_message() if message is None else views.view(message)
        # One copy on this side; on the other the message is read where it landed.
        packed.k.copy_(views.k)
        packed.v.copy_(views.v)
        return KeyValues(packed.k.flatten(2, 3), packed.v.flatten(2, 3), packed.message)


@dataclass(frozen=True)
class HeadGroup:
    """Key-value heads that are attended to together, and the portions in which they come from other ranks."""

    heads: Interval
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class RingRoute:
    """The order in which K/V travel. steps: s > 0 for every rank whose K/V, s before this one's, are needed; rising. chunks: of a
    rank's tokens."""

    groups: Sequence[HeadGroup]
    steps: Sequence[int]
    chunks: int


def group_heads(of: KeyValues, chunks: int, num_portions: int) -> list[HeadGroup]:
    """`num_portions` portions or a few more: heads are divided first, since that divides queries, too, then tokens of a chunk."""
    kv_heads, length = of.k.shape[1], of.k.shape[2] // chunks
    # The least number of groups that divides the heads and is as many as asked for, if heads suffice.
    groups = next(count for count in range(min(num_portions, kv_heads), kv_heads + 1) if kv_heads % count == 0)
    # Tokens give the portions that heads did not; no portion may be empty.
    parts = min(-(-num_portions // groups), length)
    bounds = [length * number // parts for number in range(parts + 1)]
    heads = pairwise(range(0, kv_heads + 1, kv_heads // groups))
    return [HeadGroup(each, tuple(Portion(each, tokens) for tokens in pairwise(bounds))) for each in heads]


def count_portions(tokens: int) -> int:
    """Messages in which the K/V of so many tokens travel. With one, buffers would outweigh what a rank saves by having fewer
    tokens."""
    return max(1, min(MOST_PORTIONS, tokens**2 // PORTION_PAIRS))


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
