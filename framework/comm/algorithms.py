"""Algorithms: how a collective is made of what a backend offers, and which one is taken on which device.

`ALGORITHMS` is the choice: a table and not a measurement at start-up, because ranks must choose alike and because on gloo no
size was found at which its own one wins: scripts/bench/collectives.py from 64 KiB to 64 MiB, 2 and 4 ranks
(docs/measurements/benchmarks.md). Where GPUs are shared by ranks there is no NCCL; gloo has no messages between GPUs and few
collectives, so there every operation is that of the CPU on host copies (`on_host`).

An axis of k nodes with m of its ranks on each is in two levels (`Communicator.levels`), and its rank o m + i is rank i of an
inner axis and rank o of an outer one. A collective in two hops, one over each, sends as many bytes as in one, but fewer of them
leave a node, where messages from each rank to each other one would send m times as many:

    all-gather       over outer, then over inner       between nodes (k-1)/k F/m, of F bytes of the full tensor
    reduce-scatter   over inner, then over outer       the same
    all-reduce       a reduce-scatter over inner, an all-reduce over outer, an all-gather over inner: twice that

Below, n is the size of the axis. Every algorithm starts and returns a Pending; its tensors are contiguous and on the devices
that the axis's group carries.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.communicator import Communicator, ExposedWait, Operation, Waits

# torch 2.13 renamed the collectives of a single tensor and warns at the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Messages of one collective must not match those of another kind, or of `p2p`, `collectives` and `objects`, that is under way
# between the same two ranks; nor a first hop those of a later one, which starts in a wait.
_GATHER_TAG, _SCATTER_TAG, _SPREAD_TAG, _SUMS_TAG = 1, 2, 6, 7


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
        # Taken out first, so that a second wait finds nothing to do: what `finish` adds may be added only once.
        works, finish = self._works, self._finish
        self._works, self._finish = (), None
        if works:
            (self._waits or Waits()).wait(works, self._operation)
        follows = finish() if finish is not None else None
        self._tensors = ()
        if self._waits is not None and (follows is None or follows._waits is not None):
            del self._waits.open[self]
            self._operation = self._waits = None
        if follows is None:
            return False
        # Go on with what has been started, under its name if it has one.
        self._works, self._tensors, self._finish = follows._works, follows._tensors, follows._finish
        if follows._waits is not None:
            self._operation, self._waits = follows._operation, follows._waits
            self._waits.open[self] = self._waits.open.pop(follows)
        return True

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


def then(pending: Pending, finish: "Callable[[], Pending | None]") -> Pending:
    """`pending` itself, followed by `finish` once its last part has ended; by what that starts, too."""
    former = pending._finish

    def proceed() -> Pending | None:
        follows = former() if former is not None else None
        # A part that starts another one is not the last: `finish` moves behind that.
        return finish() if follows is None else then(follows, finish)

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
    return Pending(_spread([parts[source : source + 1] for source in range(axis.size)], axis, _GATHER_TAG), [out, x])


def gather_over_nodes(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """All-gather in two hops: from the ranks at this rank's place on other nodes, then all that came so among those of a node.
    Messages land where they belong. x: any shape; out: n times its elements."""
    inner, outer = _levels_of(axis)
    parts = out.view(outer.size, inner.size, -1)
    copy(parts[outer.rank, inner.rank], x)
    first = Pending(_spread([each[inner.rank : inner.rank + 1] for each in parts], outer, _GATHER_TAG), [out, x])
    columns = list(parts.unbind(1))
    return in_turn(axis, first, lambda: Pending(_spread(columns, inner, _SPREAD_TAG), [out]))


def scatter_by_tensor(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """The backend's reduce-scatter, over `scatter_group`. out: any shape; x: n times its elements, its dtype."""
    return Pending(
        [_reduce_scatter_single(out.view(-1), x.view(-1), group=axis.scatter_group, async_op=True)], [out, x]
    )


def scatter_by_messages(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """Reduce-scatter: send every peer its part of x; when the peers' parts have come, add them to this rank's own.

    out: any shape; x: n times its elements, its dtype. The sum goes in the order of ranks, so that an element's result does not
    depend on which rank's part it is in. Needs n - 1 parts of memory besides.
    """
    parts = x.view(axis.size, -1)
    received = list(x.new_empty(axis.size - 1, out.numel()))
    works = exchange_parts(received, parts, axis)

    def add() -> None:
        terms: list[Tensor] = [*received[: axis.rank], parts[axis.rank], *received[axis.rank :]]
        total = terms[0]
        for term in terms[1:-1]:
            # Not into `out`, which may be this rank's own part, still to be added; received[0] has been added.
            total = torch.add(total, term, out=received[0])
        torch.add(total, terms[-1], out=out.view(-1))

    return Pending(works, [x], add)


def scatter_over_nodes(out: Tensor, x: Tensor, axis: Communicator) -> Pending:
    """Reduce-scatter in two hops: sums of a node's ranks, then of nodes, each in order. out: any shape; x: n times as large."""
    inner, outer = _levels_of(axis)
    parts = x.view(outer.size, inner.size, -1).transpose(0, 1)
    # A rank's parts for all nodes side by side: what the first hop leaves, the second one sends as it lies.
    sums, first = x.new_empty(outer.size * out.numel()), parts.contiguous()
    return in_turn(axis, scatter_by_messages(sums, first, inner), lambda: scatter_by_messages(out, sums, outer))


def sum_by_tensor(x: Tensor, _: Tensor, axis: Communicator) -> Pending:
    """The backend's sum, in place. x: any shape."""
    return Pending([dist.all_reduce(x, group=axis.group, async_op=True)], [x])


def sum_over_nodes(x: Tensor, _: Tensor, axis: Communicator) -> Pending:
    """All-reduce in three hops, in place: each rank of a node adds up a share, sums it over nodes, and all of a node gather them.
    x: any shape; shares differ by an element where ranks do not divide it."""
    inner, outer = _levels_of(axis)
    shares = x.view(-1).tensor_split(inner.size)
    mine = shares[inner.rank]
    terms = x.new_empty(inner.size, mine.numel())
    terms[inner.rank] = mine
    works = []
    for to, source in peers(inner):
        works.append(inner.receive(terms[source], source, _SCATTER_TAG))
        works.append(inner.send(shares[to], to, _SCATTER_TAG))

    def cross() -> Pending:
        torch.sum(terms, 0, out=mine)
        return in_turn(axis, sum_by_tensor(mine, mine, outer), spread)

    def spread() -> Pending:
        return Pending(_spread([each[None] for each in shares], inner, _SUMS_TAG), [x])

    return in_turn(axis, Pending(works, [x]), cross)


Algorithm = Callable[[Tensor, Tensor, Communicator], Pending]
# (in one hop, in two), by device and operation: (out, x, axis) -> Pending.
ALGORITHMS: dict[tuple[str, str], tuple[Algorithm, Algorithm]] = {
    # NCCL's own know the links: rings cross a node's network once for all of its ranks, by all adapters, which is what two hops
    # would send there; and its all-gather lands in place.
    ("cuda", "all_gather"): (gather_by_tensor, gather_by_tensor),
    ("cuda", "reduce_scatter"): (scatter_by_tensor, scatter_by_tensor),
    ("cuda", "all_reduce"): (sum_by_tensor, sum_by_tensor),
    # gloo's own copies through a buffer: 1.4 to 4.1 times the time of messages into place. It does not know nodes.
    ("cpu", "all_gather"): (gather_by_messages, gather_over_nodes),
    # gloo's own costs as much as its all-reduce or more: 1.8 to 6.2 times the time of messages.
    ("cpu", "reduce_scatter"): (scatter_by_messages, scatter_over_nodes),
    # gloo's ring goes through all ranks in turn: what is best within a node, and m times the bytes between nodes.
    ("cpu", "all_reduce"): (sum_by_tensor, sum_over_nodes),
}


class _FirstHop:
    """The first hop of an operation in two, as a work to wait for: its wait starts the second hop, behind that of every earlier
    operation of this rank, over whatever axis."""

    def __init__(self, first: Pending, start: Callable[[], Pending], hops: "deque[_FirstHop]"):
        self._first, self._start, self._hops = first, start, hops
        self.second: Pending | None = None
        hops.append(self)

    def wait(self) -> None:
        # Ranks wait in different orders where one's data leaves a layer out. The second hops of all operations must be under way
        # before anybody waits for a later one: else this rank would wait for a message that a peer sends behind a wait for this.
        # Hops of other axes, too: experts and dense parameters have different axes, and two ranks may share both.
        while self.second is None:
            hop = self._hops.popleft()
            hop._first.wait()
            hop.second = hop._start()


def in_turn(axis: Communicator, first: Pending, start: Callable[[], Pending]) -> Pending:
    """`first`, and then what `start` starts, in the order in which operations were started however they are waited for."""
    hop = _FirstHop(first, start, axis.waits.hops)
    return Pending([hop], finish=lambda: hop.second)


def choose(name: str, x: Tensor, axis: Communicator) -> Algorithm:
    """The algorithm of an operation on tensors that are where x is."""
    return ALGORITHMS[x.device.type, name][axis.levels is not None]


def leaving_bytes(name: str, num_bytes: int, x: Tensor, axis: Communicator, is_coded: bool) -> int:
    """Bytes of an operation on x that leave the node, of all that it sends. is_coded: it is one of `codec`."""
    # NCCL and two hops know nodes. Of what gloo or this framework do in one hop only a ring does, and there one rank of a node
    # sends all that leaves it.
    if axis.levels is not None or not (is_coded or axis.staged or x.device.type == "cpu"):
        return axis.least_leaving(num_bytes)
    if name == "all_reduce" and not is_coded:
        return num_bytes if not axis.is_on_node((axis.rank + 1) % axis.size) else 0
    return axis.most_leaving(num_bytes)


def _levels_of(axis: Communicator) -> tuple[Communicator, Communicator]:
    assert axis.levels is not None, f"axis {axis.name} is not in two levels"
    return axis.levels


def _spread(places: Sequence[Tensor], axis: Communicator, tag: int) -> list[Any]:
    """Send the tensors of this rank's place to every peer, and receive each peer's in its own. places: for each rank tensors that
    are contiguous each, [tensors, ...]."""
    works = []
    for to, source in peers(axis):
        works += [axis.receive(each, source, tag) for each in places[source]]
        works += [axis.send(each, to, tag) for each in places[axis.rank]]
    return works


def copy(target: Tensor, source: Tensor) -> None:
    """Copy source, of any shape, into target, of as many elements and the same dtype, unless both start at the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.view(-1).copy_(source.view(-1))


def exchange_parts(received: Sequence[Tensor], parts: Tensor, axis: Communicator) -> list[Any]:
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
