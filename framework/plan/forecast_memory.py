"""The one model of a rank's bytes over a step: for a plan, and for thousands of layouts of a search.

    kind            content                                                                 known
    parameters ...  states, and what of them is gathered: as `plan/memory.py` has them      exactly, padding included
    activations     what layers keep, by microbatches in flight (`plan/activations.py`)     formulas, or estimated
    logits          what the loss keeps                                                     exactly
    temporaries     tensors inside of one layer's backward, or of the loss                  formulas
    communication   hidden states that a pipeline sends and receives                        by the executor's actions
    workspace       cuBLAS'                                                                 torch's default
    outside         the driver's context and NCCL's buffers, not torch's memory             assumed (`memory_states.py`)
    slack           what the caching allocator has reserved beside tensors                  assumed (`memory_states.py`)

A rank holds the sum of two parts, each cached by what it depends on: states (`memory_states.py`), which depend on ZeRO and not
on microbatches, and activations, for which it is the other way round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from framework.errors import ModelError
from framework.mesh.context import ContextSlices
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.model.logit_map import find_logit_map
from framework.model.stage import StageBounds
from framework.parallel.pipeline.lower import LiveMoment, live_moments
from framework.parallel.pipeline.pipeline import PipelinePlan
from framework.parallel.pipeline.simulate import Costs
from framework.plan.activation_peaks import MomentTable, Peak, StageActivations, make_moments, representative
from framework.plan.activations import Activations
from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates
from framework.plan.context import ContextCost, ContextMethod
from framework.plan.forecast import MemoryForecast, NodeForecast, StageMemory
from framework.plan.layer_widths import read_masks
from framework.plan.memory import USABLE, ranks_on_nodes, sum_fullest_node
from framework.plan.memory_states import (
    FRAGMENTATION,
    PHASES,
    PhaseBytes,
    Pipelines,
    StateBytes,
    StateOptions,
    slack_of,
)
from framework.plan.policies import Counts, choose_counts, is_large, least_bytes, shorten, uniform
from framework.plan.settings import Settings
from framework.plan.shape import ModelShape
from framework.recipe.schema import Recipe

# Counted over estimated activations of models without formulas, the least and the most: `scripts/bench/foresight_memory.py
# --estimated`; opt, and gemma2, whose attention caps its scores and so has matrices of them.
ESTIMATE_OFF = (0.75, 3.3)


def forecast_memory(
    shape: ModelShape,
    candidate: Candidate,
    settings: Settings | Recipe,
    cluster: ClusterRates,
    chosen: Mapping[int, Counts] | None = None,
) -> MemoryForecast:
    """The memory of a rank at each place of the pipeline: of the first one along all other axes, as `Plan.memory`.

    settings: keep what is cached; made of a recipe where that is given. chosen: layers of each stage by policy of
    activation checkpointing; None: all as the candidate says. Raises what the model's transforms raise for degrees that do not
    fit (`ModelRules.refuse` asks first), RecipeError for more stages than layers.
    """
    return memory_model(shape, settings).forecast(candidate, cluster, chosen)


def _forecast_node(
    shape: ModelShape, candidate: Candidate, settings: Settings, cluster: ClusterRates, stages: Sequence[StageMemory]
) -> NodeForecast:
    """Forecast of the resources that the ranks of the fullest node share."""
    world, here = candidate.world, cluster.ranks_per_node
    offloaded = sum_fullest_node([each.host for each in stages], world, here)
    disk = sum_fullest_node([each.disk for each in stages], world, here)
    limit = int(USABLE * cluster.host_bytes)
    copies = _copied_bytes(shape, candidate, settings)
    return NodeForecast(offloaded, copies, cluster.host_bytes, limit, disk, cluster.node_disk_bytes)


def _copied_bytes(shape: ModelShape, candidate: Candidate, settings: Settings) -> int:
    """Bytes of held steps on a node with checkpoint.neighbor_copies, where its ranks save an even share: as `bytes_of_copies`."""
    copies, nodes = settings.recipe.checkpoint.neighbor_copies, candidate.nodes
    return 2 * min(1 + copies, nodes) * checkpoint_bytes(shape, settings) // nodes if copies else 0


def checkpoint_bytes(shape: ModelShape, settings: Settings) -> int:
    """Bytes of a checkpoint at the most: masters and moments, of frozen parameters too."""
    master = (settings.master or settings.compute).itemsize
    moment = 4 if settings.master is None else master
    return shape.size.total * (master + len(settings.states) * moment)


def describe_estimate(shape: ModelShape, candidate: Candidate) -> str | None:
    """Say which part of a forecast is estimated, and by how much it may be off; None where all of it has formulas."""
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


def host_spare_of_options(
    shape: ModelShape, stages: Candidate, options: StateOptions, settings: Settings | Recipe, cluster: ClusterRates
) -> np.ndarray:
    """Bytes of the host's memory that each option leaves on the fullest node, for a search: as `NodeForecast.spare`, but for
    copies of steps, which depend little on the layout."""
    offloaded = memory_model(shape, settings).offloaded(stages, options, cluster.ranks_per_node)
    found: np.ndarray = np.where(offloaded > 0, int(USABLE * cluster.host_bytes) - offloaded, 0)
    return found


def memory_model(shape: ModelShape, settings: Settings | Recipe) -> "MemoryModel":
    """The cached memory model of a shape with these settings."""
    known = Settings.of(settings) if isinstance(settings, Recipe) else settings
    model: MemoryModel = known.remember(("memory", shape), lambda: MemoryModel.of(shape, known))
    return model


def _most(states: PhaseBytes, activations: PhaseBytes) -> int:
    return max(_reserve(states, activations, phase) for phase in range(len(PHASES)))


def _reserve(states: PhaseBytes, activations: PhaseBytes, phase: int) -> int:
    """Bytes that the device must have in one phase."""
    moving = states.moving[phase] + activations.moving[phase]
    return states.totals[phase] + activations.totals[phase] + slack_of(moving) + states.outside


def _join(states: PhaseBytes, activations: PhaseBytes) -> StageMemory:
    """Add up both parts of a rank."""
    fullest = max(range(len(PHASES)), key=lambda phase: _reserve(states, activations, phase))
    phases = {name: {**states.phases[index], **activations.phases[index]} for index, name in enumerate(PHASES)}
    slack = slack_of(states.moving[fullest] + activations.moving[fullest])
    on_host = {**states.on_host, **activations.on_host}
    return StageMemory(phases[PHASES[fullest]], slack, phases, on_host, states.outside, states.disk)


@dataclass(frozen=True, eq=False)
class ActivationBytes:
    """Activation bytes for one model and one recipe, cached by what they depend on."""

    pipelines: Pipelines
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def of_ranks(self, each: Candidate, chosen: Mapping[int, Counts] | None) -> list[PhaseBytes]:
        ranks = range(each.pp)
        if chosen is not None:
            return [self.find_rank(each, rank, chosen) for rank in ranks]
        return [self.of_rank(each, rank) for rank in ranks]

    def of_rank(self, each: Candidate, rank: int) -> PhaseBytes:
        """Bytes of one rank of the pipeline, its layers checkpointed as the candidate says."""
        layout = each.pp, each.schedule, each.virtual, each.context, each.tp, each.ep, each.expert_tp, each.sequence
        microbatches = representative(each.schedule, each.pp, each.accumulation)
        goes = "activations" in each.offload
        tokens = each.sequences, each.cp, each.ulysses, each.is_gather, each.checkpointing, goes, microbatches
        key = ("activations of rank", rank, layout, tokens)
        found: PhaseBytes = self._remember(key, lambda: self.find_rank(each, rank, None))
        return found

    def find_rank(self, each: Candidate, rank: int, chosen: Mapping[int, Counts] | None) -> PhaseBytes:
        """`of_rank`, with the layers of each stage by policy."""
        places, activations = self.pipelines.places(each), self.of_microbatch(each)
        moments, table = self.moments(each, rank)
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
            self._phase(peaks[name], on_the_way, more[number]) | {"workspace": self.pipelines.workspace}
            for number, name in enumerate(PHASES[:3])
        ]
        nothing = self._phase(Peak(), 0, 0) | {"workspace": self.pipelines.workspace}
        on_host = {"activations": self._offloaded_bytes(activations, stages, moments)}
        return PhaseBytes.of([*phases, nothing, nothing], self.pipelines.workspace, on_host, 0)

    def moments(self, each: Candidate, rank: int) -> tuple[Sequence[LiveMoment], MomentTable]:
        """The moments at which a rank may have most, listed and as arrays."""
        if self.pipelines.pipeline is not None:
            lowered = self.pipelines.pipeline.lowered(each.accumulation)
            return self._remember(("moments of a plan", rank), lambda: _tabulate(live_moments(lowered, rank)))
        count = representative(each.schedule, each.pp, each.accumulation)
        # In which order messages of uneven stages leave depends on how long these compute.
        costs = self._stage_costs(each)
        layout = each.schedule, each.pp, each.virtual, count, costs

        def make() -> tuple[Sequence[LiveMoment], MomentTable]:
            costs_of_all = Costs(costs, costs, costs)
            make_all = partial(make_moments, each.schedule, each.pp, each.virtual, each.accumulation, costs_of_all)
            return _tabulate(self._remember(("schedule", layout), make_all)(rank))

        return self._remember(("moments", rank, layout), make)

    def _stage_costs(self, each: Candidate) -> tuple[float, ...]:
        """FLOPs of each stage, as a run's pipeline is simulated with."""

        def find() -> tuple[float, ...]:
            flops, layers = self.pipelines.shape.flops(each.context), self.pipelines.shape.layer_flops(each.context)
            first, last = flops.get("embedding", 0.0), flops.get("head", 0.0)
            stages = self.pipelines.places(each).stages
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
        """The most activations on the host. Each stage of the rank has blocks of its own."""
        if not activations.memory.offload.activations:
            return 0
        sizes = {stage.index: activations.offloaded_bytes(stage) for stage in stages}
        most = dict.fromkeys(sizes, 0)
        for each in moments:
            for index, whole, left in each.live:
                most[index] = max(most[index], whole + left)
        return sum(size * most[index] for index, size in sizes.items())

    def of_microbatch(self, each: Candidate) -> Activations:
        """Sizes of one rank's activations for one microbatch."""
        key = form_of(each), each.sequences, each.checkpointing, "activations" in each.offload
        return self._remember(("activations of", key), lambda: self._make_activations(each))

    def is_chunked(self, each: Candidate) -> bool:
        """Whether the loss is computed in chunks."""
        key = "chunked", each.sequences, each.context, each.cp, each.ulysses, each.tp
        return self._remember(key, lambda: self._is_chunked(each, _slices_of(each)))

    def _make_activations(self, each: Candidate) -> Activations:
        shape, itemsize = self.pipelines.shape, self.pipelines.settings.compute.itemsize
        slices = _slices_of(each)
        tokens = TokenLayout(each.sequences, slices.tokens_local, Axis("tp", each.tp, 0), each.sequence, slices)
        chunked, goes = self.is_chunked(each), "activations" in each.offload
        memory = self._remember(
            ("memory", each.checkpointing, goes, chunked), lambda: self.pipelines.settings.memory(each, chunked)
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
            each.ep > 1 or each.expert_tp < each.tp or self.pipelines.settings.recipe.model.expert_capacity is not None,
        )

    def _masks(self, each: Candidate) -> tuple[str | None, ...]:
        """The kind of mask of each layer."""
        make = partial(read_masks, self.pipelines.settings.recipe, self.pipelines.shape.config, each.cp, each.context)
        found: tuple[str | None, ...] = self._remember(("masks", each.cp > 1, each.context), make)
        return found

    @property
    def _packs(self) -> bool:
        return self.pipelines.settings.recipe.data.pack == "documents"

    def _contexts(self, each: Candidate) -> tuple[ContextCost, ...]:
        key = each.context, each.cp, each.ulysses, each.is_gather, each.tp, each.sequences
        return self._remember(
            ("contexts", key),
            lambda: tuple({cost: None for cost in self._context_costs(each) if cost is not None}),
        )

    def _context_costs(self, each: Candidate) -> list[ContextCost | None]:
        if each.cp == 1:
            return []
        method = ContextMethod(each.ulysses, each.cp // each.ulysses, each.is_gather)
        lengths = each.sequences, each.context, self.pipelines.settings.compute.itemsize
        shapes = dict.fromkeys(self.pipelines.shape.attentions(each.tp, each.context))
        return [None if shape is None else ContextCost(method, shape, *lengths) for shape in shapes]

    def _is_chunked(self, each: Candidate, slices: ContextSlices) -> bool:
        asked = self.pipelines.settings.recipe.memory.chunked_loss
        tokens, itemsize = each.sequences * slices.tokens_local, self.pipelines.settings.compute.itemsize
        if asked == "auto":
            asked = is_large(tokens, self.pipelines.shape.vocabulary, each.tp, itemsize, self.pipelines.settings.device)
        return asked and self._remember("logit map", self._has_logit_map)

    def _has_logit_map(self) -> bool:
        try:
            find_logit_map(self.pipelines.shape.whole, self.pipelines.settings.compute)
        except ModelError:
            return False
        return True

    def _remember(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def form_of(each: Candidate) -> tuple[object, ...]:
    """Fields of a candidate that a layer's bytes for one sequence depend on, without its policy."""
    cp = each.context, each.cp, each.ulysses, each.is_gather
    return (*cp, each.tp, each.sequence, each.expert_tp, each.ep > 1)


def _tabulate(moments: Sequence[LiveMoment]) -> tuple[Sequence[LiveMoment], MomentTable]:
    return moments, MomentTable.of(moments)


def _slices_of(each: Candidate) -> ContextSlices:
    return ContextSlices(each.context, each.ulysses, each.cp // each.ulysses)


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """Bytes of the ranks of one model and one recipe, by candidate."""

    pipelines: Pipelines
    states: StateBytes
    activations: ActivationBytes

    @classmethod
    def of(cls, shape: ModelShape, settings: Settings, pipeline: PipelinePlan | None = None) -> "MemoryModel":
        """The model of a recipe's layouts; with a plan's pipeline of that plan alone."""
        pipelines = Pipelines(shape, settings, pipeline)
        return cls(pipelines, StateBytes(pipelines), ActivationBytes(pipelines))

    def forecast(
        self, each: Candidate, cluster: ClusterRates, chosen: Mapping[int, Counts] | None = None
    ) -> MemoryForecast:
        """The memory of devices and of a node, on a cluster. chosen: as of `stages`."""
        shape, settings, stages = self.pipelines.shape, self.pipelines.settings, self.stages(each, chosen)
        return MemoryForecast(stages, cluster.memory_bytes, _forecast_node(shape, each, settings, cluster, stages))

    def stages(self, each: Candidate, chosen: Mapping[int, Counts] | None = None) -> tuple[StageMemory, ...]:
        """The bytes of a rank at each place of the pipeline. chosen: layers of each stage by policy of activation
        checkpointing; None: all as the candidate says."""
        return tuple(_join(*parts) for parts in zip(*self.parts(each, chosen), strict=True))

    def choose(self, each: Candidate, place: int, budget: int) -> Mapping[int, Counts] | None:
        """The layers of each stage of a rank by policy of activation checkpointing: the fewest FLOPs with which the rank needs at
        most `budget` bytes of its device; None where no choice does. Of stages of unlike sizes the smaller ones have the first
        layers of the largest."""
        sizes, costs = self._layers_of_stages(each, place), self.activations.of_microbatch(each).costs

        def flops_of(counts: Counts) -> float:
            return sum(costs.flops(shorten(counts, size)) for size in sizes.values())

        found = choose_counts(max(sizes.values()), self._bytes_by_choice(each, place), flops_of, budget)
        return None if found is None else {index: shorten(found, size) for index, size in sizes.items()}

    def least_by_choice(self, each: Candidate, place: int) -> tuple[int, int]:
        """(the fewest bytes that any choice leaves a rank, those of its states)."""
        most = max(self._layers_of_stages(each, place).values())
        return least_bytes(most, self._bytes_by_choice(each, place)), max(self.states.of_ranks(each)[place].totals)

    def _bytes_by_choice(self, each: Candidate, place: int) -> Callable[[Counts], int]:
        """Bytes of a rank by the choice for the largest of its stages."""
        sizes, states = self._layers_of_stages(each, place), self.states.of_ranks(each)[place]

        def bytes_of(counts: Counts) -> int:
            chosen = {index: shorten(counts, size) for index, size in sizes.items()}
            return _most(states, self.activations.find_rank(each, place, chosen))

        return bytes_of

    def _layers_of_stages(self, each: Candidate, place: int) -> Mapping[int, int]:
        """Numbers of layers of a rank's stages, by the stage's index."""
        return {stage.index: stage.stop - stage.start for stage in self.pipelines.places(each).of_ranks[place]}

    def parts(
        self, each: Candidate, chosen: Mapping[int, Counts] | None
    ) -> tuple[Sequence[PhaseBytes], Sequence[PhaseBytes]]:
        """(states, activations) of each rank of the pipeline."""
        return self.states.of_ranks(each), self.activations.of_ranks(each, chosen)

    def spare(self, stages: Candidate, options: StateOptions, limit: int) -> np.ndarray:
        """Bytes that each option leaves of a limit, on its fullest rank. options: the same layout with states elsewhere."""
        table, beside = self.states.of_options(stages, options), self.activations.of_ranks(stages, None)
        moving = table.moving + np.array([part.moving for part in beside], dtype=np.int64)
        totals = table.totals + np.array([part.totals for part in beside], dtype=np.int64)
        reserved = totals + (FRAGMENTATION * moving).astype(np.int64)
        found: np.ndarray = limit - table.outside - reserved.max(axis=(1, 2))
        return found

    def offloaded(self, stages: Candidate, options: StateOptions, here: int) -> np.ndarray:
        """Bytes of the host's memory that each option takes on the fullest node of `here` ranks."""
        beside = np.array([part.host for part in self.activations.of_ranks(stages, None)], dtype=np.int64)
        counts = np.array(ranks_on_nodes(stages.world, stages.pp, here), dtype=np.int64)
        found: np.ndarray = ((self.states.of_options(stages, options).host + beside) @ counts.T).max(axis=1)
        return found
