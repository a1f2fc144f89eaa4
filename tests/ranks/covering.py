"""Few rows of a large product in which any two values meet: what a feature breaks, it nearly always breaks for a pair."""

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def cover_pairs(
    factors: Sequence[Sequence[Any]], is_legal: Callable[..., bool], start: int = 0
) -> list[tuple[Any, ...]]:
    """Rows of one value of each factor in which any two values meet that may meet at all. Greedy, each row as full of new pairs
    as it can be; another `start` gives other rows."""
    numbered = [row for row in product(*(range(len(each)) for each in factors)) if is_legal(*_values(factors, row))]
    order = numbered[start % len(numbered) :] + numbered[: start % len(numbered)]
    rows_of: dict[tuple[tuple[int, int], ...], list[tuple[int, ...]]] = {}
    for row in order:
        for pair in _pairs(row):
            rows_of.setdefault(pair, []).append(row)
    missing = dict.fromkeys(rows_of)
    found = []
    while missing:
        best = max(rows_of[next(iter(missing))], key=lambda row: sum(pair in missing for pair in _pairs(row)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        found.append(_values(factors, best))
    return found


def _pairs(row: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(combinations(enumerate(row), 2))


def _values(factors: Sequence[Sequence[Any]], row: Sequence[int]) -> tuple[Any, ...]:
    return tuple(factor[index] for factor, index in zip(factors, row, strict=True))
