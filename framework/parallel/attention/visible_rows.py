"""The keys that a query may see: the documents that are packed into sequences, and a block of attention cut into pieces.

Documents are a value of the host, as the loader knows it, so that what is computed is decided without asking the device. What
kernels read of them is sent to the device when a layer first asks, without a wait, and kept for all other layers, forwards and
recomputations of the microbatch. They reach attention functions on the mask: transformers hands a mask of four dims to every
layer as it is, also where layers are computed again.

A query at global row t sees the keys at rows max(first[t], t - window + 1) .. t, where first[t] is the first row of its document:
an interval, whatever kind of mask the model has. So a block (an interval of queries against an interval of keys) falls into
pieces of three kinds (`PieceKind`), of which only FULL and CAUSAL ones grow with the length of a sequence. What no query sees is
in no piece, and in every piece each query sees one key at least, so a log-sum-exp of a piece is always finite.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from framework.comm.transfer import upload
from framework.mesh.token_layout import Interval

T = TypeVar("T")


@dataclass(frozen=True)
class DocumentRun:
    """Queries side by side, start .. stop - 1, of one document, which begins at row `first`."""

    start: int
    stop: int
    first: int


class Ends(NamedTuple):
    """Cumulative lengths of documents, as kernels for sequences of any length take them. offsets: [documents + 1] int32 of the
    device; longest: rows of the longest document."""

    offsets: Tensor
    longest: int


@dataclass(frozen=True, eq=False)
class Documents:
    """The rows at which documents begin in each sequence of a microbatch, or in all of them where only one sequence is given."""

    starts: tuple[tuple[int, ...], ...]
    """First rows of documents in each sequence, rising from 0."""
    length: int
    """Rows of a sequence, on all ranks of `cp`, padding included."""
    chosen: Tensor | None = None
    """Rows of the keys that a sparse attention has chosen for each query of this rank, [B, C, k]; None: all."""
    # Shared with those that `choosing` makes.
    _kept: dict[Any, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def read(cls, positions: Tensor, padding: int = 0) -> "Documents | None":
        """Documents of whole sequences whose positions begin at 0 with each; None where every sequence is one document.

        positions: [B, T] int64 of the host. padding: rows behind each sequence, which go on with its last document.
        """
        # In the loader's thread, where the positions are on the host anyway.
        starts = tuple(tuple(np.flatnonzero(row == 0).tolist()) for row in positions.numpy())
        return cls(starts, positions.shape[1] + padding) if any(len(each) > 1 for each in starts) else None

    def select(self, first: int, stop: int) -> "Documents":
        """The documents of some of the sequences."""
        return Documents(self.starts[first:stop], self.length)

    def choosing(self, rows: Tensor) -> "Documents":
        """These documents, of which a query sees no keys but the chosen ones. rows: [B, C, k]."""
        return replace(self, chosen=rows)

    def within(self, chunk: int) -> "Documents":
        """Documents cut into chunks of so many rows, counted from where a document begins."""

        def cut(starts: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(row for first, stop in pairwise((*starts, self.length)) for row in range(first, stop, chunk))

        return self.keep(("within", chunk), lambda: Documents(tuple(map(cut, self.starts)), self.length))

    def runs(self, rows: Interval) -> Iterator[tuple[int | None, list[DocumentRun]]]:
        """The documents of each sequence in these rows; those that all sequences have come under None."""
        for number, starts in enumerate(self.starts):
            # The document that the first row lies in may have begun on another rank.
            first, last = bisect_right(starts, rows[0]) - 1, bisect_left(starts, rows[1])
            found = [
                DocumentRun(max(start, rows[0]), min(stop, rows[1]), start)
                for start, stop in pairwise((*starts[first:last], *(starts[last : last + 1] or (self.length,))))
            ]
            yield (None if len(self.starts) == 1 else number), found

    def ends(self, rows: Interval, sequences: int, device: torch.device) -> Ends:
        """The ends of the documents in these rows of so many sequences, one sequence behind the other."""
        return self.keep(("ends", rows, sequences, device), lambda: self._find_ends(rows, sequences, device))

    def _find_ends(self, rows: Interval, sequences: int, device: torch.device) -> Ends:
        lengths = [run.stop - run.start for _, runs in self.runs(rows) for run in runs]
        # Where documents are given once for all sequences, each has them.
        lengths *= sequences // len(self.starts)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return Ends(upload(torch.as_tensor(offsets), device), max(lengths))

    def first_rows(self, device: torch.device) -> Tensor:
        """The row at which each token's document begins: [sequences given, length] int64."""
        return self.keep(("first rows", device), lambda: upload(self._find_first_rows(), device))

    def _find_first_rows(self) -> Tensor:
        rows = [np.repeat(starts, np.diff((*starts, self.length))) for starts in self.starts]
        return torch.as_tensor(np.stack(rows))

    def keep(self, key: Any, make: Callable[[], T]) -> T:
        """The value that `make` returns, made once for all layers and passes that ask for the key."""
        if key not in self._kept:
            self._kept[key] = make()
        return cast(T, self._kept[key])

    def on_mask(self, like: Tensor) -> Tensor:
        """An attention mask, [B, 1, C, 1], that carries the documents and says nothing else. like: [B, C]."""
        # An attribute, and no content: the host would have to wait for content. Checkpointing keeps a layer's arguments as they
        # are, so the recomputation finds it as well, whichever microbatch is under way by then.
        # Memory of its own: of a view a compiled backward saves another one, without the attribute.
        mask: Any = like.new_empty(like.shape[0], 1, like.shape[1], 1, dtype=torch.bool)
        mask.documents = self
        return cast(Tensor, mask)

    @staticmethod
    def of_mask(mask: Tensor) -> "Documents | None":
        """The documents that a mask carries, if it is one of these."""
        found = vars(mask).get("documents")
        return found if isinstance(found, Documents) else None


def select_sequences(x: Any, first: int, stop: int) -> Any:
    """The sequences first .. stop - 1 of an argument of a layer: a tensor [B, ...], a mask that carries documents, or documents.
    Other arguments are of all sequences."""
    documents = Documents.of_mask(x) if isinstance(x, Tensor) else x
    if not isinstance(documents, Documents):
        return x[first:stop] if isinstance(x, Tensor) else x
    own = documents
    if len(documents.starts) > 1:
        own = documents.keep(("sequences", first, stop), lambda: documents.select(first, stop))
    return own.on_mask(x[first:stop, 0, :, 0]) if isinstance(x, Tensor) else own


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
