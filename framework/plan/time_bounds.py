"""Lower bounds of a step's seconds, for layouts that a search has not chosen completely.

mean_rank      the mean rank's work: of any schedule, and of all microbatches that are no larger
stages         computation and messages of layers in the shortest time that a schedule allows (`bubble.least_length`),
               wherever states are kept
states         the same with ZeRO's messages and the update: all of a forecast but the simulated schedule
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from framework.parallel.pipeline.simulate import Costs
from framework.plan.bubble import least_length
from framework.plan.candidate import Candidate
from framework.plan.time import TimeModel


@dataclass(frozen=True, eq=False)
class TimeBounds:
    """Lower bounds for one model, recipe and cluster."""

    model: TimeModel
    _means: dict[object, float] = field(default_factory=dict, repr=False)

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
        ranks = (c.tp, c.sequence, c.cp, c.ulysses, c.is_gather, c.ep, c.expert_tp, c.ranks_per_node, c.world)
        work = (c.tokens, c.sequences, c.context, c.checkpointing, "activations" in c.offload, c.accumulation > 1)
        key = (ranks, work, is_chunked)
        if key not in self._means:
            # Schedules with whole backwards hide most messages.
            c, model, groups = c.changed({"schedule": "1f1b"}), self.model, self.model.groups(c)
            units = [(model.layer(kind, c, groups, 0.0), count) for kind, count in self._kinds.items()]
            times = model.times(c.context)
            units += [(model.end(work, c, groups), 1) for work in (times.embedding(c), times.head(c, is_chunked))]
            self._means[key] = sum(count * each.seconds for each, count in units)
        return self._means[key] * c.accumulation / c.pp + self.model.profile.step_s

    def stages(self, c: Candidate) -> float:
        """Seconds wherever states are kept."""
        model, (forms, order, owners) = self.model, self.model.stages(c)
        groups, host_s = model.groups(c), model.profile.microbatch_s
        sums = [model.sum_units(form, c, groups) for form in forms]
        own = [sums[index] for index in order]
        costs = Costs(
            [each.forward + host_s / 3 for each in own],
            [each.input + 2 * host_s / 3 for each in own],
            [each.weight for each in own],
            0.0,
        )
        return self._length(c, owners, costs) + model.profile.step_s

    def states(self, c: Candidate) -> float:
        """Seconds with states where `c` keeps them."""
        model = self.model
        ranks = model.ranks(c, model.groups(c))
        costs = Costs(
            [each.forward for each in ranks.stages],
            [each.input for each in ranks.stages],
            [each.weight for each in ranks.stages],
            0.0,
        )
        return self._length(c, model.stages(c)[2], costs) + ranks.late[ranks.slowest] + model.profile.step_s

    def _length(self, c: Candidate, owners: Sequence[int], costs: Costs) -> float:
        if c.pp == 1:
            return c.accumulation * sum(map(sum, (costs.forward, costs.input, costs.weight)))
        return least_length(c.schedule, owners, c.accumulation, costs)
