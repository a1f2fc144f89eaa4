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
    operations = []
    for call, messages in ((dist.irecv, receives), (dist.isend, sends)):
        for x, peer in messages:
            assert x.is_contiguous(), f"shape {tuple(x.shape)} with strides {x.stride()} is not contiguous"
            assert 0 <= peer < axis.size and peer != axis.rank, f"no peer {peer} of rank {axis.rank} on {axis}"  # noqa: PT018
            operations.append(dist.P2POp(call, x, group=axis.group, group_peer=peer))
    if not operations:
        return Pending()
    for x, _ in sends:
        axis.traffic.record("send", x.nbytes)
    return Pending(dist.batch_isend_irecv(operations), [x for x, _ in (*sends, *receives)])
