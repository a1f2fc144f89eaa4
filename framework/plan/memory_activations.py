"""Bytes of activations over a step: kept by layers for the microbatches in flight, kept by the loss, and temporaries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from framework.errors import ModelError
from framework.mesh.context import ContextSlices
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.model.logit_map import find_logit_map
from framework.model.stage import StageBounds
from framework.parallel.pipeline.lower import LiveMoment, live_moments
from framework.parallel.pipeline.simulate import Costs
from framework.plan.activation_peaks import MomentTable, Peak, StageActivations, make_moments, representative
from framework.plan.activations import Activations
from framework.plan.candidate import Candidate
from framework.plan.context import ContextCost, ContextMethod
from framework.plan.layer_widths import read_masks
from framework.plan.memory_states import PHASES, PhaseBytes, Pipelines
from framework.plan.policies import Counts, is_large, uniform


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
        make = partial(read_masks, self.pipelines.settings.recipe, self.pipelines.shape.text, each.cp, each.context)
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
        return [None if shape is None else ContextCost(method, shape, *lengths, self._packs) for shape in shapes]

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
