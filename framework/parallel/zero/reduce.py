"""Gradients into their unit's buffer, and one overlapped reduction per unit while backward goes on.

Autograd hands over each parameter's finished gradient of a microbatch; it is written (first microbatch) or added (later
ones) to the unit's flat buffer in the reduce dtype. In the last microbatch a complete unit is reduced at once, while
backward computes the units before it. Reductions start in one order on all ranks, the reverse of computation, whatever a
rank's backward skipped: a unit waits for those before it in that order, and `finish` sends what is left.
"""

from collections.abc import Sequence

from torch import nn

from framework.comm.collectives import Pending, start_all_reduce
from framework.mesh.axis import Axis
from framework.parallel.zero.buffers import Slot, UnitBuffer


class GradientSync:
    """Law 1 for replicated parameters: each gradient is summed over the axes along which it is partial, once a step."""

    def __init__(self, buffers: Sequence[UnitBuffer], axis: Axis):
        self.buffers = [buffer for buffer in reversed(buffers) if buffer.trained]
        self.axis = axis
        self._untouched: list[set[Slot]] = []
        self._waiting: list[set[Slot]] = []
        self._pending: list[Pending] = []
        self._is_last = False
        for index, buffer in enumerate(self.buffers):
            for slot in buffer.trained:
                self._watch(buffer.parameters[slot.name], index, slot)

    def start_step(self) -> None:
        """Forget the former step's gradients."""
        self._untouched = [set(buffer.trained) for buffer in self.buffers]
        self._waiting = [set(buffer.trained) for buffer in self.buffers]
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
            for buffer, missed in zip(self.buffers, self._untouched, strict=True)
            for slot in sorted(missed, key=lambda slot: slot.start)
            if buffer.touched_flag(slot) == 0
        ]

    def _watch(self, parameter: nn.Parameter, index: int, slot: Slot) -> None:
        buffer = self.buffers[index]
        view = buffer.gradient_of(slot).view(slot.shape)

        def collect(parameter: nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None, slot.name
            if slot in self._untouched[index]:
                view.copy_(gradient)
                self._untouched[index].discard(slot)
            else:
                view.add_(gradient)
            if self._is_last:
                self._waiting[index].discard(slot)
                if not self._waiting[index]:
                    self._start_ready()

        parameter.register_post_accumulate_grad_hook(collect)

    def _start_ready(self) -> None:
        while len(self._pending) < len(self.buffers) and not self._waiting[len(self._pending)]:
            index = len(self._pending)
            buffer = self.buffers[index]
            buffer.gradient[buffer.numel_trained :] = 1.0
            for slot in self._untouched[index]:
                buffer.gradient_of(slot).zero_()
                buffer.touched_flag(slot).zero_()
            self._pending.append(start_all_reduce(buffer.gradient, self.axis))
