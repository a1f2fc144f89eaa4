"""Layer buckets: consecutive layers that are gathered in one message and reduced in one, because each is small.

A message costs the host 0.1 ms on gloo however little it sends. FSDP wraps modules by size for this, and DDP has its buckets;
here units keep their buffers, so that nothing changes in what a rank owns: only what travels together.

    bucket of layers 0, 1:   part of 0 | part of 1     one after the other, from each rank of the shard axis

The embedding and the head stay by themselves: backward reads no embedding, and the head's backward follows its forward.
"""

import math
from collections.abc import Sequence

from framework.parallel.zero.plan_buffers import BufferPlan


def unit_bytes(buffers: Sequence[BufferPlan]) -> int:
    """Bytes of a unit's parameters in the compute dtype, of the whole model: equal on all ranks, also those of other slices."""
    return sum(
        math.prod(slot.layout.shape) * buffer.dtypes.compute.itemsize for buffer in buffers for slot in buffer.slots
    )


def find_layer_buckets(units: Sequence[Sequence[BufferPlan]]) -> list[tuple[int, ...]]:
    """The indices of a stage's units, in order, as they travel together: of layers as many as have `bucket_bytes` or less.

    Layers below the first trained one, which backward does not read, are not together with those that it reads.
    """
    buckets: list[tuple[int, ...]] = []
    kind, filled = (False, False), 0
    is_above_trained = False
    for index, buffers in enumerate(units):
        is_above_trained |= any(buffer.is_trained for buffer in buffers)
        limit = max((buffer.lifetimes.bucket_bytes for buffer in buffers), default=0)
        is_layer = any(buffer.unit.startswith("layers.") for buffer in buffers)
        size = unit_bytes(buffers)
        if is_layer and kind == (True, is_above_trained) and filled + size <= limit:
            buckets[-1] = (*buckets[-1], index)
            filled += size
        else:
            buckets.append((index,))
            filled = size
        kind = (is_layer, is_above_trained)
    return buckets
