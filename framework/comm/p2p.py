"""Point-to-point messages along an axis, by index in the axis. Started, never blocking: wait on the Pending.

Between two ranks messages of one direction match in the order in which they are started. Every send is recorded in
`axis.traffic`; a receive is not, the sender has it. There is no neighbour on an axis of size 1, so nothing to send.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from framework.comm.forms import Pending
from framework.mesh.axis import Axis


def start_send(x: Tensor, axis: Axis, to: int) -> Pending:
    """Start sending x to the rank at index `to`."""
    return exchange([(x, to)], [], axis)


def start_receive(x: Tensor, axis: Axis, source: int) -> Pending:
    """Start receiving into x from the rank at index `source`, which sends as many elements of the same dtype."""
    return exchange([], [(x, source)], axis)


def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> Pending:
    """Start (tensor, to) sends and (tensor, source) receives as one batch.

    Operations that depend on one another around a circle of ranks belong in one batch: NCCL runs separate ones in
    turn, and two ranks that both send first would wait for each other.
    """
    return Pending(_start(sends, receives, axis), [x for x, _ in (*sends, *receives)])


def exchange_apart(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis
) -> tuple[Pending, Pending]:
    """As `exchange`, with one Pending for what is sent and one for what is received. NCCL tells of a batch as a whole: there
    either waits for both."""
    works = _start(sends, receives, axis)
    are_apart = len(works) == len(sends) + len(receives)
    received = works[: len(receives)] if are_apart else works
    sent = works[len(receives) :] if are_apart else works
    return Pending(sent, [x for x, _ in sends]), Pending(received, [x for x, _ in receives])


def _start(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], axis: Axis) -> list[dist.Work]:
    """The works of the receives, then of the sends, or one for all."""
    operations = []
    for call, messages in ((dist.irecv, receives), (dist.isend, sends)):
        for x, peer in messages:
            assert x.is_contiguous(), f"shape {tuple(x.shape)} with strides {x.stride()} is not contiguous"
            assert 0 <= peer < axis.size and peer != axis.rank, f"no peer {peer} of rank {axis.rank} on {axis}"  # noqa: PT018
            operations.append(dist.P2POp(call, x, group=axis.group, group_peer=peer))
    if not operations:
        return []
    for x, _ in sends:
        axis.traffic.record("send", x.nbytes)
    return dist.batch_isend_irecv(operations)
