"""Forecasts of a plan, for the layout that the recipe states: bytes that a rank sends in a step, in closed form (docs: zero,
tensor, context, experts), memory and seconds as a search ranks layouts by, and a table of all stages of a run."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from statistics import fmean

import torch
from torch import nn

from framework.comm.communicator import Communicator
from framework.errors import RecipeError
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import BLOCK_AXES
from framework.model.borders import message_dtype, message_width
from framework.model.experts import Router
from framework.model.flops import expert_groups, experts_per_token
from framework.model.kept_outputs import ATTENTION
from framework.model.mixtures import Mixture
from framework.model.precision import DTYPES
from framework.model.units import count_channels, count_map, find_mixers
from framework.optim.muon import group_matrices
from framework.output import align, show_bytes, show_hours, show_seconds
from framework.parallel.parallelize import find_eager_layers
from framework.parallel.pipeline.lower import SENDS
from framework.parallel.pipeline.simulate import ActionKind, Costs
from framework.parallel.zero.plan_buffers import BufferDtypes, BufferPlan
from framework.plan.candidate import Candidate, method_of
from framework.plan.check import check_stages, check_weights
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryForecast, NodeForecast, describe_estimate
from framework.plan.layer_widths import attention_shapes
from framework.plan.messages import ContextCost, MixerCost, Passes, TokenHops, find_methods, rows_of_token
from framework.plan.plan import Plan, unconnected
from framework.plan.policies import count_forwards, spell
from framework.plan.shape import ModelShape
from framework.plan.time import Forecast, TimeModel
from framework.recipe.derive import compiles
from framework.recipe.machines import find_cluster, refuse_crowded_nodes
from framework.recipe.overrides import write_value
from framework.recipe.schema import Cluster as ClusterRecipe
from framework.recipe.schema import Recipe
from framework.recipe.stages import RunStage, split_stages

# Below this share of a device the verdict is in doubt.
LITTLE = 0.05
# scripts/bench/anchors.py, 24 rows of four systems on H100s and H800s: how far their throughput was from the forecast's.
BY_DATA_SHEETS = (
    "rates are of data sheets: 24 published throughputs were 13% off such a forecast in the median, at most 31%, nearly all"
    " below it; `meshwright doctor --measure` on a node tells its own"
)
COLUMNS = ("stage", "steps", "tokens", "sequences", "context", "memory", "to spare", "step", "time", "cost")
META = torch.device("meta")


# --- bytes that are sent


def measure_traffic(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that the rank sends in a step: parameters (`gathers`, those of ZeRO's second copy apart), gradients (`reductions to
    shards`, `to replicas`), updates of Muon on their way to owners and back (`matrices`), hidden states over `tp` and over `pp`,
    keys and values, heads, or recurrent states over `cp`, and over `ep` with equally many tokens for each expert."""
    place, accumulation = plan.topology.index("pp", rank), plan.derived.accumulation
    # Each tells the border that it crosses: a gradient that of its own stage, what goes forward that of the next.
    sends = (each for each in plan.pipeline.lowered(accumulation).ranks[place] if each.kind in SENDS)
    crossed = [plan.borders[each.stage + (each.kind is ActionKind.SEND_ACTIVATION)] for each in sends]
    messages = sum(message_width(border) * message_dtype(border).itemsize for border in crossed)
    layers = [number for bounds in plan.own_stages(rank) for number in range(bounds.start, bounds.stop)]
    costs = context_costs(plan, rank)
    cp = sum(cost.sent(passes_of_layer(plan, each)) for each in layers if costs and (cost := costs[each]) is not None)
    cp += sum(cost.sent(passes_of_layer(plan, number)) for number, cost in mixer_costs(plan, rank) if number in layers)
    matrices = group_matrices(
        plan.of_rank(rank).buffers, plan.groups, unconnected(plan.topology, rank), plan.recipe.optim.muon, META
    )
    reduce_dtype = DTYPES[plan.recipe.precision.reduce]
    buffers, again = plan.of_rank(rank).buffers, _count_again(plan, rank)
    return _parameter_traffic(buffers, accumulation, reduce_dtype, lambda _, sent: sent, again) | {
        "matrices": sum(num_bytes for each in matrices for num_bytes in each.bytes_sent.values()),
        "tp": sum(plan.tensor_bytes[number] for number in layers) * accumulation,
        "pp": prod(plan.token_layout(rank).hidden_shape(1)) * messages,
        "cp": cp * accumulation,
        "ep": sum(sum(sent_over_hops(plan, each)) for each in mixtures_of(plan, rank)) * accumulation,
    }


def measure_leaving(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of parameters, gradients and tokens on their way to experts that the rank sends to other nodes in a step; those of
    `measure_traffic`."""
    buffers, reduce_dtype = plan.of_rank(rank).buffers, DTYPES[plan.recipe.precision.reduce]
    least, again = Communicator.least_leaving, _count_again(plan, rank)
    found = _parameter_traffic(buffers, plan.derived.accumulation, reduce_dtype, least, again)
    axes = unconnected(plan.topology, rank)
    for mixture in mixtures_of(plan, rank):
        hops = zip(("ep_outer", "ep_inner"), sent_over_hops(plan, mixture), strict=True)
        leaving = sum(axes[name].most_leaving(num_bytes) for name, num_bytes in hops)
        found["ep"] = found.get("ep", 0) + leaving * plan.derived.accumulation
    return found


def _count_again(plan: Plan, rank: int) -> dict[str, int]:
    """Gathers of the rank's units for backward in a step, by name: of layers to which a backward comes; of the head where its
    backward does not follow its forward at once, as in gpipe."""
    accumulation, last = plan.derived.accumulation, len(plan.pipeline.stages) - 1
    actions = plan.pipeline.lowered(accumulation).ranks[plan.topology.index("pp", rank)]
    reshards = sum(each.kind is ActionKind.RESHARD and each.stage == last for each in actions)
    of_layers = {
        name: accumulation * each[1] for name, each in plan.shape.trained.items() if name.startswith("layers.")
    }
    return of_layers | {"head": max(0, reshards - accumulation)}


def _parameter_traffic(
    buffers: Sequence[BufferPlan],
    accumulation: int,
    reduce_dtype: torch.dtype,
    count: Callable[[Communicator, int], int],
    again: Mapping[str, int],
) -> dict[str, int]:
    """Bytes that a rank sends in a step for parameters and gradients, as docs/zero.md states them. count: what counts of the
    bytes that a message sends over an axis; again: `_count_again`.

    With P bytes of a unit, n shards and k microbatches: gathers (n-1)/n P for each time that a resharded unit is used again,
    reductions (n-1)/n P for each time that a gradient is reduced, and 2 (r-1)/r P/n once for each partial axis of r ranks.
    Where replicas divide the update, one half of that is a reduction and the other a gather of updated parameters.
    """
    gathers = copies = reductions = replicas = 0
    for buffer in buffers:
        n, axes, dtypes, lifetimes = buffer.axes.shard.size, buffer.axes, buffer.dtypes, buffer.lifetimes

        def reduced(axis: Communicator, numel: int, dtypes: BufferDtypes = dtypes) -> int:
            wire = dtypes.reduce_wire(axis, reduce_dtype)
            return numel * reduce_dtype.itemsize if wire is None else wire.message_bytes(numel)

        uses = 1 if lifetimes.keeps_parameters else accumulation + again.get(buffer.unit, 0)
        sent, inner = buffer.arriving_bytes, axes.secondary.size
        # From the second time in a step on parameters come from the second copy, if there is one.
        nearer = uses - 1 if inner > 1 else 0
        gathers += count(axes.shard, (n - 1) * sent // n) * (uses - nearer)
        copies += count(axes.secondary, (inner - 1) * sent // inner) * nearer
        if buffer.is_trained:
            times = 1 if lifetimes.keeps_gradients else accumulation
            reductions += count(axes.shard, (n - 1) * reduced(axes.shard, buffer.numel_part)) * times
            others = axes.update.size - 1
            gathers += count(axes.update, others * dtypes.kept_bytes(buffer.numel_owned))
            replicas += count(axes.update, others * reduced(axes.update, buffer.numel_owned))
            for axis in axes.partial:
                replicas += count(axis, 2 * (axis.size - 1) * reduced(axis, buffer.numel_owned) // axis.size)
    return {
        "gathers": gathers,
        "gathers of copies": copies,
        "reductions to shards": reductions,
        "to replicas": replicas,
    }


def context_costs(plan: Plan, rank: int) -> list[ContextCost | None]:
    """The cost of cp to a rank for each layer of the model and microbatch; empty where no sequence is divided."""
    derived, itemsize = plan.derived, plan.compute_dtype.itemsize
    if derived.cp == 1:
        return []
    shapes = attention_shapes(plan.config.get_text_config(), derived.tp, derived.context)
    index = plan.topology.index("ulysses", rank)
    return [None if shape is None else ContextCost(plan.candidate, shape, itemsize, index) for shape in shapes]


def mixer_costs(plan: Plan, rank: int) -> Iterator[tuple[int, MixerCost]]:
    """The cost of cp to a rank for each recurrent mixer and microbatch, with the number of its layer."""
    derived, batch, index = plan.derived, plan.recipe.batch, plan.topology.index("cp", rank)
    slices = ContextSlices(derived.context, derived.ulysses, derived.ring, index)
    for number, unit in enumerate(each for each in plan.units if each.is_layer):
        for _, mixer in find_mixers(plan.whole.get_submodule(unit.root)):
            filters = next(each.weight for each in mixer.modules() if isinstance(each, nn.Conv1d))
            channels, state = count_channels(mixer, filters.shape[0], derived.tp), count_map(mixer) // derived.tp
            lengths = batch.sequences_per_microbatch, channels, filters.shape[-1], state, plan.compute_dtype.itemsize
            yield number, MixerCost(slices, *lengths)


def sent_over_hops(plan: Plan, mixture: Mixture) -> tuple[int, int]:
    """Bytes that a rank sends between nodes and within its own for one mixture and one microbatch, with equally many tokens for
    each expert, and for each choice of experts that its router can make.

    Rows travel there and back in forward, their gradients in backward, half as much again with recomputation; numbers of rows go
    ahead of them in each forward (`TokenHops`). Ranks of `tp` that have whole experts route a part of the tokens each; those that
    slice experts all route the same.
    """
    config, activations = plan.config.get_text_config(), plan.activations
    top_k, nodes, ranks = experts_per_token(config) or 1, *map(plan.topology.size, ("ep_outer", "ep_inner"))
    router = Router(mixture.num_experts, top_k, *expert_groups(config))
    parallel = plan.recipe.parallel
    narrows, parts = parallel.expert_dispatch == "fp8", 2 if parallel.expert_overlap else 1
    rows = rows_of_token(plan.candidate, plan.recipe, router, nodes, ranks)
    hops = TokenHops(router, nodes, ranks, activations.width, activations.itemsize, narrows, rows)
    return hops.sent(Fraction(activations.rows_routed(top_k), top_k), forwards_of(plan, mixture), parts)


def forwards_of(plan: Plan, mixture: Mixture) -> int:
    """Number of times that the mixture's forward runs for one microbatch."""
    layers = [unit.name for unit in plan.units if unit.is_layer]
    return passes_of_layer(plan, layers.index(mixture.layer)).forwards


def passes_of_layer(plan: Plan, number: int) -> Passes:
    """Number of times that a layer and its attention run for one microbatch."""
    bounds = next(each for each in plan.pipeline.stages if each.start <= number < each.stop)
    counts, position = plan.chosen[bounds.index], number - bounds.start
    forwards = count_forwards(counts, position)
    is_kept = spell(counts)[position] == "selective" and ATTENTION in plan.recipe.memory.kept_operations
    return Passes(forwards, 1 if is_kept else forwards)


def mixtures_of(plan: Plan, rank: int) -> list[Mixture]:
    """The mixtures of the rank's stages, in order."""
    own = {unit.name for stage in plan.of_rank(rank).stages for unit in stage.units}
    return [mixture for mixture in plan.mixtures if mixture.layer in own]


# --- memory and seconds


@dataclass(frozen=True)
class PlanForecast:
    """A plan with its forecasts. costs: seconds of each stage's actions with one microbatch.
    cautions: what of the recipe the step time does not have. context_methods: with cp > 1 the step
    seconds of each value of parallel.context that the heads allow, the fastest first. imbalance: as of `TimeModel`."""

    plan: Plan
    cluster: ClusterRates
    candidate: Candidate
    forecast: Forecast
    costs: Costs
    cautions: tuple[str, ...] = ()
    context_methods: tuple[tuple[str, float], ...] = ()
    imbalance: float = 1.0


def measure_imbalance(loads: Mapping[str, Sequence[int]], ep: int) -> float:
    """Rows of the fullest rank's experts over the mean rank's, in the mean of layers: ranks wait for one another in each of them.
    loads: tokens of each expert, by layer; a rank has E / ep experts that follow one another."""
    ratios = []
    for tokens in loads.values():
        own = len(tokens) // ep
        ranks = [sum(tokens[first : first + own]) for first in range(0, len(tokens), own)]
        ratios += [max(ranks) * len(ranks) / sum(ranks)] if sum(ranks) else []
    return fmean(ratios) if ratios else 1.0


def forecast_plan(plan: Plan, loads: Mapping[str, Sequence[int]] | None = None) -> PlanForecast:
    """Forecast a plan on the recipe's cluster. loads: of experts, as a run has recorded them; None: all equal."""
    refuse_crowded_nodes(plan.recipe)
    cluster, cautions = ClusterRates.from_recipe(plan.recipe), []
    shape, candidate = plan.shape, plan.candidate
    memory = plan.memory_model.forecast(candidate, cluster, plan.chosen)
    if plan.recipe.memory.activation_checkpointing == "auto":
        policies = Counter(policy for rank in plan.topology.ranks("pp", 0) for policy in plan.policies(rank).values())
        candidate = replace(candidate, checkpointing=policies.most_common(1)[0][0])
        if len(policies) > 1:
            cautions.append(
                f"the step time is that of activation checkpointing {candidate.checkpointing} for all layers"
            )
    own, recorded = [each.num_experts for each in shape.mixtures], [len(each) for each in (loads or {}).values()]
    if loads is not None and own != recorded:
        raise RecipeError(
            f"--loads: the run has recorded mixtures of {recorded or 'no'} experts, and this model has those of {own or 'none'}:"
            " give a run of this model, or leave it out"
        )
    imbalance = measure_imbalance(loads or {}, candidate.ep)
    times = TimeModel(shape, plan.recipe, cluster, imbalance=imbalance)
    forecast, costs = Forecast(memory, times.forecast(candidate)), times.costs(candidate, times.ranks(candidate).stages)
    if plan.recipe.pipeline.table is not None:
        cautions.append("the step time is that of pipeline.schedule=1f1b, not of pipeline.table")
        costs = _scale(plan.pipeline.costs, costs)
    cautions += [doubt for doubt in [describe_estimate(shape, candidate)] if doubt is not None]
    below = sum(not each[1] for name, each in shape.trained.items() if name.startswith("layers."))
    if below:
        cautions.append(
            f"the memory has activations of {below} layers below the first trained one, and a run keeps none"
        )
    if plan.whole_mixers:
        mixers = " and ".join(sorted(plan.whole_mixers))
        cautions.append(
            f"{mixers} compute on the tokens of all ranks of cp: their activations and time are {candidate.cp} times"
            " what is forecast of them"
        )
    cautions += _doubt_memory(shape, memory)
    cautions += _doubt_compilation(plan)
    described, _ = find_cluster(plan.recipe)
    cautions += _doubt_nodes(described, memory.node)
    if cluster.device != "cpu" and described.measured.processor is None:
        cautions.append(BY_DATA_SHEETS)
    if cluster.is_assumed:
        cautions.append(
            f"the recipe names no machine: {cluster.name} is a guess. For GPUs cluster=h100_ib or another of"
            " recipes/cluster; `meshwright doctor --measure` describes this machine"
        )
    methods = _compare_methods(plan, times, candidate)
    return PlanForecast(plan, cluster, candidate, forecast, costs, tuple(cautions), methods, imbalance)


def forecast_cut(plan: Plan, num_nodes: int) -> tuple[float, float]:
    """(seconds of a step, seconds of it that messages of tp and ep take between nodes beyond what they would within one).
    num_nodes: of such a group."""
    times = TimeModel(plan.shape, plan.recipe, ClusterRates.from_recipe(plan.recipe))
    apart = times.forecast(plan.candidate)
    near = times.forecast(plan.candidate.changed({"ranks_per_node": num_nodes * plan.derived.ranks_per_node}))
    return apart.step_s, sum(apart.parts[axis] - near.parts[axis] for axis in BLOCK_AXES)


def _doubt_compilation(plan: Plan) -> Iterator[str]:
    """Layers that stay eager, whatever the recipe says; the step time is that of compiled ones."""
    if compiles(plan.recipe) and plan.recipe.memory.activation_checkpointing in ("selective", "auto"):
        stages = plan.of_rank(0).stages
        found = [reason for each in stages for reason in find_eager_layers(each.model.model, each.plan).values()]
        for reason, count in Counter(found).items():
            yield f"{count} layers of rank 0 are not compiled: they keep outputs by name, and graphs end at {reason}"


def _compare_methods(plan: Plan, times: TimeModel, candidate: Candidate) -> tuple[tuple[str, float], ...]:
    """(method, step seconds) of context parallelism, the fastest first."""
    heads = max((cost.shape.heads for cost in context_costs(plan, 0) if cost is not None), default=0)
    if candidate.cp == 1 or not heads:
        return ()
    found = [(write_value(method_of(each)), times.forecast(each).step_s) for each in find_methods(candidate, heads)]
    return tuple(sorted(found, key=lambda each: each[1]))


def _doubt_memory(shape: ModelShape, memory: MemoryForecast) -> list[str]:
    """Cautions about a run's needs beyond the forecast, where little is to spare."""
    if not 0 <= memory.spare < LITTLE * memory.limit:
        return []
    doubts = ["slack of the allocator and buffers of NCCL are assumptions"]
    if shape.mixtures:
        doubts.append("a router that sends some experts more tokens than others needs more")
    return [f"less than {LITTLE:.0%} of the device is to spare: {'; '.join(doubts)}"]


def _doubt_nodes(described: ClusterRecipe, node: NodeForecast) -> Iterator[str]:
    """Cautions about a node's resources that the layout uses and the cluster's file does not state."""
    if described.host_memory_gb is None and node.offloaded + node.copies:
        there = show_bytes(node.there)
        yield f"{described.name} does not say cluster.host_memory_gb: a node is taken to have {there}, as its devices have"
    if node.disk and node.disk_limit is None:
        yield f"files of states take {show_bytes(node.disk)} of a node's disks, whose room is unknown (cluster.node_disk_gb)"


def _scale(flops: Costs, seconds: Costs) -> Costs:
    """Seconds of stages of which only the FLOPs are known, as fast as others of the same model."""
    forward, inputs, weight = (
        [each * sum(own) / sum(counted) for each in counted]
        for counted, own in (
            (flops.forward, seconds.forward),
            (flops.input, seconds.input),
            (flops.weight, seconds.weight),
        )
    )
    return Costs(forward, inputs, weight, seconds.message)


# --- all stages of a run


def forecast_run(recipe: Recipe, loads: Mapping[str, Sequence[int]] | None = None) -> tuple[PlanForecast, list[str]]:
    """The forecast of a run, of its stages that with least room, and lines on all of them. loads: of experts, as recorded. Raises
    what the recipe or the model has wrong."""
    first, *plans = check_stages(recipe)
    check_weights(first)
    stages = split_stages(recipe)
    forecasts = [forecast_plan(_within(*each), loads) for each in zip(stages, plans or [first], strict=True)]
    return _join(stages, forecasts)


def _within(stage: RunStage, plan: Plan) -> Plan:
    """A stage's plan, with the tokens of its own steps."""
    return replace(plan, derived=replace(plan.derived, total_tokens=stage.num_tokens)) if stage.name else plan


def _join(stages: Sequence[RunStage], forecasts: Sequence[PlanForecast]) -> tuple[PlanForecast, list[str]]:
    """(the forecast of the stage with least memory to spare, with the hours and the cost of the whole run; lines with a table of
    all stages, none for a run without any)."""
    shares = [
        (stage.stop - stage.start, stage.stop, each.forecast.time)
        for stage, each in zip(stages, forecasts, strict=True)
    ]
    times = [(time.hours * steps / planned, time.cost * steps / planned) for steps, planned, time in shares]
    memories = [each.forecast.memory for each in forecasts]
    tightest = min(range(len(stages)), key=lambda place: (memories[place].fits, memories[place].spare))
    found, hours, cost = forecasts[tightest], sum(each[0] for each in times), sum(each[1] for each in times)
    time = replace(found.forecast.time, hours=hours, cost=cost)
    found = replace(found, forecast=replace(found.forecast, time=time))
    if not stages[0].name:
        return found, []
    rows = [_describe(*each) for each in zip(stages, forecasts, times, strict=True)]
    tokens = f"{sum(each.num_tokens for each in stages):,}"
    rows.append(("all", f"{stages[-1].stop:,}", tokens, "", "", "", "", "", show_hours(hours), _show_cost(cost)))
    others = [stage.name for stage, each in zip(stages, forecasts, strict=True) if not each.forecast.memory.fits]
    judged = [f"does not fit: {', '.join(others)}"] * bool(others)
    return found, [*align([COLUMNS, *rows], words=(0,)), *judged, "", f"stage {stages[tightest].name}:"]


def _describe(stage: RunStage, found: PlanForecast, time: tuple[float, float]) -> tuple[str, ...]:
    memory, derived = found.forecast.memory, found.plan.derived
    return (
        stage.name,
        f"{stage.start + 1:,} to {stage.stop:,}",
        f"{stage.num_tokens:,}",
        f"{derived.sequences_per_step:,}",
        f"{derived.context:,}",
        show_bytes(memory.fullest.reserved),
        show_bytes(memory.spare),
        show_seconds(found.forecast.time.step_s),
        show_hours(time[0]),
        _show_cost(time[1]),
    )


def _show_cost(cost: float) -> str:
    return f"${cost:,.0f}" if cost else "-"
