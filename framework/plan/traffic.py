"""Bytes that a rank sends in a step, in closed form (docs/zero.md, docs/tensor.md, docs/experts.md)."""

from collections.abc import Sequence

import torch

from framework.parallel.zero.plan_buffers import BufferPlan


def bytes_sent(buffers: Sequence[BufferPlan], accumulation: int, reduce_dtype: torch.dtype) -> dict[str, int]:
    """Bytes that a rank sends in a step for parameters and gradients, by the forms that docs/zero.md states.

    With P bytes of a unit, n shards and k microbatches: gathers (n-1)/n P for each time that a released unit is used again,
    reductions (n-1)/n P for each time that a gradient is reduced, and 2 (r-1)/r P/n once for each partial axis of r ranks.
    Where replicas divide the update, one half of that is a reduction and the other a gather of updated parameters.
    reduce_dtype: the dtype of gradients on their way.
    """
    gathers = reductions = replicas = 0
    for buffer in buffers:
        n, lifetimes = buffer.axes.shard.size, buffer.lifetimes
        uses = 1 if lifetimes.keeps_parameters else accumulation * (2 if buffer.unit.startswith("layers.") else 1)
        gathers += (n - 1) * buffer.numel_part * buffer.dtypes.travelling.itemsize * uses
        if buffer.is_trained:
            times = 1 if lifetimes.keeps_gradients else accumulation
            reductions += (n - 1) * buffer.numel_part * reduce_dtype.itemsize * times
            gathers += (buffer.axes.update.size - 1) * buffer.numel_owned * buffer.dtypes.compute.itemsize
            replicas += (buffer.axes.update.size - 1) * buffer.numel_owned * reduce_dtype.itemsize
            for axis in buffer.axes.partial:
                replicas += 2 * (axis.size - 1) * buffer.numel_owned * reduce_dtype.itemsize // axis.size
    return {"gathers": gathers, "reductions to shards": reductions, "to replicas": replicas}


# Of the number of rows for an expert, which travels ahead of the rows.
COUNT_BYTES = torch.int64.itemsize


def expert_bytes_sent(rows_bytes: int, counts: int, hops: Sequence[int], forwards: int) -> int:
    """Bytes that a rank sends over `ep` for one mixture and one microbatch where each expert gets equally many rows.

    rows_bytes: P, of the pairs of a token and an expert that the rank routes, tokens x top-k x hidden; counts: numbers of rows
    that go ahead of them in each forward, one for each expert; hops: ranks among which rows are exchanged, ep, or with
    parallel.expert_hierarchical those of a group and the groups. forwards: of each microbatch, 1 without recomputation.

    Of n ranks (n-1)/n of the rows are another's. They travel there and back in forward, their gradients in backward: 4 (n-1)/n P,
    half as much again with recomputation.
    """
    sent = 2 * (forwards + 1) * rows_bytes + forwards * counts * COUNT_BYTES
    return sum(sent * (ranks - 1) // ranks for ranks in hops)
