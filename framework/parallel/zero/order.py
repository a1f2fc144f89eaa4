"""The order in which units are gathered, released and reduced: a function of positions alone, equal on all ranks.

A rank tells where its computation is. From there everything follows, also for units that this rank's computation left out
(a layer that is skipped for its data): they are gathered, released and reduced in their turn, because other ranks may not
have left them out, and collectives of different units must never meet.

    forward enters unit p     those behind it are released, p and the next ones are gathered
    forward ends              all units have been entered; without a backward to come all are released
    backward enters unit p    those behind it (p+1, ...) are released, p and the ones before it are gathered, p+1 is reduced
    backward ends             all units have been entered and left

Gathers are started before the reduction: backward waits for a gather, nobody waits for a reduction.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.parameters import ParameterSync


@dataclass(frozen=True)
class UnitUse:
    """What is known of a unit before anything runs.

    is_kept: read again further on in forward (its weight is tied to a later unit), so kept until backward leaves it.
    is_read_in_backward: not an embedding, whose gradient needs no weight, and not under frozen units only.
    """

    name: str
    is_kept: bool
    is_read_in_backward: bool


class UnitOrder:
    """Positions of forward and of backward, and what they have set off. prefetch_units: units gathered ahead."""

    def __init__(
        self, uses: Sequence[UnitUse], parameters: ParameterSync, gradients: GradientSync, prefetch_units: int
    ):
        self._uses, self._parameters, self._gradients = uses, parameters, gradients
        self._depth = prefetch_units
        self._last = len(uses) - 1
        self._forward = -1
        self._backward = len(uses)

    @property
    def position(self) -> int:
        """The furthest unit that this forward has entered."""
        return self._forward

    def start_forward(self) -> None:
        """A forward begins, before the first unit."""
        self._forward = -1

    def enter_forward(self, position: int) -> None:
        """The computation is in unit `position` or was there before."""
        while self._forward < position:
            self._reshard(
                each for each in self._parameters.transient if each <= self._forward and not self._uses[each].is_kept
            )
            self._forward += 1
            for each in range(self._forward, min(self._forward + self._depth, self._last) + 1):
                self._parameters.start_unshard(each)

    def end_forward(self, has_backward: bool) -> None:
        """The forward is over."""
        self.enter_forward(self._last)
        if not has_backward:
            self._reshard(self._parameters.transient)

    def enter_backward(self, position: int) -> None:
        """The backward of unit `position` begins, if it has not begun before."""
        while self._backward > position:
            self._backward -= 1
            self._reshard(each for each in self._parameters.transient if each > self._backward)
            for each in range(self._backward, max(self._backward - self._depth, 0) - 1, -1):
                if self._uses[each].is_read_in_backward:
                    self._parameters.start_unshard(each)
            self._reduce(self._backward + 1)

    def end_backward(self) -> None:
        """The backward is over."""
        self.enter_backward(0)
        self._reshard(self._parameters.transient)
        self._reduce(0)
        self._backward = self._last + 1

    def _reshard(self, indices: Iterable[int]) -> None:
        for index in list(indices):
            self._parameters.reshard(index)

    def _reduce(self, index: int) -> None:
        if index <= self._last:
            self._gradients.reduce(self._uses[index].name)
