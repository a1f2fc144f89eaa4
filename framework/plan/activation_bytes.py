"""Bytes of a rank's activations over a step: the most that it holds at once, by the moments of its schedule and the bytes of its
stages at each of them.

For a search the schedule is as short as may be: a few microbatches, of which a rank has as many in flight at once as of all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.mesh.topology import Axis, count_passing
from framework.model.chunked_loss import find_logit_map
from framework.model.loss import is_fused
from framework.model.stage import StageBounds
from framework.parallel.pipeline.lower import LiveMoment, live_moments, lower
from framework.parallel.pipeline.pipeline import FORWARDS_AT_ONCE
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import Costs
from framework.plan.activations import Activations
from framework.plan.candidate import Candidate, remember
from framework.plan.layer_widths import read_masks
from framework.plan.messages import ContextCost, rows_of_token
from framework.plan.policies import Counts, StageActivations, is_large, uniform
from framework.plan.state_bytes import (
    PHASES,
    STAGES,
    PhaseBytes,
    Pipelines,
)

# Fields of a candidate that a layer's bytes for one sequence depend on, without its policy.
LAYER = ("context", "cp", "ulysses", "is_gather", "tp", "sequence", "expert_tp", "ep")


class Peak(NamedTuple):
    """Bytes of a rank at one moment: activations (recomputed ones included), logits, transients, hidden states between stages."""

    activations: int = 0
    logits: int = 0
    beside: int = 0
    between: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self)


@dataclass(frozen=True, eq=False)
class MomentTable:
    """Moments of a rank's step as arrays, from which peaks for many sizes of the same stages follow."""

    # Indices of the rank's stages.
    stages: tuple[int, ...]
    # Positions of the moments of forwards and of backwards.
    forwards: np.ndarray
    backwards: np.ndarray
    # [moments]: the position in `stages` of the stage that computes.
    own: np.ndarray
    # [moments, stages], as in `LiveMoment.live`.
    whole: np.ndarray
    left: np.ndarray
    # [moments]: hidden states between stages.
    between: np.ndarray

    @classmethod
    def of(cls, moments: Sequence[LiveMoment]) -> "MomentTable":
        """Tabulate the moments of one rank."""
        listed = list(moments)
        stages = tuple(index for index, _, _ in listed[0].live)
        forward = np.array([each.is_forward for each in listed])
        live = np.array([[counts[1:] for counts in each.live] for each in listed], dtype=np.int64)
        own = np.array([stages.index(each.stage) for each in listed])
        between = np.array([each.between for each in listed], dtype=np.int64)
        kinds = np.flatnonzero(forward), np.flatnonzero(~forward)
        return cls(stages, *kinds, own, live[:, :, 0], live[:, :, 1], between)

    def find_peaks(self, stages: Mapping[int, StageActivations]) -> dict[str, Peak]:
        """The most that the rank has in `forward`, `loss` and `backward` of its stages, which are given by index."""
        sizes = np.array([stages[index] for index in self.stages], dtype=np.int64)
        of = {name: sizes[:, place] for place, name in enumerate(StageActivations._fields)}
        kept = self.whole @ (of["kept"] + of["head"]) + self.left @ of["left"]
        logits, own, nothing = self.whole @ of["logits"], self.own, np.zeros_like(kept)
        between = self.between * of["hidden"][own]
        # In forward they are not there yet, in the backward of layers they have gone.
        before, logits_before = kept - of["head"][own], logits - of["logits"][own]
        ends = self.forwards[of["head"][own][self.forwards] > 0]
        return {
            "forward": _largest(self.forwards, before, logits_before, nothing, between),
            "loss": _largest(ends, kept, logits, of["chunk"][own], between),
            "backward": _largest(
                self.backwards, before + of["recomputed"][own], logits_before, of["transient"][own], between
            ),
        }


def _largest(places: np.ndarray, *kinds: np.ndarray) -> Peak:
    """The first of the largest among the moments at these places."""
    if not len(places):
        return Peak()
    place = places[np.argmax(np.sum(kinds, axis=0)[places])]
    return Peak(*(int(each[place]) for each in kinds))


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


def make_moments(
    schedule: str, pp: int, virtual: int, accumulation: int, costs: Costs
) -> Callable[[int], list[LiveMoment]]:
    """A function from a rank to its moments. costs: of each stage, by which messages are ordered."""
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
                activations.masks[stage.start : stage.stop],
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
