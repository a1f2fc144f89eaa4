"""The sums of a step over the world, in one all-reduce: a few scalars and a number for each trained parameter.

Values with one number for each rank (`reports.StepTimes`) are gathered for reported steps only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.comm.transfer import upload_values
from framework.train.spikes import SpikeLimits

NUM_SCALARS = 6


@dataclass(frozen=True)
class Flags:
    """Requests of one rank to all: to stop or to save after this step; and whether a save is under way on it. A flag of any rank
    counts."""

    stop: bool = False
    save: bool = False
    is_saving: bool = False


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
