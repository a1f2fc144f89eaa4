"""Bytes of states over a step (parameters, gradients, masters and moments) and of what is unsharded of them, in closed form
from `parallel/zero/buffer_plan.py` and as buffers are planned.

For a search the bytes of all places where states may lie are computed at once, as arrays.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from framework.comm.communicator import Communicator
from framework.comm.groups import choose_backends, plan_groups
from framework.mesh.topology import ZERO_AXES, Axis
from framework.model.precision import DTYPES
from framework.model.stage import StageBounds
from framework.optim.disk_ring import DiskShard, DiskState, file_bytes, place_chunks, ring_bytes
from framework.optim.optimizers import state_names
from framework.optim.states import MomentsDtype, count_state_bytes
from framework.parallel.pipeline.pipeline import PipelinePlan
from framework.parallel.tensor.partition import ranks_per_kv_head
from framework.parallel.zero.buffer_plan import BufferPlan, GroupSpan, Home, lifetimes_of
from framework.parallel.zero.plan_buffers import choose_homes
from framework.plan.candidate import OFFLOADED, Candidate, full_topology, remember, topology_of
from framework.plan.shape import DEGREES, ModelShape, RankUnit, StageUnits
from framework.recipe.schema import Offload, Recipe

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


# Fields of a candidate that the bounds of its stages depend on, and their units on a rank.
PLACES = ("pp", "schedule", "virtual", "context")
STAGES = (*PLACES, *DEGREES)
# Axes that the layouts of parameters and their buffers name, beside `embedding`.
BUFFER_AXES = (*ZERO_AXES, "tp", "kv", "ep", "secondary", "expert_secondary")
PHASES = ("forward", "loss", "backward", "reduction", "optimizer")
MIB = 2**20
# torch's default for one stream on Hopper (CUBLAS_WORKSPACE_CONFIG); 8.5 MiB on other GPUs. Computation has one stream.
CUBLAS_BYTES = 32 * MIB
# Assumed, not measured here: a CUDA context with torch's kernels loaded, and the buffers of a NCCL communicator over NVLink.
CONTEXT_BYTES = 512 * MIB
# One that carries only messages connects pairs as they talk, and no rings or trees.
COMMUNICATOR_BYTES, MESSAGES_BYTES = 128 * MIB, 32 * MIB
# Assumed: of what comes and goes (activations, logits, temporaries, gathered units) the caching allocator reserves this share
# more than tensors fill, because free blocks do not fit what is asked for. What lives for the whole run is allocated first, in
# blocks of its own.
FRAGMENTATION = 0.04


class PhaseBytes(NamedTuple):
    """A part of a rank's bytes: its states, or its activations."""

    # Bytes by kind in each of PHASES; their sums; and the share of those that comes and goes.
    phases: tuple[Mapping[str, int], ...]
    totals: tuple[int, ...]
    moving: tuple[int, ...]
    # In the host's memory, by kind.
    on_host: Mapping[str, int]
    # Device memory outside torch.
    outside: int
    # In a file of states.
    disk: int = 0

    @classmethod
    def of(
        cls, phases: Sequence[Mapping[str, int]], lasting: int, on_host: Mapping[str, int], outside: int, disk: int = 0
    ) -> "PhaseBytes":
        """lasting: what is there in all phases."""
        totals = tuple(sum(each.values()) for each in phases)
        return cls(tuple(phases), totals, tuple(total - lasting for total in totals), on_host, outside, disk)

    @property
    def host(self) -> int:
        """All bytes in the host's memory."""
        return sum(self.on_host.values())


def slack_of(moving: int) -> int:
    """Bytes that the allocator reserves beside tensors that come and go."""
    return int(FRAGMENTATION * moving)


@dataclass(frozen=True, eq=False)
class Pipelines:
    """The pipelines of one model, and the keys of one recipe that memory depends on and no layout changes.

    recipe: with the device and the dtype of where it will run. pipeline: that of a plan, in the place of what candidates say of
    stages and schedules."""

    shape: ModelShape
    recipe: Recipe
    pipeline: PipelinePlan | None = None

    @cached_property
    def compute(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return DTYPES[self.recipe.precision.compute]

    @cached_property
    def master(self) -> torch.dtype | None:
        """The dtype of what the optimizer updates; None: that of each buffer."""
        return DTYPES.get(self.recipe.precision.master)

    def states(self, group: str) -> tuple[str, ...]:
        """The optimizer's states of a group of parameters, by its key."""
        return state_names(self.recipe.optim, group)

    @property
    def kept(self) -> tuple[StatesOf, MomentsDtype, bool]:
        """Arguments of `measure_unit`: what the optimizer keeps beside masters."""
        return self.states, self.recipe.precision.moments, self.recipe.train.ema is not None

    @property
    def on_gpus(self) -> bool:
        """Whether ranks compute on GPUs."""
        return self.recipe.launch.device == "cuda"

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint at the most: masters and moments, of frozen parameters too, but for those beside an adapter."""
        master = (self.master or self.compute).itemsize
        moment = 4 if self.master is None else master
        shape = self.shape
        trained = {name: shape.whole.get_parameter(name).numel() for name in shape.groups}
        # Frozen parameters count as trained, except beside adapters: a branch of the run may train them.
        frozen = 0 if self.recipe.adapter.is_used else shape.size.total - sum(trained.values())
        averages = self.recipe.train.ema is not None
        moments = sum(numel * (len(self.states(shape.groups[name])) + averages) for name, numel in trained.items())
        return (sum(trained.values()) + frozen) * master + (moments + frozen * len(self.states(""))) * moment

    @remember("offload")
    def offload(self, each: Candidate) -> Offload:
        """The recipe's fractions of what the candidate offloads; all of it where the recipe has none."""
        given, names = self.recipe.memory.offload, each.offload
        fractions: dict[str, Any] = {name: (getattr(given, name) or 1.0) * (name in names) for name in OFFLOADED}
        return replace(given, **fractions)

    @remember(*PLACES)
    def stages(self, each: Candidate) -> Sequence[StageBounds]:
        """The stages of a pipeline, in order of computation."""
        if self.pipeline is not None:
            return self.pipeline.stages
        layers = self.recipe.pipeline.layers
        # `let_rest_follow` drops the recipe's split for layouts with another number of stages.
        stated = tuple(layers) if isinstance(layers, list) and len(layers) == each.pp * each.virtual else None
        return self.shape.stages(each.pp, each.schedule, each.virtual, each.context, stated)

    def _owners(self, each: Candidate) -> Sequence[int]:
        """The rank of each stage."""
        if self.pipeline is not None:
            return self.pipeline.rank_of_stage
        return self.shape.owners(each.pp, each.schedule, each.virtual)

    @remember(*PLACES)
    def of_ranks(self, each: Candidate) -> list[list[StageBounds]]:
        """The stages of each rank, in order of computation."""
        pairs = list(zip(self.stages(each), self._owners(each), strict=True))
        return [[stage for stage, owner in pairs if owner == rank] for rank in range(each.pp)]

    @remember(*PLACES, "dp", "cp", "tp", "ep", "expert_tp", "ulysses", "shard", "zero", "ranks_per_node")
    def outside(self, each: Candidate, is_least: bool = False) -> int:
        """Bytes of the device that are not torch's. is_least: at the least, whatever the schedule and wherever states lie."""
        if not self.on_gpus:
            return 0
        kv, is_muon = ranks_per_kv_head(self.shape.config, each.tp), self.recipe.optim.name == "muon"
        if is_least:
            topology = replace(topology_of(each, kv), embedding_ranks=(0, 0))
        else:
            owners, matrix = self._owners(each), self.shape.sharing(each)[0] if is_muon else 1
            topology = full_topology(self.recipe, each, (owners[0], owners[-1]), kv, matrix)
        groups = plan_groups(topology.outlines(), choose_backends("cuda", is_debug=False))
        return CONTEXT_BYTES + sum(MESSAGES_BYTES if each.only_messages else COMMUNICATOR_BYTES for each in groups)

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS keeps for its own use."""
        return CUBLAS_BYTES * self.on_gpus


# Places where the states of a layout may lie: the fields zero, shard and offload of candidates.
Places = tuple[tuple[int, int, frozenset[str]], ...]


def place_states(each: Candidate, place: tuple[int, int, frozenset[str]]) -> Candidate:
    """The layout with its states there."""
    return each.changed(dict(zip(("zero", "shard", "offload"), place, strict=True)))


class StateTable(NamedTuple):
    """Bytes of each place of states. totals, moving: [places, ranks, phases], host: [places, ranks], as of `PhaseBytes`."""

    totals: np.ndarray
    moving: np.ndarray
    host: np.ndarray


@dataclass(frozen=True, eq=False)
class StateBytes:
    """State bytes for one model and one recipe."""

    pipelines: Pipelines

    @remember(*STAGES, "zero", "shard", "batch", "cp", "ulysses", "states_offloaded", "ranks_per_node")
    def of_ranks(self, each: Candidate) -> Sequence[PhaseBytes]:
        """Bytes of each rank of the pipeline."""
        outside = self.pipelines.outside(each)
        return [self._of_rank(each, stages, outside) for stages in self._units_of_ranks(each)]

    @remember(*STAGES, "batch", "cp", "ulysses")
    def of_places(self, stages: Candidate, places: Places) -> StateTable:
        """Bytes of states in each of these places."""
        parts = [self.of_ranks(place_states(stages, place)) for place in places]
        totals = np.array([[part.totals for part in ranks] for ranks in parts], dtype=np.int64)
        moving = np.array([[part.moving for part in ranks] for ranks in parts], dtype=np.int64)
        host = np.array([[part.host for part in ranks] for ranks in parts], dtype=np.int64)
        return StateTable(totals, moving, host)

    @remember(*STAGES)
    def _units_of_ranks(self, each: Candidate) -> list[tuple[StageUnits, ...]]:
        shape = self.pipelines.shape
        return [tuple([shape.stage_units(stage, each) for stage in own]) for own in self.pipelines.of_ranks(each)]

    @remember("zero", "shard", "batch", "states_offloaded")
    def _of_rank(self, each: Candidate, stages: tuple[StageUnits, ...], outside: int) -> PhaseBytes:
        """Bytes of a rank with the units of such stages: the same for all candidates whose ranks have them."""
        device, gathered, host, disk = self._measure(each, stages)
        lasting = {kind: device[kind] for kind in KINDS if kind != "gathered"}
        parameters, gradients = gathered
        by_phase = (parameters, parameters, parameters + gradients, gradients, 0)
        phases = [{**lasting, "gathered": size} for size in by_phase]
        return PhaseBytes.of(phases, sum(lasting.values()), host, outside, disk)

    def _measure(
        self, each: Candidate, stages: Sequence[StageUnits]
    ) -> tuple[dict[str, int], tuple[int, int], dict[str, int], int]:
        """(bytes of the device by kind, gathered parameters and gradients, bytes of the host by kind, of a file) of such
        stages."""
        offload, is_pinned = self.pipelines.offload(each), self.pipelines.on_gpus
        if {offload.optimizer, offload.parameters} <= {0.0, 1.0} and offload.home == "host":
            # All units of a kind then have the same homes.
            units = [
                (self._measure_unit(each, unit, stage.order), count)
                for stage in stages
                for unit, count in stage.counted
            ]
            return total_on_device(units), count_gathered(units), total_on_host(units, is_pinned), 0
        # Under names of their own, in order of computation.
        buffers = [
            replace(buffer, unit=name)
            for stage in stages
            for name, unit in stage.in_order
            for buffer in self._buffers(each, unit, stage.order)
        ]
        buffers = choose_homes(buffers, offload)
        units = measure_units(buffers, *self.pipelines.kept)
        on_host, (disk, ring) = total_on_host(units, is_pinned), total_on_disk(buffers, self.pipelines.states)
        on_host["gathered"] += ring
        return total_on_device(units), count_gathered(units), on_host, disk

    @remember("zero", "shard", "batch", "tp", "ep", "expert_tp", "states_offloaded")
    def _measure_unit(self, each: Candidate, unit: RankUnit, order: tuple[str, ...]) -> UnitMemory:
        buffers = choose_homes(self._buffers(each, unit, order), self.pipelines.offload(each))
        return measure_unit(buffers, *self.pipelines.kept)

    @remember("zero", "shard", "batch", "tp", "ep", "expert_tp")
    def _buffers(self, each: Candidate, unit: RankUnit, order: tuple[str, ...]) -> list[BufferPlan]:
        """Buffers of a unit before states have homes."""
        recipe, kv = self.pipelines.recipe, ranks_per_kv_head(self.pipelines.shape.config, each.tp)
        topology = topology_of(each, kv, recipe.zero.secondary_shard)
        # A tied embedding is on two stages, wherever these lie.
        sizes = {name: topology.size(name) for name in (*BUFFER_AXES, "pp")} | {"embedding": 2}
        axes = {name: Communicator(Axis(name, size, 0)) for name, size in sizes.items()}
        # The order of a buffer's groups is that of the whole stage.
        groups = {f"group {number}": group for number, group in enumerate(order)} | dict(unit.local.groups)
        zero = replace(recipe.zero, stage=each.zero)
        return replace(unit.local, groups=groups).plan_buffers(
            [unit.unit], self.pipelines.master, lifetimes_of(zero), axes
        )
