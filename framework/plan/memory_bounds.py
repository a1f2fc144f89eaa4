"""Lower bounds of a rank's bytes, which a search asks before it has chosen all of a layout.

Counted is one moment, the backward of a layer on the first rank of the pipeline, when as many microbatches are under way as the
schedule ever has there:

    states         parameters of two layers and of embedding or head in full, gradients of three units in full, and a share of
                   all gradients, which have no home but the device. ZeRO and offload leave no less, whatever the layout
    activations    layers x microbatches in flight x what one keeps; what a layer computes again, and gradients inside of it. Of
                   offloaded layers what is on its way
    beside both    the allocator's slack, cuBLAS' workspace, and what is not torch's

Nothing is simulated: what the first rank has in flight is written in the schedules' warm-ups (`parallel/pipeline/schedules.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from typing import Any, NamedTuple

from framework.parallel.activation_checkpointing import count_groups
from framework.parallel.pipeline.schedules import group_sizes
from framework.plan.activation_peaks import representative
from framework.plan.candidate import Candidate, Checkpointing
from framework.plan.forecast_memory import MemoryModel, form_of
from framework.plan.memory_states import slack_of

# Of an element's gradient at the least (`BufferDtypes.gradient`).
GRADIENT_BYTES = 4
# A way to keep activations: checkpointing, and `activations` where they are offloaded.
Way = tuple[Checkpointing, frozenset[str]]


class LayerBytes(NamedTuple):
    """Bytes of a layer for one sequence, whose activations are kept in one way. kept: by each layer and microbatch in flight;
    of_group: beside that by each group of layers that are computed again together; working: by one layer, in its backward;
    leaving: by an offloaded layer on its way, next: by another one, where neighbours are offloaded."""

    kept: int
    of_group: int
    working: int
    leaving: int
    next: int


class InFlight(NamedTuple):
    """The least that the first rank of a pipeline has at once."""

    # Layers and groups of layers, times microbatches.
    layers: int
    groups: int
    # Layers of the longest of its stages.
    longest: int
    # Elements of parameters of units that are unsharded at once, and of those whose gradients are there at once.
    read: int
    reduced: int
    # Elements of parameters of all units, with experts divided by tp, and whole.
    sharded: int
    whole: int


@dataclass(frozen=True, eq=False)
class MemoryBounds:
    """Lower bounds for one model and one recipe."""

    memory: MemoryModel
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def least_of_ways(self, c: Candidate, ways: Sequence[Way], schedules: tuple[tuple[str, int], ...]) -> list[int]:
        """The least bytes of the fullest rank wherever states lie, with activations kept in each of these ways, by any of these
        schedules: names, and stages of a rank."""
        flight, form = self._in_flight(c, schedules), form_of(c)
        # A share of all gradients and three units' in full; all of them where each rank keeps all.
        gradients = min(flight.reduced + flight.sharded // (c.dp * c.cp), flight.whole)
        states = flight.read * self._read_bytes + gradients * self._gradient_bytes
        fixed = states + self._workspace + self.memory.pipelines.outside(c)
        return [
            fixed + self._add_up(c.sequences, self._layer_bytes(c, form, way), bool(way[1]), flight) for way in ways
        ]

    def _add_up(self, sequences: int, layer: LayerBytes, is_offloaded: bool, flight: InFlight) -> int:
        moving = layer.working
        if is_offloaded:
            moving += layer.leaving + layer.next * (flight.longest > 1)
        else:
            moving += layer.kept * flight.layers + layer.of_group * flight.groups
        moving *= sequences
        return moving + slack_of(moving)

    @cached_property
    def _workspace(self) -> int:
        return self.memory.pipelines.workspace

    @cached_property
    def _read_bytes(self) -> int:
        return self.memory.pipelines.settings.compute.itemsize

    @cached_property
    def _gradient_bytes(self) -> int:
        # Where some parameters are frozen nothing is said of gradients, which are fp32 or wider.
        return 0 if self.memory.pipelines.shape.recipe.model.freeze else GRADIENT_BYTES

    def _layer_bytes(self, c: Candidate, form: object, way: Way) -> LayerBytes:
        key = form, way
        if key not in self._known:
            # Several sequences have as much as one so often, or some bytes more.
            alone = c.changed({"sequences": 1, "checkpointing": "none", "offload": frozenset()})
            one, policy = self.memory.activations.of_microbatch(alone), way[0]
            cost = one.cost_of(policy)
            # A group keeps one layer's input; whatever else a layer keeps stays for all.
            of_group = one.hidden_bytes if policy == "sqrt" else 0
            # Where a recipe offloads a part of the layers neighbours need not be offloaded.
            whole = self.memory.pipelines.settings.recipe.memory.offload.activations in (0, 1)
            working = cost.recomputed + one.backward_temporaries
            self._known[key] = LayerBytes(cost.kept - of_group, of_group, working, cost.kept, cost.kept * whole)
        found: LayerBytes = self._known[key]
        return found

    def _in_flight(self, c: Candidate, schedules: tuple[tuple[str, int], ...]) -> InFlight:
        # Beyond so many microbatches all schedules have as much in flight.
        microbatches = representative("interleaved", c.pp, c.accumulation)
        key = (schedules, c.pp, microbatches, c.context, c.tp, c.ep, c.expert_tp, c.sequence)
        if key not in self._known:
            choices = [c.changed({"schedule": name, "virtual": virtual}) for name, virtual in schedules]
            self._known[key] = InFlight(*map(min, zip(*map(self._find_in_flight, choices), strict=True)))
        found: InFlight = self._known[key]
        return found

    def _find_in_flight(self, c: Candidate) -> InFlight:
        places = self.memory.pipelines.places(c)
        stages = places.of_ranks[0]
        sizes = [stage.stop - stage.start for stage in stages]
        counts = first_in_flight(c.schedule, c.pp, c.virtual, c.accumulation)
        units = [
            counted
            for stage in stages
            for counted in self.memory.pipelines.shape.stage_units(stage, places.degrees).counted
        ]
        layers = [(unit.numel, count) for unit, count in units if unit.unit.is_layer]
        ends = [unit.numel for unit, _ in units if not unit.unit.is_layer]
        return InFlight(
            sum(size * count for size, count in zip(sizes, counts, strict=True)),
            sum(count_groups(size) * count for size, count in zip(sizes, counts, strict=True)),
            max(sizes),
            # Like `count_gathered`: one layer in use and one ahead; one gradient written and two under way.
            _sum_largest(layers, 2) + max(ends, default=0),
            _sum_largest([(unit.numel, count) for unit, count in units], 3),
            sum(unit.numel * count // (c.tp if unit.has_experts else 1) for unit, count in units),
            sum(unit.numel * count for unit, count in units),
        )


def _sum_largest(sizes: Sequence[tuple[int, int]], most: int) -> int:
    """sizes: each with how often it is there."""
    return sum(sorted((size for size, count in sizes for _ in range(min(count, most))), reverse=True)[:most])


def first_in_flight(schedule: str, pp: int, virtual: int, accumulation: int) -> tuple[int, ...]:
    """Microbatches that the first rank has of each of its stages in its first backward: between their F and the end of it."""
    if schedule == "interleaved":
        sizes = group_sizes(pp, accumulation)
        ahead = (virtual - 1) * sizes[0] + 2 * (pp - 1)
        forwards = chain.from_iterable([chunk] * size for size in sizes for chunk in range(virtual))
        counts = Counter(islice(forwards, ahead + 1))
        return tuple(counts[chunk] for chunk in range(virtual))
    if schedule in ("zbv", "dualpipe_v"):
        return min(accumulation, 2 * pp - (schedule == "zbv")), 1
    # All of gpipe's, of which no more are counted than `MemoryBounds` tells apart.
    return (min(accumulation, 2 * pp if schedule == "gpipe" else pp),)
