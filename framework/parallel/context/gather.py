"""Gather: every rank gets all keys and values at once (Llama 3, Dubey et al. 2024, 3.3.2). For short rings: it holds ring * kv.

    forward     all-gather of K/V, under the blocks of this rank's own keys               (ring - 1) * kv bytes
    backward    the same once more; reduce-scatter of dK/dV in fp32 at least              (ring - 1) * (kv + dkv) bytes

K and V of a group of heads are one message. All K/V are sent, whatever a window leaves; blocks in which no query sees a key are
not computed.
"""

from framework.comm.algorithms import Pending
from framework.comm.collectives import start_all_gather, start_reduce_scatter
from framework.comm.communicator import Communicator
from framework.parallel.context.key_values import HeadGroup, KeyValues
from framework.parallel.context.merge import sum_dtype
from framework.parallel.context.ring import Attends, Differentiates, Route


class Gather:
    """Gathers keys and values along an axis; the interface of `Ring`."""

    divides_tokens = False

    def __init__(self, axis: Communicator):
        self.axis = axis

    def forward(self, own: KeyValues, route: Route, work: Attends) -> None:
        """As `Ring.forward`."""
        for group in route.groups:
            coming = _Gathered(own, group, route.chunks, self.axis)
            work.start(group)
            coming.wait()
            for source in self._sources(route):
                work.attend(coming.portion, source, coming.of(source))
            work.finish(group)

    def backward(self, own: KeyValues, route: Route, work: Differentiates) -> None:
        """As `Ring.backward`."""
        for group in route.groups:
            coming = _Gathered(own, group, route.chunks, self.axis)
            work.start(group)
            sums = coming.everyone.new_empty(coming.everyone.shape, dtype=sum_dtype(own.k.dtype))
            # What is not computed: this rank's own, and what a window leaves out.
            sums[[each for each in range(len(sums)) if each not in self._sources(route)]] = 0
            coming.wait()
            for source in self._sources(route):
                held = coming.of(source)
                held.view(sums[source]).set(work.differentiate(coming.portion, source, held))
            # In place: this rank's own part of the sums is what others gave to it, its own come under the message.
            pending = start_reduce_scatter(sums[self.axis.rank], sums, self.axis)
            work.differentiate_own(group)
            pending.wait()
            work.add(coming.portion, coming.packed.view(sums[self.axis.rank]))
            work.finish(group)

    def _sources(self, route: Route) -> list[int]:
        return [(self.axis.rank - step) % self.axis.size for step in route.steps]


class _Gathered:
    """The K/V of all ranks in some heads, on their way. everyone: [ring, elements of a rank's K and V]."""

    def __init__(self, own: KeyValues, group: HeadGroup, chunks: int, axis: Communicator):
        (self.portion,) = group.portions
        views = self.portion.select(own, chunks)
        self.everyone = own.k.new_empty(axis.size, views.k.numel() + views.v.numel())
        # Packed where the gather wants this rank's part, which it then need not copy.
        self.packed = self.portion.pack(own, chunks, self.everyone[axis.rank])
        self._pending: Pending = start_all_gather(self.everyone, self.everyone[axis.rank], axis)

    def wait(self) -> None:
        """Until all have come."""
        self._pending.wait()

    def of(self, source: int) -> KeyValues:
        """The K/V of the rank at an index."""
        return self.packed.view(self.everyone[source])
