"""Blocks: which queries of a rank attend to which keys of a rank, in as few calls as possible.

A rank of `ring` holds one or two chunks of a sequence, as many rows each (`ContextSlices.chunk_intervals`). With zig-zag chunks i
and 2 ring - 1 - i, a rank's queries against the keys of a rank p are

    p = own rank   both chunks against themselves, under the diagonal, and the later against the earlier, wholly
    p before it    both chunks against the earlier one of p, wholly
    p behind it    the later chunk against both of p, wholly                        one call

which are 2 L^2 pairs each for chunks of L rows: equal work on all ranks in every step. A window leaves fewer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from framework.mesh.token_layout import ContextSlices, Interval
from framework.parallel.attention.block_attention import AttentionBlock
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.kernels import Heads
from framework.parallel.attention.key_values import HeadGroup, KeyValues, Portion, count_portions, group_heads
from framework.parallel.attention.ring import RingRoute
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
