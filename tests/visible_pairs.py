"""Pairs of a query and a key that it sees, counted without cutting blocks into pieces."""

from torch import Tensor

from framework.mesh.context import Interval
from framework.parallel.context.visible_rows import DocumentRun, Scores, find_runs


def visible_pairs(q_rows: Interval, k_rows: Interval, scores: Scores, first_rows: Tensor | None) -> int:
    """Pairs of a query and a key that it sees: attention's work, 4 D FLOPs a pair and head forward and 10 D backward.

    first_rows: [B, n] of these queries, which counts the pairs of B sequences; None: of one sequence.
    """
    runs = find_runs(q_rows, first_rows).values()
    return sum(_count_pairs(run, k_rows, scores.window) for sequence in runs for run in sequence)


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
