"""Bytes of states over a step: parameters, gradients, masters and moments, as buffers are planned, and what is unsharded of them.

For a search the bytes of all places where states may lie are computed at once, as arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from framework.comm.communicator import Communicator
from framework.mesh.topology import Axis, count_expert_shards
from framework.model.stage import StageBounds
from framework.parallel.pipeline.pipeline import PipelinePlan
from framework.parallel.tensor.heads import ranks_per_kv_head
from framework.parallel.zero.lifetimes import lifetimes_of
from framework.parallel.zero.plan_buffers import BufferPlan, choose_homes
from framework.plan.candidate import Candidate
from framework.plan.memory import (
    KINDS,
    UnitMemory,
    count_gathered,
    measure_unit,
    measure_units,
    total_on_device,
    total_on_disk,
    total_on_host,
)
from framework.plan.settings import Settings
from framework.plan.shape import Degrees, ModelShape, RankUnit, StageUnits
from framework.recipe.schema import Offload

PHASES = ("forward", "loss", "backward", "reduction", "optimizer")
MIB = 2**20
# torch's default for one stream on Hopper (CUBLAS_WORKSPACE_CONFIG); 8.5 MiB on other GPUs. Computation has one stream.
CUBLAS_BYTES = 32 * MIB
# Assumed, not measured here: a CUDA context with torch's kernels loaded, and the buffers of a NCCL communicator over NVLink.
CONTEXT_BYTES = 512 * MIB
COMMUNICATOR_BYTES = 128 * MIB
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


@dataclass(frozen=True)
class StagePlacement:
    """A model's stages on the ranks of a pipeline, as ranks with such degrees hold them. owners: the rank of each stage."""

    stages: tuple[StageBounds, ...]
    owners: tuple[int, ...]
    degrees: Degrees

    @cached_property
    def of_ranks(self) -> list[list[StageBounds]]:
        """The stages of each rank, in order of computation."""
        pairs = list(zip(self.stages, self.owners, strict=True))
        return [[stage for stage, owner in pairs if owner == rank] for rank in range(max(self.owners) + 1)]


@dataclass(frozen=True, eq=False)
class Pipelines:
    """The pipelines of one model and one recipe, and what their ranks have whatever is trained. pipeline: that of a plan, in
    the place of what candidates say of stages and schedules."""

    shape: ModelShape
    settings: Settings
    pipeline: PipelinePlan | None = None
    _known: dict[Any, StagePlacement] = field(default_factory=dict, repr=False)

    def places(self, each: Candidate) -> StagePlacement:
        """The stages of a pipeline on its ranks."""
        layout = each.pp, each.schedule, each.virtual, each.context, each.tp, each.ep, each.expert_tp, each.sequence
        if self.pipeline is not None:
            return StagePlacement(tuple(self.pipeline.stages), tuple(self.pipeline.rank_of_stage), Degrees.of(each))
        if layout not in self._known:
            layers = self.settings.layers(each)
            stages = self.shape.stages(each.pp, each.schedule, each.virtual, each.context, layers)
            self._known[layout] = StagePlacement(
                stages, self.shape.owners(each.pp, each.schedule, each.virtual), Degrees.of(each)
            )
        return self._known[layout]

    def outside(self, each: Candidate) -> int:
        """Bytes of the device that are not torch's."""
        if self.settings.device != "cuda":
            return 0
        sizes = (each.world, each.tp, each.dp * each.cp, each.pp, each.cp, each.ep)
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in sizes)

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS keeps for its own use."""
        return CUBLAS_BYTES if self.settings.device == "cuda" else 0


# Where states lie: the fields zero, shard and offload of a candidate.
States = tuple[int, int, frozenset[str]]


@dataclass(frozen=True, eq=False)
class StateOptions:
    """Places where the states of a layout may lie. Compared by identity, so that what is known of them is found at once."""

    states: tuple[States, ...]


class StateTable(NamedTuple):
    """Bytes of each option. totals, moving: [options, ranks, phases], host: [options, ranks], as of `PhaseBytes`; outside: not
    torch's, of any rank."""

    totals: np.ndarray
    moving: np.ndarray
    outside: int
    host: np.ndarray


@dataclass(frozen=True, eq=False)
class StateBytes:
    """State bytes for one model and one recipe, cached by what they depend on."""

    pipelines: Pipelines
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def of_ranks(self, each: Candidate) -> Sequence[PhaseBytes]:
        """Bytes of each rank of the pipeline."""
        # The number of communicators depends on which of dp and cp the batch's ranks are.
        zero = each.zero, each.shard, each.dp * each.cp, each.cp > 1, each.offload - {"activations"}
        found: Sequence[PhaseBytes] = self._remember(("states", self._layout(each), zero), lambda: self._states(each))
        return found

    def of_options(self, stages: Candidate, options: StateOptions) -> StateTable:
        """Bytes of states in each of these places."""
        layout = stages.pp, stages.schedule, stages.virtual, stages.context
        degrees = stages.tp, stages.ep, stages.expert_tp, stages.sequence, stages.dp * stages.cp, stages.cp > 1
        key = ("state table", layout, degrees, options)
        found: StateTable = self._remember(key, lambda: self._make_table(stages, options))
        return found

    def _make_table(self, stages: Candidate, options: StateOptions) -> StateTable:
        names = ("zero", "shard", "offload")
        layouts = [stages.changed(dict(zip(names, each, strict=True))) for each in options.states]
        parts = [self.of_ranks(each) for each in layouts]
        totals = np.array([[part.totals for part in ranks] for ranks in parts], dtype=np.int64)
        moving = np.array([[part.moving for part in ranks] for ranks in parts], dtype=np.int64)
        host = np.array([[part.host for part in ranks] for ranks in parts], dtype=np.int64)
        return StateTable(totals, moving, self.pipelines.outside(stages), host)

    def _states(self, each: Candidate) -> list[PhaseBytes]:
        offload, found = each.offload - {"activations"}, []
        for units in self._remember(("units of ranks", self._layout(each)), partial(self._units_of_ranks, each)):
            # The same units are there for all candidates whose ranks hold such stages.
            key = tuple(map(id, units)), self.pipelines.outside(each), each.zero, each.shard, each.dp * each.cp, offload
            found.append(self._remember(("states of rank", key), partial(self._part_of_states, each, units)))
        return found

    def _units_of_ranks(self, each: Candidate) -> list[list[StageUnits]]:
        places = self.pipelines.places(each)
        return [[self.pipelines.shape.stage_units(stage, places.degrees) for stage in own] for own in places.of_ranks]

    @staticmethod
    def _layout(each: Candidate) -> tuple[Any, ...]:
        """Fields of a candidate that the stages of its ranks depend on."""
        return each.pp, each.schedule, each.virtual, each.context, each.tp, each.ep, each.expert_tp, each.sequence

    def _part_of_states(self, each: Candidate, stages: Sequence[StageUnits]) -> PhaseBytes:
        device, gathered, host, disk = self._measure(each, stages)
        lasting = {kind: device[kind] for kind in KINDS if kind != "gathered"}
        parameters, gradients = gathered
        by_phase = (parameters, parameters, parameters + gradients, gradients, 0)
        phases = [{**lasting, "gathered": size} for size in by_phase]
        return PhaseBytes.of(phases, sum(lasting.values()), host, self.pipelines.outside(each), disk)

    def _measure(
        self, each: Candidate, stages: Sequence[StageUnits]
    ) -> tuple[dict[str, int], tuple[int, int], dict[str, int], int]:
        """(bytes of the device by kind, gathered parameters and gradients, bytes of the host by kind, of a file) of such
        stages."""
        offload, names, moments = (
            self._remember(("offload", each.offload), partial(self.pipelines.settings.offload, each)),
            self.pipelines.settings.states,
            self._moments_dtype,
        )
        fractions = {offload.optimizer, offload.parameters}
        if fractions <= {0.0, 1.0} and offload.home == "host":
            # All units of a kind then have the same homes.
            units = [
                (self._measure_unit(each, unit, stage.order, offload), count)
                for stage in stages
                for unit, count in stage.counted
            ]
            return total_on_device(units), count_gathered(units), total_on_host(units, self._is_pinned), 0
        buffers = [buffer for stage in stages for buffer in choose_homes(self._buffers_in_order(each, stage), offload)]
        units = measure_units(buffers, names, moments)
        on_host, (disk, ring) = total_on_host(units, self._is_pinned), total_on_disk(buffers, names)
        on_host["gathered"] += ring
        return total_on_device(units), count_gathered(units), on_host, disk

    @property
    def _is_pinned(self) -> bool:
        return self.pipelines.settings.device == "cuda"

    def _measure_unit(self, each: Candidate, unit: RankUnit, order: tuple[str, ...], offload: Offload) -> UnitMemory:
        zero, states = self._zero_key(each, unit), each.offload - {"activations"}

        def measure() -> UnitMemory:
            buffers = choose_homes(self._planned_buffers(each, unit, order), offload)
            return measure_unit(buffers, self.pipelines.settings.states, self._moments_dtype)

        return self._remember(("unit", id(unit), order, zero, states), measure)

    def _planned_buffers(self, each: Candidate, unit: RankUnit, order: tuple[str, ...]) -> list[BufferPlan]:
        """Before states have homes: planned once for all of these."""
        key = ("buffers", id(unit), order, self._zero_key(each, unit))
        return self._remember(key, partial(self._buffers, each, unit, order))

    def _buffers_in_order(self, each: Candidate, stage: StageUnits) -> list[BufferPlan]:
        """Buffers of all units of a stage, under names of their own."""
        return [
            replace(buffer, unit=name)
            for name, unit in stage.in_order
            for buffer in self._planned_buffers(each, unit, stage.order)
        ]

    def _buffers(self, each: Candidate, unit: RankUnit, order: tuple[str, ...]) -> list[BufferPlan]:
        axes = {name: Communicator(Axis(name, size, 0)) for name, size in self._sizes(each, unit).items()}
        # The order of a buffer's groups is that of the whole stage.
        groups = {f"group {number}": group for number, group in enumerate(order)} | dict(unit.local.groups)
        local = replace(unit.local, groups=groups)
        return local.plan_buffers(
            [unit.unit], self.pipelines.settings.master, lifetimes_of(self.pipelines.settings.zero(each)), axes
        )

    def _zero_key(self, each: Candidate, unit: RankUnit) -> tuple[Any, ...]:
        return each.zero, *self._sizes(each, unit).values()

    def _sizes(self, each: Candidate, unit: RankUnit) -> dict[str, int]:
        """Sizes of the axes that the unit's buffers may name."""
        batch, is_mixture = each.dp * each.cp, unit.has_experts
        sizes = {
            "tp": each.tp,
            # A config of transformers' takes long to read.
            "kv": self._remember(("kv", each.tp), lambda: ranks_per_kv_head(self.pipelines.shape.config, each.tp)),
            "ep": each.ep,
            "embedding": 2,
            "shard": each.shard,
            "replica": batch // each.shard,
            "expert_shard": 1,
            "expert_replica": 1,
        }
        if is_mixture:
            copies = batch * each.tp // (each.expert_tp * each.ep)
            shard = self._expert_shard(each) if each.zero else 1
            sizes |= {"expert_shard": shard, "expert_replica": copies // shard}
        return sizes

    def _expert_shard(self, each: Candidate) -> int:
        degrees = each.shard, each.tp, each.ep, each.expert_tp, each.dp * each.cp
        return self._remember(("expert shard", degrees), lambda: count_expert_shards(*degrees))

    @property
    def _moments_dtype(self) -> Any:
        return self.pipelines.settings.recipe.precision.moments

    def _remember(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]
