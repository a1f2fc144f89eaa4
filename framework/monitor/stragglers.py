"""Stragglers: ranks that are merely slow, by robust statistics over ranks and over reported steps.

A rank's seconds of a phase are compared with the median of the other ranks that do the same work. What it takes longer, its
excess, is taken over the last reports by its median; the spread of the excess, by its median absolute deviation, says how far
that median may be off by chance. A report, a save or a busy moment that falls on one rank moves neither.

    data            waits for its microbatches
    compute         time of a step in which it waits neither for data nor for another rank
    communication   waits for other ranks longer than these wait. All wait for a rank that is slow in data or in compute, so this
                    is judged only where no rank is

Where every rank is alone in its pipeline stage no two do the same work. There a rank is compared with its own past and with the
change of the others:

    data            t - b - max(0, median of the others' t - b)
    compute         t - b * max(1, median of the others' t / b)
    communication   not judged: how long a stage waits follows from the schedule

t: the seconds of this step; b: their median over BASELINE reports near the beginning of this start. So nothing that slows all
stages alike blames a rank, nor does a stage that has become faster. A rank that was slow from the beginning is not seen.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PHASES = ("data", "compute", "communication")
# The last reports that are judged, and the least number of them.
WINDOW, LEAST = 50, 20
# A rank is slow when it holds up each step by so much of its time, and is so again no more when by less than the other.
SLOW, CLEAR = 0.15, 0.08
# And by no less than this: steps of milliseconds differ by what the operating system does.
LEAST_S = 0.005
# Standard errors of a median that chance does not make, over days of reports and thousands of ranks.
SIGNIFICANT = 6.0
# Reports that are left out at the beginning of a start, as programs and caches warm up, and those that are the past of a rank.
WARM_UP, BASELINE = 10, WINDOW
# A difference to a past of as many reports as the window has is off by chance as much again as the window's.
ERROR_OF_PAST = 2**0.5
# Standard deviation of normal noise over its median absolute deviation; standard error of its median over deviation / sqrt(n).
DEVIATION_OF_MAD, ERROR_OF_MEDIAN = 1.4826, 1.2533


@dataclass(frozen=True)
class Straggler:
    """A rank that delays each step by excess_s in a phase, a `fraction` of the step. is_slow: False if it is slow no longer."""

    rank: int
    phase: str
    excess_s: float
    fraction: float
    is_slow: bool = True


class Stragglers:
    """Finds stragglers in reports. groups: ranks that do the same work and are compared; ranks of groups of one are compared with
    their past. others: the comparison in words."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        is_alone = all(len(group) == 1 for group in groups)
        self._groups = [] if is_alone else [np.array(group) for group in groups if len(group) > 1]
        self._past = Past() if is_alone and len(groups) > 1 else None
        self._error = ERROR_OF_PAST if is_alone else 1.0
        self.others = "in its first steps" if is_alone else "ranks with the same work"
        self._excess: deque[np.ndarray] = deque(maxlen=WINDOW)  # [phases, ranks] each
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self.slow: dict[tuple[int, str], float] = {}  # the excess of each (rank, phase) that is slow now

    def add(
        self, step_s: float, data_s: Sequence[float], own_s: Sequence[float], waited_s: Sequence[float]
    ) -> list[Straggler]:
        """Add a reported step: its seconds, and the seconds of each rank in the three phases. Returns the ranks that have
        changed."""
        excess = self._find_excess(np.array([data_s, own_s, waited_s]))
        if excess is None:
            return []
        self._excess.append(excess)
        self._steps_s.append(step_s)
        return self._judge() if len(self._excess) >= LEAST else []

    def _find_excess(self, times: np.ndarray) -> np.ndarray | None:
        """The excess of each rank. times, result: [phases, ranks]. None where there is no comparison, or not yet."""
        if self._past is not None:
            return self._past.find_excess(times)
        excess = np.zeros_like(times)
        for group in self._groups:
            excess[:, group] = times[:, group] - median_of_others(times[:, group])
        return excess if self._groups else None

    def _judge(self) -> list[Straggler]:
        window = np.stack(self._excess)
        excess = np.median(window, axis=0)
        spread = DEVIATION_OF_MAD * np.median(np.abs(window - excess), axis=0)
        chance = SIGNIFICANT * self._error * ERROR_OF_MEDIAN * spread / np.sqrt(len(window))
        step_s = float(np.median(self._steps_s))
        is_slow = (excess > SLOW * step_s) & (excess > chance) & (excess > LEAST_S)
        stays_slow = (excess > CLEAR * step_s) & (excess > CLEAR / SLOW * LEAST_S)
        for group in self._groups:  # else ranks that wait for a slow one would be blamed
            if stays_slow[:2, group].any():
                is_slow[2, group] = stays_slow[2, group] = False
        return self._change(excess, is_slow, stays_slow, step_s)

    def _change(
        self, excess: np.ndarray, is_slow: np.ndarray, stays_slow: np.ndarray, step_s: float
    ) -> list[Straggler]:
        former, self.slow = self.slow, {}
        for number, rank in zip(*np.nonzero(is_slow | stays_slow), strict=True):
            key = int(rank), PHASES[number]
            if is_slow[number, rank] or key in former:
                self.slow[key] = float(excess[number, rank])
        begun = [key for key in self.slow if key not in former]
        over = [key for key in former if key not in self.slow]
        found = [Straggler(*key, self.slow[key], self.slow[key] / step_s) for key in begun]
        return found + [Straggler(rank, phase, 0.0, 0.0, is_slow=False) for rank, phase in over]


class Past:
    """The past of ranks that are each alone in their stage: their times near the beginning of this start."""

    def __init__(self) -> None:
        self._seen: list[np.ndarray] = []  # [phases, ranks] each
        self._usual: np.ndarray | None = None

    def find_excess(self, times: np.ndarray) -> np.ndarray | None:
        """The time of each rank beyond its own past and beyond what the others explain. times, result: [phases, ranks]. None
        until enough is known."""
        if self._usual is None:
            self._seen.append(times)
            if len(self._seen) == WARM_UP + BASELINE:
                self._usual, self._seen = np.median(np.stack(self._seen[WARM_UP:]), axis=0), []
            return None
        excess = np.zeros_like(times)
        longer, slower = times[0] - self._usual[0], times[1] / np.maximum(self._usual[1], LEAST_S / 1e3)
        excess[0] = longer - np.maximum(0.0, median_of_others(longer))
        excess[1] = times[1] - self._usual[1] * np.maximum(1.0, median_of_others(slower))
        return excess


def median_of_others(values: np.ndarray) -> np.ndarray:
    """For each element along the last dim the median of all others there. values: [..., n], n > 1; the result has its shape."""
    n = values.shape[-1]
    order = np.argsort(values, axis=-1)
    ordered = np.take_along_axis(values, order, axis=-1)
    place = np.argsort(order, axis=-1)  # of each element in the order
    # The j-th of the others is the j-th of all, or the next one from the element's own place on.
    sides = [
        np.where(place > j, ordered[..., j : j + 1], ordered[..., j + 1 : j + 2]) for j in ((n - 2) // 2, (n - 1) // 2)
    ]
    return (sides[0] + sides[1]) / 2
