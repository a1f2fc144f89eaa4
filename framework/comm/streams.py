"""Long messages of bytes between hosts, beside training: files that ranks keep for one another.

Each message goes in segments, and the next segments of all messages start when those before have come: gloo would take a message
of many GiB as one operation, and hold buffers of that size for a receiver that is late.
"""

from collections.abc import Sequence

from torch import Tensor

from framework.comm.communicator import Communicator

# Apart from the tags of `algorithms`, `agreement` and `objects`: streams may follow one of their messages at once.
STREAM_TAG = 5
# As much as staging fills at once: large enough that the time between two segments does not show.
SEGMENT_BYTES = 16 << 20


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
    for x, _ in sends:
        axis.traffic.record("send bytes", x.nbytes)
    rounds = max((-(-len(x) // segment_bytes) for x, _ in (*sends, *receives)), default=0)
    for number in range(rounds):
        part = slice(number * segment_bytes, (number + 1) * segment_bytes)
        # Receives first, so that a segment finds its place when it comes. A peer with longer messages waits in its own round for
        # nobody but those that have as many: the rank with the lowest round can always go on, so there is no cycle.
        works = [axis.receive(x[part], peer, STREAM_TAG) for x, peer in receives if part.start < len(x)]
        works += [axis.send(x[part], peer, STREAM_TAG) for x, peer in sends if part.start < len(x)]
        for work in works:
            work.wait()
