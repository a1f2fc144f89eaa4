"""NCCL simulator: ranks as threads on simulated GPUs, and the rules that NCCL has for messages.

gloo hides what NCCL may do, and the simulator does as late and as harshly as it may:

    a result lands in its wait; until then the output holds no number
    an input must keep its bits and its memory until the wait
    operations of one communicator run in the order in which they were started, a batch of messages as a whole
    a communicator's n-th collective is the same on all its ranks
    ranks that cannot go on are a deadlock, said at once with what each of them waits for

Each rank has a simulated GPU (`gpu.py`), so that what the framework does on GPUs alone runs. `installed` replaces
torch.distributed below `framework/comm`, and torch.cuda; nothing of the framework is changed.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm import algorithms, codec, collectives, connect, p2p
from framework.mesh.topology import Topology
from tests.nccl import gpu

Combine = Callable[[Sequence["Operation"]], Tensor]
Place = tuple[str, int]  # a communicator's name and a rank in it


class SimulatorError(AssertionError):
    """Code that NCCL would not carry out as it is meant."""


class Network:
    """The devices of all ranks, and what their threads share.

    serial: a device runs its operations of all communicators one at a time, in the order in which its host started them, as with
    one hardware queue, or where kernels of NCCL find no free multiprocessors.
    runs_ahead: ranks that cannot go on are no error: their devices are held up, and their hosts go on until they ask for a value.
    """

    def __init__(self, num_ranks: int, serial: bool = False, runs_ahead: bool = False) -> None:
        self.serial, self.num_running, self.has_failed = serial, num_ranks, False
        self.runs_ahead, self.hangs = runs_ahead, False
        self.changed = threading.Condition()
        # By communicator and rank; in serial mode by rank. What is over has left.
        self.queues: defaultdict[Any, deque[Operation]] = defaultdict(deque)
        self.collectives: defaultdict[Place, list[Operation]] = defaultdict(list)
        # By communicator, kind and the two ranks, sender first. The n-th send meets the n-th receive.
        self.messages: defaultdict[tuple[str, str, int, int], list[Message]] = defaultdict(list)
        self._waiting: dict[int, Operation] = {}

    def start(self, operation: "Operation") -> None:
        """Queue an operation that a rank's host starts."""
        group = operation.group
        with self.changed:
            if not operation.messages:
                self.collectives[group.name, group.rank].append(operation)
            for message in operation.messages:
                self.messages[message.key].append(message)
            self.queues[group.rank if self.serial else (group.name, group.rank)].append(operation)
            while any(self._run_first(queue) for queue in self.queues.values() if queue):
                pass
            self.changed.notify_all()

    def wait(self, operation: "Operation") -> bool:
        """Return when the operation is over. False, or SimulatorError, if no rank can go on."""
        rank = operation.group.rank
        with self.changed:
            self._waiting[rank] = operation
            while not (operation.is_over or self.hangs):
                self._check_deadlock()
                if not self.hangs:
                    self.changed.wait()
            del self._waiting[rank]
        return operation.is_over

    def leave(self, has_failed: bool) -> None:
        """End a rank."""
        with self.changed:
            self.num_running -= 1
            self.has_failed |= has_failed
            self.changed.notify_all()

    def _check_deadlock(self) -> None:
        if self.has_failed:
            raise SimulatorError("another rank has failed")
        if len(self._waiting) == self.num_running and not any(each.is_over for each in self._waiting.values()):
            self.has_failed, self.hangs = not self.runs_ahead, self.runs_ahead
            self.changed.notify_all()
            if self.hangs:
                return
            waits = "; ".join(f"rank {rank}: {self._waiting[rank]}" for rank in sorted(self._waiting))
            raise SimulatorError(f"deadlock: {waits}")

    def _run_first(self, queue: "deque[Operation]") -> bool:
        """Run the first operation of a queue if all who take part have come to it. Whether anything has changed."""
        first = queue[0]
        has_changed = first.meet_messages(self) if first.messages else self._is_first_everywhere(first)
        if first.messages and not all(message.is_met for message in first.messages):
            return has_changed
        if has_changed or first.messages:
            first.is_over = True
            queue.popleft()
            return True
        return False

    def _is_first_everywhere(self, operation: "Operation") -> bool:
        """Whether a collective is at the head of the queue of every rank of its communicator, or was, and is over there."""
        peers = operation.peers(self)
        if self.runs_ahead and peers is not None and len({each.kind for each in peers}) > 1:
            return False  # NCCL may hang there, or may not
        return peers is not None and all(each.is_over or self.is_first(each) for each in peers)

    def is_first(self, operation: "Operation") -> bool:
        """Whether the operation is at the head of its rank's queue."""
        group = operation.group
        queue = self.queues[group.rank if self.serial else (group.name, group.rank)]
        return bool(queue) and queue[0] is operation


@dataclass(frozen=True, eq=False)
class Group:
    """A communicator as one rank sees it; stands for torch's process group. ranks: those of the world, in its order."""

    network: Network
    name: str
    ranks: tuple[int, ...]
    rank: int

    @property
    def place(self) -> int:
        """This rank's index."""
        return self.ranks.index(self.rank)


@dataclass(eq=False)
class Message:
    """One tensor of a batch, on its sender's or its receiver's side. data: what is sent. key: of `Network.messages`."""

    operation: "Operation"
    key: tuple[str, str, int, int]
    x: Tensor
    data: Tensor | None
    number: int
    is_met: bool = False

    def partner(self, network: Network) -> "Message | None":
        """The other side, once it has been started."""
        name, kind, source, target = self.key
        others = network.messages[name, "receive" if kind == "send" else "send", source, target]
        return others[self.number] if len(others) > self.number else None


class Operation:
    """One started operation of one rank, which torch would call a work.

    kind: equal on all ranks. combine: the output, of the operations of all ranks in their order. in_place: the output is the
    input. sends, receives: a batch of (tensor, index of the peer) instead.
    """

    def __init__(
        self,
        group: Group,
        kind: str,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        combine: Combine | None = None,
        in_place: bool = False,
        sends: Sequence[tuple[Tensor, int]] = (),
        receives: Sequence[tuple[Tensor, int]] = (),
        splits: Sequence[int] | None = None,
    ) -> None:
        self.group, self.kind, self._combine, self._in_place, self.splits = group, kind, combine, in_place, splits
        self._inputs, self._outputs = [*inputs, *(x for x, _ in sends)], [*outputs, *(x for x, _ in receives)]
        gpu.run_current_stream()
        with gpu.unseen():
            self._start(sends, receives)

    def _start(self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> None:
        group = self.group
        self.data = [x.detach().clone() for x in self._inputs]
        self._memory = [(x, x.untyped_storage().nbytes()) for x in (*self._inputs, *self._outputs) if x.numel()]
        self.number = len(group.network.collectives[group.name, group.rank])
        self.messages: list[Message] = []
        for what, messages in (("send", sends), ("receive", receives)):
            for x, peer in messages:
                self._add_message(what, x, group.ranks[peer])
        self.is_over = self._is_done = False
        read = [] if self._in_place else self._inputs
        for out in self._outputs:
            _spoil(out, read)
        if not gpu.is_held():
            group.network.start(self)

    def __str__(self) -> str:
        return f"{self.kind} #{self.number} over {self.group.name}"

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the result land. SimulatorError for whatever NCCL would have made wrong."""
        if self._is_done:
            return True
        if gpu.is_held() or not self.group.network.wait(self):
            gpu.here().hold()
            return True
        with gpu.unseen():
            self._end()
        return True

    def _end(self) -> None:
        for x, num_bytes in self._memory:
            if x.untyped_storage().nbytes() < num_bytes:
                raise SimulatorError(f"{self}: memory was given back while it was under way")
        if not self._in_place and not all(map(_has_bits, self._inputs, self.data)):
            raise SimulatorError(f"{self}: its input was written to while it was under way")
        if self.messages:
            self._receive()
        else:
            self._land()
        self._is_done = True

    def peers(self, network: Network) -> "list[Operation] | None":
        """This collective on all ranks, in their order; None while one has not come to it."""
        of_ranks = [network.collectives[self.group.name, rank] for rank in self.group.ranks]
        return None if any(len(each) <= self.number for each in of_ranks) else [each[self.number] for each in of_ranks]

    def meet_messages(self, network: Network) -> bool:
        """Let the messages of a batch meet others at the heads of their queues. Whether any has."""
        has_met = False
        for message in self.messages:
            other = None if message.is_met else message.partner(network)
            if other is not None and network.is_first(other.operation):
                message.is_met = other.is_met = has_met = True
        return has_met

    def _add_message(self, what: str, x: Tensor, peer: int) -> None:
        rank, network = self.group.rank, self.group.network
        key = (self.group.name, what, *((rank, peer) if what == "send" else (peer, rank)))
        number = len(network.messages[key]) + sum(message.key == key for message in self.messages)
        self.messages.append(Message(self, key, x, x.detach().clone() if what == "send" else None, number))

    def _land(self) -> None:
        peers = self.peers(self.group.network)
        assert peers is not None, "a collective that is over has come everywhere"
        if len({each.kind for each in peers}) > 1:
            told = ", ".join(f"rank {each.group.rank} {each.kind}" for each in peers)
            raise SimulatorError(f"different operations #{self.number} over {self.group.name}: {told}")
        if self._combine is not None:
            self._outputs[0].detach().view(-1).copy_(self._combine(peers).reshape(-1))

    def _receive(self) -> None:
        for message in self.messages:
            if message.data is None:
                sent = message.partner(self.group.network)
                assert sent is not None and sent.data is not None  # noqa: PT018
                if (sent.x.numel(), sent.x.dtype) != (message.x.numel(), message.x.dtype):
                    raise SimulatorError(
                        f"{self}: {sent.x.shape} {sent.x.dtype} for {message.x.shape} {message.x.dtype}"
                    )
                message.x.detach().view(-1).copy_(sent.data.view(-1))


def _spoil(out: Tensor, inputs: Sequence[Tensor]) -> None:
    """Take the numbers out of what an operation is to write, but for what it is to read."""
    out = out.detach()
    kept = [(x, x.clone()) for x in inputs if x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()]
    out.fill_(torch.nan if out.is_floating_point() else 85)  # 0x55 of bytes that are a float's
    for x, former in kept:
        x.detach().copy_(former)


def _has_bits(x: Tensor, former: Tensor) -> bool:
    return torch.equal(x.detach().reshape(-1).view(torch.uint8), former.reshape(-1).view(torch.uint8))


class Distributed:
    """What `framework/comm` calls of torch.distributed."""

    ReduceOp = dist.ReduceOp

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        def combine(ranks: Sequence[Operation]) -> Tensor:
            return _reduce([each.data[0] for each in ranks], op)

        kind = f"all_reduce {op} [{x.numel()}] {x.dtype}"
        return _finish(Operation(group, kind, [x], [x], combine, in_place=True), async_op)

    def all_gather(self, out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
        def combine(ranks: Sequence[Operation]) -> Tensor:
            return torch.cat([each.data[0].reshape(-1) for each in ranks])

        return _finish(Operation(group, f"all_gather [{x.numel()}] {x.dtype}", [x], [out], combine), async_op)

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Any, async_op: bool) -> Any:
        def combine(ranks: Sequence[Operation]) -> Tensor:
            parts = [each.data[0].view(len(ranks), -1)[group.place] for each in ranks]
            return _reduce(parts, dist.ReduceOp.SUM)

        return _finish(Operation(group, f"reduce_scatter [{x.numel()}] {x.dtype}", [x], [out], combine), async_op)

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Any = None,
        in_splits: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        def part(each: Operation) -> Tensor:
            data = each.data[0]
            parts = data.chunk(len(group.ranks)) if each.splits is None else data.split(list(each.splits))
            return parts[group.place].reshape(-1)

        def combine(ranks: Sequence[Operation]) -> Tensor:
            return torch.cat([part(each) for each in ranks])

        return _finish(Operation(group, f"all_to_all {x.dtype}", [x], [out], combine, splits=in_splits), async_op)

    def broadcast(self, x: Tensor, group: Any = None, group_src: int = 0, async_op: bool = False) -> Any:
        def combine(ranks: Sequence[Operation]) -> Tensor:
            return ranks[group_src].data[0]

        return _finish(
            Operation(group, f"broadcast [{x.numel()}] {x.dtype}", [x], [x], combine, in_place=True), async_op
        )

    isend, irecv = "send", "receive"  # kinds of a P2POp, which `batch_isend_irecv` carries out

    class P2POp(NamedTuple):
        """One message of a batch."""

        kind: str
        x: Tensor
        group: Any
        group_peer: int

    def batch_isend_irecv(self, messages: Sequence[P2POp]) -> list[Operation]:
        """One work for a batch, as NCCL has it."""
        if not messages:
            return []
        group = messages[0].group
        sends, receives = (
            [(each.x, each.group_peer) for each in messages if each.kind == kind] for kind in (self.isend, self.irecv)
        )
        to, source = ([group.ranks[peer] for _, peer in each] for each in (sends, receives))
        return [Operation(group, f"messages to {to} and from {source}", sends=sends, receives=receives)]


def _reduce(terms: Sequence[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(list(terms))
    if op == dist.ReduceOp.SUM:
        return stacked.sum(0)
    return stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.amin(0)


def _finish(operation: Operation, async_op: bool) -> Any:
    return operation if async_op else operation.wait()


@contextmanager
def installed() -> Iterator[None]:
    """The simulator in the place of torch.distributed and of torch.cuda."""
    fake = Distributed()
    with ExitStack() as stack:
        stack.enter_context(gpu.installed())
        for module, name, value in (
            (algorithms, "dist", fake),
            (codec, "dist", fake),
            (collectives, "dist", fake),
            (p2p, "dist", fake),
            (algorithms, "_all_gather_single", fake.all_gather),
            (algorithms, "_reduce_scatter_single", fake.reduce_scatter),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


def make_mesh(network: Network, topology: Topology, rank: int) -> connect.Mesh:
    """A rank's mesh with the communicators that `connect` makes on GPUs."""

    def persist(build: Any, *_: Any) -> Group:
        plan = build.args[0]
        return Group(network, plan.name, plan.ranks, rank)

    stores = SimpleNamespace(PrefixStore=lambda name, store: None)
    with (
        patch.object(connect, "persist", persist),
        patch.object(connect, "dist", stores),
        patch.object(connect, "set_group_timeout", lambda *_: None),
    ):
        backends = connect.choose_backends("cuda", is_debug=False)
        axes = connect.join_axes(topology, rank, backends, None, timedelta(seconds=1))  # type: ignore[arg-type]
    return connect.Mesh(topology, rank, gpu.GPU, axes)


def run_ranks(
    topology: Topology, body: Callable[[connect.Mesh], Any], serial: bool = False, runs_ahead: bool = False
) -> list[Any]:
    """body(mesh) on a thread for each rank, within `installed`; the results, or the first error that is a cause."""
    network = Network(topology.world, serial, runs_ahead)
    meshes = [make_mesh(network, topology, rank) for rank in range(topology.world)]
    return run_threads(network, [lambda mesh=mesh: body(mesh) for mesh in meshes])  # type: ignore[misc]


def run_threads(network: Network, bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of bodies, each on a thread of its own as a rank of the network."""
    results: dict[int, Any] = {}
    errors: dict[int, BaseException] = {}

    def work(rank: int) -> None:
        try:
            with gpu.SimulatedGpu():
                results[rank] = bodies[rank]()
        except BaseException as error:  # told below, by the thread that waits
            errors[rank] = error
        network.leave(has_failed=rank in errors)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}") for rank in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_cause(errors)
    return [results[rank] for rank in range(len(bodies))]


def _raise_cause(errors: Mapping[int, BaseException]) -> None:
    causes = [error for error in errors.values() if "another rank has failed" not in str(error)]
    for error in causes or errors.values():
        raise error
