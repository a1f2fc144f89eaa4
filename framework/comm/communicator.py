"""Communicator: what carries messages along one axis of the mesh, and the Traffic that this rank has sent there; and Waits: the
operations that a rank has started, those that hold it up, and how far its device has come among them.

Over gloo the host waits in an operation, and so does the rank. Over NCCL the host starts operations and waits, and goes on at
once: what is held up is the device. So events stand in the computing stream where an operation starts and on both sides of each
wait. A stream runs them in order: the first that has not passed says what the device is at.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from framework.comm.transfer import choose_current
from framework.mesh.topology import ZERO_AXES, Axis

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


class Traffic:
    """Calls and bytes that one rank has sent along one axis since the start, by operation.

    `comm/` records and nobody resets: a step's traffic is a difference. Bytes are what this rank sends to the others
    by the operation's bandwidth-optimal algorithm (2 (n-1)/n of the tensor for an all-reduce of n ranks), so that
    volumes compare with theory and with a link's bandwidth.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        # Bytes that leave their node.
        self.bytes_leaving: dict[str, int] = {}

    def record(self, operation: str, num_bytes: int, leaving: int = 0) -> int:
        """One more call of `operation`, which sends `num_bytes`, so many of them to other nodes. The number of calls so far."""
        self.calls[operation] = calls = self.calls.get(operation, 0) + 1
        self.bytes[operation] = self.bytes.get(operation, 0) + num_bytes
        self.bytes_leaving[operation] = self.bytes_leaving.get(operation, 0) + leaving
        return calls


class Message:
    """A message of gloo under way, whose wait has the time-out of the communicator. gloo's own is the short one with which the
    group was connected: torch lengthens it for collectives only, so a peer that was busy for a minute would end the run."""

    __slots__ = ("_timeout", "_work")

    def __init__(self, work: Any, timeout: timedelta):
        self._work, self._timeout = work, timeout

    def wait(self) -> None:
        """Return when the tensor is sent or has come. Raises RuntimeError when neither happens in time."""
        self._work.wait(self._timeout)


class Communicator:
    """An axis with its process groups, and this rank's Traffic along it.

    An axis of size 1 has no group, and every collective over it returns its input. A larger one without a group is
    *unconnected*: plans are made with it (sizes, ranks, bytes), and a collective over it is an AssertionError.

    name, size, rank, ranks: the axis's: its number of ranks, this process's index among them, their world ranks in order.
    group: a torch process group over the axis's ranks, in their order. scatter_group: a second one for reduce-scatters, where
    operations of one group queue behind each other (NCCL). check_s: debug mode, see `collectives`. staged: the groups carry
    tensors of the CPU only, and those of a GPU go through host memory. timeout: of a message's wait. waits: where waits over this
    and other axes are noted, None: in one of its own. secret: of the run's start, for what is sealed. levels: of an axis in two
    levels, the inner and the outer one.
    """

    def __init__(
        self,
        axis: Axis,
        group: Any = None,
        scatter_group: Any = None,
        *,
        check_s: float | None = None,
        staged: bool = False,
        timeout: timedelta = timedelta(minutes=30),
        waits: Waits | None = None,
        secret: bytes = b"",
    ):
        self.axis, self.check_s, self.staged, self.timeout = axis, check_s, staged, timeout
        # Attributes and not properties: a step of 8 layers on 2 ranks of `tp` asks some 1,200 times for a size or a rank.
        self.name, self.size, self.rank, self.ranks = axis.name, axis.size, axis.rank, axis.ranks
        self.nodes = axis.nodes
        self.levels: tuple[Communicator, Communicator] | None = None
        self.traffic = Traffic()
        self.waits = waits or Waits()
        self.secret = secret
        self.names_ranges = False  # while a profiler records
        self._group, self._scatter_group = group, scatter_group
        # Buffers of a library for these ranks, by the bytes of a row (`deep_ep`).
        self.held: dict[int, Any] = {}

    def range(self, what: str, label: object = "") -> AbstractContextManager[Any]:
        """Names what is done meanwhile in a profiler's trace; nothing where none records."""
        # A record_function costs 8 us even where nobody listens (this 0.8; measured on this project's busy x86 machine).
        return record_function(f"{what} {label}".rstrip()) if self.names_ranges else nullcontext()

    def record(self, name: str, num_bytes: int, label: str = "", leaving: int | None = None) -> Operation:
        """Count an operation that is about to start, which sends `num_bytes`, as traffic of this axis. leaving: those of the
        bytes that go to other nodes, None: as few as can be."""
        sent_away = self.least_leaving(num_bytes) if leaving is None else leaving
        return Operation(self.axis, name, label, self.traffic.record(name, num_bytes, sent_away))

    def least_leaving(self, num_bytes: int) -> int:
        """Bytes of a collective that leave their node where each number crosses the network once for all ranks of a node:
        on k nodes (k-1)/k of what a rank has been left with in its own, or (k-1)/(n-1) of all that it sends."""
        return num_bytes * (self.nodes - 1) // max(1, self.size - 1)

    def most_leaving(self, num_bytes: int) -> int:
        """The same where every rank sends to every other one for itself: the ranks that are on other nodes, of all others."""
        return num_bytes * (self.size - self.size // self.nodes) // max(1, self.size - 1)

    def is_on_node(self, peer: int) -> bool:
        """Whether the rank at index `peer` shares this rank's node."""
        here = self.size // self.nodes
        return peer // here == self.rank // here

    @contextmanager
    def waiting(self, operation: Operation) -> Iterator[None]:
        """Around calls that start an operation and wait for its end."""
        self.waits.current, began = operation, time.perf_counter()
        # Left as it is by an error: then it says where this rank was when a peer went.
        yield
        self.waits.current = None
        self.waits.seconds += time.perf_counter() - began

    @property
    def group(self) -> Any:
        """The torch process group. AssertionError where there is none."""
        # Not None to torch: it would take the world's group, and the sum would be over ranks that have no part in it.
        assert self._group is not None, (
            f"the communicator of axis {self.name} ({self.size} ranks) is unconnected: it has no process group to send through"
        )
        return self._group

    def send(self, x: Tensor, to: int, tag: int) -> Message:
        """Start sending x, any shape, contiguous and on the CPU, to the rank at index `to`. Counts no traffic."""
        return Message(self.group.send([x], to, tag), self.timeout)

    def receive(self, x: Tensor, source: int, tag: int) -> Message:
        """Start receiving into x, any shape, contiguous and on the CPU, from the rank at index `source`."""
        return Message(self.group.recv([x], source, tag), self.timeout)

    @property
    def scatter_group(self) -> Any:
        """The process group for reduce-scatters: one of their own where operations of `group` queue, else `group`."""
        return self.group if self._scatter_group is None else self._scatter_group

    @property
    def groups(self) -> tuple[Any, ...]:
        """The process groups that there are: none, `group`, or `group` and `scatter_group`."""
        return tuple(group for group in (self._group, self._scatter_group) if group is not None)


def link_levels(axes: dict[str, Communicator]) -> dict[str, Communicator]:
    """The axes by name, of which those in two levels now have these."""
    for name in ZERO_AXES:
        inner, outer = axes[f"{name}_inner"], axes[f"{name}_outer"]
        axes[name].levels = (inner, outer) if outer.size > 1 else None
    return axes


# {axis: {operation: (calls, bytes)}}, bytes as `collectives` defines them.
TrafficReading = dict[str, dict[str, tuple[int, int]]]


def read_traffic(axes: Mapping[str, Communicator], between_nodes: bool = False) -> TrafficReading:
    """Calls and bytes of every axis of a mesh since it was connected. between_nodes: only those bytes that leave their node."""
    return {
        name: {
            operation: (calls, (traffic.bytes_leaving if between_nodes else traffic.bytes)[operation])
            for operation, calls in traffic.calls.items()
        }
        for name, traffic in ((name, axis.traffic) for name, axis in axes.items())
    }


def subtract_traffic(after: TrafficReading, before: TrafficReading) -> TrafficReading:
    """Calls and bytes between two snapshots; operations and axes without a call are left out."""
    # Counters only grow, and an operation may appear between the readings: what is missing before counts as 0.
    changed: TrafficReading = {}
    for axis, operations in after.items():
        for operation, (calls, num_bytes) in operations.items():
            calls_before, bytes_before = before.get(axis, {}).get(operation, (0, 0))
            if calls > calls_before:
                changed.setdefault(axis, {})[operation] = (calls - calls_before, num_bytes - bytes_before)
    return changed


def sum_traffic(reading: TrafficReading, between_nodes: TrafficReading | None = None) -> dict[str, dict[str, int]]:
    """Sums over operations: {axis: {"calls": n, "bytes": n}}, as a StepReport carries them; with a reading of what went between
    nodes also "bytes_between_nodes", where there are any."""
    found = {
        axis: {
            "calls": sum(calls for calls, _ in operations.values()),
            "bytes": sum(num_bytes for _, num_bytes in operations.values()),
        }
        for axis, operations in reading.items()
    }
    for axis, operations in (between_nodes or {}).items():
        if away := sum(num_bytes for _, num_bytes in operations.values()):
            found[axis]["bytes_between_nodes"] = away
    return found
