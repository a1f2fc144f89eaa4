"""The sums of a step over the world, in one all-reduce: a few scalars and a number for each trained parameter; and spikes, steps
whose loss or gradient norm, by these sums, lies far above those of the steps before.

Values with one number for each rank (`reports.StepTimes`) are gathered for reported steps only. The limits above which a step
is a spike travel with its sums:

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

import torch
from torch import Tensor

from framework.comm.transfer import upload_values

NUM_SCALARS = 6
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


@dataclass(frozen=True)
class Flags:
    """Requests of one rank to all: to stop or to save after this step; and whether a save is under way on it. A flag of any rank
    counts."""

    stop: bool = False
    save: bool = False
    is_saving: bool = False


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


@dataclass(frozen=True)
class StepSums:
    """terms: [6 + 2 M + P] fp64 on the device: loss, squared norm of the gradient (its norm after `take_norm`), ranks that ask to
    stop, ranks that ask to save, the loss scale (after `take_norm`), ranks that are saving; then of M metrics, those of the loss
    and the losses of sources, the sums, and the numbers of what was added up; then for each of the model's P trained parameters
    the ranks whose backward has reached it.

    The last are sent in every step: which parameters a forward uses may depend on its data, so a rank that missed one must hear
    in this very step whether another reached it, and the others cannot know that one asks: to agree on asking, hosts would wait
    for one another, or for the device. No fixed number of scalars holds an exact answer. Beside the scalars, because a message
    costs the host far more than its bytes: 8 for each parameter tensor, 7 KiB of a model of 671B.

    limits: [2] fp64 on the device, of loss and norm, equal on all ranks and not summed: they come with the scalars' copy.
    """

    terms: Tensor
    limits: Tensor
    num_scalars: int

    @classmethod
    def pack(
        cls,
        loss: Tensor,
        squared_norm: Tensor,
        flags: Flags,
        reached: Tensor,
        limits: SpikeLimits,
        metrics: Tensor,
        device: torch.device,
    ) -> "StepSums":
        """This rank's terms. loss, squared_norm: scalars on the device, in any dtype; reached: [P] fp64, 1 or 0; metrics: [2, M]
        fp64."""
        mine = [0.0, 0.0, flags.stop, flags.save, 0.0, flags.is_saving]
        sent = upload_values([*mine, *limits], torch.float64, device)
        terms = torch.cat([sent[:NUM_SCALARS], metrics.flatten(), reached])
        sums = cls(terms, sent[NUM_SCALARS:], NUM_SCALARS + metrics.numel())
        sums.loss.copy_(loss)
        sums.norm.copy_(squared_norm)
        return sums

    @property
    def vector(self) -> Tensor:
        """The scalars and metrics, [6 + 2 M]: a view."""
        return self.terms[: self.num_scalars]

    @property
    def reached(self) -> Tensor:
        """[P], above 0 for parameters that some rank has reached, once it is summed over the world: a view."""
        return self.terms[self.num_scalars :]

    @property
    def are_within_limits(self) -> Tensor:
        """Whether neither loss nor norm, once `take_norm` was called, is above its limit: a bool scalar on the device."""
        return (self.vector[:2] <= self.limits).all()

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch, a scalar, once it is summed over the world."""
        return self.vector[0]

    @property
    def norm(self) -> Tensor:
        """The norm of the gradient, a scalar, once `take_norm` was called."""
        return self.vector[1]

    def take_norm(self, loss_scale: Tensor) -> None:
        """Make the norm of squares, summed over the world, of gradients that are `loss_scale` times too large. In place: the host
        reads the norm by which the device clips, to the last bit, and the scale."""
        self.vector[4].copy_(loss_scale)
        self.norm.sqrt_().div_(loss_scale)


@dataclass(frozen=True)
class StepValues:
    """The sums over the world, on the host."""

    loss: float
    gradient_norm: float
    flags: Flags
    loss_scale: float
    metrics: tuple[float | None, ...] = ()
    """Means over the batch of the loss's metrics, then of the losses of sources; None where there was nothing to add up."""

    @classmethod
    def unpack(cls, values: Sequence[float]) -> "StepValues":
        """values: those of `StepSums.vector`."""
        loss, gradient_norm, stop, save, loss_scale, saving, *rest = values
        pairs = zip(rest[: len(rest) // 2], rest[len(rest) // 2 :], strict=True)
        metrics = tuple(total / count if count else None for total, count in pairs)
        return cls(loss, gradient_norm, Flags(stop > 0, save > 0, saving > 0), loss_scale, metrics)

    @property
    def is_finite(self) -> bool:
        """Whether the step may have updated anything."""
        return abs(self.loss) + self.gradient_norm < float("inf")


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
