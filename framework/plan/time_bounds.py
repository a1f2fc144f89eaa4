"""Lower bounds of a step's seconds, for layouts that a search has not chosen completely.

mean_rank      the mean rank's work: of any schedule, and of all microbatches that are no larger
stages         computation and messages of layers in the shortest time that a schedule allows (`bubble.least_length`),
               wherever states are kept
states         the same with ZeRO's messages and the update: all of a forecast but the simulated schedule
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from framework.parallel.pipeline.simulate import Costs
from framework.plan.bubble import least_length
from framework.plan.candidate import Candidate
from framework.plan.remember import remember
from framework.plan.time import DIVISION, WORK, TimeModel


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
        return one_s * c.accumulation / c.pp + self.model.profile.step_s

    @remember(*DIVISION, *WORK, "world")
    def _all_units(self, c: Candidate, is_chunked: bool) -> float:
        """Seconds of all units for a microbatch."""
        model, times = self.model, self.model.times(c.context)
        units = [(model.layer(c, kind, 0.0), count) for kind, count in self._kinds.items()]
        units += [(model.end(c, work), 1) for work in (times.embedding(c), times.head(c, is_chunked))]
        return sum(count * each.seconds for each, count in units)

    def stages(self, c: Candidate) -> float:
        """Seconds wherever states are kept."""
        model, (forms, owners) = self.model, self.model.stages(c)
        host_s = model.profile.microbatch_s
        sums = {form: model.sum_units(c, form) for form in dict.fromkeys(forms)}
        own = [sums[form] for form in forms]
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
        ranks = model.ranks(c)
        costs = replace(model.costs_of(c, ranks.stages), message=0.0)
        return self._length(c, model.stages(c)[1], costs) + ranks.late[ranks.slowest] + model.profile.step_s

    def _length(self, c: Candidate, owners: Sequence[int], costs: Costs) -> float:
        if c.pp == 1:
            return c.accumulation * sum(map(sum, (costs.forward, costs.input, costs.weight)))
        return least_length(c.schedule, owners, c.accumulation, costs)
