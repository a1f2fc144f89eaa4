"""Exposed communication: how long computation stood still for collectives that it did not hide."""

import time
from collections.abc import Callable, Collection
from typing import Any

import torch

from framework.comm.algorithms import Pending


class ExposedWait:
    """One wait. On CUDA its ends are events of the stream that waited, and both must have passed when `seconds` is asked."""

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
        self._stalls: list[ExposedWait] = []

    def wait(self, operations: Collection[Pending]) -> None:
        """Return when the results of all may be used; on CUDA, by what is put on the current stream next."""
        before = self._mark()
        while operations:  # what follows from an operation is started before that from the next one is waited for
            operations = [operation for operation in operations if operation.advance()]
        self._stalls.append(ExposedWait(before, self._mark()))

    def take(self) -> list[ExposedWait]:
        """The waits since the last call."""
        taken, self._stalls = self._stalls, []
        return taken

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
