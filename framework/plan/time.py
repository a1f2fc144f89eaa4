"""Seconds of a step, in parts that add up, and what follows from them: tokens/s, MFU, hours, cost.

    matmuls, attention, elementwise, recomputation    kernels                                          operators.py
    tp, cp, ep                                        messages of layers that nothing hides            exposure.py
    pp                                                messages between stages that hold a rank up: none of ours do
    gathers, reductions                               ZeRO's, beyond the computation beside them       sharding.py
    contention                                        computation slowed by messages that run beside it
    imbalance                                         waiting for the rank whose experts have most rows    operators.py
    bubble                                            waiting of the slowest rank in the pipeline      stage_times.py
    references                                        other forwards of a step that losses of preferences need
    optimizer, offload, checkpoint                    update and norm, states that travel, saves       sharding.py
    host                                              launching kernels

They are the slowest rank's. A step is a pipeline's actions one after another, then the update, on all ranks at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from framework.comm.codec import BlockCodec
from framework.model.loss import is_fused
from framework.model.precision import DTYPES
from framework.parallel.activation_checkpointing import count_groups
from framework.parallel.attention import find_stock_attention
from framework.parallel.pipeline.simulate import Costs
from framework.parallel.zero.plan_buffers import FROZEN
from framework.parallel.zero.row_codes import bytes_per_number
from framework.plan.candidate import Candidate, remember
from framework.plan.cluster import ClusterRates, Collective
from framework.plan.exposure import NOTHING, Exposure, Groups, LayerMessages, hide, place_groups
from framework.plan.forecast_memory import MemoryForecast, MemoryModel
from framework.plan.operators import LayerTimes, UnitWork, Work, read_operators, typical_document
from framework.plan.profile import OURS, OURS_ON_GPUS, Profile, Rates
from framework.plan.shape import DEGREES, ModelShape, RankUnit
from framework.plan.sharding import Sharding, Update, expected_goodput
from framework.plan.stage_times import (
    Elements,
    PipelineTimes,
    Seconds,
    StageForm,
    StageTime,
    UnitTime,
    find_length,
    least_length,
)
from framework.recipe.derive import compiles
from framework.recipe.schema import Recipe

KERNELS = ("matmuls", "attention", "elementwise", "recomputation")
MESSAGES = ("tp", "cp", "ep", "ep_outer", "ep_inner", "pp", "gathers", "reductions", "contention")
PARTS = (*KERNELS, *MESSAGES, "imbalance", "bubble", "references", "optimizer", "offload", "checkpoint", "host")
# Fields of a candidate that the seconds of a layer depend on: how ranks divide it, and what they compute of a microbatch.
DIVISION = ("tp", "ep", "expert_tp", "cp", "ulysses", "is_gather", "sequence", "ranks_per_node")
WORK = ("tokens", "sequences", "checkpointing", "adds", "offloads_activations", "splits_backward")


@dataclass(frozen=True)
class TimeForecast:
    """Seconds of a step, of the rank that takes longest.

    parts: what adds up to `step_s`: matmuls, attention, elementwise, recomputation, tp, cp, ep and pp that nothing hides,
    bubble, gathers and reductions that nothing hides, contention, imbalance of experts, optimizer, offload, checkpoint, host
    (`plan/time.py`).
    hidden: seconds of communication behind computation, by axis. mfu: useful FLOPs over what the devices could do, by
    `model/flops.py`: the same for every layout. goodput: share of the time that failures leave. hours, cost: of all of
    train.steps, failures included; cost in the cluster's currency. estimated: share of the layers' FLOPs whose matmuls are not
    known."""

    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    tokens: int
    world: int
    mfu: float
    goodput: float = 1.0
    hours: float = 0.0
    cost: float = 0.0
    estimated: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks together."""
        return self.tokens / self.step_s

    @property
    def tokens_per_s_and_rank(self) -> float:
        """Tokens of one rank."""
        return self.tokens_per_s / self.world


@dataclass(frozen=True)
class Forecast:
    """Memory and time of a layout."""

    memory: MemoryForecast
    time: TimeForecast


class TimeModel:
    """Step-time forecasts of one model with one recipe's choices on one cluster. profile: of the implementation, by default ours;
    imbalance: rows of the fullest rank's experts over the mean rank's. For one thread."""

    def __init__(
        self,
        shape: ModelShape,
        settings: Recipe,
        cluster: ClusterRates,
        profile: Profile | None = None,
        imbalance: float = 1.0,
    ):
        compute = settings.precision.compute
        dtype = "bf16" if compute == "auto" else compute
        itemsize = {"fp32": 4, "fp64": 8}.get(dtype, 2)
        self.shape, self.settings, self.cluster = shape, settings, cluster
        self.profile = replace(profile or self._own_profile(itemsize), imbalance=imbalance)
        if compiles(settings):
            self.profile = self.profile.fused()
        self.rates = Rates(cluster, self.profile, dtype, itemsize)
        wide, base, precision = float(itemsize), settings.adapter.base, settings.precision
        matrices = [
            shape.whole.get_parameter(name) for each in shape.units if each.is_layer for name in each.parameters
        ]
        share = sum(each.numel() for each in matrices if each.ndim == 2) / shape.size.total
        gathered = wide if base == "bf16" else wide + (bytes_per_number(base) - wide) * share
        if settings.zero.quantize_gather != "none":
            gathered = BlockCodec(settings.zero.quantize_gather).bytes_per_number
        # Linear layers' weights travel as fp8 where they are unsharded for each use and have one scale each (`gather_in_fp8`).
        is_narrow = dtype == "fp8" and precision.fp8_scaling == "tensor"
        at_three = wide + (1.0 - wide) * share if is_narrow else gathered
        reduced, keeps_codes = float(DTYPES[precision.reduce].itemsize), base != "bf16"
        self.shardings = [
            Sharding(settings.zero, width, reduced, cluster, self.profile, keeps_codes)
            for width in (gathered, at_three)
        ]
        self.update = Update(settings, cluster, self.profile, itemsize, shape)
        self.memory = MemoryModel.of(shape, settings)

    def _own_profile(self, itemsize: int) -> Profile:
        """Ours. Rows of documents are one packed call, which cuDNN's kernel does not take; nor is it transformers' first."""
        if not is_fused(self.settings.launch.device, itemsize):
            return OURS
        return replace(OURS_ON_GPUS, kernel="flash2" if self.settings.data.isolates or self._is_stock else "cudnn")

    @cached_property
    def _is_stock(self) -> bool:
        """Whether layers attend by transformers' attention."""
        return self.settings.parallel.cp == 1 and find_stock_attention(self.shape.config, self.settings) is not None

    def forecast(self, candidate: Candidate) -> TimeForecast:
        """The step time of a candidate that the model and the recipe allow."""
        c = candidate
        ranks, owners = self.ranks(c), self.stages(c)[1]
        own = [stage for stage, owner in zip(ranks.stages, owners, strict=True) if owner == ranks.slowest]
        parts, hidden = self._add_up(own, c)
        parts["bubble"] = max(self._length(c, ranks) - ranks.busy[ranks.slowest], 0.0)
        parts["references"] = self.settings.loss.extra_forwards * self._scoring(c, ranks)
        for name, seconds in ranks.updates[ranks.slowest].items():
            parts[name] += seconds
        # A number for each parameter is summed beside loss and norm.
        flags = 8.0 * len(self.shape.groups)
        parts["optimizer"] += self.cluster.collective("all_reduce", flags, self.groups(c)["world"])
        return self._conclude(c, parts, hidden, max(ranks.owned))

    def ranks(self, c: Candidate) -> PipelineTimes:
        """The stages and the work of each rank of the pipeline."""
        forms, owners = self.stages(c)
        # Virtual stages are dozens, and most of them are alike.
        found = {form: self.stage(c, form) for form in dict.fromkeys(forms)}
        stages = [found[form] for form in forms]
        busy, late, owned = ([0.0] * c.pp for _ in range(3))
        for stage, owner in zip(stages, owners, strict=True):
            busy[owner] += c.accumulation * stage.microbatch
            late[owner] += sum(stage.once.values())
            owned[owner] += stage.owned
        updates = [self.update.seconds(elements, c) for elements in owned]
        late = [once + sum(update.values()) for once, update in zip(late, updates, strict=True)]
        return PipelineTimes(stages, busy, late, updates, owned)

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
        goodput = expected_goodput(failures_per_s, interval_s)
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

    def _length(self, c: Candidate, ranks: PipelineTimes) -> float:
        """Seconds of the pipeline's actions, from the first to the last of all ranks."""
        if c.pp == 1:
            return ranks.busy[0]
        costs, owners = self.costs(c, ranks.stages), self.stages(c)[1]
        # The remembered path need not be the longest for these costs.
        least = least_length(c.schedule, owners, c.accumulation, costs)
        return max(find_length(c.schedule, c.pp, c.accumulation, costs), least, sum(ranks.busy) / c.pp)

    def _scoring(self, c: Candidate, ranks: PipelineTimes) -> float:
        """Seconds of a forward of all microbatches alone: the slowest rank computes them one after another behind the first."""
        forwards = [0.0] * c.pp
        for stage, owner in zip(ranks.stages, self.stages(c)[1], strict=True):
            forwards[owner] += stage.forward
        return sum(forwards) + (c.accumulation - 1) * max(forwards)

    def costs(self, c: Candidate, stages: Sequence[StageTime]) -> Costs:
        """Seconds of these stages' actions for one microbatch, and of a message: the simulator's costs of a step's timeline."""
        return Costs(
            [each.forward for each in stages],
            [each.input for each in stages],
            [each.weight for each in stages],
            self._message_s(c),
        )

    def _message_s(self, c: Candidate) -> float:
        outside = c.tokens / c.tp if c.sequence else c.tokens
        width = self.shape.message_width if c.pp > 1 else self.shape.hidden
        return self.cluster.message(outside * width * self.rates.itemsize, self.groups(c)["pp"])

    @remember("dp", "cp", "tp", "pp", "ep", "expert_tp", "ulysses", "zero", "shard", "ranks_per_node")
    def groups(self, c: Candidate) -> Groups:
        """The groups of a candidate's axes."""
        keys = self.settings.zero.secondary_shard, self.settings.parallel.expert_hierarchical
        return place_groups(c, *keys, self.cluster.ranks_per_domain)

    def _document(self, context: int) -> int | None:
        """Tokens of a document, as `LayerTimes` has them. transformers' attention computes all pairs and masks."""
        if not self.settings.data.isolates:
            return None
        return 0 if self._is_stock else typical_document(context)

    @remember()
    def times(self, context: int) -> LayerTimes:
        """Seconds of units, with sequences of `context` tokens."""
        operators = read_operators(self.shape.whole, self.shape.units, context, self.settings.model.tp_plan)
        return LayerTimes(
            operators, self.rates, frozenset(self.settings.memory.kept_operations), self._document(context)
        )

    @remember("pp", "schedule", "virtual", "context")
    def stages(self, c: Candidate) -> tuple[Sequence[StageForm], Sequence[int]]:
        """(the form of each stage, the rank of each)."""
        forms = []
        for each in self.memory.pipelines.stages(c):
            kinds = self.shape.kinds[each.start : each.stop]
            counted = tuple((kind, kinds.count(kind)) for kind in dict.fromkeys(kinds))
            forms.append(StageForm(each.is_first, each.is_last, counted, each))
        return forms, self.shape.owners(c.pp, c.schedule, c.virtual)

    @remember(*DIVISION, *WORK, "dp", "pp", "zero", "shard", "offloads_parameters")
    def stage(self, c: Candidate, form: StageForm) -> StageTime:
        """A stage with ZeRO's messages."""
        units, profile, groups = self.sum_units(c, form), self.profile, self.groups(c)
        sharding = self.shardings[c.zero == 3].time(units.units, c, groups)
        forward_gather, backward_gather = sharding.gathers
        hidden = units.hidden | {"shard": sharding.hidden}
        # Copy engines carry transfers to the host and back.
        slowed = profile.stolen * sum(seconds for axis, seconds in hidden.items() if axis != "offload")
        # Messages slow forward and backward alike: a third and two thirds.
        forward = units.forward + forward_gather + slowed / 3
        inputs = units.input + backward_gather + sharding.reductions + 2 * slowed / 3
        parts = units.parts | {
            "gathers": forward_gather + backward_gather,
            "reductions": sharding.reductions,
            "contention": slowed,
        }
        once = {
            "gathers": sharding.gathers_once,
            "reductions": sharding.reductions_once,
            "contention": profile.stolen * sharding.hidden_once,
        }
        experts = groups["expert_shard"].size
        owned = sum(
            each.count * (each.trained_dense / c.shard + each.trained_experts / experts) for each in units.units
        )
        return replace(
            units,
            forward=forward,
            input=inputs,
            parts=parts,
            hidden=hidden,
            once=once,
            hidden_once={"shard": sharding.hidden_once},
            owned=owned,
        )

    @remember(*DIVISION, *WORK, "world")
    def sum_units(self, c: Candidate, form: StageForm) -> StageTime:
        """A stage's units, before ZeRO."""
        total, elements, bounds = StageTime(), self._elements(c, form), form.bounds
        times = self.times(c.context)
        if bounds.is_first:
            total.add(self.end(c, times.embedding(c), "embedding"), 1, elements["embedding"], "embedding")
        count = bounds.stop - bounds.start
        grouped = (count - count_groups(count)) / count if c.checkpointing == "sqrt" else 0.0
        for kind, number in form.layers:
            total.add(self.layer(c, kind, grouped), number, elements[kind])
        if bounds.is_last:
            head = times.head(c, self.memory.activations.is_chunked(c))
            total.add(self.end(c, head, "head"), 1, elements["head"], "head")
        return total

    def layer(self, c: Candidate, kind: int, grouped: float) -> UnitTime:
        """A layer with its messages. grouped: as `UnitTime.grouped`."""
        times, number = self.times(c.context), self.shape.kinds.index(kind)
        layer, work = times.operators.layers[number], times.layer(c, number)
        is_halved = self.settings.parallel.expert_overlap and layer.experts is not None and min(c.ep, c.sequences) > 1
        if is_halved:  # matmuls of half the rows
            work = times.layer(replace(c, sequences=c.sequences // 2), number).times(c.sequences / (c.sequences // 2))
        work, has_backward = self._leave_out(work, f"layers.{number}")
        own = LayerMessages(layer, work, c, self.groups(c), self.rates, self.settings)
        offload = {"offload": self._offload(number, work, c)} if c.offloads_activations and has_backward else {}
        found: dict[str, Exposure] = {"tp": own.tp(), "cp": own.cp(), **own.ep(), **offload}
        launched = self.profile.launch_s(layer.experts.experts // c.ep if layer.experts else None) * (1 + is_halved)
        exposures = {axis: each for axis, each in found.items() if each is not NOTHING}
        if not has_backward:
            exposures, grouped = {axis: Exposure(each.forward) for axis, each in exposures.items()}, 0.0
        return UnitTime(work, exposures, grouped, launched, has_backward)

    def _leave_out(self, work: UnitWork, name: str) -> tuple[UnitWork, bool]:
        """(the unit's work without that of gradients which nobody needs, whether a backward comes to it): weight gradients as far
        as its parameters are frozen, and below the first trained unit all of backward."""
        share, has_backward = self.shape.trained[name]
        if not has_backward:
            return replace(work, input=Work(), weight=Work(), again=Work(), column=0.0, uneven=work.uneven / 3), False
        return (
            work if share == 1.0 else replace(work, weight=work.weight.times(share), column=work.column * share)
        ), True

    def _offload(self, number: int, work: UnitWork, c: Candidate) -> Exposure:
        """Exposure of a layer's activations: to the host under the next layer's forward, back under its backward."""
        seconds = self.memory.activations.of_microbatch(c).bytes_of_layer(number) / self.cluster.host_rate
        late, hidden = hide(seconds, work.forward.total)
        late_back, hidden_back = hide(seconds, work.backward)
        return Exposure(late, late_back, hidden + hidden_back)

    def end(self, c: Candidate, work: UnitWork, name: str) -> UnitTime:
        """Embedding or head, with the border of hidden states that a divided vocabulary needs."""
        work, has_backward = self._leave_out(work, name)
        if c.tp == 1:
            return UnitTime(work, has_backward=has_backward)
        groups = self.groups(c)
        num_bytes = c.tokens * self.shape.hidden * self.rates.itemsize
        kinds: tuple[Collective, Collective] = ("all_gather", "reduce_scatter")
        if c.sequence:
            gather, scatter = (self.cluster.collective(kind, num_bytes, groups["tp"]) for kind in kinds)
        else:
            gather, scatter = 0.0, self.cluster.collective("all_reduce", num_bytes, groups["tp"])
        # The embedding's sum leaves in forward, the head's in backward, under its weight gradient.
        if name == "embedding":
            return UnitTime(work, {"tp": Exposure(scatter, gather * has_backward)}, has_backward=has_backward)
        late, hidden = hide(scatter, self.profile.hides_tp_gradient * work.column)
        return UnitTime(work, {"tp": Exposure(gather, late, hidden)})

    @remember(*DEGREES)
    def _elements(self, c: Candidate, form: StageForm) -> Mapping[int | str, Elements]:
        """Elements on a rank by kind of layer, and of embedding and head."""
        units = self.shape.stage_units(form.bounds, c)
        found: dict[int | str, Elements] = dict.fromkeys(("embedding", "head"), (0.0,) * 4)
        found |= {each.unit.name: self._count(each) for each in units.ends}
        counted = [(self._count(each), count) for each, count in units.layers]
        if len(counted) == len(form.layers):
            return found | {kind: each for (kind, _), (each, _) in zip(form.layers, counted, strict=True)}
        # Layers that share weights are laid out one by one: each is taken to have the mean.
        number = sum(count for _, count in counted)
        dense, *others = (sum(each[place] * count for each, count in counted) / number for place in range(4))
        return found | {kind: (dense, others[0], others[1], others[2]) for kind, _ in form.layers}

    def _count(self, unit: RankUnit) -> Elements:
        prefixes = tuple(f"{mixture.experts}." for mixture in self.shape.mixtures if mixture.layer == unit.unit.name)
        counts = [0.0] * 4
        for name, layout in unit.layouts.items():
            is_expert = name.startswith(prefixes)
            counts[is_expert] += layout.numel_local
            counts[2 + is_expert] += layout.numel_local * (unit.local.groups[name] != FROZEN)
        return counts[0], counts[1], counts[2], counts[3]
