"""Bytes of a rank over a step, foretold for thousands of layouts: the Plan's own numbers, and what stands beside tensors.

    kind            what                                                                    known by
    parameters ...  states, and what of them is gathered: as `plan/memory.py` has them      exactly, padding included
    activations     what layers keep, by microbatches in flight (`plan/activations.py`)     formulas, or estimated
    logits          what the loss keeps                                                     exactly
    temporaries     tensors inside of one layer's backward, or of the loss                  formulas
    communication   hidden states that a pipeline sends and receives                        by the executor's actions
    workspace       cuBLAS'                                                                 torch's default
    outside         the driver's context and NCCL's buffers, not torch's memory             an assumption, below
    slack           what the caching allocator has reserved beside tensors                  an assumption, below

What a rank holds is the sum of two parts that are remembered by themselves: states, which depend on ZeRO and not on
microbatches, and activations, for which it is the other way round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.foresight.candidate import Candidate
from framework.foresight.forecast import MemoryForecast, StageMemory
from framework.foresight.settings import Settings
from framework.foresight.shape import Degrees, ModelShape, RankUnit, StageUnits
from framework.mesh.axis import Axis
from framework.mesh.context import ContextSlices
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import count_expert_shards
from framework.model.logit_map import find_logit_map
from framework.model.stage import StageBounds
from framework.parallel.pipeline.live import LiveMoment, live_moments
from framework.parallel.pipeline.lower import lower
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import Costs, unit_costs
from framework.parallel.tensor import ranks_per_kv_head
from framework.parallel.zero.choose_homes import choose_homes
from framework.parallel.zero.lifetimes import lifetimes_of
from framework.parallel.zero.plan_buffers import BufferPlan
from framework.plan.activations import Activations, MomentTable, Peak, StageActivations, read_masks
from framework.plan.cluster import Cluster
from framework.plan.context import ContextCost, Method
from framework.plan.logits import is_large
from framework.plan.memory import (
    KINDS,
    UnitMemory,
    bytes_held,
    bytes_on_host,
    count_gathered,
    measure_unit,
    measure_units,
    total_on_device,
    total_on_host,
)
from framework.plan.policies import Counts, uniform
from framework.recipe.schema import Offload, Recipe

# Counted over estimated activations of models without formulas, the least and the most: `scripts/bench/foresight_memory.py
# --estimated`; opt, and gemma2, whose attention caps its scores and so has matrices of them.
ESTIMATE_OFF = (0.75, 3.3)
PHASES = ("forward", "loss", "backward", "reduction", "optimizer")
BACKWARD = PHASES.index("backward")
MIB = 2**20
# Where states lie: the fields zero, shard and offload of a candidate.
States = tuple[int, int, frozenset[str]]
# torch's default for one stream on Hopper (CUBLAS_WORKSPACE_CONFIG); 8.5 MiB on other GPUs. Computation has one stream.
CUBLAS_BYTES = 32 * MIB
# Assumed, not measured here: a CUDA context with torch's kernels loaded, and the buffers of a NCCL communicator over NVLink.
CONTEXT_BYTES = 512 * MIB
COMMUNICATOR_BYTES = 128 * MIB
# Assumed: of what comes and goes (activations, logits, temporaries, gathered units) the caching allocator reserves this share
# more than tensors fill, because free blocks do not fit what is asked for. What lives for the whole run is allocated first, in
# blocks of its own.
FRAGMENTATION = 0.04


class Part(NamedTuple):
    """A part of a rank's bytes. phases: by kind, of each of PHASES; totals: their sums; moving: of those what comes and goes;
    host: in the host's memory; outside: not torch's."""

    phases: tuple[Mapping[str, int], ...]
    totals: tuple[int, ...]
    moving: tuple[int, ...]
    host: int
    outside: int

    @classmethod
    def of(cls, phases: Sequence[Mapping[str, int]], lasting: int, host: int, outside: int) -> "Part":
        """lasting: what is there in all phases."""
        totals = tuple(sum(each.values()) for each in phases)
        return cls(tuple(phases), totals, tuple(total - lasting for total in totals), host, outside)


@dataclass(frozen=True)
class Places:
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
class StateOptions:
    """Places where the states of a layout may lie. Compared by identity, so that what is known of them is found at once."""

    states: tuple[States, ...]


class StateTable(NamedTuple):
    """Bytes of each option. totals, moving: [options, ranks, phases], as of `Part`; outside: not torch's, of any rank.
    in_backward: [options], on the first rank of the pipeline, with the slack of what comes and goes."""

    totals: np.ndarray
    moving: np.ndarray
    outside: int
    in_backward: np.ndarray


class UnitOfOptions(NamedTuple):
    """Bytes of one unit by option: for the whole run, and what comes and goes with its full parameters and gradients."""

    is_layer: bool
    lasting: np.ndarray
    unsharded: np.ndarray
    unreduced: np.ndarray


def _sum_largest(sizes: Sequence[np.ndarray], most: int) -> np.ndarray:
    """Of each option the sum of so many of the largest."""
    if len(sizes) <= most:
        return sum(sizes, np.zeros(1, dtype=np.int64))
    return np.sort(np.stack(sizes), axis=0)[-most:].sum(axis=0)


NOTHING = Part(tuple({} for _ in PHASES), (0,) * len(PHASES), (0,) * len(PHASES), 0, 0)


def forecast_memory(
    shape: ModelShape,
    candidate: Candidate,
    settings: Settings | Recipe,
    cluster: Cluster,
    chosen: Mapping[int, Counts] | None = None,
) -> MemoryForecast:
    """The memory of a rank at each place of the pipeline: of the first one along all other axes, as `Plan.memory`.

    settings: what is remembered is remembered with them; a recipe's are made of it. chosen: layers of each stage by policy of
    activation checkpointing; None: all as the candidate says. Raises what the model's transforms raise for degrees that do not
    fit (`ModelShape.refusal` asks first), RecipeError for more stages than layers.
    """
    states, activations = memory_model(shape, settings).parts(candidate, chosen)
    stages = tuple(_join(*each) for each in zip(states, activations, strict=True))
    return MemoryForecast(stages, cluster.memory_bytes)


def describe_estimate(shape: ModelShape, candidate: Candidate) -> str | None:
    """What of a forecast is estimated, and by how much it may be off; None where all of it has formulas."""
    if shape.has_formulas:
        return None
    low, high = ESTIMATE_OFF
    kept = (
        "activations of layers" if candidate.checkpointing in ("none", "selective") else "what one layer computes again"
    )
    return (
        f"{kept} are estimated: {shape.text.model_type} has layers of another form than Llama's. Counted bytes of such models"
        f" were between {low:g} and {high:g} of the estimate; states, inputs of layers and logits are exact"
    )


def spare_bytes(shape: ModelShape, candidate: Candidate, settings: Settings | Recipe, cluster: Cluster) -> int:
    """`forecast_memory(...).spare` alone, for a search: negative where the fullest rank lacks so many."""
    states, activations = memory_model(shape, settings).parts(candidate, None)
    return cluster.memory_bytes - max(map(_most, states, activations))


def spare_of_options(
    shape: ModelShape, stages: Candidate, options: StateOptions, settings: Settings | Recipe, cluster: Cluster
) -> np.ndarray:
    """`spare_bytes` of all options at once: `stages` with states in other places."""
    return memory_model(shape, settings).spare(stages, options, cluster.memory_bytes)


def memory_model(shape: ModelShape, settings: Settings | Recipe) -> "MemoryModel":
    """What is known of a model's bytes with these settings: one for both, which remembers."""
    known = Settings.of(settings) if isinstance(settings, Recipe) else settings
    model: MemoryModel = known.remember(("memory", shape), lambda: MemoryModel(shape, known))
    return model


def _most(states: Part, activations: Part) -> int:
    return max(_reserve(states, activations, phase) for phase in range(len(PHASES)))


def _reserve(states: Part, activations: Part, phase: int) -> int:
    """What the device must have for one phase."""
    moving = states.moving[phase] + activations.moving[phase]
    return states.totals[phase] + activations.totals[phase] + slack_of(moving) + states.outside


def slack_of(moving: int) -> int:
    """What the allocator reserves beside tensors that come and go."""
    return int(FRAGMENTATION * moving)


def _join(states: Part, activations: Part) -> StageMemory:
    """Both parts of a rank."""
    fullest = max(range(len(PHASES)), key=lambda phase: _reserve(states, activations, phase))
    phases = {name: {**states.phases[index], **activations.phases[index]} for index, name in enumerate(PHASES)}
    slack = slack_of(states.moving[fullest] + activations.moving[fullest])
    host = states.host + activations.host
    return StageMemory(phases[PHASES[fullest]], slack, phases, host, states.outside)


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """Parts of memory of one model and one recipe, each remembered by what it depends on."""

    shape: ModelShape
    settings: Settings
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def parts(self, each: Candidate, chosen: Mapping[int, Counts] | None) -> tuple[Sequence[Part], Sequence[Part]]:
        """(states, activations) of each rank of the pipeline."""
        return self.states(each), self._activations(each, chosen)

    def states(self, each: Candidate) -> Sequence[Part]:
        """Of each rank of the pipeline."""
        layout = each.pp, each.schedule, each.virtual, each.context, each.tp, each.ep, each.expert_tp, each.sequence
        # Which of dp and cp the batch's ranks are decides how many communicators there are.
        zero = each.zero, each.shard, each.dp * each.cp, each.cp > 1, each.offload - {"activations"}
        found: Sequence[Part] = self._remember(("states", layout, zero), lambda: self._states(each))
        return found

    def places(self, each: Candidate) -> Places:
        """The stages of a pipeline on its ranks."""
        layout = each.pp, each.schedule, each.virtual, each.context, each.tp, each.ep, each.expert_tp, each.sequence
        found: Places = self._remember(("places", layout), lambda: self._find_places(each))
        return found

    def _find_places(self, each: Candidate) -> Places:
        layers = self.settings.recipe.pipeline.layers
        stages = self.shape.stages(each.pp, each.schedule, each.virtual, each.context, layers)
        return Places(stages, self.shape.owners(each.pp, each.schedule, each.virtual), Degrees.of(each))

    def spare(self, stages: Candidate, options: StateOptions, limit: int) -> np.ndarray:
        """Bytes that each option leaves of a limit, on its fullest rank. options: the same layout with states elsewhere."""
        table, ranks = self.states_of_options(stages, options), self._deciding_ranks(stages)
        beside = [self.activations_of_rank(stages, rank) for rank in ranks]
        moving = table.moving[:, ranks] + np.array([part.moving for part in beside], dtype=np.int64)
        totals = table.totals[:, ranks] + np.array([part.totals for part in beside], dtype=np.int64)
        reserved = totals + (FRAGMENTATION * moving).astype(np.int64)
        found: np.ndarray = limit - table.outside - reserved.max(axis=(1, 2))
        return found

    def states_of_options(self, stages: Candidate, options: StateOptions) -> StateTable:
        """Bytes of states in each of these places."""
        layout = stages.pp, stages.schedule, stages.virtual, stages.context
        degrees = stages.tp, stages.ep, stages.expert_tp, stages.sequence, stages.dp * stages.cp, stages.cp > 1
        key = ("state table", layout, degrees, options)
        found: StateTable = self._remember(key, lambda: self._make_table(stages, options))
        return found

    def _deciding_ranks(self, each: Candidate) -> list[int]:
        """Ranks of the pipeline of which one is the fullest: without those that hold equal stages and at no moment more than
        another one has at one of its own, as most ranks in the middle."""
        microbatches = representative(each.schedule, each.pp, each.accumulation)
        key = "deciding", each.schedule, each.pp, each.virtual, each.context, microbatches
        return self._remember(key, lambda: self._find_deciding_ranks(each))

    def _find_deciding_ranks(self, each: Candidate) -> list[int]:
        kept: dict[Any, list[int]] = {}
        tables = [self._moments(each, rank)[1] for rank in range(each.pp)]
        for rank, stages in enumerate(self.places(each).of_ranks):
            forms = [(stage.is_first, stage.is_last, self.shape.kinds[stage.start : stage.stop]) for stage in stages]
            others = kept.setdefault(tuple(forms), [])
            if not any(tables[other].covers(tables[rank]) for other in others):
                others.append(rank)
        return sorted(rank for ranks in kept.values() for rank in ranks)

    def _make_table(self, stages: Candidate, options: StateOptions) -> StateTable:
        names = ("zero", "shard", "offload")
        layouts = [stages.changed(dict(zip(names, each, strict=True))) for each in options.states]
        if self._divides_units:
            totals, moving = self._add_up_units(stages, options, layouts)
        else:
            parts = [self.states(each) for each in layouts]
            totals = np.array([[part.totals for part in ranks] for ranks in parts], dtype=np.int64)
            moving = np.array([[part.moving for part in ranks] for ranks in parts], dtype=np.int64)
        first = moving[:, 0, BACKWARD]
        in_backward = totals[:, 0, BACKWARD] + (FRAGMENTATION * first).astype(np.int64)
        return StateTable(totals, moving, self.outside(stages), in_backward)

    def _add_up_units(
        self, stages: Candidate, options: StateOptions, layouts: Sequence[Candidate]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(totals, moving [options, ranks, phases])."""
        places = self.places(stages)
        memo: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        ranks = []
        for held in places.of_ranks:
            units = [self.shape.stage_units(stage, places.degrees) for stage in held]
            key = tuple(map(id, units))
            if key not in memo:
                memo[key] = self._phases_of_options(units, options, layouts)
            ranks.append(memo[key])
        totals, moving = (np.stack(arrays, axis=1) for arrays in zip(*ranks, strict=True))
        return totals, moving

    @property
    def _divides_units(self) -> bool:
        """Whether all units of a kind have the same homes: none is offloaded in part, nothing lies on disks."""
        offload = self.settings.recipe.memory.offload
        return offload.home == "host" and {offload.optimizer, offload.parameters} <= {0.0, 1.0}

    def _phases_of_options(
        self, stages: Sequence[StageUnits], options: StateOptions, layouts: Sequence[Candidate]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(totals, moving [options, phases]) of a rank with such stages, as `_part_of_states` has them of one."""
        counts: dict[tuple[int, tuple[str, ...]], int] = {}
        found = {}
        for stage in stages:
            for unit, count in stage.counted:
                key = id(unit), stage.order
                counts[key] = counts.get(key, 0) + count
                found[key] = self._unit_of_options(unit, stage.order, options, layouts)
        lasting = sum(count * found[key].lasting for key, count in counts.items())
        layers = [
            found[key].unsharded for key, count in counts.items() for _ in range(min(count, 2)) if found[key].is_layer
        ]
        ends = [each.unsharded for each in found.values() if not each.is_layer]
        unreduced = [found[key].unreduced for key, count in counts.items() for _ in range(min(count, 3))]
        parameters = _sum_largest(layers, 2) + _sum_largest(ends, 1)
        gradients = _sum_largest(unreduced, 3)
        moving = np.stack(
            np.broadcast_arrays(parameters, parameters, parameters + gradients, gradients, 0 * gradients), axis=1
        )
        return moving + np.asarray(lasting)[:, None], moving

    def _unit_of_options(
        self, unit: RankUnit, order: tuple[str, ...], options: StateOptions, layouts: Sequence[Candidate]
    ) -> "UnitOfOptions":
        first = layouts[0]
        degrees = first.tp, first.ep, first.expert_tp, first.dp * first.cp

        def measure() -> UnitOfOptions:
            units = [self._measure_unit(each, unit, order, self.settings.offload(each)) for each in layouts]
            numbers = [(sum(each.device.values()), each.unsharded, each.unreduced) for each in units]
            return UnitOfOptions(units[0].is_layer, *np.array(numbers, dtype=np.int64).T)

        return self._remember(("unit of options", id(unit), order, degrees, options), measure)

    # --- states

    def _states(self, each: Candidate) -> list[Part]:
        places = self.places(each)
        memo: dict[Any, Part] = {}
        parts = []
        for stages in places.of_ranks:
            units = [self.shape.stage_units(stage, places.degrees) for stage in stages]
            key = tuple(map(id, units))
            if key not in memo:
                memo[key] = self._part_of_states(each, units)
            parts.append(memo[key])
        return parts

    def _part_of_states(self, each: Candidate, stages: Sequence[StageUnits]) -> Part:
        device, gathered, host = self._measure(each, stages)
        lasting = {kind: device[kind] for kind in KINDS if kind != "gathered"}
        parameters, gradients = gathered
        by_phase = (parameters, parameters, parameters + gradients, gradients, 0)
        phases = [{**lasting, "gathered": size} for size in by_phase]
        return Part.of(phases, sum(lasting.values()), sum(host.values()), self.outside(each))

    def _measure(
        self, each: Candidate, stages: Sequence[StageUnits]
    ) -> tuple[dict[str, int], tuple[int, int], dict[str, int]]:
        """(bytes of the device by kind, gathered parameters and gradients, bytes of the host by kind) of such stages."""
        offload, names, moments = self.settings.offload(each), self.settings.states, self._moments_dtype
        fractions = {offload.optimizer, offload.parameters}
        if fractions <= {0.0, 1.0} and offload.home == "host":
            # All units of a kind then have the same homes.
            units = [
                (self._measure_unit(each, unit, stage.order, offload), count)
                for stage in stages
                for unit, count in stage.counted
            ]
            return total_on_device(units), count_gathered(units), total_on_host(units)
        buffers = [buffer for stage in stages for buffer in choose_homes(self._buffers_in_order(each, stage), offload)]
        units = measure_units(buffers, names, moments)
        return bytes_held(buffers, names, moments), count_gathered(units), bytes_on_host(buffers, names, moments)

    def _measure_unit(self, each: Candidate, unit: RankUnit, order: tuple[str, ...], offload: Offload) -> UnitMemory:
        zero, states = self._zero_key(each, unit), each.offload - {"activations"}

        def measure() -> UnitMemory:
            buffers = choose_homes(self._planned_buffers(each, unit, order), offload)
            return measure_unit(buffers, self.settings.states, self._moments_dtype)

        return self._remember(("unit", id(unit), order, zero, states), measure)

    def _planned_buffers(self, each: Candidate, unit: RankUnit, order: tuple[str, ...]) -> list[BufferPlan]:
        """Before states have homes: planned once for all of these."""
        key = ("buffers", id(unit), order, self._zero_key(each, unit))
        return self._remember(key, partial(self._buffers, each, unit, order))

    def _buffers_in_order(self, each: Candidate, stage: StageUnits) -> list[BufferPlan]:
        """Of all units of a stage, under names of their own."""
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
        return local.plan_buffers([unit.unit], self.settings.master, lifetimes_of(self.settings.zero(each)), axes)

    def _zero_key(self, each: Candidate, unit: RankUnit) -> tuple[Any, ...]:
        return each.zero, *self._sizes(each, unit).values()

    def _sizes(self, each: Candidate, unit: RankUnit) -> dict[str, int]:
        """Of the axes that the unit's buffers may name."""
        batch, is_mixture = each.dp * each.cp, unit.has_experts
        sizes = {
            "tp": each.tp,
            # A config of transformers' takes long to read.
            "kv": self._remember(("kv", each.tp), lambda: ranks_per_kv_head(self.shape.config, each.tp)),
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
        return self.settings.recipe.precision.moments

    def outside(self, each: Candidate) -> int:
        """Bytes of the device that are not torch's."""
        if self.settings.device != "cuda":
            return 0
        sizes = (each.world, each.tp, each.dp * each.cp, each.pp, each.cp, each.ep)
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in sizes)

    # --- activations

    def _activations(self, each: Candidate, chosen: Mapping[int, Counts] | None) -> list[Part]:
        ranks = range(each.pp)
        if chosen is not None:
            return [self._activations_of_rank(each, rank, chosen) for rank in ranks]
        return [self.activations_of_rank(each, rank) for rank in ranks]

    def activations_of_rank(self, each: Candidate, rank: int) -> Part:
        """Of one rank of the pipeline, its layers as the candidate says."""
        layout = each.pp, each.schedule, each.virtual, each.context, each.tp, each.ep, each.expert_tp, each.sequence
        microbatches = representative(each.schedule, each.pp, each.accumulation)
        goes = "activations" in each.offload
        tokens = each.sequences, each.cp, each.ulysses, each.is_gather, each.checkpointing, goes, microbatches
        key = ("activations of rank", rank, layout, tokens)
        found: Part = self._remember(key, lambda: self._activations_of_rank(each, rank, None))
        return found

    def _activations_of_rank(self, each: Candidate, rank: int, chosen: Mapping[int, Counts] | None) -> Part:
        places, activations = self.places(each), self.activations_of(each)
        moments, table = self._moments(each, rank)
        policy, stages = each.checkpointing, places.of_ranks[rank]
        counts = chosen or {stage.index: uniform(policy, stage.stop - stage.start) for stage in stages}
        # Virtual stages of a rank are dozens, and most of them are alike.
        alike: dict[Any, StageActivations] = {}
        by_stage = {}
        for stage in stages:
            own = counts[stage.index]
            form = stage.is_first, stage.is_last, stage.stop - stage.start, own, activations.masks_of(stage)
            if form not in alike:
                alike[form] = activations.of_stage(stage, own)
            by_stage[stage.index] = alike[form]
        peaks = table.find_peaks(by_stage)
        on_the_way = max(map(activations.transfer_bytes, stages)) if activations.memory.offload.activations else 0
        has_loss = any(stage.is_last for stage in stages)
        more = (0, activations.loss_temporaries * has_loss, activations.backward_temporaries)
        phases = [
            self._phase(peaks[name], on_the_way, more[number]) | {"workspace": self.workspace}
            for number, name in enumerate(PHASES[:3])
        ]
        nothing = {"activations": 0, "logits": 0, "temporaries": 0, "workspace": self.workspace}
        host = self._offloaded_bytes(activations, stages, moments)
        return Part.of([*phases, nothing, nothing], self.workspace, host, 0)

    def _moments(self, each: Candidate, rank: int) -> tuple[Sequence[LiveMoment], MomentTable]:
        count = representative(each.schedule, each.pp, each.accumulation)
        # In which order messages of uneven stages leave depends on how long these compute.
        costs = self._stage_costs(each)
        layout = each.schedule, each.pp, each.virtual, count, costs

        def make() -> tuple[Sequence[LiveMoment], MomentTable]:
            costs_of_all = Costs(costs, costs, costs)
            make_all = partial(_make_moments, each.schedule, each.pp, each.virtual, each.accumulation, costs_of_all)
            found = self._remember(("schedule", layout), make_all)(rank)
            return found, MomentTable.of(found)

        return self._remember(("moments", rank, layout), make)

    def _stage_costs(self, each: Candidate) -> tuple[float, ...]:
        """FLOPs of each stage, as a run's pipeline is simulated with."""

        def find() -> tuple[float, ...]:
            flops, layers = self.shape.flops(each.context), self.shape.layer_flops(each.context)
            first, last = flops.get("embedding", 0.0), flops.get("head", 0.0)
            stages = self.places(each).stages
            return tuple(sum(layers[x.start : x.stop]) + first * x.is_first + last * x.is_last for x in stages)

        key = "stage costs", each.pp, each.schedule, each.virtual, each.context
        found: tuple[float, ...] = self._remember(key, find)
        return found

    def _phase(self, peak: Peak, on_the_way: int, more: int) -> dict[str, int]:
        kept = peak.activations + on_the_way if peak.total else 0
        beside = {"temporaries": peak.beside + more, "communication": peak.between}
        return {"activations": kept, "logits": peak.logits} | beside

    def _offloaded_bytes(
        self, activations: Activations, stages: Sequence[StageBounds], moments: Sequence[LiveMoment]
    ) -> int:
        """Of activations on the host at the most. Each stage of the rank has blocks of its own."""
        if not activations.memory.offload.activations:
            return 0
        sizes = {stage.index: activations.offloaded_bytes(stage) for stage in stages}
        most = dict.fromkeys(sizes, 0)
        for each in moments:
            for index, whole, left in each.live:
                most[index] = max(most[index], whole + left)
        return sum(size * most[index] for index, size in sizes.items())

    @property
    def workspace(self) -> int:
        """Of the libraries that multiply."""
        return CUBLAS_BYTES if self.settings.device == "cuda" else 0

    def activations_of(self, each: Candidate) -> Activations:
        """Of one rank and microbatch."""
        key = form_of(each), each.sequences, each.checkpointing, "activations" in each.offload
        return self._remember(("activations of", key), lambda: self._make_activations(each))

    def is_chunked(self, each: Candidate) -> bool:
        """Whether the loss is computed in chunks."""
        key = "chunked", each.sequences, each.context, each.cp, each.ulysses, each.tp
        return self._remember(key, lambda: self._is_chunked(each, _slices_of(each)))

    def _make_activations(self, each: Candidate) -> Activations:
        shape, itemsize = self.shape, self.settings.compute.itemsize
        slices = _slices_of(each)
        tokens = TokenLayout(each.sequences, slices.tokens_local, Axis("tp", each.tp, 0), each.sequence, slices)
        chunked, goes = self.is_chunked(each), "activations" in each.offload
        memory = self._remember(
            ("memory", each.checkpointing, goes, chunked), lambda: self.settings.memory(each, chunked)
        )
        layers = self._remember(("flops", each.context), lambda: shape.layer_flops(each.context))
        return Activations(
            tokens,
            shape.hidden,
            shape.text.vocab_size,
            itemsize,
            shape.widths,
            sum(layers) / len(layers),
            memory,
            each.expert_tp,
            shape.mixture,
            self._contexts(each),
            self._packs,
            self._masks(each),
            each.ep > 1 or each.expert_tp < each.tp or self.settings.recipe.model.expert_capacity is not None,
        )

    def _masks(self, each: Candidate) -> tuple[str | None, ...]:
        """Of each layer."""
        make = partial(read_masks, self.settings.recipe, self.shape.text, each.cp, each.context)
        found: tuple[str | None, ...] = self._remember(("masks", each.cp > 1, each.context), make)
        return found

    @property
    def _packs(self) -> bool:
        return self.settings.recipe.data.pack == "documents"

    def _contexts(self, each: Candidate) -> tuple[ContextCost, ...]:
        key = each.context, each.cp, each.ulysses, each.is_gather, each.tp, each.sequences
        return self._remember(
            ("contexts", key),
            lambda: tuple({cost: None for cost in self._context_costs(each) if cost is not None}),
        )

    def _context_costs(self, each: Candidate) -> list[ContextCost | None]:
        if each.cp == 1:
            return []
        method = Method(each.ulysses, each.cp // each.ulysses, each.is_gather)
        lengths = each.sequences, each.context, self.settings.compute.itemsize
        shapes = dict.fromkeys(self.shape.attentions(each.tp, each.context))
        return [None if shape is None else ContextCost(method, shape, *lengths, self._packs) for shape in shapes]

    def _is_chunked(self, each: Candidate, slices: ContextSlices) -> bool:
        asked = self.settings.recipe.memory.chunked_loss
        tokens, itemsize = each.sequences * slices.tokens_local, self.settings.compute.itemsize
        if asked == "auto":
            asked = is_large(tokens, self.shape.vocabulary, each.tp, itemsize, self.settings.device)
        return asked and self._remember("logit map", self._has_logit_map)

    def _has_logit_map(self) -> bool:
        try:
            find_logit_map(self.shape.whole, self.settings.compute)
        except ModelError:
            return False
        return True

    def _remember(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def form_of(each: Candidate) -> tuple[object, ...]:
    """What a layer's bytes for one sequence depend on, but for its policy."""
    cp = each.context, each.cp, each.ulysses, each.is_gather
    return (*cp, each.tp, each.sequence, each.expert_tp, each.ep > 1)


def _slices_of(each: Candidate) -> ContextSlices:
    return ContextSlices(each.context, each.ulysses, each.cp // each.ulysses)


def representative(schedule: str, pp: int, accumulation: int) -> int:
    """The fewest microbatches, of those that are known to do, with which a rank has as many in flight at once as with so many."""
    if schedule == "gpipe":
        return accumulation
    if schedule != "interleaved":
        # From here on each more only repeats: of a V both halves have to be full.
        return min(accumulation, {"zbv": 2 * pp, "dualpipe_v": 2 * pp + 1}.get(schedule, pp + 1))
    # Groups of pp and, first, so many of pp + 1 as the division leaves over: beyond them the same comes again.
    groups, longer = divmod(accumulation, pp)
    most = max(4, longer + 2) if longer else 3
    return most * pp + longer if groups > most else accumulation


def moments_of(schedule: str, pp: int, virtual: int, accumulation: int) -> list[list[LiveMoment]]:
    """Of each rank the moments at which it may have most: those at which no other has as much of each stage."""
    return list(map(_make_moments(schedule, pp, virtual, accumulation, unit_costs(pp * virtual)), range(pp)))


def _make_moments(
    schedule: str, pp: int, virtual: int, accumulation: int, costs: Costs
) -> Callable[[int], list[LiveMoment]]:
    """What makes those of a rank."""
    few = min(accumulation, 4 * pp) if schedule == "gpipe" else representative(schedule, pp, accumulation)
    lowered = lower(make_schedule(schedule, pp, few, virtual), costs)

    def make(rank: int) -> list[LiveMoment]:
        own = _undominated(live_moments(lowered, rank))
        if few == accumulation or schedule != "gpipe":
            return own
        # All are in flight at once: with each one more there is one more of them, and one more that was sent.
        return [_with_more(each, accumulation - few, rank < pp - 1) for each in own if each.live[0][1] == few]

    return make


def _with_more(moment: LiveMoment, count: int, sends: bool) -> LiveMoment:
    ((stage, whole, waiting),) = moment.live
    between = moment.between + count * (moment.is_forward and sends)
    return moment._replace(live=((stage, whole + count, waiting),), between=between)


def _undominated(moments: Sequence[LiveMoment]) -> list[LiveMoment]:
    kept: dict[tuple[bool, int], list[LiveMoment]] = {}
    for each in sorted(moments, key=lambda each: -sum(whole + left for _, whole, left in each.live)):
        others = kept.setdefault((each.is_forward, each.stage), [])
        if not any(_has_as_much(other, each) for other in others):
            others.append(each)
    return [each for group in kept.values() for each in group]


def _has_as_much(one: LiveMoment, other: LiveMoment) -> bool:
    """A microbatch in flight keeps its hidden states at least, so it stands for one between stages as well."""
    pairs = list(zip(one.live, other.live, strict=True))
    more = sum(a[1] - b[1] for a, b in pairs)
    return one.between + more >= other.between and all(a[1] >= b[1] and a[2] >= b[2] for a, b in pairs)
