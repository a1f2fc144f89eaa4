"""Unit buckets: consecutive units that are unsharded in one message and reduced in one, because each is small.

A message costs the host 0.1 ms on gloo however little it sends. FSDP wraps modules by size for this, and DDP has its buckets;
here units keep their buffers, so that nothing changes in what a rank owns: only what travels together.

    bucket of units 0, 1:   part of 0 | part of 1     one after the other, from each rank of the shard axis
"""

import math
from collections.abc import Container, Sequence

from framework.parallel.zero.plan_buffers import SMALL_BYTES, BufferPlan

LEAST_UNITS = 8


def largest_shared(bucket_bytes: int) -> int:
    """The most bytes of a unit that travels with others, in buckets of so many."""
    return min(bucket_bytes, max(SMALL_BYTES, bucket_bytes // LEAST_UNITS))


def unit_bytes(buffers: Sequence[BufferPlan]) -> int:
    """Bytes of a unit's parameters in the compute dtype, of the whole model: equal on all ranks, also those of other slices."""
    return sum(
        math.prod(slot.layout.shape) * buffer.dtypes.compute.itemsize for buffer in buffers for slot in buffer.slots
    )


def gathers_alone(buffers: Sequence[BufferPlan]) -> bool:
    """Whether a unit's parameters travel by themselves: something stands between the memory that is sent and what is written, and
    they come one unit after another because the device has no room for more."""
    return not all(buffer.is_whole or buffer.is_sent_as_held for buffer in buffers)


def find_unit_buckets(units: Sequence[Sequence[BufferPlan]], alone: Container[int] = ()) -> list[tuple[int, ...]]:
    """The indices of a stage's units, in order, as they travel together: as many small ones as have `bucket_bytes` or less.
    alone: indices of those that are never with others."""
    buckets: list[tuple[int, ...]] = []
    filled = 0
    for index, buffers in enumerate(units):
        limit = max((buffer.lifetimes.bucket_bytes for buffer in buffers), default=0)
        size = unit_bytes(buffers)
        if index in alone or size > largest_shared(limit):
            size = limit + 1
        if buckets and filled + size <= limit:
            buckets[-1] = (*buckets[-1], index)
            filled += size
        else:
            buckets.append((index,))
            filled = size
    return buckets
