"""Ring: keys and values go around, and a rank computes with those it holds while the next are on their way (Liu et al. 2023).

    forward     step s: rank r holds K/V of rank r - s                                        (ring - 1) * kv bytes
    backward    the same once more, and dK/dV travel with them: a rank adds what its queries give, and sends the sum to
                the rank that holds these K/V next, at last home                              (ring - 1) * (kv + dkv) bytes

kv are the bytes of K and V of one rank's tokens in their dtype, dkv those of their gradients in fp32 at least: a sum over ranks
is rounded once. K and V are one message, dK and dV another. A sum starts at the first rank behind its home, so it needs ring - 1
hops; what a rank's queries give to its own keys never travels.

Steps in which no rank of the axis sees any key, because the window has ended, are left out: K/V go to the rank that needs them
next, several ranks on. With n steps left n messages are sent instead of ring - 1.
"""

from collections.abc import Callable, Iterator, Sequence

from framework.comm.communicator import Communicator
from framework.comm.p2p import exchange
from framework.parallel.context.key_values import Contribution, KeyValues
from framework.parallel.context.merge import sum_dtype

Attend = Callable[[int, KeyValues], None]
Differentiate = Callable[[int, KeyValues], list[Contribution]]


class Ring:
    """Passes keys and values on along an axis; on one rank there is nothing to pass."""

    def __init__(self, axis: Communicator):
        self.axis = axis

    def forward(self, own: KeyValues, steps: Sequence[int], attend: Attend) -> None:
        """Call attend(index, K/V of the rank at that index) with this rank's own, then, for each step s of `steps` (rising), with
        those of the rank s before this one."""
        held = own.pack() if steps else own
        for step, following in _with_next((0, *steps)):
            # Started before computing, so that it is on its way meanwhile. Into new memory: `held` is read and sent.
            coming = None if following is None else _Shift(held, following - step, self.axis)
            attend((self.axis.rank - step) % self.axis.size, held)
            held = held if coming is None else coming.arrive()

    def backward(self, own: KeyValues, steps: Sequence[int], differentiate: Differentiate) -> KeyValues:
        """Gradients of this rank's K/V, summed over the axis, in fp32 at least. differentiate(index, K/V): gradients that this
        rank's queries give to the K/V of the rank at that index."""
        sums: _Shift | None = None
        coming = _Shift(own.pack(), steps[0], self.axis) if steps else None
        for step, following in _with_next(steps):
            assert coming is not None
            held = coming.arrive()
            coming = None if following is None else _Shift(held, following - step, self.axis)
            contributions = differentiate((self.axis.rank - step) % self.axis.size, held)
            # Waited for only now: the rank before added to it while this one was computing.
            so_far = own.new_zeros(sum_dtype(own.k.dtype)) if sums is None else sums.arrive()
            so_far.add(contributions)
            sums = _Shift(so_far, (self.axis.size if following is None else following) - step, self.axis)
        # This rank's own come last, under the last hop: no second sum has to be kept for them from the beginning on.
        contributions = differentiate(self.axis.rank, own)
        home = own.new_zeros(sum_dtype(own.k.dtype)) if sums is None else sums.arrive()
        home.add(contributions)
        return home


class _Shift:
    """A message under way to the rank `by` ahead, while as much comes from the rank `by` before."""

    def __init__(self, sent: KeyValues, by: int, axis: Communicator):
        self._received = sent.new_empty()
        to, source = (axis.rank + by) % axis.size, (axis.rank - by) % axis.size
        # One batch: around a cycle of ranks every one sends and receives.
        self._pending = exchange([(sent.message, to)], [(self._received.message, source)], axis)

    def arrive(self) -> KeyValues:
        """What has come; what was sent may be dropped from here on."""
        self._pending.wait()
        return self._received


def _with_next(steps: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """Each step with the one behind it, None behind the last."""
    yield from zip(steps, (*steps[1:], None), strict=False)
