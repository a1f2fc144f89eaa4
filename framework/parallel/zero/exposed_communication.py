"""Exposed communication: how long computation was idle for collectives that it did not hide."""

import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from framework.comm.algorithms import Pending


class ExposedWait:
    """One interval of exposed communication. On CUDA its ends are events of the stream that waited, and both must have passed
    when `seconds` is asked: else it raises, because asking must not make the host wait."""

    def __init__(self, before: Any, after: Any):
        self._before, self._after = before, after

    @property
    def seconds(self) -> float:
        if isinstance(self._before, torch.cuda.Event):
            return self._before.elapsed_time(self._after) / 1e3
        return self._after - self._before


class ExposedCommunication:
    """Waits for collectives and remembers how long that took. On CPUs a wait for a reduction includes the sum that it does
    itself."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._device, self._clock = device, clock
        self._exposed: list[ExposedWait] = []

    def wait(self, operations: Collection[Pending]) -> None:
        """Wait until the results of all may be used; on CUDA, by what the current stream does next: the host goes on."""
        if not operations:
            return
        before = self._mark()
        # Round by round: what follows from an operation is started before the next one is waited for, so that second halves
        # of several operations are under way together.
        while operations:
            operations = [operation for operation in operations if operation.advance()]
        self._exposed.append(ExposedWait(before, self._mark()))

    def take(self) -> list[ExposedWait]:
        """The waits since the last call."""
        waits, self._exposed = self._exposed, []
        return waits

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return self._clock()
        # An event and not the host's clock: the host only enqueues the wait, the stream is what is idle.
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
