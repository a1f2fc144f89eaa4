"""Algorithms: how a collective is made of what a backend offers, and which one is taken on which device.

`ALGORITHMS` is the choice: a table and not a measurement at start-up, because ranks must choose alike and because on gloo no
size was found at which its own one wins: scripts/bench/collectives.py from 64 KiB to 64 MiB, 2 and 4 ranks
(docs/measurements/benchmarks.md). Where GPUs are shared by ranks there is no NCCL; gloo has no messages between GPUs and few
collectives, so there every operation is that of the CPU on host copies (`on_host`).

Below, n is the size of the axis. Every algorithm starts and returns a Pending; its tensors are contiguous and on the devices
that the axis's group carries.
"""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.comm.waits import ExposedWait, Operation, Waits

# torch 2.13 renamed the collectives of a single tensor and warns at the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Messages of one collective must not match those of another kind, or of `p2p`, that is under way between the same two
# ranks.
_GATHER_TAG, _SCATTER_TAG = 1, 2


class Pending:
    """A started operation. Its tensors belong to it until `wait` returns: neither write to them nor read the results. Whoever
    starts one waits for it, at the latest in the same step: `Waits.check_ended` is the law.

    On CUDA `wait` makes the current stream wait, not the CPU. References are held until then, so that the allocator
    cannot give the memory to another tensor while the communication stream still uses it.

    finish: what is left to do when `works` have ended; it may start something that is to be waited for in turn.
    """

    def __init__(
        self,
        works: Sequence[Any] = (),
        tensors: Sequence[Tensor] = (),
        finish: "Callable[[], Pending | None] | None" = None,
    ):
        self._works = works
        self._tensors = tensors
        self._finish = finish
        self._operation: Operation | None = None
        self._waits: Waits | None = None

    def named(self, operation: Operation, axis: Communicator) -> "Pending":
        """This, whose waits are noted from now on as waits for the operation, which is open until the last one."""
        if self._works or self._finish is not None:
            self._operation, self._waits = operation, axis.waits
            axis.waits.begin(self, operation)
        return self

    @torch.compiler.disable
    def advance(self) -> bool:
        """Wait for what has been started, and start what follows from it. False if nothing does: then this is the end."""
        return self._advance()

    def _advance(self) -> bool:
        # Taken out first, so that a second wait finds nothing to do: `finish` gives buffers back, which may be done only once.
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        if works:
            (self._waits or Waits()).wait(works, self._operation)
        follows = finish() if finish is not None else None
        self._tensors = ()
        if self._waits is not None and (follows is None or follows._waits is not None):
            del self._waits.open[self]
            self._operation = self._waits = None
        if follows is not None:
            self._take_over(follows)
        return follows is not None

    def _take_over(self, other: "Pending") -> None:
        """Go on with what `other` has started, under its name if it has one."""
        self._works, self._tensors, self._finish = other._works, other._tensors, other._finish
        if other._waits is not None:
            self._operation, self._waits = other._operation, other._waits
            self._waits.open[self] = self._waits.open.pop(other)

    @torch.compiler.disable
    def wait(self) -> None:
        """Return when the results may be used; a second wait does nothing."""
        while self._advance():
            pass


def on_host(start: Callable[[Tensor, Tensor], Pending], out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """Start an operation of x whose result is `out`: on both as they are, or on host copies where the axis is staged.

    out, x: any shapes and dtypes that `start` takes; one tensor for an operation in place. Staged, x is read before this
    returns, `out` is written when it is waited for, and that wait is the CPU's too.
    """
    if not axis.staged:
        return start(out, x)
    host_x = to_host(x)
    # An algorithm in place reads `out`, so one copy must be both.
    host_out = host_x if out is x else torch.empty(out.shape, dtype=out.dtype)
    return then(start(host_out, host_x), lambda: copy(out, host_out))


def to_host(x: Tensor) -> Tensor:
    """A copy of x, any shape, on the CPU; a copy also if x is there. Waits for the device."""
    return x.to("cpu", copy=True)


def then(pending: Pending, finish: Callable[[], None]) -> Pending:
    """`pending` itself, followed by `finish` once its last part has ended."""
    former = pending._finish

    def proceed() -> Pending | None:
        follows = former() if former is not None else None
        # A part that starts another one is not the last: `finish` moves behind that.
        if follows is not None:
            return then(follows, finish)
        finish()
        return None

    # Not another Pending around it: this one is open under its operation's name.
    pending._finish = proceed
    return pending


def gather_by_tensor(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """The backend's all-gather. x: any shape; out: n times its elements, its dtype, ranks' x one after another."""
    return Pending([_all_gather_single(out.view(-1), x.view(-1), group=axis.group, async_op=True)], [out, x])


def gather_by_messages(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """All-gather: send x to every peer and receive each peer's x where it belongs. x: any shape; out: n times its elements."""
    parts = out.view(axis.size, -1)
    copy(parts[axis.rank], x)
    works = []
    for to, source in peers(axis):
        works.append(axis.receive(parts[source], source, _GATHER_TAG))
        works.append(axis.send(x, to, _GATHER_TAG))
    return Pending(works, [out, x])


def scatter_by_tensor(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """The backend's reduce-scatter, over `scatter_group`. out: any shape; x: n times its elements, its dtype."""
    return Pending(
        [_reduce_scatter_single(out.view(-1), x.view(-1), group=axis.scatter_group, async_op=True)], [out, x]
    )


def scatter_by_messages(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """Reduce-scatter: send every peer its part of x; when the peers' parts have come, add them to this rank's own.

    out: any shape; x: n times its elements, its dtype. The sum goes in the order of ranks, so that an element's result does not
    depend on which rank's part it is in. Needs n - 1 parts of memory besides, which the axis keeps for the next one.
    """
    parts = x.view(axis.size, -1)
    buffer = axis.take_buffer((axis.size - 1) * out.numel(), x)
    received = list(buffer[: (axis.size - 1) * out.numel()].view(axis.size - 1, -1))
    works = _exchange_parts(received, parts, axis)

    def add() -> None:
        terms: list[Tensor] = [*received[: axis.rank], parts[axis.rank], *received[axis.rank :]]
        total = terms[0]
        for term in terms[1:-1]:
            # Not into `out`, which may be this rank's own part, still to be added; received[0] has been added.
            total = torch.add(total, term, out=received[0])
        torch.add(total, terms[-1], out=out.view(-1))
        # Only now: an operation that starts before this wait must receive into other memory.
        axis.give_back(buffer)

    return Pending(works, [x], add)


# (out, x, axis) -> Pending, by device and operation.
ALGORITHMS: dict[tuple[str, str], Callable[[Tensor, Tensor, Communicator], Pending]] = {
    # NCCL's own know the links, and its all-gather lands in place.
    ("cuda", "all_gather"): gather_by_tensor,
    ("cuda", "reduce_scatter"): scatter_by_tensor,
    # gloo's own copies through a buffer: 1.4 to 4.1 times the time of messages into place.
    ("cpu", "all_gather"): gather_by_messages,
    # gloo's own costs as much as its all-reduce or more: 1.8 to 6.2 times the time of messages.
    ("cpu", "reduce_scatter"): scatter_by_messages,
}


def scatter_rounded(out: Tensor, x: Tensor, axis: Communicator, reduce_dtype: torch.dtype) -> Pending:
    """Reduce-scatter of x rounded to reduce_dtype; parts are added in out's dtype, in the order of ranks.

    out: any shape; x: n times its elements, its dtype. Sends (n-1)/n of x in reduce_dtype.
    """
    exchange = _RoundedExchange(x, axis, reduce_dtype)

    def add() -> None:
        exchange.add_up(out.view(-1))
        exchange.end()

    return Pending(exchange.works, [x], add)


def sum_rounded(x: Tensor, axis: Communicator, reduce_dtype: torch.dtype) -> Pending:
    """All-reduce of x, in place: every rank adds up one part as in `scatter_rounded`, and all gather the sums, rounded too.

    x: any shape and floating dtype. Sends 2 (n-1)/n of x in reduce_dtype; the second half starts in the wait.
    """
    exchange = _RoundedExchange(x, axis, reduce_dtype)

    def gather() -> Pending:
        mine = exchange.sent[axis.rank]
        own = x.view(-1)[axis.rank * mine.numel() : (axis.rank + 1) * mine.numel()]
        exchange.add_up(own)
        # Through the rounded buffer, this rank's own sum too: else it alone would keep the unrounded bits of its part, and
        # replicas would drift apart.
        mine[: own.numel()] = own
        return then(ALGORITHMS[x.device.type, "all_gather"](exchange.sent, mine, axis), take_over)

    def take_over() -> None:
        x.view(-1).copy_(exchange.sent.view(-1)[: x.numel()])
        exchange.end()

    return Pending(exchange.works, [x], gather)


class _RoundedExchange:
    """Every rank's part of every rank's x, rounded, on its way. sent: this rank's x in reduce_dtype, [ranks, part], the tail
    padded; received: all ranks' parts for this rank, [ranks, part]."""

    def __init__(self, x: Tensor, axis: Communicator, reduce_dtype: torch.dtype):
        numel = axis.size * -(-x.numel() // axis.size)
        self._axis = axis
        self._buffer = axis.take_buffer(2 * numel, x.new_empty(0, dtype=reduce_dtype))
        self.sent, self.received = self._buffer[: 2 * numel].view(2, axis.size, -1)
        flat = self.sent.view(-1)
        flat[: x.numel()] = x.view(-1)
        # Nobody adds the padding up, but it is sent: reused memory would send what an earlier operation has left.
        flat[x.numel() :] = 0
        self.works: list[Any]
        if x.is_cuda:
            # One launch for all parts. NCCL would add in reduce_dtype; exchanged, parts are added in x's dtype below.
            self.works = [dist.all_to_all_single(self.received, self.sent, group=axis.scatter_group, async_op=True)]
        else:
            self.received[axis.rank] = self.sent[axis.rank]
            peers = [part for rank, part in enumerate(self.received) if rank != axis.rank]
            self.works = _exchange_parts(peers, self.sent, axis)

    def add_up(self, out: Tensor) -> None:
        """Write the sum of what was received into out, [n] of at most a part's elements, in its dtype and in the order of
        ranks."""
        first, *others = (part[: out.numel()] for part in self.received)
        out.copy_(first)
        for term in others:
            out += term

    def end(self) -> None:
        """Give the memory back."""
        self._axis.give_back(self._buffer)


def copy(target: Tensor, source: Tensor) -> None:
    """Copy source, of any shape, into target, of as many elements and the same dtype, unless both start at the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.view(-1).copy_(source.view(-1))


def _exchange_parts(received: Sequence[Tensor], parts: Tensor, axis: Communicator) -> list[Any]:
    """Send every peer its part and receive the peers' parts into `received`, which has no place for this rank's own."""
    works = []
    for to, source in peers(axis):
        place = received[source if source < axis.rank else source - 1]
        works.append(axis.receive(place, source, _SCATTER_TAG))
        works.append(axis.send(parts[to], to, _SCATTER_TAG))
    return works


def peers(axis: Communicator) -> list[tuple[int, int]]:
    """(send to, receive from) at distance 1, 2, ...: at each distance every rank sends one message and receives one."""
    # In the order of ranks instead, all would send to rank 0 first, and its link would carry n - 1 messages while others idle.
    return [((axis.rank + by) % axis.size, (axis.rank - by) % axis.size) for by in range(1, axis.size)]


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
