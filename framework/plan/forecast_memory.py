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
on microbatches, and activations (`memory_activations.py`), for which it is the other way round.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from framework.parallel.pipeline.pipeline import PipelinePlan
from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates
from framework.plan.forecast import MemoryForecast, NodeForecast, StageMemory
from framework.plan.memory import USABLE, ranks_on_nodes, sum_fullest_node
from framework.plan.memory_activations import ActivationBytes
from framework.plan.memory_states import (
    FRAGMENTATION,
    PHASES,
    PhaseBytes,
    Pipelines,
    StateBytes,
    StateOptions,
    slack_of,
)
from framework.plan.policies import Counts, choose_counts, least_bytes, shorten
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
