"""What all ranks learn of a step: a fixed number of scalars, summed over the world in one all-reduce.

Its size depends on neither the world nor the model. What has one number for each rank (`loop.RankTimes`) is gathered for
reported steps only; what has one for each parameter (`step._start_reached`) travels as bytes in a reduction of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.comm.transfer import upload_values


@dataclass(frozen=True)
class Flags:
    """What one rank asks of all of them: to stop after this step, to save after it. A flag of any rank counts."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class StepSums:
    """vector: [4] fp64 on the device: loss, squared norm of the gradient (its norm after `take_root`), ranks that ask to stop,
    ranks that ask to save."""

    vector: Tensor

    @classmethod
    def pack(cls, loss: Tensor, squared_norm: Tensor, flags: Flags, device: torch.device) -> "StepSums":
        """This rank's terms. loss, squared_norm: scalars on the device, in any dtype."""
        sums = cls(upload_values([0.0, 0.0, flags.stop, flags.save], torch.float64, device))
        sums.loss.copy_(loss)
        sums.vector[1].copy_(squared_norm)
        return sums

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch, a scalar, once it is summed over the world."""
        return self.vector[0]

    def take_root(self) -> Tensor:
        """The norm, a scalar, once the squares are summed over the world. In place: the host reads what the device clips by,
        to the last bit."""
        return self.vector[1].sqrt_()


@dataclass(frozen=True)
class StepValues:
    """The sums over the world, on the host."""

    loss: float
    gradient_norm: float
    flags: Flags

    @classmethod
    def unpack(cls, values: Sequence[float]) -> "StepValues":
        """values: those of `StepSums.vector`."""
        loss, gradient_norm, stop, save = values
        return cls(loss, gradient_norm, Flags(stop > 0, save > 0))

    @property
    def is_finite(self) -> bool:
        """Whether the step has updated anything."""
        return abs(self.loss) + self.gradient_norm < float("inf")
