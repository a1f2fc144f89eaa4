"""The order in which units are unsharded, resharded and reduced: a function of positions alone, equal on all ranks.

A rank tells where its computation is. From there everything follows, also for units that this rank's computation left out
(a layer that is skipped for its data): they are unsharded, resharded and reduced in their turn, because other ranks may not
have left them out, and collectives of different units must never meet. DeepSpeed records a trace of modules instead and drops it
when data takes another path; ranks whose traces differ hang.

    forward enters unit p     those behind it are resharded, p and the next ones are unsharded
    forward ends              all units have been entered; without a backward to come all are resharded
    backward enters unit p    those behind it (p+1, ...) are resharded, p and the ones before it are unsharded, p+1 is reduced
    backward ends             all units have been entered and left
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.parameters import ParameterSync


@dataclass(frozen=True)
class UnitUse:
    """Facts about a unit that are known before anything runs.

    is_kept: read again further on in forward (its weight is tied to a later unit), so kept until backward leaves it.
    is_read_in_backward: not an embedding, whose gradient needs no weight, and not above frozen units only.
    """

    name: str
    is_kept: bool
    is_read_in_backward: bool


class UnitOrder:
    """Positions of forward and of backward, and what they have set off. prefetch_units: units unsharded ahead of the one in use,
    in forward and in backward (Zhao et al. 2023, section 3.3)."""

    def __init__(
        self, uses: Sequence[UnitUse], parameters: ParameterSync, gradients: GradientSync, prefetch_units: int
    ):
        self._uses, self._parameters, self._gradients = uses, parameters, gradients
        self._prefetch_units = prefetch_units
        self._with_parameters = [index for index, buffers in enumerate(parameters.units) if buffers]
        self._last = len(uses) - 1
        self._forward = -1
        self._backward = len(uses)

    @property
    def position(self) -> int:
        """The furthest unit that this forward has entered."""
        return self._forward

    def unshard_ahead(self, is_forward: bool) -> None:
        """Start to unshard the unit that computation meets first; the others follow as it goes on."""
        if is_forward:
            self._unshard_forward(self._with_parameters[0])
        elif self._uses[self._with_parameters[-1]].is_read_in_backward:
            self._unshard_backward(self._with_parameters[-1])

    def start_forward(self) -> None:
        """Begin a forward, before the first unit."""
        self._forward = -1

    def enter_forward(self, position: int) -> None:
        """Enter unit `position` and those before it, if forward has not yet: reshard what is behind, unshard what comes."""
        # One unit at a time, also over those that this rank skipped: ranks that did not skip them start the same collectives
        # in the same order.
        while self._forward < position:
            # Before the unshard: its memory may be taken from what is resharded, which is what bounds the peak.
            self._reshard(
                each for each in self._parameters.transient if each <= self._forward and not self._uses[each].is_kept
            )
            self._forward += 1
            for each in range(self._forward, min(self._forward + self._prefetch_units, self._last) + 1):
                if each not in self._parameters.unsharded:
                    self._unshard_forward(each)

    def end_forward(self, has_backward: bool) -> None:
        """Finish a forward: all units have been entered, and without a backward to come all are resharded."""
        self.enter_forward(self._last)
        # The last unit stays for a backward: it is the first that backward reads, at once.
        if not has_backward:
            self._reshard(self._parameters.transient)
            # Units that stay, of which this forward has left some out: nothing may be under way behind a validation.
            self._parameters.wait_for_unshards()

    def enter_backward(self, position: int) -> None:
        """Begin the backward of unit `position` and of those behind it, if it has not begun: reshard, unshard, reduce."""
        while self._backward > position:
            self._backward -= 1
            self._reshard(each for each in self._parameters.transient if each > self._backward)
            for each in range(self._backward, max(self._backward - self._prefetch_units, 0) - 1, -1):
                if each not in self._parameters.unsharded and self._uses[each].is_read_in_backward:
                    self._unshard_backward(each)
            # After the unshards: backward waits for these within a unit's time, nobody waits for a reduction so soon, and on one
            # communicator what is started first is sent first.
            self._reduce(self._backward + 1)

    def end_backward(self) -> None:
        """Finish a backward: every unit has been entered, left and reduced."""
        self.enter_backward(0)
        self._reshard(self._parameters.transient)
        # Not before: gradients of the first unit may arrive until autograd has returned.
        self._reduce(0)
        self._backward = self._last + 1

    def _unshard_forward(self, index: int) -> None:
        # Those of its bucket that are still to come: what forward has left in it is resharded.
        self._parameters.start_unshard(index, *(each for each in self._parameters.buckets[index] if each > index))

    def _unshard_backward(self, index: int) -> None:
        bucket = reversed(self._parameters.buckets[index])
        others = (each for each in bucket if each < index and self._uses[each].is_read_in_backward)
        self._parameters.start_unshard(index, *others)

    def _reshard(self, indices: Iterable[int]) -> None:
        for index in list(indices):  # a copy: resharding takes the unit out of `transient`
            self._parameters.reshard(index)

    def _reduce(self, index: int) -> None:
        if index <= self._last:
            self._gradients.reduce(self._uses[index].name)
