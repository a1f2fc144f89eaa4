"""Communicator: what carries messages along one axis of the mesh, and the Traffic that this rank has sent there."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.profiler import record_function

from framework.comm.waits import Operation, Waits
from framework.mesh.topology import ZERO_AXES, Axis

if TYPE_CHECKING:
    from framework.comm.connect import Mesh


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


def read_traffic(mesh: "Mesh", between_nodes: bool = False) -> TrafficReading:
    """Calls and bytes of every axis since the mesh was connected. between_nodes: only those bytes that leave their node."""
    return {
        name: {
            operation: (calls, (traffic.bytes_leaving if between_nodes else traffic.bytes)[operation])
            for operation, calls in traffic.calls.items()
        }
        for name, traffic in ((name, axis.traffic) for name, axis in mesh.axes.items())
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
