"""The one model of a rank's bytes over a step: for a plan, and for thousands of layouts of a search.

    kind            content                                                                 known
    parameters ...  states, and what of them is gathered (`state_bytes.py`)                 exactly, padding included
    activations     what layers keep, by microbatches in flight (`activation_bytes.py`)     formulas, or estimated
    logits          what the loss keeps                                                     exactly
    temporaries     tensors inside of one layer's backward, or of the loss                  formulas
    communication   hidden states that a pipeline sends and receives                        by the executor's actions
    workspace       cuBLAS'                                                                 torch's default
    outside         the driver's context and NCCL's buffers, not torch's memory             assumed (`state_bytes.py`)
    slack           what the caching allocator has reserved beside tensors                  assumed (`state_bytes.py`)

A rank holds the sum of two parts, each cached by what it depends on: states (`state_bytes.py`), which depend on ZeRO and not
on microbatches, and activations, for which it is the other way round.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from framework.output import show_bytes
from framework.parallel.pipeline.pipeline import PipelinePlan
from framework.plan.activation_bytes import ActivationBytes
from framework.plan.candidate import Candidate, resolve_target
from framework.plan.cluster import ClusterRates
from framework.plan.policies import Counts, choose_counts, least_bytes, shorten
from framework.plan.shape import ModelShape
from framework.plan.state_bytes import (
    FRAGMENTATION,
    PHASES,
    PhaseBytes,
    Pipelines,
    Places,
    StateBytes,
    place_states,
    slack_of,
)
from framework.recipe.schema import Recipe

SLACK = "allocator slack"
OUTSIDE = "outside torch"


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank at one place of the pipeline, at the moment of a step that needs most."""

    # Tensors of the device by kind: parameters, gradients, master, optimizer, gathered, activations, logits, temporaries,
    # communication, workspace.
    held: Mapping[str, int]
    # Reserved by the allocator beyond what tensors use.
    slack: int
    # The same kinds at each phase of a step, of which `held` is the largest.
    phases: Mapping[str, Mapping[str, int]]
    # The host's memory by kind.
    on_host: Mapping[str, int] = field(default_factory=dict)
    # Device memory outside torch: the driver's context, NCCL's buffers.
    outside: int = 0
    # The rank's file of states.
    disk: int = 0

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return sum(self.on_host.values())

    @property
    def allocated(self) -> int:
        """Bytes of tensors."""
        return sum(self.held.values())

    @property
    def kinds(self) -> dict[str, int]:
        """All bytes of the device by kind: `held`, and what is not in tensors."""
        return {**self.held, OUTSIDE: self.outside, SLACK: self.slack}

    @property
    def reserved(self) -> int:
        """Bytes that the device must have."""
        return self.allocated + self.slack + self.outside


@dataclass(frozen=True)
class NodeForecast:
    """Bytes that the ranks of the fullest node take together of what they share."""

    # The host's memory: offloaded states and activations, and copies of steps in its file system (checkpoint.neighbor_copies).
    offloaded: int = 0
    copies: int = 0
    # All of the host's memory, and the share of it for both.
    there: int = 0
    limit: int = 0
    # Files of states, and the room for them; None where it is unknown.
    disk: int = 0
    disk_limit: int | None = None

    @property
    def spare(self) -> int:
        """Bytes of the host's memory that are left; negative: so many are missing."""
        # Linux gives a file system in memory half of it.
        return min(self.limit - self.offloaded - self.copies, self.there // 2 - self.copies)

    @property
    def fits(self) -> bool:
        """Whether a node has all of it."""
        is_on_disk = self.disk_limit is None or self.disk <= self.disk_limit
        return is_on_disk and (self.spare >= 0 or not self.offloaded + self.copies)


@dataclass(frozen=True)
class MemoryForecast:
    """stages: a rank at each place of the pipeline, in order. limit: bytes of a device that ranks may use. node: what ranks of a
    node share."""

    stages: tuple[StageMemory, ...]
    limit: int
    node: NodeForecast = NodeForecast()

    @property
    def fullest(self) -> StageMemory:
        """The rank that decides whether the run fits."""
        return max(self.stages, key=lambda each: each.reserved)

    @property
    def spare(self) -> int:
        """Bytes that are left on the fullest rank; negative: so many are missing."""
        return self.limit - self.fullest.reserved

    @property
    def fits(self) -> bool:
        """Whether devices and nodes have all of it."""
        return self.spare >= 0 and self.node.fits


def describe_shortages(node: NodeForecast) -> Iterator[str]:
    """Resources that a node lacks, each with the key that states what it has; empty where the layout fits."""
    needed = node.offloaded + node.copies
    if needed and node.spare < 0:
        what = [f"{show_bytes(node.offloaded)} of what is offloaded"] * (node.offloaded > 0)
        what += [f"{show_bytes(node.copies)} of copies of steps (checkpoint.neighbor_copies)"] * (node.copies > 0)
        where = f"{show_bytes(node.limit)} of a node's {show_bytes(node.there)} of host memory (cluster.host_memory_gb)"
        if node.offloaded + node.copies <= node.limit:
            where = f"{show_bytes(node.there // 2)} of /dev/shm, half of a node's host memory (cluster.host_memory_gb)"
        yield f"{show_bytes(-node.spare)} over the {where}, for {' and '.join(what)}"
    if node.disk_limit is not None and node.disk > node.disk_limit:
        yield (
            f"{show_bytes(node.disk - node.disk_limit)} over the {show_bytes(node.disk_limit)} of a node's own disks"
            f" (cluster.node_disk_gb), for {show_bytes(node.disk)} of files of states"
        )


# The share of a node's memory that ranks have for offloaded states: Python, torch, NCCL and page tables need the rest.
USABLE = 0.9


@cache
def ranks_on_nodes(world: int, pp: int, here: int) -> tuple[tuple[int, ...], ...]:
    """Number of ranks at each place of the pipeline, for each kind of node with `here` ranks; neighbours share a node."""
    size = world // pp
    nodes = [(first, min(first + here, world)) for first in range(0, world, here)]
    counts = [
        tuple(max(0, min(stop, (place + 1) * size) - max(first, place * size)) for place in range(pp))
        for first, stop in nodes
    ]
    return tuple(dict.fromkeys(counts))


def sum_fullest_node(of_stage: Sequence[int], world: int, here: int) -> int:
    """The most that the ranks of one node have together. of_stage: of a rank at each place of the pipeline: ranks that differ in
    other coordinates have as much."""
    return max(
        sum(count * size for count, size in zip(counts, of_stage, strict=True))
        for counts in ranks_on_nodes(world, len(of_stage), here)
    )


# Counted over estimated activations of models without formulas, the least and the most: `scripts/bench/foresight_memory.py
# --estimated`; opt, and gemma2, whose attention caps its scores and so has matrices of them.
ESTIMATE_OFF = (0.75, 3.3)


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
