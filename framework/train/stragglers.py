"""Stragglers: ranks that are merely slow, by robust statistics over ranks and over reported steps.

A rank's seconds of a phase are compared with the median of the other ranks that do the same work. What it takes longer, its
excess, is taken over the last reports by its median; the spread of the excess, by its median absolute deviation, says how far
that median may be off by chance. A report, a save or a busy moment that falls on one rank moves neither.

    data            waits for its microbatches
    compute         time of a step in which it waits neither for data nor for another rank
    communication   waits for other ranks longer than these wait. All wait for a rank that is slow in data or in compute, so this
                    is asked only where nobody is
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PHASES = ("data", "compute", "communication")
# The last reports that are looked at, and how many there must be.
WINDOW, LEAST = 50, 20
# A rank is slow when it holds up each step by so much of its time, and is so again no more when by less than the other.
SLOW, CLEAR = 0.15, 0.08
# And by no less than this: steps of milliseconds differ by what the operating system does.
LEAST_S = 0.005
# Standard errors of a median that chance does not make, over days of reports and thousands of ranks.
SIGNIFICANT = 6.0
# Standard deviation of normal noise over its median absolute deviation; standard error of its median over deviation / sqrt(n).
DEVIATION_OF_MAD, ERROR_OF_MEDIAN = 1.4826, 1.2533


@dataclass(frozen=True)
class Straggler:
    """A rank that holds up each step by excess_s in a phase, a `fraction` of the step. is_slow: False where it is over."""

    rank: int
    phase: str
    excess_s: float
    fraction: float
    is_slow: bool = True


class Stragglers:
    """Judges reports. groups: ranks that do the same work, and so can be compared; those of a group of one are not."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = [np.array(group) for group in groups if len(group) > 1]
        self._excess: deque[np.ndarray] = deque(maxlen=WINDOW)  # [phases, ranks] each
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self.slow: dict[tuple[int, str], float] = {}  # the excess of each (rank, phase) that is slow now

    def add(
        self, step_s: float, data_s: Sequence[float], own_s: Sequence[float], waited_s: Sequence[float]
    ) -> list[Straggler]:
        """One reported step: its seconds, and those of each rank in the three phases. What has changed by it."""
        if not self._groups:
            return []
        times = np.array([data_s, own_s, waited_s])
        excess = np.zeros_like(times)
        for group in self._groups:
            excess[:, group] = times[:, group] - median_of_others(times[:, group])
        self._excess.append(excess)
        self._steps_s.append(step_s)
        return self._judge() if len(self._excess) >= LEAST else []

    def _judge(self) -> list[Straggler]:
        window = np.stack(self._excess)
        excess = np.median(window, axis=0)
        spread = DEVIATION_OF_MAD * np.median(np.abs(window - excess), axis=0)
        chance = SIGNIFICANT * ERROR_OF_MEDIAN * spread / np.sqrt(len(window))
        step_s = float(np.median(self._steps_s))
        is_slow = (excess > SLOW * step_s) & (excess > chance) & (excess > LEAST_S)
        stays_slow = (excess > CLEAR * step_s) & (excess > CLEAR / SLOW * LEAST_S)
        for group in self._groups:  # else others than the one that is waited for would be blamed
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
