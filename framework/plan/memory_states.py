"""Bytes of states over a step: parameters, gradients, masters and moments, as buffers are planned, and what is unsharded of them.

For a search the bytes of all places where states may lie are computed at once, as arrays.
"""

from collections.abc import Mapping, Sequence
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
from framework.optim.optimizers import state_names
from framework.optim.states import MomentsDtype
from framework.parallel.pipeline.pipeline import PipelinePlan
from framework.parallel.tensor.partition import ranks_per_kv_head
from framework.parallel.zero.buffer_plan import BufferPlan, lifetimes_of
from framework.parallel.zero.plan_buffers import choose_homes
from framework.plan.candidate import OFFLOADED, Candidate, remember, topology_of
from framework.plan.memory import (
    KINDS,
    StatesOf,
    UnitMemory,
    count_gathered,
    measure_unit,
    measure_units,
    total_on_device,
    total_on_disk,
    total_on_host,
)
from framework.plan.shape import DEGREES, ModelShape, RankUnit, StageUnits
from framework.recipe.schema import Offload, Recipe

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

    @remember(*PLACES)
    def of_ranks(self, each: Candidate) -> list[list[StageBounds]]:
        """The stages of each rank, in order of computation."""
        owners: Sequence[int] = self.shape.owners(each.pp, each.schedule, each.virtual)
        if self.pipeline is not None:
            owners = self.pipeline.rank_of_stage
        pairs = list(zip(self.stages(each), owners, strict=True))
        return [[stage for stage, owner in pairs if owner == rank] for rank in range(each.pp)]

    @remember("pp", "dp", "cp", "tp", "ep", "expert_tp", "ulysses", "shard", "zero")
    def outside(self, each: Candidate) -> int:
        """Bytes of the device that are not torch's."""
        if not self.on_gpus:
            return 0
        topology = topology_of(each, ranks_per_kv_head(self.shape.config, each.tp))
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

    @remember(*STAGES, "zero", "shard", "batch", "cp", "ulysses", "states_offloaded")
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
