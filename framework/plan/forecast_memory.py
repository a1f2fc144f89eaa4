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
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.mesh.topology import Axis, count_passing
from framework.model.chunked_loss import find_logit_map
from framework.model.loss import is_fused
from framework.model.stage import StageBounds
from framework.parallel.pipeline.lower import LiveMoment, live_moments
from framework.parallel.pipeline.pipeline import FORWARDS_AT_ONCE, PipelinePlan
from framework.parallel.pipeline.simulate import Costs
from framework.plan.activation_peaks import MomentTable, Peak, StageActivations, make_moments, representative
from framework.plan.activations import Activations
from framework.plan.candidate import Candidate, remember
from framework.plan.cluster import ClusterRates
from framework.plan.context import ContextCost
from framework.plan.forecast import MemoryForecast, NodeForecast, StageMemory
from framework.plan.layer_widths import read_masks
from framework.plan.memory import USABLE, ranks_on_nodes, sum_fullest_node
from framework.plan.memory_states import (
    FRAGMENTATION,
    PHASES,
    STAGES,
    PhaseBytes,
    Pipelines,
    Places,
    StateBytes,
    place_states,
    slack_of,
)
from framework.plan.policies import Counts, choose_counts, is_large, least_bytes, shorten, uniform
from framework.plan.shape import ModelShape
from framework.plan.target import resolve_target
from framework.plan.token_hops import rows_of_token
from framework.recipe.schema import Recipe

# Counted over estimated activations of models without formulas, the least and the most: `scripts/bench/foresight_memory.py
# --estimated`; opt, and gemma2, whose attention caps its scores and so has matrices of them.
ESTIMATE_OFF = (0.75, 3.3)
# Fields of a candidate that a layer's bytes for one sequence depend on, without its policy.
LAYER = ("context", "cp", "ulysses", "is_gather", "tp", "sequence", "expert_tp", "ep")


def describe_estimate(shape: ModelShape, candidate: Candidate) -> str | None:
    """Say which part of a forecast is estimated, and by how much it may be off; None where all of it has formulas."""
    if shape.widths is not None:
        return None
    low, high = ESTIMATE_OFF
    kept = (
        "activations of layers"
        if candidate.checkpointing in ("none", "selective")
        else "activations that one layer computes again"
    )
    return (
        f"{kept} are estimated: {shape.text.model_type} has layers of another form than Llama's. Counted bytes of such models"
        f" were between {low:g} and {high:g} of the estimate; states, inputs of layers and logits are exact"
    )


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
    """Activation bytes for one model and one recipe."""

    pipelines: Pipelines

    def of_ranks(self, each: Candidate, chosen: Mapping[int, Counts] | None) -> list[PhaseBytes]:
        """Bytes of each rank of the pipeline. chosen: layers of each stage by policy; None: all as the candidate says."""
        if chosen is not None or self.pipelines.pipeline is not None:
            return [self.find_rank(each, rank, chosen) for rank in range(each.pp)]
        # The fewest microbatches with as many in flight: layouts with more of them have the same bytes, but for `_scoring_peak`.
        fewest = representative(each.schedule, each.pp, each.accumulation)
        if self.pipelines.recipe.loss.extra_forwards:
            fewest = max(fewest, min(each.accumulation, FORWARDS_AT_ONCE))
        few = each.changed({"accumulation": fewest})
        return [self._of_rank(few, rank) for rank in range(each.pp)]

    @remember(
        *STAGES, "sequences", "cp", "ulysses", "is_gather", "checkpointing", "offloads_activations", "accumulation"
    )
    def _of_rank(self, each: Candidate, rank: int) -> PhaseBytes:
        return self.find_rank(each, rank, None)

    def find_rank(self, each: Candidate, rank: int, chosen: Mapping[int, Counts] | None) -> PhaseBytes:
        """Bytes of one rank of the pipeline."""
        stages, activations = self.pipelines.of_ranks(each)[rank], self.of_microbatch(each)
        (moments, table), policy = self._moments(each, rank), each.checkpointing
        counts = chosen or {stage.index: uniform(policy, stage.stop - stage.start) for stage in stages}
        # Virtual stages of a rank are dozens, and most of them are alike.
        alike: dict[tuple[object, ...], StageActivations] = {}
        by_stage = {}
        for stage in stages:
            own = counts[stage.index]
            form = (
                stage.is_first,
                stage.is_last,
                stage.stop - stage.start,
                own,
                activations.masks_of(stage),
                activations.more_of(stage),
            )
            if form not in alike:
                alike[form] = activations.of_stage(stage, own)
            by_stage[stage.index] = alike[form]
        peaks = table.find_peaks(by_stage)
        if self.pipelines.recipe.loss.extra_forwards:
            scoring = self._scoring_peak(each, stages, activations)
            peaks["forward"] = max(peaks["forward"], scoring, key=lambda peak: peak.total)
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

    def _scoring_peak(self, each: Candidate, stages: Sequence[StageBounds], activations: Activations) -> Peak:
        """The most that a rank has in a forward for a reference, without backward: of one layer, or of logits and their loss, and
        of hidden states those that arrive and those that it has sent, which it holds until all microbatches are through
        (`execute.StageLinks`). A number for each document is what comes of it."""
        own = {stage.index for stage in stages}
        sending = sum(not stage.is_last and stage.index + 1 not in own for stage in stages)
        arriving = any(not stage.is_first and stage.index - 1 not in own for stage in stages)
        # It holds the one that it computes with and the next; where it sends, the last of those is its own.
        count = sending * min(each.accumulation, FORWARDS_AT_ONCE) + arriving * (1 if sending else 2)
        between = count * activations.hidden_bytes
        layer = Peak(activations.forward_bytes, between=between)
        if not any(stage.is_last for stage in stages):
            return layer
        beside = activations.loss_temporaries + activations.chunk_bytes
        return max(layer, Peak(0, activations.logits_bytes, beside, between), key=lambda peak: peak.total)

    @remember("pp", "schedule", "virtual", "context", "accumulation")
    def _moments(self, each: Candidate, rank: int) -> tuple[Sequence[LiveMoment], MomentTable]:
        """The moments at which a rank may have most, listed and as arrays."""
        if self.pipelines.pipeline is not None:
            found = live_moments(self.pipelines.pipeline.lowered(each.accumulation), rank)
        else:
            found = self._schedule(each)(rank)
        return found, MomentTable.of(found)

    @remember("pp", "schedule", "virtual", "context", "accumulation")
    def _schedule(self, each: Candidate) -> Callable[[int], list[LiveMoment]]:
        """In which order messages of uneven stages leave depends on how long these compute: on their FLOPs, as in a run."""
        flops, layers = self.pipelines.shape.flops(each.context), self.pipelines.shape.layer_flops(each.context)
        first, last = flops.get("embedding", 0.0), flops.get("head", 0.0)
        stages = self.pipelines.stages(each)
        costs = tuple(sum(layers[x.start : x.stop]) + first * x.is_first + last * x.is_last for x in stages)
        return make_moments(each.schedule, each.pp, each.virtual, each.accumulation, Costs(costs, costs, costs))

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

    @remember(*LAYER, "sequences", "checkpointing", "offloads_activations", "ranks_per_node", "world")
    def of_microbatch(self, each: Candidate) -> Activations:
        """Sizes of one rank's activations for one microbatch."""
        pipelines, slices = self.pipelines, _slices_of(each)
        shape, recipe = pipelines.shape, pipelines.recipe
        layers = shape.layer_flops(each.context)
        memory = replace(
            recipe.memory,
            activation_checkpointing=each.checkpointing,
            offload=pipelines.offload(each),
            chunked_loss=self.is_chunked(each),
        )
        return Activations(
            TokenLayout(each.sequences, slices.tokens_local, Axis("tp", each.tp, 0), each.sequence, slices),
            shape.hidden,
            shape.text.vocab_size,
            pipelines.compute.itemsize,
            shape.widths,
            sum(layers) / len(layers),
            memory,
            each.expert_tp,
            shape.mixture,
            self._contexts(each),
            recipe.data.isolates,
            self._masks(each),
            each.ep > 1 or each.expert_tp < each.tp or recipe.model.expert_capacity is not None,
            is_fused(recipe.launch.device, pipelines.compute.itemsize),
            *self._count_rows(each),
            mixers=self._mixers(each),
        )

    def _mixers(self, each: Candidate) -> tuple[int, ...]:
        """Bytes of each layer's recurrent mixer beside the layer's estimate; empty where layers have formulas."""
        shape, dtype, tokens = self.pipelines.shape, self.pipelines.compute, _slices_of(each).tokens_local
        if shape.widths is not None:
            return ()
        outside, e = tokens // (each.tp if each.sequence else 1), dtype.itemsize
        beside = shape.hidden * (tokens * e + outside * (4 + e))
        estimated = outside * shape.hidden * e
        return tuple(
            0 if found is None else each.sequences * (found.kept // each.tp + beside - found.replaced * estimated)
            for found in shape.mixers(tokens, dtype)
        )

    def _count_rows(self, each: Candidate) -> tuple[float, float]:
        """Rows of a token that come to ranks for their nodes, and the padding of those in buffers of experts."""
        mixture, way = self.pipelines.shape.mixture, self.pipelines.recipe.parallel.expert_hierarchical
        nodes = each.ep // count_passing(way, each.ep, each.expert_tp, each.ranks_per_node, each.world)
        if mixture is None:
            return 1.0, 1.0
        outer, inner = rows_of_token(each, self.pipelines.recipe, mixture.router, nodes, each.ep // nodes)
        return float(outer), max(1.0, float(inner) / mixture.top_k)

    @remember("cp", "context")
    def _masks(self, each: Candidate) -> tuple[str | None, ...]:
        """The kind of mask of each layer."""
        return read_masks(self.pipelines.recipe, self.pipelines.shape.config, each.cp, each.context)

    @remember("context", "cp", "ulysses", "is_gather", "tp", "sequences")
    def _contexts(self, each: Candidate) -> tuple[ContextCost, ...]:
        """The attentions of layers, those that differ, where cp divides sequences."""
        if each.cp == 1:
            return ()
        itemsize = self.pipelines.compute.itemsize
        shapes = dict.fromkeys(self.pipelines.shape.attentions(each.tp, each.context))
        return tuple(ContextCost(each, shape, itemsize) for shape in shapes if shape is not None)

    @remember("sequences", "context", "cp", "ulysses", "tp")
    def is_chunked(self, each: Candidate) -> bool:
        """Whether the loss is computed in chunks."""
        asked, recipe = self.pipelines.recipe.memory.chunked_loss, self.pipelines.recipe
        if asked == "auto":
            tokens, itemsize = each.sequences * _slices_of(each).tokens_local, self.pipelines.compute.itemsize
            asked = is_large(tokens, self.pipelines.shape.vocabulary, each.tp, itemsize, recipe.launch.device)
        return asked and self._has_logit_map

    @cached_property
    def _has_logit_map(self) -> bool:
        try:
            find_logit_map(self.pipelines.shape.whole, self.pipelines.compute)
        except ModelError:
            return False
        return True


def _slices_of(each: Candidate) -> ContextSlices:
    return ContextSlices(each.context, each.ulysses, each.ring)


@dataclass(frozen=True, eq=False)
class MemoryModel:
    """Bytes of the ranks of one model and one recipe, by candidate."""

    pipelines: Pipelines
    states: StateBytes
    activations: ActivationBytes

    @classmethod
    def of(cls, shape: ModelShape, recipe: Recipe, pipeline: PipelinePlan | None = None) -> "MemoryModel":
        """The model of a recipe's layouts; with a plan's pipeline of that plan alone."""
        pipelines = Pipelines(shape, resolve_target(recipe), pipeline)
        return cls(pipelines, StateBytes(pipelines), ActivationBytes(pipelines))

    def forecast(
        self, each: Candidate, cluster: ClusterRates, chosen: Mapping[int, Counts] | None = None
    ) -> MemoryForecast:
        """The memory of devices and of a node, on a cluster: of the first rank at each place of the pipeline along all other
        axes. chosen: as of `stages`. Raises what the model's transforms raise for degrees that do not fit (`ModelRules.refuse`
        asks first), RecipeError for more stages than layers."""
        stages = self.stages(each, chosen)
        offloaded = sum_fullest_node([stage.host for stage in stages], each.world, cluster.ranks_per_node)
        disk = sum_fullest_node([stage.disk for stage in stages], each.world, cluster.ranks_per_node)
        limit = int(USABLE * cluster.host_bytes)
        # Held steps, where ranks save an even share: as `bytes_of_copies`.
        copies = self.pipelines.recipe.checkpoint.neighbor_copies
        held = 2 * min(1 + copies, each.nodes) * self.pipelines.checkpoint_bytes // each.nodes if copies else 0
        node = NodeForecast(offloaded, held, cluster.host_bytes, limit, disk, cluster.node_disk_bytes)
        return MemoryForecast(stages, cluster.memory_bytes, node)

    def stages(self, each: Candidate, chosen: Mapping[int, Counts] | None = None) -> tuple[StageMemory, ...]:
        """The bytes of a rank at each place of the pipeline. chosen: layers of each stage by policy of activation
        checkpointing; None: all as the candidate says."""
        parts = zip(self.states.of_ranks(each), self.activations.of_ranks(each, chosen), strict=True)
        return tuple(_join(*each) for each in parts)

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
            activations = self.activations.find_rank(each, place, chosen)
            return max(_reserve(states, activations, phase) for phase in range(len(PHASES)))

        return bytes_of

    def _layers_of_stages(self, each: Candidate, place: int) -> Mapping[int, int]:
        """Numbers of layers of a rank's stages, by the stage's index."""
        return {stage.index: stage.stop - stage.start for stage in self.pipelines.of_ranks(each)[place]}

    def spare(self, stages: Candidate, places: Places, limit: int) -> np.ndarray:
        """Bytes that the fullest rank has left of a limit, for the same layout with states in each of these places."""
        table, beside = self.states.of_places(stages, places), self.activations.of_ranks(stages, None)
        moving = table.moving + np.array([part.moving for part in beside], dtype=np.int64)
        totals = table.totals + np.array([part.totals for part in beside], dtype=np.int64)
        reserved = totals + (FRAGMENTATION * moving).astype(np.int64)
        outside = np.array([self.pipelines.outside(place_states(stages, place)) for place in places], dtype=np.int64)
        found: np.ndarray = limit - outside - reserved.max(axis=(1, 2))
        return found

    def host_spare(self, stages: Candidate, places: Places, cluster: ClusterRates) -> np.ndarray:
        """Bytes of the host's memory that the fullest node has left, likewise: as `NodeForecast.spare`, but for copies of steps,
        which depend little on the layout."""
        beside = np.array([part.host for part in self.activations.of_ranks(stages, None)], dtype=np.int64)
        counts = np.array(ranks_on_nodes(stages.world, stages.pp, cluster.ranks_per_node), dtype=np.int64)
        offloaded = ((self.states.of_places(stages, places).host + beside) @ counts.T).max(axis=1)
        found: np.ndarray = np.where(offloaded > 0, int(USABLE * cluster.host_bytes) - offloaded, 0)
        return found
