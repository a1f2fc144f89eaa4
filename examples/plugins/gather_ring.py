"""A context method, `parallel.context=gather_ring`: all keys and values at once in forward, round the ring in backward.

Forward has one message, as `gather` has, and backward never holds the gradients of all ranks, as `ring` does not.
"""

from framework.extend import context_method
from framework.parallel.attention.ring import Gather, Ring


@context_method("gather_ring")
class GatherRing(Gather):
    """Forward is Gather's."""

    def backward(self, own, route, work):
        """Have `work` differentiate by the K/V of all ranks, and add what they give to this one's."""
        Ring(self.axis).backward(own, route, work)
