"""Point-to-point messages along an axis, between ranks named by their index in it. Started, never blocking: wait on the Pending.

Tensors are contiguous, of any shape and dtype; sender and receiver agree on both beforehand, since no shape is sent. Every
message is as many bytes as its tensor.

Between two ranks messages of one direction match in the order in which they are started. Every send is recorded in
`axis.traffic`; a receive is not, the sender has it. There is no neighbour on an axis of size 1, so nothing to send.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.algorithms import Pending, copy, to_host
from framework.comm.communicator import Communicator, Operation

# Collectives use other tags: messages of one tag match in the order in which they are started.
_TAG = 0


def start_send(x: Tensor, axis: Communicator, to: int) -> Pending:
    """Start sending x, of any shape and dtype, to the rank at index `to` of the axis: x.nbytes bytes."""
    return exchange([(x, to)], [], axis)


def start_receive(x: Tensor, axis: Communicator, source: int) -> Pending:
    """Start receiving into x, of any shape, from the rank at index `source`, which sends as many elements of the same dtype."""
    return exchange([], [(x, source)], axis)


@torch.compiler.disable
def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Communicator, label: str = ""
) -> Pending:
    """Start (tensor, to) sends and (tensor, source) receives over the axis as one batch; each tensor of any shape. label: what
    they are for.

    Operations that depend on one another around a cycle of ranks belong in one batch: NCCL runs separate ones in
    turn, and two ranks that both send first would wait for each other. Raises AssertionError for a tensor that is not contiguous
    and for a peer that the axis does not have.
    """
    received, sent, finish = _start(sends, receives, axis)
    tensors = [x for x, _ in (*sends, *receives)]
    return Pending([*received, *sent], tensors, finish).named(_name(sends, receives, axis, label), axis)


@torch.compiler.disable
def exchange_apart(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Communicator, label: str = ""
) -> tuple[Pending, Pending]:
    """An `exchange` of tensors of any shapes with two Pendings, for what is sent and for what is received: the received may be
    used while the sent is still under way. NCCL tells of a batch as a whole: there either waits for both."""
    received, sent, finish = _start(sends, receives, axis)
    # Without messages of its kind a Pending is over: nobody waits for it, and NCCL's one work of a batch would leave it open.
    leaving = Pending(sent, [x for x, _ in sends]) if sends else Pending()
    arriving = Pending(received, [x for x, _ in receives], finish) if receives else Pending()
    # Sends and receives that are one work wait for the peers of both.
    is_one = sent is received
    names = _name(sends, receives if is_one else [], axis, label), _name(sends if is_one else [], receives, axis, label)
    return leaving.named(names[0], axis), arriving.named(names[1], axis)


def _name(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Communicator, label: str
) -> Operation:
    """The operation that a wait for the messages shows."""
    what = "send" if not receives else "send and receive" if sends else "receive"
    # 0: the two sides of a message count differently, so no number says whether a peer has come to it.
    return Operation(axis.axis, what, label, 0, tuple({axis.ranks[peer]: None for _, peer in (*receives, *sends)}))


def _start(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Communicator
) -> tuple[Sequence[Any], Sequence[Any], Callable[[], None]]:
    """Start the messages, of tensors of any shapes, or of host copies where the axis is staged. Returns works to wait for before
    what is received may be read, works before what is sent may be written to, and what is then left to do for the received."""
    for x, peer in (*sends, *receives):
        assert x.is_contiguous(), f"shape {tuple(x.shape)} with strides {x.stride()} is not contiguous"
        # A rank that sends to itself would wait for a receive that it has not started yet.
        assert 0 <= peer < axis.size and peer != axis.rank, f"no peer {peer} of rank {axis.rank} on {axis}"  # noqa: PT018
    for x, peer in sends:
        axis.traffic.record("send", x.nbytes, 0 if axis.is_on_node(peer) else x.nbytes)
    leaving, arriving = list(sends), list(receives)
    if axis.staged:
        leaving = [(to_host(x), peer) for x, peer in sends]
        arriving = [(torch.empty(x.shape, dtype=x.dtype), peer) for x, peer in receives]

    def finish() -> None:
        for (x, _), (came, _) in zip(receives, arriving, strict=True):
            copy(x, came)

    with axis.range("send and receive over", axis.name):
        works = _start_batch(leaving, arriving, axis)
    # NCCL coalesces a batch into one work; of gloo's messages each has its own.
    if len(works) == len(sends) + len(receives):
        return works[: len(receives)], works[len(receives) :], finish
    return works, works, finish


def _start_batch(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Communicator
) -> Sequence[Any]:
    """Works to wait for: receives first, then sends, tensors of any shape, in the caller's order, in which messages of one pair
    match; or one work for all."""
    if all(x.device.type == "cpu" for x, _ in (*sends, *receives)):
        # gloo knows no batches. What torch's does for each of its messages takes the host as long as the message: 20 us.
        works = [axis.receive(x, peer, _TAG) for x, peer in receives]
        return works + [axis.send(x, peer, _TAG) for x, peer in sends]
    operations = [
        dist.P2POp(call, x, group=axis.group, group_peer=peer)
        for call, messages in ((dist.irecv, receives), (dist.isend, sends))
        for x, peer in messages
    ]
    return dist.batch_isend_irecv(operations)


# Apart from the tags of `algorithms`, `collectives` and `objects`: streams may follow one of their messages at once.
STREAM_TAG = 5
# Bytes that staging fills at once: large enough that the time between two segments does not show.
SEGMENT_BYTES = 16 << 20


@torch.compiler.disable
def pass_bytes(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    axis: Communicator,
    segment_bytes: int = SEGMENT_BYTES,
) -> None:
    """Send each (bytes, to) and fill each (bytes, source); returns when all have come and gone.

    Tensors: uint8 [n] of the host, contiguous; sender and receiver know n. Peers are indices in the axis, others than this rank.
    Between two ranks messages of one direction match in the order of the calls. Every rank that sends or receives calls it;
    those that do neither need not. Recorded in the axis's traffic: the bytes sent.
    """
    for x, peer in sends:
        axis.traffic.record("send bytes", x.nbytes, 0 if axis.is_on_node(peer) else x.nbytes)
    rounds = max((-(-len(x) // segment_bytes) for x, _ in (*sends, *receives)), default=0)
    for number in range(rounds):
        part = slice(number * segment_bytes, (number + 1) * segment_bytes)
        # Receives first, so that a segment finds its place when it comes. A peer with longer messages waits in its own round for
        # nobody but those that have as many: the rank with the lowest round can always go on, so there is no cycle.
        works = [axis.receive(x[part], peer, STREAM_TAG) for x, peer in receives if part.start < len(x)]
        works += [axis.send(x[part], peer, STREAM_TAG) for x, peer in sends if part.start < len(x)]
        for work in works:
            work.wait()
