"""Ring: keys and values go around, and a rank computes with those it holds while the next are on their way (Liu et al. 2023).

    forward     step s: rank r holds K/V of rank r - s                                        (ring - 1) * kv bytes
    backward    the same once more, and dK/dV travel with them: a rank adds what its queries give, and sends the sum to
                the rank that holds these K/V next, at last home                              (ring - 1) * (kv + dkv) bytes

kv are the bytes of K and V of one rank's tokens in their dtype, dkv those of their gradients in fp32 at least: a sum over ranks
is rounded once. A sum starts at the first rank behind its home, so it needs ring - 1 hops; what a rank's queries give to its own
keys never travels.

K and V travel in portions (`blocks`), each one message of both: all steps of one portion, then those of the next, whose first
message is under way while the last step of the one before is computed.

Gather is the other transport: every rank gets all keys and values at once (Llama 3, Dubey et al. 2024, 3.3.2). For short rings:
it holds ring * kv. All are sent, whatever a window leaves; blocks in which no query sees a key are not computed.

    forward     all-gather of K/V, under the blocks of this rank's own keys               (ring - 1) * kv bytes
    backward    the same once more; reduce-scatter of dK/dV in fp32 at least              (ring - 1) * (kv + dkv) bytes

Steps of a ring in which no rank of the axis sees any key, because the window has ended, are left out: K/V go to the rank that
needs them next, several ranks on. With n steps left n messages are sent instead of ring - 1.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from framework.comm.algorithms import Pending
from framework.comm.collectives import reduce_scatter, start_all_gather
from framework.comm.communicator import Communicator
from framework.comm.p2p import exchange
from framework.model.precision import sums_dtype
from framework.parallel.attention.blocks import KeyValues, Portion, RingRoute
from framework.parallel.attention.passes import BackwardPass, ForwardPass


class Transport(Protocol):
    """A way in which the keys and values of other ranks come to this one."""

    def forward(self, own: KeyValues, route: RingRoute, work: ForwardPass) -> None:
        """Have `work` attend to the K/V of all ranks of the route."""

    def backward(self, own: KeyValues, route: RingRoute, work: BackwardPass) -> None:
        """Have `work` differentiate by the K/V of all ranks of the route, and add what all ranks give to this one's."""


class Ring:
    """Passes keys and values on along an axis; on one rank there is nothing to pass."""

    def __init__(self, axis: Communicator):
        self.axis = axis

    def forward(self, own: KeyValues, route: RingRoute, work: ForwardPass) -> None:
        # The first message leaves before anything is computed.
        conveyor = _Conveyor(own, route, self.axis)
        for group in route.groups:
            work.start(group)
            for portion in group.portions:
                for step in route.steps:
                    work.attend(portion, self._source(step), conveyor.take())
            work.finish(group)

    def backward(self, own: KeyValues, route: RingRoute, work: BackwardPass) -> None:
        conveyor = _Conveyor(own, route, self.axis)
        for group in route.groups:
            work.start(group)
            # Sums whose last hop is under way to this rank: one portion's at most.
            homeward: list[tuple[Portion, _Shift]] = []
            for portion in group.portions:
                last = self._sum_around(portion, route.steps, conveyor, work)
                # The sums of the portion before came home under this one's computation.
                _add_arrived(homeward, work)
                homeward += [(portion, last)] if last is not None else []
            # This rank's own come last, under the last hop.
            work.differentiate_own(group)
            _add_arrived(homeward, work)
            work.finish(group)

    def _sum_around(
        self, portion: Portion, steps: Sequence[int], conveyor: "_Conveyor", work: BackwardPass
    ) -> "_Shift | None":
        """Add to the sums of others that come by. Returns the last hop, with which this rank's own come home."""
        sums: _Shift | None = None
        for step, following in zip(steps, (*steps[1:], self.axis.size), strict=False):
            # The next rank's K/V are on their way under this computation.
            held = conveyor.take()
            contributions = work.differentiate(portion, self._source(step), held)
            # Waited for only now: the rank before added to them while this one was computing.
            so_far = held.new_message(sums_dtype(held.k.dtype)) if sums is None else sums.arrive()
            (so_far.set if sums is None else so_far.add)(contributions)
            del held, contributions  # before the next are received and computed
            # Sent as many ranks on as K/V, so that sums and K/V of one rank meet at each rank; the last hop leads home.
            sums = _Shift(so_far, following - step, self.axis)
        return sums

    def _source(self, step: int) -> int:
        return (self.axis.rank - step) % self.axis.size


class _Conveyor:
    """A rank's K/V on their way around, portion by portion. The first are sent when it is made, others when those before are
    taken, so one message is under way while another is computed with."""

    def __init__(self, own: KeyValues, route: RingRoute, axis: Communicator):
        self._own, self._chunks, self._axis = own, route.chunks, axis
        # The first hop goes from this rank to the first that needs its K/V; steps that nobody needs are jumped over.
        hops = [after - before for before, after in pairwise((0, *route.steps))]
        self._moves = iter(
            [
                (portion, number == 0, hop)
                for group in route.groups
                for portion in group.portions
                for number, hop in enumerate(hops)
            ]
        )
        self._coming = self._start(None)

    def take(self) -> KeyValues:
        """The K/V of the next step. They are memory of their own, and may be read until the next are taken."""
        assert self._coming is not None, "all have come"
        held = self._coming.arrive()
        self._coming = self._start(held)
        return held

    def _start(self, held: KeyValues | None) -> "_Shift | None":
        portion, is_first, hop = next(self._moves, (None, False, 0))
        if portion is None:
            return None
        sent = portion.pack(self._own, self._chunks) if is_first else held
        assert sent is not None
        return _Shift(sent, hop, self._axis)


class _Shift:
    """A message under way to the rank `by` ahead, while as much comes from the rank `by` before."""

    def __init__(self, sent: KeyValues, by: int, axis: Communicator):
        assert sent.message is not None
        # New memory: what is sent is read meanwhile, and torch's allocator hands it out again in the order of this stream only,
        # which waits for the message in `arrive`.
        self._received = sent.new_message()
        assert self._received.message is not None
        to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
        # One batch: around a cycle of ranks every one sends and receives.
        self._pending = exchange([(sent.message, to)], [(self._received.message, source)], axis, "keys and values")

    def arrive(self) -> KeyValues:
        """The K/V that have come. What was sent may be written to or dropped from here on."""
        self._pending.wait()
        return self._received


def _add_arrived(homeward: "list[tuple[Portion, _Shift]]", work: BackwardPass) -> None:
    while homeward:
        portion, shift = homeward.pop()
        work.add(portion, shift.arrive())


class Gather:
    """Gathers keys and values along an axis; the interface of `Ring`."""

    def __init__(self, axis: Communicator):
        self.axis = axis

    def forward(self, own: KeyValues, route: RingRoute, work: ForwardPass) -> None:
        for group in route.groups:
            for portion in group.portions:
                coming = _Gathered(own, portion, route.chunks, self.axis)
                if portion == group.portions[0]:
                    work.start(group)
                # Under the blocks of this rank's own keys, of the first portion; later ones wait for their message.
                coming.wait()
                for source in self._sources(route):
                    work.attend(portion, source, coming.of(source))
                del coming  # before the next are received
            work.finish(group)

    def backward(self, own: KeyValues, route: RingRoute, work: BackwardPass) -> None:
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

    def _differentiate(self, portion: Portion, coming: "_Gathered", route: RingRoute, work: BackwardPass) -> None:
        everyone, sources = coming.everyone, self._sources(route)
        # Where dtypes agree a rank's sums take the place of its K/V, which have been read by then.
        dtype = sums_dtype(everyone.dtype)
        sums = everyone if dtype == everyone.dtype else torch.empty_like(everyone, dtype=dtype)
        # Sums that are not computed: this rank's own, and those that a window leaves out.
        for each in range(len(sums)):
            if each not in sources:
                sums[each].zero_()
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
        # Started at once, so that the caller computes with its own keys meanwhile.
        self._pending: Pending = start_all_gather(self.everyone, self.everyone[axis.rank], axis, "keys and values")

    def wait(self) -> None:
        """Until all have come."""
        self._pending.wait()

    def of(self, source: int) -> KeyValues:
        """The K/V of the rank at an index."""
        return self.packed.view(self.everyone[source])
