"""Exposed communication: how long a rank stood still for collectives that computation did not hide."""

import time
from collections.abc import Callable, Iterable

from framework.comm.collectives import Pending


class Waits:
    """Waits for collectives and adds up how long that took, in seconds since the start; a step's share is a difference.

    On CPUs a wait for a reduction includes the sum that it does itself. On CUDA it is the device's stream that waits, and
    the host's clock sees next to nothing of it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.seconds = 0.0
        self._clock = clock

    def wait(self, operations: Iterable[Pending]) -> None:
        """Return when the results of all may be used."""
        start = self._clock()
        for operation in operations:
            operation.wait()
        self.seconds += self._clock() - start
