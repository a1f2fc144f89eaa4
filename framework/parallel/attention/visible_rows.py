"""The keys that a query may see, and a block of attention cut into pieces that kernels can compute.

A query at global row t sees the keys at rows max(first[t], t - window + 1) .. t, where first[t] is the first row of its document:
an interval, whatever kind of mask the model has. So a block (an interval of queries against an interval of keys) falls into
pieces of three kinds (`PieceKind`), of which only FULL and CAUSAL ones grow with the length of a sequence. What no query sees is
in no piece, and in every piece each query sees one key at least, so a log-sum-exp of a piece is always finite.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise

from framework.mesh.token_layout import Interval
from framework.parallel.attention.documents import DocumentRun, Documents


@dataclass(frozen=True)
class Scores:
    """The way a score is made of a query and a key, and what a query may see.

    window: a query sees the last `window` rows up to and with its own (transformers' sliding_window).
    softcap: c in c tanh(s / c), after the scale.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class PieceKind(Enum):
    """The keys of a piece that its queries see."""

    FULL = auto()
    """Every query sees every key."""
    CAUSAL = auto()
    """Queries and keys are the same rows, and a query sees the keys up to its own."""
    MASKED = auto()
    """Only a mask tells, of no more than tile x tile elements."""


@dataclass(frozen=True)
class BlockPiece:
    """q and k: intervals of global rows. sequence: the one of the batch that it belongs to; None: all."""

    kind: PieceKind
    q: Interval
    k: Interval
    sequence: int | None = None


def find_runs(q_rows: Interval, documents: Documents | None) -> Iterable[tuple[int | None, list[DocumentRun]]]:
    """Runs of these queries in each sequence, or under None those that all sequences have."""
    return [(None, [DocumentRun(*q_rows, 0)])] if documents is None else documents.runs(q_rows)


def find_pieces(
    q_rows: Interval, k_rows: Interval, scores: Scores, documents: Documents | None, tile: int
) -> list[BlockPiece]:
    """Pieces of a block, those of the same queries side by side; none if no query sees any key."""
    pieces: list[BlockPiece] = []
    for sequence, runs in find_runs(q_rows, documents):
        found = [piece for run in runs for piece in _pieces_of_run(run, k_rows, scores, tile)]
        pieces += found if sequence is None else [replace(piece, sequence=sequence) for piece in found]
    return pieces


def _pieces_of_run(run: DocumentRun, k_rows: Interval, scores: Scores, tile: int) -> Iterator[BlockPiece]:
    # Keys of the document up to its last query here: of others none is seen.
    lowest, stop = max(k_rows[0], run.first), min(k_rows[1], run.stop)
    start = max(run.start, lowest)
    window = scores.window or run.stop
    end = min(run.stop, stop + window - 1)
    if start >= end or lowest >= stop:
        return
    # Even the last query sees the first key: the window cuts nothing off.
    if end - window <= lowest:
        yield from _causal_pieces((start, end), (lowest, stop))
        return
    # A tile of a window that is shorter is MASKED with the keys in front of it: half a tile of queries keeps that in size.
    step = tile if window >= tile else max(tile // 2, 1)
    for first, last in _cut((start, end), step):
        yield from _pieces_of_tile((first, last), (max(lowest, first - window + 1), min(stop, last)), window)


def _pieces_of_tile(q: Interval, k: Interval, window: int) -> Iterator[BlockPiece]:
    """Pieces of a tile of queries, of which the first sees the first key."""
    # The first key that the last query of the tile still sees; the first query sees all from k[0] on.
    seen_by_all = max(k[0], q[1] - window)
    # The window is shorter than the tile: no key is seen by all, so one mask says it all.
    if seen_by_all > q[0]:
        yield BlockPiece(PieceKind.MASKED, q, k)
        return
    left = min(seen_by_all, k[1])
    if k[0] < left:
        yield BlockPiece(PieceKind.MASKED, (q[0], min(q[1], left + window - 1)), (k[0], left))
    if seen_by_all < k[1]:
        yield from _causal_pieces(q, (seen_by_all, k[1]))


def _causal_pieces(q: Interval, k: Interval) -> Iterator[BlockPiece]:
    """Pieces of a block where a query sees all keys up to its own row."""
    # Rows that are both queries and keys. Behind them queries see all keys, in front of them keys are seen by all queries.
    diagonal = max(q[0], k[0]), min(q[1], k[1])
    if diagonal[0] >= diagonal[1]:
        yield BlockPiece(PieceKind.FULL, q, k)
        return
    if k[0] < diagonal[0]:
        yield BlockPiece(PieceKind.FULL, (diagonal[0], diagonal[1]), (k[0], diagonal[0]))
    yield BlockPiece(PieceKind.CAUSAL, diagonal, diagonal)
    if diagonal[1] < q[1]:
        yield BlockPiece(PieceKind.FULL, (diagonal[1], q[1]), k)


def cut_pieces(pieces: Iterable[BlockPiece], tile: int) -> Iterator[BlockPiece]:
    """Pieces with no side longer than a tile, for a kernel that holds the scores of a whole piece."""
    for piece in pieces:
        if piece.kind is PieceKind.MASKED:
            yield piece
            continue
        # Tiles of a CAUSAL piece above the diagonal are left out, those below it are FULL.
        for q in _cut(piece.q, tile):
            for k in _cut(piece.k, tile):
                if piece.kind is PieceKind.FULL or k[1] <= q[0]:
                    yield replace(piece, kind=PieceKind.FULL, q=q, k=k)
                elif q == k:
                    yield replace(piece, q=q, k=k)


def _cut(rows: Interval, tile: int) -> list[Interval]:
    return list(pairwise([*range(*rows, tile), rows[1]]))
