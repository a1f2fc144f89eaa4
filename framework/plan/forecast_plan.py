"""Forecasts of a plan: for the layout that the recipe states, those by which a search ranks layouts."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from framework.errors import RecipeError
from framework.mesh.topology import BLOCK_AXES
from framework.parallel.parallelize import find_eager_layers
from framework.parallel.pipeline.simulate import Costs
from framework.plan.candidate import Candidate, method_of
from framework.plan.cluster import ClusterRates
from framework.plan.context import find_methods
from framework.plan.forecast import Forecast, MemoryForecast, NodeForecast
from framework.plan.forecast_memory import describe_estimate
from framework.plan.plan import Plan
from framework.plan.shape import ModelShape
from framework.plan.text import show_bytes
from framework.plan.time import TimeModel
from framework.plan.traffic import context_costs
from framework.recipe.clusters import find_cluster, refuse_crowded_nodes
from framework.recipe.derive import compiles
from framework.recipe.overrides import write_value
from framework.recipe.schema import Cluster as ClusterRecipe

# Below this share of a device the verdict is in doubt.
LITTLE = 0.05
# scripts/bench/anchors.py, 24 rows of four systems on H100s and H800s: how far their throughput was from the forecast's.
BY_DATA_SHEETS = (
    "rates are of data sheets: 24 published throughputs were 13% off such a forecast in the median, at most 31%, nearly all"
    " below it; `meshwright doctor --measure` on a node tells its own"
)


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
