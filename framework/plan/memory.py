"""Bytes that a rank holds at the most, in closed form: the table of `parallel/zero/lifetimes.py`, padding included."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from framework.optim.disk_chunks import DiskShard, StateKind, file_bytes, place_chunks, ring_bytes
from framework.optim.states import MomentsDtype, count_state_bytes
from framework.parallel.zero.layer_buckets import unit_bytes
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


@dataclass(frozen=True)
class UnitMemory:
    """Bytes of one unit on a rank. device, host: of its states by kind; casts: on the host, of masters on their way to the
    device; unsharded, unreduced: what comes and goes with its full parameters and its full gradients. whole: of its parameters
    in the compute dtype, of all ranks; bucket_bytes: up to so many of `whole` layers travel in one message."""

    is_layer: bool
    device: Mapping[str, int]
    host: Mapping[str, int]
    casts: int
    unsharded: int
    unreduced: int
    whole: int
    bucket_bytes: int

    @property
    def may_share_messages(self) -> bool:
        return self.is_layer and self.whole < self.bucket_bytes


def measure_unit(buffers: Sequence[BufferPlan], states: Sequence[str], moments: MomentsDtype = "fp32") -> UnitMemory:
    """buffers: all of one unit, with the homes of their states."""
    casts = sum(
        each.numel_owned * each.dtypes.compute.itemsize
        for each in buffers
        if each.lifetimes.homes.master == Home.HOST and each.lifetimes.homes.parameters == Home.DEVICE
    )
    return UnitMemory(
        buffers[0].unit.startswith("layers."),
        _bytes_at(Home.DEVICE, buffers, states, moments),
        _bytes_at(Home.HOST, buffers, states, moments),
        casts,
        sum(each.unsharded_bytes for each in buffers),
        sum(each.unreduced_bytes for each in buffers),
        unit_bytes(buffers),
        max(each.lifetimes.bucket_bytes for each in buffers),
    )


def measure_units(
    buffers: Iterable[BufferPlan], states: Sequence[str], moments: MomentsDtype = "fp32"
) -> list[tuple[UnitMemory, int]]:
    """Each unit of a rank, once."""
    units: dict[str, list[BufferPlan]] = {}
    for buffer in buffers:
        units.setdefault(buffer.unit, []).append(buffer)
    return [(measure_unit(each, states, moments), 1) for each in units.values()]


def total_on_device(units: Sequence[tuple[UnitMemory, int]]) -> dict[str, int]:
    """What lives on the device for the whole run, by kind, and the most that gathered parameters and unreduced gradients add.
    units: of a rank, each with how many are alike."""
    return _total([(each.device, count) for each, count in units]) | {"gathered": sum(count_gathered(units))}


def total_on_host(units: Sequence[tuple[UnitMemory, int]]) -> dict[str, int]:
    """What lives in the host's memory, by kind; of gathered the casts alone."""
    casts = sum(each.casts * count for each, count in units)
    return _total([(each.host, count) for each, count in units]) | {"gathered": casts}


def bytes_held(buffers: Sequence[BufferPlan], states: Sequence[str], moments: MomentsDtype = "fp32") -> dict[str, int]:
    """What lives on the device for the whole run, by kind, and the most that gathered parameters and unreduced gradients add.

    The table of `parallel/zero/lifetimes.py` in bytes, padding included.
    """
    return total_on_device(measure_units(buffers, states, moments))


def bytes_on_host(
    buffers: Sequence[BufferPlan], states: Sequence[str], moments: MomentsDtype = "fp32"
) -> dict[str, int]:
    """What lives in the host's memory, by kind. gradients: copies for the update; gathered: casts of masters on their way to the
    device, and the ring of buffers of states that live on a disk."""
    held = total_on_host(measure_units(buffers, states, moments))
    shards = disk_shards(buffers, states)
    return held | {"gathered": held["gathered"] + (ring_bytes(place_chunks(shards)) if shards else 0)}


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


def count_gathered(units: Sequence[tuple[UnitMemory, int]]) -> tuple[int, int]:
    """Two units' full parameters beside the larger of embedding and head, and three units' full gradients, where these come
    and go: one in use, one ahead; one being written, two under way. Layers that travel together count as one, and once more for
    the memory in which their message is packed."""
    shared = [(each, count) for each, count in units if each.may_share_messages]
    single = [(each, count) for each, count in units if not each.may_share_messages]
    unsharded, buckets = _fill_bucket([(each.unsharded, each, count) for each, count in shared])
    # Of one bucket alone, too: gradients, their message and its sum are different memory of the pool.
    unreduced, _ = _fill_bucket([(each.unreduced, each, count) for each, count in shared])
    layers = _largest([*((each.unsharded, n) for each, n in single if each.is_layer), (unsharded, buckets)], 2)
    ends = max((each.unsharded for each, _ in units if not each.is_layer), default=0)
    gradients = _largest([*((each.unreduced, n) for each, n in single), (unreduced, 3)], 3)
    # Where parameters are resident, too: their message is not.
    packed = min(
        sum(each.whole * count for each, count in shared), max((each.bucket_bytes for each, _ in shared), default=0)
    )
    return sum(layers) + ends + packed, sum(gradients) + unreduced


def _fill_bucket(layers: Sequence[tuple[int, UnitMemory, int]]) -> tuple[int, int]:
    """(the most bytes that a bucket of such layers may have, how many buckets there may be: 1, or 2 for more).

    layers: bytes of each, itself, and how many are alike."""
    total = sum(size * count for size, _, count in layers)
    if not total:
        return 0, 0
    # A byte of the model is a byte of a bucket: what it brings to this rank is at most that of the densest layer.
    limit = max(-(-size * each.bucket_bytes // each.whole) for size, each, _ in layers)
    return (total, 1) if total <= limit else (limit, 2)


def _largest(sizes: Iterable[tuple[int, int]], most: int) -> list[int]:
    """The largest of some sizes, each with how often it is there."""
    return sorted((size for size, count in sizes for _ in range(min(count, most))), reverse=True)[:most]


def _total(counted: Iterable[tuple[Mapping[str, int], int]]) -> dict[str, int]:
    total = dict.fromkeys(KINDS, 0)
    for sizes, count in counted:
        for kind, size in sizes.items():
            total[kind] += size * count
    return total


def show_bytes(size: int) -> str:
    """In GiB, below one in MiB."""
    return f"{size / 2**30:,.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.0f} MiB"
