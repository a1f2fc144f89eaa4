"""Spikes: steps whose loss or gradient norm lies far above those of the steps before.

    loss limit   level + max(DEVIATIONS * deviation, LEAST_LOSS_RISE * |level|)
    norm limit   level * max(spread ** NORM_POWER, LEAST_NORM_RISE)

    level        median of the last LEVEL_STEPS values
    deviation    1.0484 * median of |difference between neighbours - median difference|, over the last WINDOW values
    spread       median of the ratio of neighbours, the larger over the smaller, over the same

Differences, because a loss that still falls steeply is far from every median, and its noise is what counts. 1.0484 of the median
is a standard deviation if noise is normal. The spread is the same for logarithms: the norm's limit is some 10 standard deviations
of its logarithm above the level, for norms have heavy tails. Only what lies above counts. Values that were not finite are left
out; those of spikes are not: they move no median until they are half of it, and a level that stays becomes the new one. There
are no limits before LEVEL_STEPS steps are known.

All ranks decide alike with no word between them: they read equal sums, and there is no operation here but those that IEEE 754
rounds in one way on every machine.

The limits of a step follow from the steps up to LAG before it, never from newer ones that a rank may know: they are sent with
the step, when the step before it is still on the device. So they are the same whether a save or a resume came between or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

WINDOW = 128
LEVEL_STEPS = 32
LAG = 2
DEVIATIONS = 10.0
# The difference of two normal values has sqrt(2) of their deviation, and its median distance is 0.6745 of that.
NORMAL_DIFFERENCE = 1.0484
LEAST_LOSS_RISE = 0.05
NORM_POWER = 10
LEAST_NORM_RISE = 4.0
# Weights are taken for hurt when so many of the last steps were spikes.
PERSISTENT_SPIKES = 3
PERSISTENT_WITHIN = 8


class SpikeLimits(NamedTuple):
    """Above either of these a step is a spike. Infinite: there are no limits."""

    loss: float = inf
    gradient_norm: float = inf

    def are_exceeded(self, loss: float, gradient_norm: float) -> bool:
        """Whether finite values are a spike."""
        return loss > self.loss or gradient_norm > self.gradient_norm

    @property
    def are_known(self) -> bool:
        return isfinite(self.loss)


NO_LIMITS = SpikeLimits()


@dataclass
class SpikeState:
    """The detector's state. JSON-able, a part of RunState: a resume decides as the uninterrupted run.

    seen: [step, loss, gradient norm] of the last steps with finite values. recent: spikes among the last PERSISTENT_WITHIN steps,
    with those that were not finite. count: spikes of the run.
    """

    seen: list[list[float]] = field(default_factory=list)
    recent: list[int] = field(default_factory=list)
    count: int = 0

    def limits(self, step: int) -> SpikeLimits:
        """The limits of a step. The steps up to `step - LAG` must have been added; newer ones change nothing."""
        known = [values for at, *values in self.seen if at <= step - LAG][-WINDOW:]
        return find_limits([loss for loss, _ in known], [norm for _, norm in known])

    def add(self, step: int, loss: float, gradient_norm: float, limits: SpikeLimits) -> bool:
        """Add the values of a step, in the order of steps. Returns whether it was a spike by its limits."""
        is_finite = isfinite(loss) and isfinite(gradient_norm)
        is_spike = is_finite and limits.are_exceeded(loss, gradient_norm)
        self.count += is_spike
        if is_finite:
            self.seen = [*self.seen, [step, loss, gradient_norm]][-(WINDOW + LAG) :]
        # A value that is not finite before there are limits may come from a loss scale of fp16 that is still being found.
        if is_spike or (not is_finite and limits.are_known):
            self.recent = [*self.recent, step]
        self.recent = [each for each in self.recent if each > step - PERSISTENT_WITHIN]
        return is_spike

    @property
    def first_persistent(self) -> int | None:
        """The step of the first spike, where so many of the last steps were spikes that weights are hurt; else None."""
        return self.recent[0] if len(self.recent) >= PERSISTENT_SPIKES else None


def find_limits(losses: Sequence[float], norms: Sequence[float]) -> SpikeLimits:
    """The limits that follow from equally many finite losses and norms, the newest last."""
    if len(losses) < LEVEL_STEPS:
        return NO_LIMITS
    return SpikeLimits(_loss_limit(losses), _norm_limit(norms))


def _loss_limit(losses: Sequence[float]) -> float:
    level = median(losses[-LEVEL_STEPS:])
    differences = [new - old for old, new in pairwise(losses)]
    trend = median(differences)
    deviation = NORMAL_DIFFERENCE * median([abs(each - trend) for each in differences])
    return level + max(DEVIATIONS * deviation, LEAST_LOSS_RISE * abs(level))


def _norm_limit(norms: Sequence[float]) -> float:
    level = median(norms[-LEVEL_STEPS:])
    pairs = [(min(pair), max(pair)) for pair in pairwise(norms)]
    if level <= 0.0:  # nothing was trained
        return inf
    spread = median([high / low if low > 0.0 else inf for low, high in pairs])
    rise = 1.0
    for _ in range(NORM_POWER):  # and not `**`, which is the mathematical library's
        rise *= spread
    return level * max(rise, LEAST_NORM_RISE)
