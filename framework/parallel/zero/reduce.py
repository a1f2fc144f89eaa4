"""Gradients into their unit's buffer, and one overlapped reduction per unit while backward goes on.

Each parameter's gradient of a microbatch is written (first microbatch) or added (later ones) to the unit's flat buffer in
the reduce dtype. In the last microbatch a complete unit is reduced at once, while backward computes the units before it.
Reductions start in one order on all ranks, the reverse of computation, whatever a rank's backward skipped: a unit waits for
those before it in that order, and `finish` sends what is left.
"""

from collections.abc import Sequence

from torch import Tensor

from framework.comm.collectives import Pending, start_all_reduce
from framework.errors import LayoutError
from framework.mesh.axis import Axis
from framework.parallel.zero.buffers import GradientPlace, Slot, UnitBuffer


class GradientSync:
    """Law 1 for replicated parameters: each gradient is summed over the axes along which it is partial, once a step."""

    def __init__(self, buffers: Sequence[UnitBuffer], axis: Axis):
        self.buffers = [buffer for buffer in reversed(buffers) if buffer.trained]
        self.axis = axis
        self._waiting: list[set[Tensor]] = []
        self._pending: list[Pending] = []
        self._is_last = False
        for index, buffer in enumerate(self.buffers):
            for name, place in buffer.places.items():
                self._watch(place, index, name)

    def start_step(self) -> None:
        """Forget the former step's gradients."""
        for buffer in self.buffers:
            for place in buffer.places.values():
                place.touched = False
        self._waiting = [
            {leaf for place in buffer.places.values() for leaf in place.sources} for buffer in self.buffers
        ]
        self._pending = []
        self._is_last = False

    def start_backward(self, is_last: bool) -> None:
        """Announce the backward of a microbatch; only the last one reduces."""
        self._is_last = is_last

    def finish(self) -> None:
        """Send what no backward completed, and wait for all reductions."""
        for waiting in self._waiting:
            waiting.clear()
        self._start_ready()
        for pending in self._pending:
            pending.wait()

    def untouched(self) -> list[tuple[UnitBuffer, Slot]]:
        """Parameters that no rank's backward reached in this step: stock optimizers leave those alone, decay included.

        Reads the reduced flags only where this rank's own backward missed a parameter, so it costs no device sync otherwise.
        """
        return [
            (buffer, slot)
            for buffer in self.buffers
            for slot in buffer.trained
            if not buffer.places[slot.name].touched and buffer.touched_flag(slot) == 0
        ]

    def _watch(self, place: GradientPlace, index: int, name: str) -> None:
        def collect(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if index < len(self._pending):
                raise LayoutError(
                    f"{name} received a gradient after its unit's reduction: its layer uses the weight in two ways"
                )
            if parameter is not place.tick:
                assert gradient is not None, name
                place.add(gradient)
            if self._is_last:
                self._waiting[index].discard(parameter)
                if not self._waiting[index]:
                    self._start_ready()

        place.parameter.register_post_accumulate_grad_hook(collect)
        place.tick.register_post_accumulate_grad_hook(collect)

    def _start_ready(self) -> None:
        while len(self._pending) < len(self.buffers) and not self._waiting[len(self._pending)]:
            buffer = self.buffers[len(self._pending)]
            buffer.gradient[buffer.numel_trained :] = 1.0
            for slot in buffer.trained:
                if not buffer.places[slot.name].touched:
                    buffer.gradient_of(slot).zero_()
                    buffer.touched_flag(slot).zero_()
            self._pending.append(start_all_reduce(buffer.gradient, self.axis))
