"""Bytes that a rank holds at the most, in closed form: the table of `parallel/zero/lifetimes.py`, padding included."""

from collections.abc import Sequence
from dataclasses import dataclass

from framework.optim.disk_chunks import DiskShard, StateKind, file_bytes, place_chunks, ring_bytes
from framework.optim.states import MomentsDtype, count_state_bytes
from framework.parallel.zero.lifetimes import Home
from framework.parallel.zero.plan_buffers import BufferPlan, GroupSpan

KINDS = ("parameters", "gradients", "master", "optimizer", "gathered")


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank. held: bytes of its device by kind, activations included; live: the most microbatches of its stages at
    once between their forward and the end of their backward. What kernels and the framework itself use comes on top. on_host:
    bytes by kind that have their home in the host's memory, activations between forward and backward included. on_disk: bytes of
    its file of states."""

    held: dict[str, int]
    live: int
    on_host: dict[str, int]
    on_disk: int = 0

    @property
    def total(self) -> int:
        """All bytes of the device."""
        return sum(self.held.values())


def bytes_held(buffers: Sequence[BufferPlan], states: Sequence[str], moments: MomentsDtype = "fp32") -> dict[str, int]:
    """What lives on the device for the whole run, by kind, and the most that gathered parameters and unreduced gradients add.

    The table of `parallel/zero/lifetimes.py` in bytes, padding included.
    """
    return _bytes_at(Home.DEVICE, buffers, states, moments) | {"gathered": _largest_gathered(buffers)}


def bytes_on_host(
    buffers: Sequence[BufferPlan], states: Sequence[str], moments: MomentsDtype = "fp32"
) -> dict[str, int]:
    """What lives in the host's memory, by kind. gradients: copies for the update; gathered: casts of masters on their way to the
    device, and the ring of buffers of states that live on a disk."""
    casts = sum(
        each.numel_owned * each.dtypes.compute.itemsize
        for each in buffers
        if each.lifetimes.homes.master == Home.HOST and each.lifetimes.homes.parameters == Home.DEVICE
    )
    shards = disk_shards(buffers, states)
    ring = ring_bytes(place_chunks(shards)) if shards else 0
    return _bytes_at(Home.HOST, buffers, states, moments) | {"gathered": casts + ring}


def bytes_on_disk(buffers: Sequence[BufferPlan], states: Sequence[str]) -> int:
    """The size of a rank's file of states: whole pages of each part of a chunk, and its stamps."""
    return file_bytes(place_chunks(disk_shards(buffers, states)))


def disk_shards(buffers: Sequence[BufferPlan], states: Sequence[str]) -> list[DiskShard]:
    """The states of those buffers whose master lives on a disk: a shard for each of them. A chunk begins with each span: kernels
    round by vectors, which begin there."""
    return [
        DiskShard(
            each.numel_owned,
            (
                StateKind("master", each.dtypes.master),
                *(StateKind(name, each.dtypes.gradient) for name in states),
            ),
            tuple(
                cut for span in each.spans for where in [within_owned(each, span)] for cut in (where.start, where.stop)
            ),
        )
        for each in buffers
        if each.lifetimes.homes.master == Home.DISK
    ]


def within_owned(plan: BufferPlan, span: GroupSpan) -> slice:
    """Where a span lies in what this rank owns of its buffer."""
    return slice(span.start - plan.start, span.stop - plan.start)


def _bytes_at(
    home: Home, buffers: Sequence[BufferPlan], states: Sequence[str], moments: MomentsDtype
) -> dict[str, int]:
    total = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        held = buffer.held_bytes(len(states), home)
        full = held.pop("moments")
        # Wherever they live they have few bits.
        total["optimizer"] += len(states) * _low_bit_bytes(buffer, moments) if full and moments != "fp32" else full
        for kind, num_bytes in held.items():
            total[kind] += num_bytes
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


def show_bytes(size: int) -> str:
    """In GiB, below one in MiB."""
    return f"{size / 2**30:,.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.0f} MiB"
