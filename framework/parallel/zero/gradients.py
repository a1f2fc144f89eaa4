"""Gradients: collected in their unit's buffer, reduced unit by unit while backward goes on.

Each parameter's gradient of a microbatch is written (first) or added (later) to the unit's flat gradient in the master
dtype. When backward has left a unit, its gradient is reduce-scattered over the shard axis, and after the step's last backward
this rank's part is reduce-scattered over the update axis and all-reduced over the axes over which it is partial: law 1, with
nothing else to know.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import ref

import torch
from torch import Tensor

from framework.comm.algorithms import Pending
from framework.comm.collectives import start_all_reduce, start_reduce_scatter
from framework.parallel.zero.buffers import Deferred, GradView, UnitBuffer
from framework.parallel.zero.exposed_communication import ExposedCommunication
from framework.parallel.zero.plan_buffers import Slot

# Full gradients that may be under way to their shards while backward fills the next one. With two, a reduction may take as
# long as the backward of a unit and a half before anyone waits.
REDUCTIONS_IN_FLIGHT = 2


@dataclass(frozen=True)
class Reduction:
    """A reduce-scatter under way: from the full gradient into `part`, which is `summed` itself or a scratch to be added."""

    buffer: UnitBuffer
    pending: Pending
    full: Tensor
    part: Tensor


class GradientSync:
    """Follows a step: start_step, then for each microbatch start_backward, (gradients arrive), reduce of each unit from the
    last to the first, then finish. A backward may come in two halves: start_input_backward, end_input_backward, and at any
    time later backward_weights. reduce_dtype: the dtype in which ranks send; sums are in that of the buffers."""

    def __init__(self, buffers: Sequence[UnitBuffer], waits: ExposedCommunication, reduce_dtype: torch.dtype):
        self.reduce_dtype = reduce_dtype
        self.buffers = [buffer for buffer in reversed(buffers) if buffer.is_trained]
        self.waits = waits
        self._of_unit: dict[str, list[UnitBuffer]] = {}
        for buffer in self.buffers:
            self._of_unit.setdefault(buffer.unit, []).append(buffer)
        self._is_last = False
        self._deferred: Deferred | None = None
        self._has_reduced: set[UnitBuffer] = set()
        self._reductions: deque[Reduction] = deque()
        self._sums: list[tuple[Pending, Iterator[Pending]]] = []  # over replicas: under way, and what follows
        for _, _, place in self.grad_views:
            # Weak: Python's collector does not see what autograd's hooks hold. A circle through one would keep the run for
            # ever, with its memory and the threads of its process groups.
            place.parameter.register_post_accumulate_grad_hook(partial(_collect, ref(place)))

    @property
    def grad_views(self) -> list[tuple[UnitBuffer, Slot, GradView]]:
        """Every trained parameter, in an order that is equal on all ranks."""
        return [(buffer, slot, buffer.grad_views[slot.name]) for buffer in self.buffers for slot in buffer.slots]

    def start_step(self) -> None:
        """Forget the former step's gradients."""
        for _, _, place in self.grad_views:
            place.is_written = place.is_reached = False
        self._has_reduced = set()

    def start_backward(self, is_last: bool) -> None:
        """Announce the backward of a microbatch, and whether it is the step's last.

        What the former backward still had under way has had a whole forward's time; its memory is needed again.
        """
        self.wait_for_reductions()
        self._is_last = is_last
        for buffer in self.buffers:
            buffer.is_complete = False

    def start_input_backward(self) -> None:
        """Announce a backward that computes the gradients of activations and leaves those of weights for later."""
        self._deferred = {}
        for _, _, place in self.grad_views:
            place.deferred = self._deferred

    def end_input_backward(self) -> Deferred:
        """What it has left: the factors of the linear layers' products, and such gradients as came with it anyway."""
        deferred, self._deferred = self._deferred, None
        assert deferred is not None, "no input backward was started"
        for _, _, place in self.grad_views:
            place.deferred = None
        return deferred

    @torch.no_grad()
    def backward_weights(self, deferred: Deferred, is_last: bool) -> None:
        """The rest of that backward: each unit's gradients, from the last unit to the first, and its reduction."""
        self.start_backward(is_last)
        for unit in self._of_unit:
            for bring in deferred.pop(unit, ()):
                bring()
            self.reduce(unit)

    def reduce(self, unit: str) -> None:
        """Backward has left the unit: what did not get a gradient will get none in this microbatch."""
        if self._deferred is not None:
            return
        for buffer in self._of_unit.get(unit, ()):
            buffer.is_complete = True
            if self._is_last or not buffer.plan.lifetimes.keeps_gradients:
                self._reduce(buffer)

    def finish(self) -> None:
        """Wait until `reduced` holds the sum over all microbatches and ranks."""
        self.wait_for_reductions()
        while self._sums:
            self.waits.wait([pending for pending, _ in self._sums])
            self._sums = [(pending, rest) for _, rest in self._sums if (pending := next(rest, None))]

    def _reduce(self, buffer: UnitBuffer) -> None:
        buffer.open_gradient()
        for place in buffer.grad_views.values():
            if not place.is_written:
                place.view.zero_()
        is_first = buffer not in self._has_reduced
        self._has_reduced.add(buffer)
        summed = buffer.summed
        part = summed if is_first else buffer.pool.take(summed.numel(), summed.dtype, summed.device)
        full = buffer.close_gradient()
        pending = start_reduce_scatter(
            part, full, buffer.plan.axes.shard, f"gradient of {buffer.unit}", self.reduce_dtype
        )
        self._reductions.append(Reduction(buffer, pending, full, part))
        while self._reductions and (len(self._reductions) > REDUCTIONS_IN_FLIGHT or buffer.plan.axes.shard.size == 1):
            self._wait_for_oldest()

    def wait_for_reductions(self) -> None:
        """Wait until the reductions under way have ended, and give their memory back."""
        while self._reductions:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        """Wait for the oldest reduction; its part is then complete for this microbatch."""
        reduction = self._reductions.popleft()
        buffer = reduction.buffer
        self.waits.wait([reduction.pending])
        if reduction.part is not buffer.summed:
            buffer.summed.add_(reduction.part)
            buffer.pool.give_back(reduction.part)
        if not buffer.plan.lifetimes.keeps_gradients:
            buffer.pool.give_back(reduction.full)
        if self._is_last and (pending := next(rest := self._sum_replicas(buffer), None)):
            self._sums.append((pending, rest))

    def _sum_replicas(self, buffer: UnitBuffer) -> Iterator[Pending]:
        """What a part still has to be summed over, one after the other."""
        label = f"gradient of {buffer.unit}"
        yield start_reduce_scatter(buffer.reduced, buffer.summed, buffer.plan.axes.update, label, self.reduce_dtype)
        for axis in buffer.plan.axes.partial:
            yield start_all_reduce(buffer.reduced, axis, label=label, reduce_dtype=self.reduce_dtype)


def _collect(weak: ref[GradView], parameter: Tensor) -> None:
    """Take over what autograd has accumulated in a backward."""
    place, gradient = weak(), parameter.grad
    parameter.grad = None
    assert place is not None and gradient is not None, tuple(parameter.shape)  # noqa: PT018
    place.add(gradient)
