"""Waits: the operations that a rank has started, those that hold it up, and how far its device has come among them.

Over gloo the host waits in an operation, and so does the rank. Over NCCL the host starts operations and waits, and goes on at
once: what is held up is the device. So events stand in the computing stream where an operation starts and on both sides of each
wait. A stream runs them in order: the first that has not passed says what the device is at.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from framework.comm.transfer import choose_current
from framework.mesh.topology import Axis

# The last operations that are remembered: more than a step and the next one start, between which a device may be.
REMEMBERED = 8192


class Operation(NamedTuple):
    """A collective or message that this rank has started: the `number`-th of its name over the axis, for `label`, such as a unit.

    peers: world ranks whose messages it exchanges, empty for a collective, which every rank of the axis takes part in.
    """

    axis: Axis
    name: str
    label: str
    number: int
    peers: tuple[int, ...] = ()

    def __str__(self) -> str:
        with_whom = f" with ranks {list(self.peers)}" if self.peers else ""
        return f"{self.name} of {self.label or '(unnamed)'} over axis {self.axis.name}{with_whom}"


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


class Place(NamedTuple):
    """Where a device is. waits_in: the operation that holds its computing stream up. ahead: the operations, in order, that the
    host has started and the computing stream has not come to."""

    waits_in: Operation | None
    ahead: Sequence[Operation]


class Point(NamedTuple):
    """An event in the computing stream: where an operation starts, or, is_wait, on one side of a wait for it."""

    operation: Operation
    event: Any
    is_wait: bool = False
    is_behind: bool = False


class DeviceProgress:
    """Progress of a GPU's computing stream. The thread that trains writes, any thread asks. ended_waits: of the last step.

    An event costs the host 2 us, three for each operation; the device nothing that shows.
    """

    def __init__(self) -> None:
        self._points: deque[Point] = deque()
        self._stream: torch.cuda.Stream | None = None
        self._waits: list[ExposedWait] = []
        self.ended_waits: list[ExposedWait] = []

    def note_start(self, operation: Operation) -> None:
        """An operation has been started."""
        stream = torch.cuda.current_stream()
        self._stream = self._stream or stream
        # Behind an upload, say, an operation starts in a stream of its own, whose events say nothing of this one.
        if stream == self._stream:
            self._points.append(Point(operation, stream.record_event()))

    def note_wait(self, operation: Operation) -> None:
        """The stream is about to be made to wait for the operation."""
        self._note_side(operation, is_behind=False)

    def note_end(self, operation: Operation) -> None:
        """The stream has been made to wait."""
        self._note_side(operation, is_behind=True)
        self._waits.append(ExposedWait(self._points[-2].event, self._points[-1].event))

    def end_step(self) -> None:
        """Let go of events that have passed, by the thread that trains: at the end of a step, whose waits are then
        `ended_waits`."""
        self.ended_waits, self._waits = self._waits, []
        while self._points and self._points[0].event.query():
            self._points.popleft()

    def find_place(self) -> Place:
        """Where the device is now. Asks it, and waits for nothing."""
        points = list(self._points)  # a copy: the thread that trains may add meanwhile
        if not points or self._stream is None:
            return Place(None, ())
        # A thread of its own begins with the first GPU, on which a question would take memory.
        choose_current(self._stream.device)
        first = bisect_left(points, True, key=lambda point: not point.event.query())
        ahead = points[first:]
        waits_in = ahead[0].operation if ahead and ahead[0].is_behind else None
        return Place(waits_in, [point.operation for point in ahead if not point.is_wait])

    def _note_side(self, operation: Operation, is_behind: bool) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        self._points.append(Point(operation, event, True, is_behind))


class Waits:
    """The operations of the thread that communicates over a mesh, for whoever watches it: that thread writes, any thread reads.

    current: the operation that holds the thread up now. seconds: for how long operations have held it up so far, by the host's
    clock. recent: the last operations that were started. open: those that were started and not yet waited for, by their Pending.
    It is held here, and with it its memory, also where the code that started it has dropped it. hops: first hops of operations
    in two that were started and not yet waited for, in order, see `algorithms`. device: of NCCL's operations, which hold up the
    device and not the thread; else None.
    """

    __slots__ = ("current", "device", "hops", "open", "recent", "seconds")

    def __init__(self, device: DeviceProgress | None = None) -> None:
        self.current: Operation | None = None
        self.seconds = 0.0
        self.recent: deque[Operation] = deque(maxlen=REMEMBERED)
        self.open: dict[Any, Operation] = {}
        self.hops: deque[Any] = deque()
        self.device = device

    def begin(self, pending: Any, operation: Operation) -> None:
        """An operation has been started, which is open until its Pending has been waited for."""
        self.open[pending] = operation
        self.recent.append(operation)
        if self.device is not None:
            self.device.note_start(operation)

    def check_ended(self, place: str) -> None:
        """AssertionError with the name of each operation that is still open at the end of `place`, such as a step."""
        # Only where a step has succeeded: an error on the way leaves operations open, and is the one to be told.
        assert not self.open, (
            f"started and never waited for at the end of {place}: {', '.join(map(str, self.open.values()))}. A peer, or the"
            " device, may still use the memory of these operations: whoever starts one must wait for it, or not start it"
        )
        if self.device is not None:
            self.device.end_step()

    def wait(self, works: Any, operation: Operation | None) -> None:
        """Wait for works of the operation."""
        if self.device is not None and operation is not None:
            self.device.note_wait(operation)
        # Two stores and two clocks, 0.4 us: the wait itself is tens of us (docs/reliability.md has the measurement).
        self.current, began = operation, time.perf_counter()
        for work in works:
            work.wait()
        self.current = None
        self.seconds += time.perf_counter() - began
        if self.device is not None and operation is not None:
            self.device.note_end(operation)

    @property
    def ended(self) -> list[ExposedWait]:
        """Waits of the device in the step that has ended; none of a host, which has `seconds`."""
        return self.device.ended_waits if self.device is not None else []

    def find_place(self) -> Place:
        """The rank's place: what it waits in, and what its device has not come to."""
        current = self.current
        if self.device is None or current is not None:
            return Place(current, ())
        return self.device.find_place()
