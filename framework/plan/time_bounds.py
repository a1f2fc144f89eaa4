"""Lower bounds of a step's seconds, which a search asks before it has chosen all of a layout.

least_mean           the mean rank's work, of all schedules
least                work and messages of layers in the shortest time that a schedule allows (`bubble.least_length`)
least_of_states      what ZeRO and the update add to it, as if computation beside their messages had no end
least_with_states    both, with the computation that there is: all but the simulated schedule
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from framework.plan.bubble import WHOLE_BACKWARDS
from framework.plan.candidate import Candidate
from framework.plan.collectives import Groups
from framework.plan.sharding import ShardedUnit
from framework.plan.stage_time import StageForm, UnitTime
from framework.plan.time import TimeModel
from framework.recipe.derive import SPLIT_BACKWARDS

# Computation that hides whatever can be hidden.
ENDLESS_S = 1e30
# Seconds of a unit for one microbatch that paths through a schedule are made of.
PASSES = ("forward", "to the input's gradient", "all")


class Paths(NamedTuple):
    """Paths through schedules, of which the longest bounds each. once, often: [paths, passes x units], units of a path, and those
    that come with each microbatch; stages: [paths], of those; first: of each schedule the first of its paths."""

    once: np.ndarray
    often: np.ndarray
    stages: np.ndarray
    first: np.ndarray


@dataclass(frozen=True, eq=False)
class TimeBounds:
    """Those of one model, recipe and cluster."""

    model: TimeModel
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def gains_by_size(self) -> bool:
        """Whether a microbatch of k times as many tokens never takes longer than k microbatches. So it is by the formulas:
        kernels and messages have a start and a rate, tiles fill waves no worse, and what hides messages grows with them. Curves
        of measured ratios may say otherwise."""
        cluster = self.model.cluster
        curves = [cluster.memory_curve, *(link.correction for link in cluster.links.values())]
        return not cluster.corrections and not cluster.gradients and all(each is None for each in curves)

    def least_mean(self, c: Candidate, smallest: Candidate) -> float:
        """Seconds of the mean rank, whatever the schedule is: of microbatches of so many sequences, and where they gain by their
        size of all smaller ones whose size divides it, down to those of `smallest`."""
        # A large microbatch may have its loss in chunks, which computes the head once more, and a small one not.
        is_chunked = self.model.memory.activations.is_chunked(smallest)
        units = self._units(c, ((c.schedule, c.virtual),), is_chunked)
        return float(units[-len(self._names) :] @ self._counts) * c.accumulation / c.pp

    def least(self, c: Candidate, schedules: tuple[tuple[str, int], ...]) -> float:
        """Seconds wherever states lie, by any of these schedules: names, and stages of a rank."""
        units = self._units(c, schedules, self.model.memory.activations.is_chunked(c))
        paths = self._paths(c, schedules)
        seconds = paths.once @ units + c.accumulation * (
            paths.often @ units + paths.stages * self.model.profile.microbatch_s
        )
        of_schedules = np.maximum.reduceat(seconds, paths.first) if len(schedules) > 1 else seconds.max()
        return float(of_schedules.min()) + self.model.profile.step_s

    # --- units

    @cached_property
    def _kinds(self) -> Mapping[int, int]:
        """Layers of each kind."""
        return Counter(self.model.shape.kinds)

    @cached_property
    def _names(self) -> tuple[int | str, ...]:
        return (*self._kinds, "embedding", "head")

    @cached_property
    def _counts(self) -> np.ndarray:
        return np.array([*self._kinds.values(), 1, 1], dtype=float)

    def _units(self, c: Candidate, schedules: tuple[tuple[str, int], ...], is_chunked: bool) -> np.ndarray:
        """Seconds of one microbatch of each unit, by pass: [passes x units]. Schedules that leave weight gradients for later hide
        fewer messages. is_chunked: the loss."""
        is_split = all(name in SPLIT_BACKWARDS for name, _ in schedules)
        ranks = (c.tp, c.sequence, c.cp, c.ulysses, c.is_gather, c.ep, c.expert_tp, c.ranks_per_node, c.world)
        work = (c.tokens, c.sequences, c.context, c.checkpointing, "activations" in c.offload, c.accumulation > 1)
        key = (ranks, work, is_split, is_chunked)
        if key not in self._known:
            name = schedules[0][0] if is_split else "1f1b"
            self._known[key] = self._find_units(c.changed({"schedule": name}), is_chunked)
        found: np.ndarray = self._known[key]
        return found

    def _find_units(self, c: Candidate, is_chunked: bool) -> np.ndarray:
        model, groups = self.model, self.model.groups(c)
        found = [_passes(model.layer(kind, c, groups, 0.0)) for kind in self._kinds]
        key = ("ends", c.tokens, c.context, c.tp, c.sequence, c.accumulation > 1, groups.tp.nodes, is_chunked)
        if key not in self._known:
            times = model.times(c.context)
            ends = times.embedding(c), times.head(c, is_chunked)
            self._known[key] = [_passes(model.end(work, c, groups)) for work in ends]
        return np.array([*found, *self._known[key]]).T.ravel()

    # --- paths

    def _paths(self, c: Candidate, schedules: tuple[tuple[str, int], ...]) -> Paths:
        key = ("paths", schedules, c.pp, c.context)
        if key not in self._known:
            found = [self._find_paths(c.changed({"schedule": name, "virtual": virtual})) for name, virtual in schedules]
            first = np.cumsum([0, *(len(each) for each in found[:-1])])
            once, often, stages = zip(*[path for each in found for path in each], strict=True)
            self._known[key] = Paths(np.array(once), np.array(often), np.array(stages), first)
        paths: Paths = self._known[key]
        return paths

    def _find_paths(self, c: Candidate) -> list[tuple[np.ndarray, np.ndarray, int]]:
        """(units that come once, units of each microbatch, stages of these) of each path, as `least_length` has them."""
        forms, order, owners = self.model.stages(c)
        stages = [self._count(forms[index]) for index in order]
        whole, nothing = c.schedule in WHOLE_BACKWARDS, self._count(None)
        ranks: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, int]] = {}
        for rank in range(c.pp):
            own = [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
            # Of ranks with equal stages the last one begins last.
            work = self._as_pass(2, sum(own, nothing))
            ranks[tuple(work)] = self._as_pass(0, sum(stages[: owners.index(rank)], nothing)), work, len(own)
        passage = 2 if whole else 1
        to_last = self._as_pass(passage, sum(stages[:-1], nothing)), self._as_pass(passage, stages[-1]), 0
        paths = [*ranks.values(), to_last]
        if whole:
            last = sum((stage for stage, owner in zip(stages, owners, strict=True) if owner == c.pp - 1), nothing)
            before = self._as_pass(2, sum(stages[: c.pp - 1], nothing))
            paths.append((before, self._as_pass(2, last), owners.count(c.pp - 1)))
        return paths

    def _count(self, form: StageForm | None) -> np.ndarray:
        """Units of a stage by name; of no stage none."""
        counts: dict[int | str, int] = {} if form is None else dict(form.layers)
        if form is not None:
            counts |= {"embedding": int(form.bounds.is_first), "head": int(form.bounds.is_last)}
        return np.array([counts.get(name, 0) for name in self._names], dtype=float)

    def _as_pass(self, number: int, counts: np.ndarray) -> np.ndarray:
        found = np.zeros((len(PASSES), len(counts)))
        found[number] = counts
        return found.ravel()

    # --- states

    def least_with_states(self, c: Candidate, least: float) -> float:
        """Seconds that know where states lie, but simulate no schedule. least: wherever they lie."""
        model, groups = self.model, self.model.groups(c)
        stages = [model.stage(form, c, groups) for form in model.stages(c)[0]]
        slowest = bound = 0.0
        for indices in self._kinds_of_ranks(c):
            own = [stages[index] for index in indices]
            busy = c.accumulation * sum([each.microbatch for each in own])
            late = sum([each.after for each in own])
            late += sum(model.update.seconds(sum([each.owned for each in own]), c).values())
            if busy + late > slowest:
                slowest, bound = busy + late, late + max(least, busy + model.profile.step_s)
        return bound

    def least_of_states(self, c: Candidate) -> tuple[float, float]:
        """What states add to a step at the least, whatever the rank: seconds of each microbatch, and of what comes once."""
        model, groups = self.model, self.model.groups(c)
        stages = [self._least_of_stage(form, c, groups) for form in model.stages(c)[0]]
        ranks = [[stages[index] for index in own] for own in self._kinds_of_ranks(c)]
        updates = [sum(model.update.seconds(sum([owned for _, _, owned in own]), c).values()) for own in ranks]
        often = min(sum([each for each, _, _ in own]) for own in ranks)
        return often, min(sum([once for _, once, _ in own], own_s) for own, own_s in zip(ranks, updates, strict=True))

    def _least_of_stage(self, form: StageForm, c: Candidate, groups: Groups) -> tuple[float, float, float]:
        """(seconds of a microbatch, seconds of a step, elements that a rank updates) of a stage."""
        elements, ends = self.model.elements(form, c), form.bounds
        counted = [("embedding", 1)] * ends.is_first + [*form.layers] + [("head", 1)] * ends.is_last
        units = [
            ShardedUnit(*elements[kind], ENDLESS_S, ENDLESS_S, count, kind == "embedding", kind == "head")
            for kind, count in counted
        ]
        found, stolen = self.model.sharding.time(units, c, groups), self.model.profile.stolen
        owned = sum([each.count * (each.dense / c.shard + each.experts / groups.expert_shard.size) for each in units])
        microbatch = sum(found.gathers) + found.reductions + stolen * found.hidden
        return microbatch, found.gathers_once + found.reductions_once + stolen * found.hidden_once, owned

    def _kinds_of_ranks(self, c: Candidate) -> Sequence[tuple[int, ...]]:
        """The forms of the stages of each rank of the pipeline, once for ranks that have the same."""
        key = ("ranks", c.pp, c.schedule, c.virtual, c.context)
        if key not in self._known:
            _, order, owners = self.model.stages(c)
            ranks: list[list[int]] = [[] for _ in range(c.pp)]
            for index, owner in zip(order, owners, strict=True):
                ranks[owner].append(index)
            self._known[key] = tuple(dict.fromkeys(map(tuple, ranks)))
        found: Sequence[tuple[int, ...]] = self._known[key]
        return found


def _passes(unit: UnitTime) -> tuple[float, float, float]:
    return unit.forward, unit.forward + unit.input, unit.seconds
