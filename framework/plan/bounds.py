"""Lower bounds of a rank's bytes and of a step's seconds, which a search asks before it has chosen all of a layout.

Of bytes one moment is counted, the backward of a layer on the first rank of the pipeline, when as many microbatches are under way
as the schedule ever has there:

    states         parameters of two layers and of embedding or head in full, gradients of three units in full, and a share of
                   all gradients, which have no home but the device. ZeRO and offload leave no less, whatever the layout
    activations    layers x microbatches in flight x what one keeps; what a layer computes again, and gradients inside of it. Of
                   offloaded layers what is on its way
    beside both    the allocator's slack, cuBLAS' workspace, and what is not torch's

Nothing is simulated: what the first rank has in flight is written in the schedules' warm-ups (`parallel/pipeline/schedules.py`).

Of seconds:

    mean_rank      the mean rank's work: of any schedule, and of all microbatches that are no larger
    stages         computation and messages of layers in the shortest time that a schedule allows (`stage_times.least_length`),
                   wherever states are kept
    states         the same with ZeRO's messages and the update: all of a forecast but the simulated schedule
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice

import numpy as np

from framework.parallel.activation_checkpointing import count_groups
from framework.parallel.pipeline.schedules import group_sizes
from framework.parallel.pipeline.simulate import Costs
from framework.plan.activation_bytes import LAYER, representative
from framework.plan.candidate import Candidate, Checkpointing, remember
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryModel
from framework.plan.shape import ModelShape
from framework.plan.stage_times import least_length
from framework.plan.state_bytes import FRAGMENTATION, sum_largest
from framework.plan.time import DIVISION, WORK, Forecast, TimeModel
from framework.recipe.schema import Recipe

# Lower bound of the bytes of a gradient's element (`BufferDtypes.gradient`).
GRADIENT_BYTES = 4
# A way to keep activations: checkpointing, and `activations` where they are offloaded.
Way = tuple[Checkpointing, frozenset[str]]
# Names of schedules, with the stages of a rank.
Schedules = tuple[tuple[str, int], ...]


@dataclass(frozen=True, eq=False)
class MemoryBounds:
    """Lower bounds for one model and one recipe."""

    memory: MemoryModel

    def least_of_ways(self, c: Candidate, schedules: Schedules, ways: tuple[Way, ...]) -> np.ndarray:
        """[schedules, ways]: the least bytes of the fullest rank wherever states lie."""
        pipelines = self.memory.pipelines
        few = c.changed({"accumulation": representative("interleaved", c.pp, c.accumulation)})
        layers, groups, is_long, read, reduced, sharded, whole = self._in_flight(few, schedules)
        kept, of_group, working, of_neighbour = self._layer_bytes(c, ways)
        # A share of all gradients and three units' in full; all of them where each rank keeps all. Where some parameters are
        # frozen nothing is said of gradients, which are fp32 or wider.
        gradients = np.minimum(reduced + sharded // c.batch, whole) * (
            0 if pipelines.recipe.model.freeze or pipelines.recipe.adapter.is_used else GRADIENT_BYTES
        )
        states = read * pipelines.compute.itemsize + gradients + pipelines.workspace + pipelines.outside(c, True)
        moving = c.sequences * (working + kept * layers + of_group * groups + of_neighbour * is_long)
        found: np.ndarray = states + moving + (FRAGMENTATION * moving).astype(np.int64)
        return found

    @remember(*LAYER)
    def _layer_bytes(self, c: Candidate, ways: tuple[Way, ...]) -> np.ndarray:
        """[4, ways]: bytes of a layer for one sequence: kept by each layer and microbatch in flight; beside that by each group of
        layers that are computed again together; by one layer in its backward, with an offloaded one on its way; by another one
        on its way, where neighbours are offloaded. Several sequences have as much as one so often, or some bytes more."""
        one = self.memory.activations.of_microbatch(
            c.changed({"sequences": 1, "checkpointing": "none", "offload": frozenset()})
        )
        # Where a recipe offloads a part of the layers neighbours need not be offloaded.
        has_neighbours = self.memory.pipelines.recipe.memory.offload.activations in (0, 1)
        rows = []
        for policy, offload in ways:
            cost = one.cost_of(policy)
            # A group keeps one layer's input; whatever else a layer keeps stays for all.
            of_group = one.hidden_bytes if policy == "sqrt" else 0
            working = cost.recomputed + one.backward_temporaries
            # A recurrent mixer may keep less than its layer's estimate.
            kept = cost.kept + (min((0, *one.mixers)) if policy == "none" else 0)
            if offload:
                rows.append((0, 0, working + kept, kept * has_neighbours))
            else:
                rows.append((kept - of_group, of_group, working, 0))
        return np.array(rows, dtype=np.int64).T

    @remember("pp", "accumulation", "context", "tp", "ep", "expert_tp", "sequence")
    def _in_flight(self, c: Candidate, schedules: Schedules) -> np.ndarray:
        """[7, schedules, 1]: the least that the first rank of a pipeline has at once: layers, and groups of layers, times
        microbatches; whether a stage of its has several layers; elements of parameters of units that are unsharded at once, of
        those whose gradients are there at once, and of all units, with experts divided by tp, and whole."""
        choices = [c.changed({"schedule": name, "virtual": virtual}) for name, virtual in schedules]
        return np.array([self._find_in_flight(each) for each in choices], dtype=np.int64).T[..., None]

    def _find_in_flight(self, c: Candidate) -> tuple[int, ...]:
        stages = self.memory.pipelines.of_ranks(c)[0]
        sizes = [stage.stop - stage.start for stage in stages]
        counts = first_in_flight(c.schedule, c.pp, c.virtual, c.accumulation)
        shape = self.memory.pipelines.shape
        units = [counted for stage in stages for counted in shape.stage_units(stage, c).counted]
        layers = [(unit.numel, count) for unit, count in units if unit.unit.is_layer]
        ends = [unit.numel for unit, _ in units if not unit.unit.is_layer]
        return (
            sum(size * count for size, count in zip(sizes, counts, strict=True)),
            sum(count_groups(size) * count for size, count in zip(sizes, counts, strict=True)),
            max(sizes) > 1,
            # Like `count_gathered`: one layer in use and one ahead; one gradient written and two under way.
            sum_largest(layers, 2) + max(ends, default=0),
            sum_largest([(unit.numel, count) for unit, count in units], 3),
            sum(unit.numel * count // (c.tp if unit.has_experts else 1) for unit, count in units),
            sum(unit.numel * count for unit, count in units),
        )


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


@dataclass(frozen=True, eq=False)
class TimeBounds:
    """Lower bounds for one model, recipe and cluster."""

    model: TimeModel

    @cached_property
    def gains_by_size(self) -> bool:
        """Whether a microbatch of k times as many tokens never takes longer than k microbatches. It does not by the formulas:
        kernels and messages have a start and a rate, tiles fill waves no worse, and what hides messages grows with them. Curves
        of measured ratios may say otherwise."""
        cluster = self.model.cluster
        curves = [cluster.memory_curve, *(link.correction for link in cluster.links.values())]
        return not cluster.corrections and not cluster.gradients and all(each is None for each in curves)

    @cached_property
    def _kinds(self) -> Counter[int]:
        """Layers of each kind."""
        return Counter(self.model.shape.kinds)

    def mean_rank(self, c: Candidate, smallest: Candidate | None = None) -> float:
        """Seconds of the mean rank with any schedule. smallest: the smallest microbatches that the bound is for, where they gain
        by their size and their number divides that of `c`."""
        # A large microbatch may have its loss in chunks, which computes the head once more, and a small one not.
        is_chunked = self.model.memory.activations.is_chunked(smallest or c)
        # Schedules with whole backwards hide most messages.
        one_s = self._all_units(c.changed({"schedule": "1f1b"}), is_chunked)
        return one_s * c.accumulation / c.pp

    @remember(*DIVISION, *WORK, "world")
    def _all_units(self, c: Candidate, is_chunked: bool) -> float:
        """Seconds of all units for a microbatch."""
        model, times = self.model, self.model.times(c.context)
        units = [(model.layer(c, kind, 0.0), count) for kind, count in self._kinds.items()]
        ends = (times.embedding(c), "embedding"), (times.head(c, is_chunked), "head")
        units += [(model.end(c, work, name), 1) for work, name in ends]
        return sum(count * each.seconds for each, count in units)

    def stages(self, c: Candidate) -> float:
        """Seconds wherever states are kept."""
        model, (forms, owners) = self.model, self.model.stages(c)
        sums = {form: model.sum_units(c, form) for form in dict.fromkeys(forms)}
        own = [sums[form] for form in forms]
        return self._length(c, owners, replace(model.costs(c, own), message=0.0))

    def states(self, c: Candidate) -> float:
        """Seconds with states where `c` keeps them."""
        model = self.model
        ranks = model.ranks(c)
        costs = replace(model.costs(c, ranks.stages), message=0.0)
        return self._length(c, model.stages(c)[1], costs) + ranks.late[ranks.slowest]

    def _length(self, c: Candidate, owners: Sequence[int], costs: Costs) -> float:
        if c.pp == 1:
            return c.accumulation * sum(map(sum, (costs.forward, costs.input, costs.weight)))
        return least_length(c.schedule, owners, c.accumulation, costs)


class Engine:
    """Forecasts and their lower bounds, for one model, recipe and cluster."""

    def __init__(self, shape: ModelShape, recipe: Recipe, cluster: ClusterRates):
        self.shape, self.cluster, self.times = shape, cluster, TimeModel(shape, recipe, cluster)
        self.bytes = self.times.memory
        self.least_bytes, self.least_time = MemoryBounds(self.bytes), TimeBounds(self.times)

    def forecast(self, candidate: Candidate) -> Forecast:
        """Bytes and seconds of a layout."""
        return Forecast(self.bytes.forecast(candidate, self.cluster), self.times.forecast(candidate))
