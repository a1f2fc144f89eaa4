"""The seconds of a step, in parts that add up, and what follows of them: tokens a second, MFU, hours, cost.

    matmuls, attention, elementwise, recomputation    kernels                                          operators.py
    tp, cp, ep                                        messages of layers that nothing hides            exposure.py
    pp                                                messages between stages that hold a rank up
    gathers, reductions                               ZeRO's, beyond the computation beside them       sharding.py
    contention                                        computation slowed by messages that run beside it
    bubble                                            waiting of the busiest rank in the pipeline      bubble.py
    optimizer, offload, checkpoint                    update and norm, states that travel, saves       update.py
    host                                              what the host does before kernels are launched

They are of the rank that takes longest. A step is a pipeline's actions one after another, then the update, on all ranks at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from framework.model.precision import DTYPES
from framework.parallel.activation_checkpointing import count_groups
from framework.parallel.pipeline.simulate import Costs
from framework.plan.activations import Activations
from framework.plan.bubble import Lengths, least_length
from framework.plan.candidate import Candidate
from framework.plan.cluster import Cluster, Collective
from framework.plan.collectives import Groups, Links, place_groups
from framework.plan.exposure import NOTHING, Exposure, Overlaps, expose_cp, expose_ep, expose_tp, hide
from framework.plan.forecast import TimeForecast
from framework.plan.forecast_memory import memory_model
from framework.plan.operators import LayerTimes, ModelOperators, Rates, UnitWork, read_operators
from framework.plan.profile import OURS, Profile
from framework.plan.settings import Settings
from framework.plan.shape import Degrees, ModelShape, RankUnit
from framework.plan.sharding import Sharding
from framework.plan.stage_time import Seconds, StageForm, StageSum, StageTime, UnitTime
from framework.plan.update import Update, expected_goodput
from framework.recipe.derive import SPLIT_BACKWARDS, compiles
from framework.recipe.schema import Recipe

PARTS = (
    *("matmuls", "attention", "elementwise", "recomputation", "tp", "cp", "ep", "pp", "gathers", "reductions"),
    *("contention", "bubble", "optimizer", "offload", "checkpoint", "host"),
)


class TimeModel:
    """Forecasts of one model with one recipe's choices on one cluster, by one profile, ours where none is given. What a layout
    shares with others is computed once. Callers are one thread."""

    def __init__(self, shape: ModelShape, settings: Recipe, cluster: Cluster, profile: Profile | None = None):
        compute = settings.precision.compute
        dtype = "bf16" if compute == "auto" else compute
        itemsize = {"fp32": 4, "fp64": 8}.get(dtype, 2)
        self.shape, self.settings, self.cluster = shape, settings, cluster
        self.profile = profile or OURS
        if compiles(settings.memory):
            self.profile = self.profile.fused()
        self.rates, self.links = Rates(cluster, self.profile, dtype, itemsize), Links(cluster, itemsize)
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
        self._kept = frozenset(memory.kept_operations)
        self._lengths = Lengths()
        self._known: dict[Any, Any] = {}

    def forecast(self, candidate: Candidate) -> TimeForecast:
        """Of a candidate that the model and the recipe allow."""
        c, groups = candidate, self.groups(candidate)
        _, _, owners = self.stages(c)
        stages, busy, after, owned = self._ranks(c, groups)
        updates = [self.update.seconds(elements, c) for elements in owned]
        worst = _slowest(busy, after, updates)
        own = [stage for stage, owner in zip(stages, owners, strict=True) if owner == worst]
        parts, hidden = self._add_up(own, c)
        parts["bubble"] = max(self._length(c, groups, stages, busy) - busy[worst], 0.0)
        for name, seconds in updates[worst].items():
            parts[name] += seconds
        # A number for each parameter is summed beside loss and norm.
        flags = 8.0 * len(self.shape.groups)
        parts["optimizer"] += self.links.collective("all_reduce", flags, groups.world)
        parts["host"] += self.profile.step_s
        return self._conclude(c, parts, hidden, max(owned))

    def _ranks(
        self, c: Candidate, groups: Groups
    ) -> tuple[Sequence[StageTime], Sequence[float], Sequence[float], Sequence[float]]:
        """(stages in order; of each rank its microbatches' seconds, those of what comes once, elements that it updates)."""
        forms, order, owners = self.stages(c)
        found = [self.stage(form, c, groups) for form in forms]
        stages = [found[index] for index in order]
        busy, after, owned = ([0.0] * c.pp for _ in range(3))
        for stage, owner in zip(stages, owners, strict=True):
            busy[owner] += c.accumulation * stage.microbatch
            after[owner] += stage.after
            owned[owner] += stage.owned
        return stages, busy, after, owned

    def costs(self, candidate: Candidate) -> Costs:
        """Seconds of each stage's actions for one microbatch, and of a message: what a step's timeline is simulated with."""
        groups, (forms, order, _) = self.groups(candidate), self.stages(candidate)
        found = [self.stage(form, candidate, groups) for form in forms]
        return self._costs(candidate, groups, [found[index] for index in order])

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
            self._operators(c.context).estimated,
        )

    def _length(self, c: Candidate, groups: Groups, stages: Sequence[StageTime], busy: Sequence[float]) -> float:
        """Seconds of the pipeline's actions, from the first to the last of all ranks."""
        if c.pp == 1:
            return busy[0]
        costs, owners = self._costs(c, groups, stages), self.stages(c)[2]
        # What is remembered is a path, which need not be the longest for these costs.
        least = least_length(c.schedule, owners, c.accumulation, costs)
        found = self._lengths.length(c.schedule, c.pp, c.accumulation, costs)
        return max(found, least, sum(busy) / c.pp)

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
        key = (c.dp, c.cp, c.tp, c.pp, c.ep, c.expert_tp, c.ulysses, c.shard, c.ranks_per_node)
        return self._remember(key, lambda: place_groups(c))

    def _operators(self, context: int) -> ModelOperators:
        return self._remember(
            ("operators", context), lambda: read_operators(self.shape.whole, self.shape.units, context)
        )

    def times(self, context: int) -> LayerTimes:
        return self._remember(("times", context), lambda: LayerTimes(self._operators(context), self.rates, self._kept))

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
        ranks = (c.tp, c.ep, c.expert_tp, c.cp, c.ulysses, c.is_gather, c.shard)
        goes = ("activations" in c.offload, "parameters" in c.offload)
        work = (c.tokens, c.sequences, c.sequence, c.checkpointing, c.zero, c.accumulation > 1, goes)
        key = ("stage", id(form), ranks, work, c.schedule in SPLIT_BACKWARDS, c.dp, c.pp, c.ranks_per_node)
        return self._remember(key, lambda: self._find_stage(form, c, groups))

    def _find_stage(self, form: StageForm, c: Candidate, groups: Groups) -> StageTime:
        total = self._sum(form, c, groups)
        sharding = self.sharding.time(total.units, c, groups)
        waits = self._message_s(c, groups) * (1 - self.profile.hides_p2p) if c.pp > 1 else 0.0
        return total.conclude(sharding, waits, self.profile, c, groups.expert_shard.size)

    def _sum(self, form: StageForm, c: Candidate, groups: Groups) -> StageSum:
        """A stage's units, whatever ZeRO does with them."""
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
        layer = self._operators(c.context).layers[self.shape.kinds.index(kind)]
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
        """Of a layer's activations to the host under the next layer's forward, and back under its backward."""
        seconds = self._activations(c).layer_bytes / self.cluster.host_rate
        late, hidden = hide(seconds, work.forward.total)
        late_back, hidden_back = hide(seconds, work.backward)
        return Exposure(late, late_back, hidden + hidden_back)

    def _activations(self, c: Candidate) -> Activations:
        return self.memory.activations.of_microbatch(c)

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

    def _remember(self, key: Any, make: Any) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _slowest(busy: Sequence[float], after: Sequence[float], updates: Sequence[Mapping[str, float]]) -> int:
    """The rank whose own work takes longest."""
    totals = [own + late + sum(update.values()) for own, late, update in zip(busy, after, updates, strict=True)]
    return totals.index(max(totals))


def forecast_time(
    shape: ModelShape, candidate: Candidate, settings: Recipe, cluster: Cluster, profile: Profile | None = None
) -> TimeForecast:
    """The seconds of a step of one candidate; whoever asks for many keeps a `TimeModel`. profile: ours where none is given."""
    return TimeModel(shape, settings, cluster, profile).forecast(candidate)
