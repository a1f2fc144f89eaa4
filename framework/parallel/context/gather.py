"""Gather: every rank gets all keys and values at once (Llama 3, Dubey et al. 2024, 3.3.2). For short rings: it holds ring * kv.

    forward     all-gather of K/V, under the blocks of this rank's own keys               (ring - 1) * kv bytes
    backward    the same once more; reduce-scatter of dK/dV in fp32 at least              (ring - 1) * (kv + dkv) bytes

K and V are one message. All K/V are sent, whatever a window leaves; blocks that nobody sees are not computed.
"""

from collections.abc import Sequence

from torch import Tensor

from framework.comm.collectives import reduce_scatter, start_all_gather
from framework.comm.communicator import Communicator
from framework.parallel.context.key_values import KeyValues
from framework.parallel.context.merge import sum_dtype
from framework.parallel.context.ring import Attend, Differentiate


class Gather:
    """Gathers keys and values along an axis; the interface of `Ring`."""

    def __init__(self, axis: Communicator):
        self.axis = axis

    def forward(self, own: KeyValues, steps: Sequence[int], attend: Attend) -> None:
        """As `Ring.forward`."""
        everyone = self._places(own)
        packed = own.pack_into(everyone[self.axis.rank])
        pending = start_all_gather(everyone, packed.message, self.axis)
        # The gather only reads this rank's part while it runs.
        attend(self.axis.rank, packed)
        pending.wait()
        for step in steps:
            source = (self.axis.rank - step) % self.axis.size
            attend(source, own.like(everyone[source]))

    def backward(self, own: KeyValues, steps: Sequence[int], differentiate: Differentiate) -> KeyValues:
        """As `Ring.backward`."""
        sums = self._places(own).to(sum_dtype(own.k.dtype)).zero_()

        def add(source: int, held: KeyValues) -> None:
            own.like(sums[source]).add(differentiate(source, held))

        self.forward(own, steps, add)
        total = own.like(sums[self.axis.rank])
        reduce_scatter(total.message, sums, self.axis)
        return total

    def _places(self, own: KeyValues) -> Tensor:
        """[ring, elements of K and V]."""
        return own.k.new_empty(self.axis.size, own.k.numel() + own.v.numel())
