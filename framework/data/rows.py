"""Rows of whole documents: best-fit packing of a stream (`data.pack=best_fit`).

A document of n tokens takes n - 1 places of a row: each token but the last is an input, each but the first a label. Documents
are taken from the longest to the shortest, equal ones in an order that the seed draws, and each goes into the row with the least
space that holds it (best-fit decreasing). All documents of a stream are packed at once, so the rows are a function of the seed,
the documents' lengths and the context, and sample g is row g of them: `order.py` draws when it comes.

`data.pack=alone` gives each document a row, for models that carry a state from one to the next.

A conversation that is longer than a row is left out or cut behind (`data.overlong`); text is cut into pieces of whole rows. Of
answers to compare each two documents side by side are packed as one, and stay apart in their row.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from framework.data.order import permute
from framework.data.store import TokenStream
from framework.errors import DataError

Overlong = Literal["skip", "truncate", "refuse"]


@dataclass(frozen=True)
class Rows:
    """The documents, or pieces, of each row: tokens [starts[k], stops[k]) for k in [first[row], first[row + 1])."""

    starts: np.ndarray
    """[pieces] int64, in the order of the rows."""
    stops: np.ndarray
    first: np.ndarray
    """[rows + 1] int64."""
    context: int

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    @property
    def fill(self) -> float:
        """The share of places that have a token; 0 without rows."""
        return float((self.stops - self.starts - 1).sum()) / max(1, self.num_rows * self.context)

    @classmethod
    def of(cls, stream: TokenStream, context: int, overlong: Overlong, key: int = 0, is_alone: bool = False) -> "Rows":
        """The rows of a stream. key: draws the order of equally long documents; is_alone: a row for each. DataError where
        `overlong` refuses one."""
        starts, stops = _list_pieces(stream, context, overlong)
        together = 1 + stream.is_paired  # documents that are packed as one
        lengths = _count_places(starts, stops, together)
        index = np.arange(len(lengths), dtype=np.uint64)
        drawn = permute(index, np.full_like(index, len(lengths)), np.full_like(index, key)).astype(np.int64)
        by_length = drawn[np.argsort(-lengths[drawn], kind="stable")]
        row_of = np.arange(len(lengths)) if is_alone else _fit(lengths[by_length], context)
        in_rows = by_length[np.argsort(row_of, kind="stable")]
        in_rows = (in_rows[:, None] * together + np.arange(together)).reshape(-1)
        counts = np.bincount(row_of) * together if len(row_of) else np.zeros(0, np.int64)
        return cls(starts[in_rows], stops[in_rows], np.concatenate([[0], np.cumsum(counts)]), context)


def refuse_no_rows(source: str, stream: TokenStream, num_rows: int, context: int) -> None:
    """Raises DataError where a source of this name has no row to train on."""
    if num_rows == 0:
        cut = "" if stream.is_paired else ", or set data.overlong=truncate"
        raise DataError(
            f"data.sources.{source}: each of its {stream.noun} is longer than batch.context={context}. Raise batch.context{cut}"
        )


def count_overlong(stream: TokenStream, context: int) -> int:
    """The number of conversations, or pairs, that are longer than a row; 0 for text, which is cut."""
    ends = stream.read_ends()
    starts = np.concatenate([[0], ends[:-1]])
    return 0 if stream.trained is None else int((_count_places(starts, ends, 1 + stream.is_paired) > context).sum())


def _count_places(starts: np.ndarray, stops: np.ndarray, together: int) -> np.ndarray:
    """The places of a row that each document takes, or so many together: [n] int64."""
    return (stops - starts - 1).reshape(-1, together).sum(axis=1)


def _list_pieces(stream: TokenStream, context: int, overlong: Overlong) -> tuple[np.ndarray, np.ndarray]:
    """(first token, behind the last) of each document or piece that fits into a row and has a label: [n] int64 each."""
    together, stops = 1 + stream.is_paired, stream.read_ends()
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    if stream.trained is None:
        counts = np.maximum(1, -(-(stops - starts - 1) // context))
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts, stops = np.repeat(starts, counts) + number * context, np.repeat(stops, counts)
    elif overlong == "refuse" and (count := count_overlong(stream, context)):
        raise DataError(
            f"{count:,} of {len(stops) // together:,} {stream.noun}, longer than batch.context={context}: refused"
            " (data.overlong=refuse). Raise batch.context, or set data.overlong to skip or truncate"
        )
    fits = np.repeat(_count_places(starts, stops, together) <= context, together)
    fits |= (stream.trained is None) | (overlong == "truncate")
    stops = np.minimum(stops, starts + context + 1)
    kept = fits & ((stops - starts > 1) | stream.is_paired)
    return starts[kept], stops[kept]


def _fit(lengths: np.ndarray, context: int) -> np.ndarray:
    """The row of each piece, in order of falling length: [n] int64."""
    rows = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(context + 1)]  # by the space that is left
    spaces, num_rows = 0, 0  # bit k of `spaces`: some row has k places left
    for index, length in enumerate(lengths.tolist()):
        roomy = spaces >> length
        if roomy:
            space = length + (roomy & -roomy).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces ^= 1 << space
        else:
            row, space, num_rows = num_rows, context, num_rows + 1
        rows[index] = row
        if space > length:
            open_rows[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows
