"""Seconds of a step, in parts that add up, and what follows from them: tokens/s, MFU, hours, cost.

    matmuls, attention, elementwise, recomputation    kernels                                          operators.py
    tp, cp, ep                                        messages of layers that nothing hides            exposure.py
    pp                                                messages between stages that hold a rank up
    gathers, reductions                               ZeRO's, beyond the computation beside them       sharding.py
    contention                                        computation slowed by messages that run beside it
    bubble                                            waiting of the slowest rank in the pipeline      bubble.py
    optimizer, offload, checkpoint                    update and norm, states that travel, saves       update.py
    host                                              launching kernels

They are the slowest rank's. A step is a pipeline's actions one after another, then the update, on all ranks at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from framework.model.precision import DTYPES
from framework.model.stage import StageBounds
from framework.parallel.activation_checkpointing import count_groups
from framework.parallel.pipeline.simulate import Costs
from framework.plan.bubble import Lengths, least_length
from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates, Collective
from framework.plan.exposure import (
    NOTHING,
    Exposure,
    Groups,
    LinkTimes,
    Overlaps,
    expose_cp,
    expose_ep,
    expose_tp,
    hide,
    place_groups,
)
from framework.plan.forecast import TimeForecast
from framework.plan.forecast_memory import memory_model
from framework.plan.operators import LayerTimes, UnitWork, Work, read_operators
from framework.plan.profile import OURS, Profile, Rates
from framework.plan.settings import Settings
from framework.plan.shape import Degrees, ModelShape, RankUnit
from framework.plan.sharding import ShardedUnit, Sharding
from framework.plan.update import Update, expected_goodput
from framework.recipe.derive import SPLIT_BACKWARDS, compiles
from framework.recipe.schema import Recipe

PARTS = (
    *("matmuls", "attention", "elementwise", "recomputation", "tp", "cp", "ep", "pp", "gathers", "reductions"),
    *("contention", "bubble", "optimizer", "offload", "checkpoint", "host"),
)

Seconds = dict[str, float]


@dataclass(frozen=True, eq=False)
class StageForm:
    """A stage as far as its time depends on it. bounds: of the first such stage; layers: (kind, number of them), in order."""

    bounds: StageBounds
    layers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnitTime:
    """A unit for one microbatch. exposures: of its messages, by axis. grouped: share of its forwards that run a second time to
    bring back the input of another layer (activation checkpointing by groups)."""

    work: UnitWork
    exposures: Mapping[str, Exposure] = field(default_factory=dict)
    grouped: float = 0.0

    @cached_property
    def again(self) -> Work:
        """Recomputation."""
        return self.work.again + self.work.forward.times(self.grouped) if self.grouped else self.work.again

    @cached_property
    def forward(self) -> float:
        """Seconds of its forward."""
        return self.work.forward.total + sum(each.forward for each in self.exposures.values())

    @cached_property
    def input(self) -> float:
        """Seconds of its input gradient, recomputation included."""
        messages = sum(each.backward + self.grouped * each.forward for each in self.exposures.values())
        return self.work.input.total + self.again.total + messages

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward where no group of layers is computed again."""
        return self.work.total + sum([each.forward + each.backward for each in self.exposures.values()])


@dataclass
class StageSum:
    """A stage's units for one microbatch, before ZeRO. Seconds of its passes, by part in `parts`; `hidden`: of messages under
    computation, by axis. units: what ZeRO shards, in order of computation."""

    forward: float = 0.0
    input: float = 0.0
    weight: float = 0.0
    parts: Seconds = field(default_factory=dict)
    hidden: Seconds = field(default_factory=dict)
    units: list[ShardedUnit] = field(default_factory=list)

    def add(self, unit: UnitTime, count: int, elements: tuple[float, float], end: str = "") -> None:
        """Add equal units. elements: (dense, of experts) of one on a rank, before ZeRO; end: embedding or head, "" for layers."""
        work, again = unit.work, unit.again
        self.forward += count * unit.forward
        self.input += count * unit.input
        self.weight += count * work.weight.total
        computed = work.forward + work.input + work.weight
        for name, seconds in (
            ("matmuls", computed.matmuls),
            ("attention", computed.attention),
            ("elementwise", computed.elementwise),
            ("recomputation", again.total),
            *((axis, each.forward * (1 + unit.grouped) + each.backward) for axis, each in unit.exposures.items()),
        ):
            self.parts[name] = self.parts.get(name, 0.0) + count * seconds
        for axis, each in unit.exposures.items():
            self.hidden[axis] = self.hidden.get(axis, 0.0) + count * each.hidden
        backward = unit.input + work.weight.total
        self.units.append(ShardedUnit(*elements, unit.forward, backward, count, end == "embedding", end == "head"))


@dataclass(frozen=True)
class StageTime:
    """A stage with ZeRO's messages."""

    forward: float
    """Seconds of a microbatch's forward; `input`, `weight`: of its input and weight gradients."""
    input: float
    weight: float
    parts: Mapping[str, float]
    """The same seconds by part; `hidden`: of messages under computation, by axis."""
    hidden: Mapping[str, float]
    once: Mapping[str, float]
    """Seconds of a step, whatever the number of microbatches; `hidden_once` likewise."""
    hidden_once: Mapping[str, float]
    owned: float
    """Parameters (elements) that the rank's optimizer updates."""

    @cached_property
    def microbatch(self) -> float:
        """Seconds of one microbatch."""
        return self.forward + self.input + self.weight


@dataclass(frozen=True)
class PipelineTimes:
    """All ranks of a pipeline. stages: in order; by rank: seconds of its microbatches (busy), of what comes once a step (late),
    the update's parts, elements that it updates."""

    stages: Sequence[StageTime]
    busy: Sequence[float]
    late: Sequence[float]
    updates: Sequence[Mapping[str, float]]
    owned: Sequence[float]

    @cached_property
    def slowest(self) -> int:
        """The rank whose own work takes longest."""
        totals = [busy + late for busy, late in zip(self.busy, self.late, strict=True)]
        return totals.index(max(totals))


class TimeModel:
    """Step-time forecasts of one model with one recipe's choices on one cluster. profile: of the implementation, by default ours.
    What layouts share is memoized. For one thread."""

    def __init__(self, shape: ModelShape, settings: Recipe, cluster: ClusterRates, profile: Profile | None = None):
        compute = settings.precision.compute
        dtype = "bf16" if compute == "auto" else compute
        itemsize = {"fp32": 4, "fp64": 8}.get(dtype, 2)
        self.shape, self.settings, self.cluster = shape, settings, cluster
        self.profile = profile or OURS
        if compiles(settings):
            self.profile = self.profile.fused()
        self.rates, self.links = Rates(cluster, self.profile, dtype, itemsize), LinkTimes(cluster, itemsize)
        memory = settings.memory
        overlaps = Overlaps(
            is_async=settings.parallel.overlap == "always",
            regathers=memory.gathered_inputs == "regather",
            halves=settings.parallel.expert_overlap,
            keeps_attention="attention" in memory.kept_operations,
        )
        self._overlaps = overlaps, replace(overlaps, splits=True)
        gathered = 1.0 if dtype == "fp8" else float(itemsize)
        reduced = float(DTYPES[settings.precision.reduce].itemsize)
        self.sharding = Sharding(settings.zero, gathered, reduced, self.links, self.profile)
        self.update = Update(settings, cluster, self.profile, itemsize)
        self.memory = memory_model(shape, Settings.of(settings))
        self._lengths = Lengths()
        self._known: dict[Any, Any] = {}

    def forecast(self, candidate: Candidate) -> TimeForecast:
        """The step time of a candidate that the model and the recipe allow."""
        c, groups = candidate, self.groups(candidate)
        ranks, owners = self.ranks(c, groups), self.stages(c)[2]
        own = [stage for stage, owner in zip(ranks.stages, owners, strict=True) if owner == ranks.slowest]
        parts, hidden = self._add_up(own, c)
        parts["bubble"] = max(self._length(c, groups, ranks) - ranks.busy[ranks.slowest], 0.0)
        for name, seconds in ranks.updates[ranks.slowest].items():
            parts[name] += seconds
        # A number for each parameter is summed beside loss and norm.
        flags = 8.0 * len(self.shape.groups)
        parts["optimizer"] += self.links.collective("all_reduce", flags, groups.world)
        parts["host"] += self.profile.step_s
        return self._conclude(c, parts, hidden, max(ranks.owned))

    def ranks(self, c: Candidate, groups: Groups) -> PipelineTimes:
        """The stages and the work of each rank of the pipeline."""
        forms, order, owners = self.stages(c)
        found = [self.stage(form, c, groups) for form in forms]
        stages = [found[index] for index in order]
        busy, late, owned = ([0.0] * c.pp for _ in range(3))
        for stage, owner in zip(stages, owners, strict=True):
            busy[owner] += c.accumulation * stage.microbatch
            late[owner] += sum(stage.once.values())
            owned[owner] += stage.owned
        updates = [self.update.seconds(elements, c) for elements in owned]
        late = [once + sum(update.values()) for once, update in zip(late, updates, strict=True)]
        return PipelineTimes(stages, busy, late, updates, owned)

    def costs(self, candidate: Candidate) -> Costs:
        """Seconds of each stage's actions for one microbatch, and of a message: the simulator's costs of a step's timeline."""
        groups = self.groups(candidate)
        return self._costs(candidate, groups, self.ranks(candidate, groups).stages)

    def _add_up(self, own: Sequence[StageTime], c: Candidate) -> tuple[Seconds, Seconds]:
        parts: Seconds = dict.fromkeys(PARTS, 0.0)
        hidden: Seconds = {}
        for stage in own:
            for times, values, target in (
                (c.accumulation, stage.parts, parts),
                (1, stage.once, parts),
                (c.accumulation, stage.hidden, hidden),
                (1, stage.hidden_once, hidden),
            ):
                for name, seconds in values.items():
                    target[name] = target.get(name, 0.0) + times * seconds
        return parts, hidden

    def _conclude(self, c: Candidate, parts: Seconds, hidden: Seconds, owned: float) -> TimeForecast:
        settings, cluster = self.settings, self.cluster
        step_s = sum(parts.values())
        stall_s, interval_s = self.update.save(owned, c, step_s)
        parts["checkpoint"] = stall_s * step_s / interval_s if interval_s else 0.0
        step_s += parts["checkpoint"]
        failures_per_s = cluster.failures_per_device_hour * c.world / 3600
        goodput = expected_goodput(failures_per_s, interval_s, self.profile.restart_s)
        hours = settings.train.steps * step_s / 3600 / goodput
        useful = self.shape.flops_per_token(c.context) * c.tokens_per_step
        return TimeForecast(
            parts,
            hidden,
            c.tokens_per_step,
            c.world,
            useful / (step_s * c.world * self.rates.peak),
            goodput,
            hours,
            hours * c.world * cluster.price_per_hour,
            self.times(c.context).operators.estimated,
        )

    def _length(self, c: Candidate, groups: Groups, ranks: PipelineTimes) -> float:
        """Seconds of the pipeline's actions, from the first to the last of all ranks."""
        if c.pp == 1:
            return ranks.busy[0]
        costs, owners = self._costs(c, groups, ranks.stages), self.stages(c)[2]
        # The remembered path need not be the longest for these costs.
        least = least_length(c.schedule, owners, c.accumulation, costs)
        return max(self._lengths.length(c.schedule, c.pp, c.accumulation, costs), least, sum(ranks.busy) / c.pp)

    def _costs(self, c: Candidate, groups: Groups, stages: Sequence[StageTime]) -> Costs:
        return Costs(
            [each.forward for each in stages],
            [each.input for each in stages],
            [each.weight for each in stages],
            self._message_s(c, groups),
        )

    def _message_s(self, c: Candidate, groups: Groups) -> float:
        outside = c.tokens / c.tp if c.sequence else c.tokens
        return self.links.message(outside * self.shape.hidden * self.rates.itemsize, groups.pp)

    def groups(self, c: Candidate) -> Groups:
        """The groups of a candidate's axes."""
        key = (c.dp, c.cp, c.tp, c.pp, c.ep, c.expert_tp, c.ulysses, c.shard, c.ranks_per_node)
        return self._remember(key, lambda: place_groups(c))

    def times(self, context: int) -> LayerTimes:
        """Seconds of units, with sequences of `context` tokens."""

        def read() -> LayerTimes:
            operators = read_operators(self.shape.whole, self.shape.units, context)
            return LayerTimes(operators, self.rates, frozenset(self.settings.memory.kept_operations))

        return self._remember(("times", context), read)

    def stages(self, c: Candidate) -> tuple[Sequence[StageForm], Sequence[int], Sequence[int]]:
        """(stages that differ, which of them each stage is, the rank of each)."""
        return self._remember(("stages", c.pp, c.schedule, c.virtual, c.context), lambda: self._find_stages(c))

    def _find_stages(self, c: Candidate) -> tuple[Sequence[StageForm], Sequence[int], Sequence[int]]:
        layers = self.memory.pipelines.settings.layers(c)
        bounds = self.shape.stages(c.pp, c.schedule, c.virtual, c.context, layers)
        numbers: dict[Any, int] = {}
        forms: list[StageForm] = []
        order: list[int] = []
        for each in bounds:
            kinds = self.shape.kinds[each.start : each.stop]
            counted = tuple((kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
            key = each.is_first, each.is_last, counted
            if key not in numbers:
                numbers[key] = len(forms)
                forms.append(StageForm(each, counted))
            order.append(numbers[key])
        return forms, order, self.shape.owners(c.pp, c.schedule, c.virtual)

    def stage(self, form: StageForm, c: Candidate, groups: Groups) -> StageTime:
        """A stage with ZeRO's messages."""
        ranks = (c.tp, c.ep, c.expert_tp, c.cp, c.ulysses, c.is_gather, c.shard)
        goes = ("activations" in c.offload, "parameters" in c.offload)
        work = (c.tokens, c.sequences, c.sequence, c.checkpointing, c.zero, c.accumulation > 1, goes)
        key = ("stage", id(form), ranks, work, c.schedule in SPLIT_BACKWARDS, c.dp, c.pp, c.ranks_per_node)
        return self._remember(key, lambda: self._find_stage(form, c, groups))

    def _find_stage(self, form: StageForm, c: Candidate, groups: Groups) -> StageTime:
        units, profile = self.sum_units(form, c, groups), self.profile
        sharding = self.sharding.time(units.units, c, groups)
        # A message to or from a neighbour may hold the rank up.
        waits = self._message_s(c, groups) * (1 - profile.hides_p2p) if c.pp > 1 else 0.0
        host_s, (forward_gather, backward_gather) = profile.microbatch_s, sharding.gathers
        hidden = units.hidden | {"shard": sharding.hidden}
        # Copy engines carry transfers to the host and back.
        slowed = profile.stolen * sum(seconds for axis, seconds in hidden.items() if axis != "offload")
        # Messages slow forward and backward alike: a third and two thirds.
        forward = units.forward + forward_gather + waits + host_s / 3 + slowed / 3
        inputs = units.input + backward_gather + sharding.reductions + waits + 2 * host_s / 3 + 2 * slowed / 3
        parts = units.parts | {
            "gathers": forward_gather + backward_gather,
            "reductions": sharding.reductions,
            "pp": 2 * waits,
            "contention": slowed,
            "host": host_s,
        }
        once = {
            "gathers": sharding.gathers_once,
            "reductions": sharding.reductions_once,
            "contention": profile.stolen * sharding.hidden_once,
        }
        experts = groups.expert_shard.size
        owned = sum(each.count * (each.dense / c.shard + each.experts / experts) for each in units.units)
        return StageTime(forward, inputs, units.weight, parts, hidden, once, {"shard": sharding.hidden_once}, owned)

    def sum_units(self, form: StageForm, c: Candidate, groups: Groups) -> StageSum:
        """A stage's units, before ZeRO."""
        ranks = (c.tp, c.ep, c.expert_tp, c.cp, c.ulysses, c.is_gather, c.ranks_per_node, c.world)
        work = (c.tokens, c.sequences, c.sequence, c.checkpointing, c.accumulation > 1, "activations" in c.offload)
        key = ("sum", id(form), ranks, work, c.schedule in SPLIT_BACKWARDS)
        return self._remember(key, lambda: self._find_sum(form, c, groups))

    def _find_sum(self, form: StageForm, c: Candidate, groups: Groups) -> StageSum:
        total, elements, bounds = StageSum(), self.elements(form, c), form.bounds
        times = self.times(c.context)
        if bounds.is_first:
            total.add(self.end(times.embedding(c), c, groups), 1, elements["embedding"], "embedding")
        count = bounds.stop - bounds.start
        grouped = (count - count_groups(count)) / count if c.checkpointing == "sqrt" else 0.0
        for kind, number in form.layers:
            total.add(self.layer(kind, c, groups, grouped), number, elements[kind])
        if bounds.is_last:
            head = times.head(c, self.memory.activations.is_chunked(c))
            total.add(self.end(head, c, groups), 1, elements["head"], "head")
        return total

    def layer(self, kind: int, c: Candidate, groups: Groups, grouped: float) -> UnitTime:
        """A layer with its messages. grouped: as `UnitTime.grouped`."""
        layer = self.times(c.context).operators.layers[self.shape.kinds.index(kind)]
        work = self.times(c.context).layer(layer, c)
        own = self._overlaps[c.schedule in SPLIT_BACKWARDS]
        found = {
            axis: expose(layer, work, c, groups, self.links, self.profile, own)
            for axis, expose in (("tp", expose_tp), ("cp", expose_cp), ("ep", expose_ep))
        }
        if "activations" in c.offload:
            found["offload"] = self._offload(work, c)
        return UnitTime(work, {axis: each for axis, each in found.items() if each is not NOTHING}, grouped)

    def _offload(self, work: UnitWork, c: Candidate) -> Exposure:
        """Exposure of a layer's activations: to the host under the next layer's forward, back under its backward."""
        seconds = self.memory.activations.of_microbatch(c).layer_bytes / self.cluster.host_rate
        late, hidden = hide(seconds, work.forward.total)
        late_back, hidden_back = hide(seconds, work.backward)
        return Exposure(late, late_back, hidden + hidden_back)

    def end(self, work: UnitWork, c: Candidate, groups: Groups) -> UnitTime:
        """Embedding or head, with the border of hidden states that a divided vocabulary needs."""
        if c.tp == 1:
            return UnitTime(work)
        num_bytes = c.tokens * self.shape.hidden * self.rates.itemsize
        kinds: tuple[Collective, Collective] = ("all_gather", "reduce_scatter")
        if c.sequence:
            gather, scatter = (self.links.collective(kind, num_bytes, groups.tp) for kind in kinds)
        else:
            gather, scatter = 0.0, self.links.collective("all_reduce", num_bytes, groups.tp)
        # The embedding's sum leaves in forward, the head's in backward, under its weight gradient.
        if not work.column:
            return UnitTime(work, {"tp": Exposure(scatter, gather)})
        late, hidden = hide(scatter, self.profile.hides_tp_gradient * work.column)
        return UnitTime(work, {"tp": Exposure(gather, late, hidden)})

    def elements(self, form: StageForm, c: Candidate) -> Mapping[int | str, tuple[float, float]]:
        """(dense, of experts) of a unit's parameters on a rank, by kind of layer, and of embedding and head."""
        key = ("elements", id(form), c.tp, c.ep, c.expert_tp, c.sequence)
        return self._remember(key, lambda: self._find_elements(form, c))

    def _find_elements(self, form: StageForm, c: Candidate) -> Mapping[int | str, tuple[float, float]]:
        units = self.shape.stage_units(form.bounds, Degrees.of(c))
        found: dict[int | str, tuple[float, float]] = {"embedding": (0.0, 0.0), "head": (0.0, 0.0)}
        found |= {each.unit.name: self._count(each) for each in units.ends}
        counted = [(*self._count(each), count) for each, count in units.layers]
        if len(counted) == len(form.layers):
            return found | {kind: each[:2] for (kind, _), each in zip(form.layers, counted, strict=True)}
        # Layers that share weights are laid out one by one: each is taken to have the mean.
        number = sum(count for *_, count in counted)
        mean = tuple(sum(each[place] * each[2] for each in counted) / number for place in (0, 1))
        return found | {kind: (mean[0], mean[1]) for kind, _ in form.layers}

    def _count(self, unit: RankUnit) -> tuple[float, float]:
        prefixes = tuple(f"{mixture.experts}." for mixture in self.shape.mixtures if mixture.layer == unit.unit.name)
        of_experts = sum(
            layout.numel_local for name, layout in unit.layouts.items() if prefixes and name.startswith(prefixes)
        )
        return float(unit.numel - of_experts), float(of_experts)

    def _remember(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]
