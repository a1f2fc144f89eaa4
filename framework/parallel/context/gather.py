"""Gather: every rank gets all keys and values at once (Llama 3, Dubey et al. 2024, 3.3.2). For short rings: it holds ring * kv.

    forward     all-gather of K/V, under the blocks of this rank's own keys               (ring - 1) * kv bytes
    backward    the same once more; reduce-scatter of dK/dV in fp32 at least              (ring - 1) * (kv + dkv) bytes

K and V travel in portions (`key_values`), each one message of both. All are sent, whatever a window leaves; blocks in which no
query sees a key are not computed.
"""

import torch

from framework.comm.algorithms import Pending
from framework.comm.collectives import reduce_scatter, start_all_gather
from framework.comm.communicator import Communicator
from framework.model.precision import sums_dtype
from framework.parallel.context.key_values import KeyValues, Portion
from framework.parallel.context.ring import Attends, Differentiates, RingRoute


class Gather:
    """Gathers keys and values along an axis; the interface of `Ring`."""

    def __init__(self, axis: Communicator):
        self.axis = axis

    def forward(self, own: KeyValues, route: RingRoute, work: Attends) -> None:
        """Have `work` attend to the K/V of all ranks of the route: `Ring.forward`."""
        for group in route.groups:
            for portion in group.portions:
                coming = _Gathered(own, portion, route.chunks, self.axis)
                if portion == group.portions[0]:
                    work.start(group)
                coming.wait()
                for source in self._sources(route):
                    work.attend(portion, source, coming.of(source))
                del coming  # before the next are received
            work.finish(group)

    def backward(self, own: KeyValues, route: RingRoute, work: Differentiates) -> None:
        """Have `work` differentiate by the K/V of all ranks of the route: `Ring.backward`."""
        for group in route.groups:
            work.start(group)
            for portion in group.portions:
                coming = _Gathered(own, portion, route.chunks, self.axis)
                if portion == group.portions[0]:
                    work.differentiate_own(group)
                coming.wait()
                self._differentiate(portion, coming, route, work)
                del coming
            work.finish(group)

    def _differentiate(self, portion: Portion, coming: "_Gathered", route: RingRoute, work: Differentiates) -> None:
        everyone, sources = coming.everyone, self._sources(route)
        # Where dtypes agree a rank's sums take the place of its K/V, which have been read by then.
        dtype = sums_dtype(everyone.dtype)
        sums = everyone if dtype == everyone.dtype else torch.empty_like(everyone, dtype=dtype)
        # What is not computed: this rank's own, and what a window leaves out.
        sums[[each for each in range(len(sums)) if each not in sources]] = 0
        for source in sources:
            held = coming.of(source)
            held.view(sums[source]).set(work.differentiate(portion, source, held))
        # In place: this rank's part of the sums becomes what others gave to it.
        reduce_scatter(sums[self.axis.rank], sums, self.axis)
        work.add(portion, coming.packed.view(sums[self.axis.rank]))

    def _sources(self, route: RingRoute) -> list[int]:
        return [(self.axis.rank - step) % self.axis.size for step in route.steps]


class _Gathered:
    """The K/V of all ranks in some heads, on their way. everyone: [ring, elements of a rank's K and V]."""

    def __init__(self, own: KeyValues, portion: Portion, chunks: int, axis: Communicator):
        views = portion.select(own, chunks)
        self.everyone = own.k.new_empty(axis.size, views.k.numel() + views.v.numel())
        # Packed where the gather wants this rank's part, which it then need not copy.
        self.packed = portion.pack(own, chunks, self.everyone[axis.rank])
        self._pending: Pending = start_all_gather(self.everyone, self.everyone[axis.rank], axis, "keys and values")

    def wait(self) -> None:
        """Until all have come."""
        self._pending.wait()

    def of(self, source: int) -> KeyValues:
        """The K/V of the rank at an index."""
        return self.packed.view(self.everyone[source])
