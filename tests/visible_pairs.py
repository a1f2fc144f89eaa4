"""Pairs of a query and a key that it sees, counted without cutting blocks into pieces."""

from torch import Tensor

from framework.mesh.token_layout import Interval
from framework.parallel.attention.visible_rows import DocumentRun, Documents, Scores, find_runs


def documents_of(first_rows: Tensor) -> Documents:
    """first_rows: [B, S], the row at which each token's document begins."""
    starts = tuple(tuple(dict.fromkeys(row.tolist())) for row in first_rows)
    return Documents(starts, first_rows.shape[1])


def visible_pairs(q_rows: Interval, k_rows: Interval, scores: Scores, documents: Documents | None) -> int:
    """Pairs of a query and a key that it sees: attention's work, 4 D FLOPs a pair and head forward and 10 D backward.

    documents: of as many sequences as are counted; None: of one.
    """
    runs = find_runs(q_rows, documents)
    return sum(_count_pairs(run, k_rows, scores.window) for _, sequence in runs for run in sequence)


def _count_pairs(run: DocumentRun, k_rows: Interval, window: int | None) -> int:
    """Pairs with key <= query, less those with key <= query - window."""
    lowest, stop = max(k_rows[0], run.first), max(k_rows[1], run.first)
    causal = _count_causal(run.start, run.stop, lowest, stop)
    return causal if window is None else causal - _count_causal(run.start - window, run.stop - window, lowest, stop)


def _count_causal(start: int, stop: int, lowest: int, highest: int) -> int:
    def triangle(side: int) -> int:
        return side * (side + 1) // 2 if side > 0 else 0

    def keys_from(first: int) -> int:
        return triangle(stop - first) - triangle(start - first)

    return keys_from(lowest) - keys_from(highest)
