"""The grid in parts of about equal size, one for each day, so that four weeks of runs cover it all.

A case's parts are a function of its name alone, or what its mark says: the same part is the same cases, today and in a month, and
a case that is added moves no other.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import xxhash

NUM_PARTS = 28
# Of a file: one mechanism, whose tests are run by whoever changes it, and by every fourth part of the grid. `make test` leaves
# them out.
TURN = 4
IN_TURN = pytest.mark.grid(turn=TURN)
SECONDS_PER_DAY = 86_400


def few_of(rows: Iterable[Any], is_shown: Callable[..., bool]) -> list[Any]:
    """Parameters of a test: all of `rows`, tuples or single values. Those that are shown run in `make test`, or in their
    file's turn, the others in a part of the grid."""
    return [
        pytest.param(*row, marks=() if is_shown(*row) else pytest.mark.grid)
        for row in (each if isinstance(each, tuple) else (each,) for each in rows)
    ]


def is_in_part(item: pytest.Item, part: int) -> bool:
    """Whether a test runs in `part`. What is not in the grid runs in all of them, a file that has turns in every fourth one, any
    other case in one: that of its mark, `pytest.mark.grid(part=2)` where tests share what is dear, else that of its node id."""
    mark = item.get_closest_marker("grid")
    if mark is None:
        return True
    if "turn" in mark.kwargs:
        return (part - part_of(item.nodeid.partition("::")[0])) % mark.kwargs["turn"] == 0
    own = mark.kwargs.get("part", part_of(item.nodeid))
    assert own in range(NUM_PARTS), f"{item.nodeid}: grid(part={own!r}), and the parts are 0 to {NUM_PARTS - 1}"
    return bool(part == own)


def part_of(name: str) -> int:
    """The part, 0 to 27, of the case with this name (pytest's node id)."""
    return xxhash.xxh64_intdigest(name.encode()) % NUM_PARTS


def part_of_day(seconds: float | None = None) -> int:
    """The part of the day (UTC) that is `seconds` after 1970; None: today."""
    return int((time.time() if seconds is None else seconds) // SECONDS_PER_DAY) % NUM_PARTS
