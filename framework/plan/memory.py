"""Bytes that a rank holds at the most, in closed form: the table of `parallel/zero/lifetimes.py`, padding included."""

from collections.abc import Sequence
from dataclasses import dataclass

from framework.optim.states import MomentsDtype, count_state_bytes
from framework.parallel.zero.plan_buffers import BufferPlan

KINDS = ("parameters", "gradients", "master", "optimizer", "gathered")


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank. held: bytes by kind, activations included; live: the most microbatches of its stages at once between
    their forward and the end of their backward. What kernels and the framework itself use comes on top."""

    held: dict[str, int]
    live: int

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.held.values())


def bytes_held(buffers: Sequence[BufferPlan], states: Sequence[str], moments: MomentsDtype = "fp32") -> dict[str, int]:
    """What lives for the whole run, by kind, and the most that gathered parameters and unreduced gradients add to it.

    The table of `parallel/zero/lifetimes.py` in bytes, padding included.
    """
    total = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        held = buffer.held_bytes(len(states))
        full = held.pop("moments")
        total["optimizer"] += full if moments == "fp32" else len(states) * _low_bit_bytes(buffer, moments)
        for kind, num_bytes in held.items():
            total[kind] += num_bytes
    total["gathered"] = _largest_gathered(buffers)
    return total


def _low_bit_bytes(buffer: BufferPlan, moments: MomentsDtype) -> int:
    """One moment of what a rank owns of a buffer, which has no padding but within blocks."""
    intervals = (each.layout.interval or (0, each.layout.numel_local) for each in buffer.held.values())
    return count_state_bytes(moments, intervals) if buffer.is_trained else 0


def _largest_gathered(buffers: Sequence[BufferPlan]) -> int:
    """Two units' full parameters beside the larger of embedding and head, and three units' full gradients, where these come
    and go: one in use, one ahead; one being written, two under way."""
    parameters: dict[str, int] = {}
    gradients: dict[str, int] = {}
    for buffer in buffers:
        parameters[buffer.unit] = parameters.get(buffer.unit, 0) + buffer.unsharded_bytes
        gradients[buffer.unit] = gradients.get(buffer.unit, 0) + buffer.unreduced_bytes
    layers = sorted((num for unit, num in parameters.items() if unit.startswith("layers.")), reverse=True)
    ends = [num for unit, num in parameters.items() if not unit.startswith("layers.")]
    return sum(layers[:2]) + max(ends, default=0) + sum(sorted(gradients.values(), reverse=True)[:3])
