"""Bytes of parameters, gradients and optimizer states, in closed form from `parallel/zero/lifetimes.py`: part of the forecast."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from framework.optim.disk_ring import DiskShard, DiskState, file_bytes, place_chunks, ring_bytes
from framework.optim.states import MomentsDtype, count_state_bytes
from framework.parallel.zero.lifetimes import Home
from framework.parallel.zero.plan_buffers import BufferPlan, GroupSpan

# The share of a node's memory that ranks have for offloaded states: Python, torch, NCCL and page tables need the rest.
USABLE = 0.9
# The optimizer's per-element states of a group of parameters, by its key.
StatesOf = Callable[[str], Sequence[str]]
KINDS = ("parameters", "gradients", "master", "optimizer", "gathered")


@dataclass(frozen=True)
class UnitMemory:
    """Bytes of one unit on a rank."""

    is_layer: bool
    # Bytes of its states by kind, on the device and on the host.
    device: Mapping[str, int]
    host: Mapping[str, int]
    # On the host: casts of masters on their way to the device, and what torch's cache of pinned memory adds.
    casts: int
    pinning: int
    # Bytes of its full parameters and full gradients, which come and go.
    unsharded: int
    unreduced: int
    # Whether unsharded parameters stay for the step.
    keeps_parameters: bool
    # Units that are unsharded ahead.
    prefetch_units: int


def measure_unit(
    buffers: Sequence[BufferPlan], states: StatesOf, moments: MomentsDtype = "fp32", averages: bool = False
) -> UnitMemory:
    """buffers: all of one unit, with the homes of their states. averages: whether weights have averages (`train.ema`)."""
    casts = sum(
        each.dtypes.kept_bytes(each.numel_owned)
        for each in buffers
        if each.lifetimes.homes.master == Home.HOST and each.lifetimes.homes.parameters == Home.DEVICE
    )
    return UnitMemory(
        buffers[0].unit.startswith("layers."),
        _bytes_at(Home.DEVICE, buffers, states, moments, averages),
        _bytes_at(Home.HOST, buffers, states, moments, averages),
        casts,
        sum(map(_pinning_bytes, buffers)),
        sum(each.unsharded_bytes for each in buffers),
        sum(each.unreduced_bytes for each in buffers),
        all(each.lifetimes.keeps_parameters for each in buffers),
        buffers[0].lifetimes.prefetch_units,
    )


def measure_units(
    buffers: Iterable[BufferPlan], states: StatesOf, moments: MomentsDtype = "fp32", averages: bool = False
) -> list[tuple[UnitMemory, int]]:
    """Each unit of a rank, once."""
    units: dict[str, list[BufferPlan]] = {}
    for buffer in buffers:
        units.setdefault(buffer.unit, []).append(buffer)
    return [(measure_unit(each, states, moments, averages), 1) for each in units.values()]


def total_on_device(units: Sequence[tuple[UnitMemory, int]]) -> dict[str, int]:
    """Bytes on the device for the whole run, by kind, and the most that gathered parameters and unreduced gradients add.
    units: of a rank, each with how many are alike."""
    return _total([(each.device, count) for each, count in units]) | {"gathered": sum(count_gathered(units))}


def total_on_host(units: Sequence[tuple[UnitMemory, int]], is_pinned: bool) -> dict[str, int]:
    """Bytes in the host's memory by kind; of gathered the casts alone. is_pinned: a GPU copies to and from them."""
    casts = sum(each.casts * count for each, count in units)
    pinning = sum(each.pinning * count for each, count in units) * is_pinned
    return _total([(each.host, count) for each, count in units]) | {"gathered": casts, "pinning": pinning}


def total_on_disk(buffers: Sequence[BufferPlan], states: StatesOf) -> tuple[int, int]:
    """(bytes of a rank's file of states: whole pages of each part of a chunk, and its stamps; bytes of the ring of host buffers
    through which they travel)."""
    shards = disk_shards(buffers, states)
    chunks = place_chunks(shards)
    return file_bytes(chunks), ring_bytes(chunks) if shards else 0


def disk_shards(buffers: Sequence[BufferPlan], states: StatesOf) -> list[DiskShard]:
    """The states of those buffers whose master lives on a disk: a shard for each of them. A chunk begins with each span: kernels
    round by vectors, which begin there."""
    return [
        DiskShard(
            each.numel_owned,
            (
                DiskState("master", each.dtypes.master),
                *(DiskState(name, each.dtypes.gradient) for name in states(each.slots[0].group)),
            ),
            tuple(
                cut for span in each.spans for where in [within_owned(each, span)] for cut in (where.start, where.stop)
            ),
        )
        for each in buffers
        if each.lifetimes.homes.master == Home.DISK
    ]


def count_states(buffer: BufferPlan, states: StatesOf) -> int:
    """Elements of all states of what a rank owns of a buffer, padding included as the rest of it."""
    most = max(len(states(slot.group)) for slot in buffer.slots)
    fewer = sum((each.stop - each.start) * (most - len(states(each.group))) for each in buffer.spans)
    return buffer.numel_owned * most - fewer


def within_owned(plan: BufferPlan, span: GroupSpan) -> slice:
    """Where a span lies in what this rank owns of its buffer."""
    return slice(span.start - plan.start, span.stop - plan.start)


def _bytes_at(
    home: Home, buffers: Sequence[BufferPlan], states: StatesOf, moments: MomentsDtype, averages: bool
) -> dict[str, int]:
    total = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        held = buffer.held_bytes(count_states(buffer, states), home)
        full = held.pop("moments")
        # Wherever they live they have few bits.
        count = len(states(buffer.slots[0].group))
        total["optimizer"] += count * _low_bit_bytes(buffer, moments) if full and moments != "fp32" else full
        total["optimizer"] += averages * buffer.held_bytes(buffer.numel_owned, home)["moments"]
        for kind, num_bytes in held.items():
            total[kind] += num_bytes
    return total


def _pinning_bytes(buffer: BufferPlan) -> int:
    """Bytes that torch's cache of pinned memory adds to a buffer's blocks on the host: it rounds each up to a power of two.
    Masters and moments, which the host updates, are not pinned."""
    homes, dtypes = buffer.lifetimes.homes, buffer.dtypes
    held = buffer.held_bytes(0, Home.HOST)
    delivered = buffer.numel_owned * dtypes.gradient.itemsize * buffer.is_trained * (homes.master == Home.HOST)
    cast = dtypes.kept_bytes(buffer.numel_owned)
    is_cast = homes.master == Home.HOST and homes.parameters == Home.DEVICE
    blocks = [held["parameters"], held["gradients"] - delivered, delivered, cast * is_cast]
    return sum((1 << (size - 1).bit_length()) - size for size in blocks if size)


def _low_bit_bytes(buffer: BufferPlan, moments: MomentsDtype) -> int:
    """One moment of what a rank owns of a buffer, which has no padding but within blocks."""
    intervals = (each.layout.interval or (0, each.layout.numel_local) for each in buffer.held.values())
    return count_state_bytes(moments, intervals) if buffer.is_trained else 0


def count_gathered(units: Sequence[tuple[UnitMemory, int]]) -> tuple[int, int]:
    """Full parameters and full gradients, where these come and go: at most those of the unit in use and of the units ahead of it
    beside the larger of embedding and head; and of three units, one being written and two under way."""
    parameters = sum(each.unsharded * count for each, count in units)
    if not any(each.keeps_parameters for each, _ in units):
        ahead = max((each.prefetch_units for each, _ in units), default=0)
        layers = sum_largest([(each.unsharded, count) for each, count in units if each.is_layer], 1 + ahead)
        parameters = min(
            layers + max((each.unsharded for each, _ in units if not each.is_layer), default=0), parameters
        )
    return parameters, sum_largest([(each.unreduced, count) for each, count in units], 3)


def sum_largest(sizes: Iterable[tuple[int, int]], most: int) -> int:
    """Sum of the largest of some sizes, each with how often it is there."""
    return sum(sorted((size for size, count in sizes for _ in range(min(count, most))), reverse=True)[:most])


def _total(counted: Iterable[tuple[Mapping[str, int], int]]) -> dict[str, int]:
    total = dict.fromkeys(KINDS, 0)
    for sizes, count in counted:
        for kind, size in sizes.items():
            total[kind] += size * count
    return total


@cache
def ranks_on_nodes(world: int, pp: int, here: int) -> tuple[tuple[int, ...], ...]:
    """Number of ranks at each place of the pipeline, for each kind of node with `here` ranks; neighbours share a node."""
    size = world // pp
    nodes = [(first, min(first + here, world)) for first in range(0, world, here)]
    counts = [
        tuple(max(0, min(stop, (place + 1) * size) - max(first, place * size)) for place in range(pp))
        for first, stop in nodes
    ]
    return tuple(dict.fromkeys(counts))


def sum_fullest_node(of_stage: Sequence[int], world: int, here: int) -> int:
    """The most that the ranks of one node have together. of_stage: of a rank at each place of the pipeline: ranks that differ in
    other coordinates have as much."""
    return max(
        sum(count * size for count, size in zip(counts, of_stage, strict=True))
        for counts in ranks_on_nodes(world, len(of_stage), here)
    )
