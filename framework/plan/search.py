"""The search: all legal layouts of a recipe on its ranks, ranked by forecast.

Layouts are millions, so not all are forecast. Choices are made in an order (`CHOICES`), in four steps, and all layouts that share
the first ones have lower bounds of bytes (memory_bounds.py) and of seconds (time_bounds.py):

    division     how ranks divide the computation: degrees, context, sequence, experts      the mean rank's work
    microbatch                                                                              the same, exactly
    stages       schedule, activation checkpointing, offload of activations                 the schedule's least time
    states       ZeRO and offload of states                                                 all but the simulated schedule

Bytes come first: layouts that recompute nothing are fast, and most of them do not fit, so that their time says nothing of the
layouts that do. The node with the least bound is expanded next, until that is above the last of the best so far. So the ranking
is that of brute force, and a test says so; what was left out is counted.
"""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count
from math import prod
from operator import itemgetter
from time import process_time
from typing import Any, Literal

import numpy as np

from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates
from framework.plan.forecast import Forecast, MemoryForecast, TimeForecast
from framework.plan.forecast_memory import MemoryModel, forecast_memory, host_spare_of_options, memory_model
from framework.plan.memory_bounds import MemoryBounds, Way
from framework.plan.memory_states import StateOptions
from framework.plan.rejections import Constraints, Rejection, read_field, too_large, too_large_for_node
from framework.plan.settings import Settings
from framework.plan.shape import ModelShape
from framework.plan.space import CHOICES, Space
from framework.plan.time import TimeModel
from framework.plan.time_bounds import TimeBounds

By = Literal["time", "memory"]
Mesh = tuple[int, int, int, int, int]
Schedules = tuple[tuple[str, int], ...]
DIVISION, WORK, SCHEDULE = ("context", "sequence", "experts"), "microbatch", "schedule"
WAY = ("checkpointing", "activations")
STATES = ("zero", "states")
# Sums in another order differ in the last digits: a bound must not exclude an equal layout.
ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class Engine:
    """Forecasts and their lower bounds, for one model, recipe and cluster."""

    shape: ModelShape
    settings: Settings
    cluster: ClusterRates
    times: TimeModel
    bytes: MemoryModel
    least_bytes: MemoryBounds
    least_time: TimeBounds

    @classmethod
    def of(cls, shape: ModelShape, settings: Settings, cluster: ClusterRates) -> "Engine":
        """The engine of a recipe."""
        times, model = TimeModel(shape, settings.recipe, cluster), memory_model(shape, settings)
        return cls(shape, settings, cluster, times, model, MemoryBounds(model), TimeBounds(times))

    def memory(self, candidate: Candidate) -> MemoryForecast:
        """Bytes of each rank of the pipeline."""
        return forecast_memory(self.shape, candidate, self.settings, self.cluster)

    def time(self, candidate: Candidate) -> TimeForecast:
        """Seconds of a step."""
        return self.times.forecast(candidate)

    def spare(self, stages: Candidate, options: StateOptions) -> np.ndarray:
        """Bytes that the fullest rank has left, for `stages` with states in each of these places; negative: missing."""
        return self.bytes.spare(stages, options, self.cluster.memory_bytes)

    def host_spare(self, stages: Candidate, options: StateOptions) -> np.ndarray:
        """Bytes of the host's memory that the fullest node has left, likewise."""
        return host_spare_of_options(self.shape, stages, options, self.settings, self.cluster)


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, with its forecast. price: of its ranks for an hour, 0 where unknown."""

    candidate: Candidate
    forecast: Forecast
    price: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.forecast.time.step_s

    @property
    def cost_per_token(self) -> float:
        """Cost in the unit of the price."""
        return self.price / 3600 / self.forecast.time.tokens_per_s

    @property
    def bytes(self) -> int:
        """Bytes of the fullest rank."""
        return self.forecast.memory.fullest.reserved


@dataclass(frozen=True)
class SearchResult:
    """The ranking, and what became of the other layouts."""

    by: By
    space: Space
    ranked: tuple[Ranked, ...]
    """The best, in order."""
    others: tuple[Ranked, ...]
    """Others that were forecast and fit, in order."""
    of_meshes: tuple[Ranked, ...]
    """The best layout of each mesh, as many as were wanted, in order."""
    rejections: tuple[Rejection, ...]
    """Each with the number of layouts that it stands for."""
    num_layouts: int
    num_slower: int
    """Layouts that bounds exclude: not forecast."""
    num_forecast: int
    cpu_s: float
    engine: Engine

    @property
    def num_rejected(self) -> int:
        """Layouts that no recipe may have, or that do not fit."""
        return sum(each.count for each in self.rejections)


@dataclass
class Search:
    """One search."""

    space: Space
    constraints: Constraints
    engine: Engine
    by: By = "time"
    best: int = 20
    """Layouts that are wanted, in order."""
    price: float = 0.0
    meshes: int = 0
    """Meshes that are wanted, each with its best layout."""
    within: float = 0.0
    """Wanted beside `best`: all layouts that exceed the best one by no more than this share."""
    ranked: list[tuple[tuple[object, ...], Ranked]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    num_layouts: int = 0
    num_slower: int = 0
    num_forecast: int = 0
    _firsts: dict[Mesh, tuple[tuple[object, ...], Ranked]] = field(default_factory=dict, repr=False)
    _open: list[tuple[float, int, int, Mesh, Callable[[], None]]] = field(default_factory=list, repr=False)
    _numbers: Iterator[int] = field(default_factory=count, repr=False)
    _places: dict[Any, tuple[StateOptions, list[Rejection]]] = field(default_factory=dict, repr=False)
    _asked: Counter[Any] = field(default_factory=Counter, repr=False)
    _options: dict[Any, StateOptions] = field(default_factory=dict, repr=False)
    _counts: dict[Any, int] = field(default_factory=dict, repr=False)
    _schedules_of: dict[int, Schedules] = field(default_factory=dict, repr=False)

    def run(self) -> SearchResult:
        """Search all layouts. Raises for no layout: it is rejected."""
        began = process_time()
        for c in self.divisions():
            self._consider_division(c)
        while self._open:
            bound, _, num_layouts, mesh, expand = heappop(self._open)
            if self._is_excluded(bound, mesh):
                self.num_slower += num_layouts
            else:
                expand()
        for key, (_, refused) in self._places.items():
            self.rejections += [replace(each, count=self._asked[key] * each.count) for each in refused]
        found = [each for _, each in self.ranked]
        firsts = [each for _, each in sorted(self._firsts.values(), key=itemgetter(0))]
        return SearchResult(
            self.by,
            self.space,
            tuple(found[: self.best]),
            tuple(found[self.best :]),
            tuple(firsts[: self.meshes]),
            tuple(self.rejections),
            self.num_layouts,
            self.num_slower,
            self.num_forecast,
            process_time() - began,
            self.engine,
        )

    def choose_layout(self, rejection: Rejection) -> Candidate | None:
        """One of the layouts that are rejected as too large: the first legal values of what is left to choose, with states where
        they leave most. None where no rule allows any."""
        names = list(CHOICES)
        rest = names[names.index(rejection.choice) + 1 :]
        if not rest:
            return rejection.candidate
        stages = next(self.expand(rejection.candidate, tuple(name for name in rest if name not in STATES)), None)
        if stages is None:
            return None
        options, _ = self._places[self._place_states(stages)]
        if not options.states:
            return None
        return _with_states(stages, options, int(np.argmax(self.engine.spare(stages, options))))

    # --- nodes

    def divisions(self) -> Iterator[Candidate]:
        """Divisions of the computation that no rule is against: all choices before the microbatch."""
        for c in self.space.children("degrees", self.space.root()):
            self.num_layouts += self._count(c, "degrees")
            if self._is_legal("degrees", c):
                yield from self.expand(c, DIVISION)

    def _consider_division(self, c: Candidate) -> None:
        """Bound a division: its smallest microbatches need least bytes, its largest ones least time."""
        works = sorted(self.space.values(WORK, c), key=itemgetter("sequences"))
        smallest, schedules = c.changed(works[0]), self._schedules(c)
        if not schedules:
            refused = list(self.expand(c, (WORK, SCHEDULE)))  # each for a reason of its own
            assert not refused, refused
            return
        fitting = self._fitting(DIVISION[-1], smallest, self._ways, schedules)
        if not fitting:
            return
        least, largest = self.engine.least_time, c.changed(works[-1])
        bound: float = min(fitting.values())
        if self.by == "time":
            # Where curves are measured nothing is known before each size is asked.
            gains = least.gains_by_size and all(largest.sequences % each["sequences"] == 0 for each in works)
            layouts = self._quickest(largest, fitting) if gains else ()
            bound = min((least.mean_rank(each, smallest) for each in layouts), default=0.0)
        self._push(bound, DIVISION[-1], c, partial(self._open_division, c))

    def _open_division(self, division: Candidate) -> None:
        schedules = self._schedules(division)
        for c in self.expand(division, (WORK,)):
            if fitting := self._fitting(WORK, c, self._ways, schedules):
                bound: float = min(fitting.values())
                if self.by == "time":
                    bound = min(self.engine.least_time.mean_rank(each) for each in self._quickest(c, fitting))
                self._push(bound, WORK, c, partial(self._open_work, c))

    def _open_work(self, work: Candidate) -> None:
        for schedule in self.expand(work, (SCHEDULE,)):
            own = ((schedule.schedule, schedule.virtual),)
            for c in self.expand(schedule, WAY) if self._fitting(SCHEDULE, schedule, self._ways, own) else ():
                way = (c.checkpointing, c.offload)
                if fitting := self._fitting(WAY[-1], c, (way,), own):
                    # The cheap bound first: most of them are never expanded.
                    bound = fitting[way] if self.by == "memory" else self.engine.least_time.mean_rank(c)
                    self._push(bound, WAY[-1], c, partial(self._open_way, c))

    def _open_way(self, c: Candidate) -> None:
        if self.by == "memory":
            self._open_stages(c)
        else:
            self._push(self.engine.least_time.stages(c), WAY[-1], c, partial(self._open_stages, c))

    def _open_stages(self, stages: Candidate) -> None:
        """Consider the places of states: those that fit, by their bounds."""
        key = self._place_states(stages)
        self._asked[key] += 1
        options, limit = self._places[key][0], self.engine.cluster.memory_bytes
        if not options.states:
            return
        spare, host = self.engine.spare(stages, options), self.engine.host_spare(stages, options)
        over = np.flatnonzero(spare < 0)
        if len(over):
            nearest = over[np.argmax(spare[over])]
            layout = _with_states(stages, options, nearest)
            self.rejections.append(too_large(layout, -int(spare[nearest]), limit, "states", len(over)))
        over = np.flatnonzero((spare >= 0) & (host < 0))
        if len(over):
            layout = _with_states(stages, options, over[np.argmax(host[over])])
            self.rejections.append(too_large_for_node(layout, self.engine.memory(layout).node, len(over)))
        for which in np.flatnonzero((spare >= 0) & (host >= 0)).tolist():
            layout = _with_states(stages, options, which)
            bound = limit - int(spare[which]) if self.by == "memory" else self.engine.least_time.states(layout)
            self._push(bound, "states", layout, partial(self._forecast, layout))

    def _forecast(self, c: Candidate) -> None:
        memory = self.engine.memory(c)
        if not memory.node.fits:
            self.rejections.append(too_large_for_node(c, memory.node))
            return
        ranked = Ranked(c, Forecast(memory, self.engine.time(c)), self.price * self.space.world)
        self.num_forecast += 1
        first, second = self._value(ranked), ranked.step_s if self.by == "memory" else ranked.bytes
        entry = ((first, second, rank_layout(c)), ranked)
        insort(self.ranked, entry, key=itemgetter(0))
        if self.meshes:
            known = self._firsts.setdefault(mesh_of(c), entry)
            self._firsts[mesh_of(c)] = min(known, entry, key=itemgetter(0))

    def _push(self, bound: float, choice: str, c: Candidate, expand: Callable[[], None]) -> None:
        """Open the layouts that share the choices of `c` up to this one, unless their bound excludes them already."""
        num_layouts, mesh = self._count(c, choice), mesh_of(c)
        if self._is_excluded(bound, mesh):
            self.num_slower += num_layouts
        else:
            # Among equals in the order in which they are found, which is always the same.
            heappush(self._open, (bound, next(self._numbers), num_layouts, mesh, expand))

    # --- legality and bytes

    def expand(self, c: Candidate, choices: tuple[str, ...]) -> Iterator[Candidate]:
        """`c` with all values of these choices that nothing is against."""
        if not choices:
            yield c
            return
        for child in self.space.children(choices[0], c):
            if self._is_legal(choices[0], child):
                yield from self.expand(child, choices[1:])

    def _is_legal(self, choice: str, c: Candidate) -> bool:
        found = self.constraints.refuse(choice, c)
        if found is not None:
            asked, (key, reason) = found
            self.rejections.append(Rejection(asked.kind, c, choice, reason, key, count=self._count(c, choice)))
        return found is None

    def _count(self, c: Candidate, choice: str) -> int:
        """Layouts that share the choices of `c` up to this one: how many values the later ones have depends on degrees alone."""
        key = (choice, c.dp, c.cp, c.tp, c.pp)
        if key not in self._counts:
            names = list(CHOICES)
            self._counts[key] = prod(len(self.space.values(name, c)) for name in names[names.index(choice) + 1 :])
        return self._counts[key]

    def _place_states(self, c: Candidate) -> Any:
        """The key in `_places` of the legal places of states: asked once for all layouts that agree in what the rules read."""
        key = (c.dp * c.cp, c.tp, c.offload, *[read_field(c, name) for name in self._read_for_states])
        if key not in self._places:
            known = len(self.rejections)
            found = tuple([(each.zero, each.shard, each.offload) for each in self.expand(c, STATES)])
            refused = self.rejections[known:]
            del self.rejections[known:]
            options = self._options.setdefault((c.dp * c.cp, c.tp, found), StateOptions(found))
            by_reason: dict[tuple[str, str, str], list[Rejection]] = {}
            for each in refused:
                by_reason.setdefault((each.choice, each.key, each.reason), []).append(each)
            alike = [replace(own[0], count=sum(each.count for each in own)) for own in by_reason.values()]
            self._places[key] = options, alike
        return key

    @cached_property
    def _read_for_states(self) -> tuple[str, ...]:
        """The fields that rules about states read, of those that are chosen before."""
        own = {name for choice in STATES for name in CHOICES[choice]}
        asked = [each for choice in STATES for each in self.constraints.by_choice[choice]]
        return tuple(dict.fromkeys(name for each in asked for name in each.fields if name not in own))

    def _fitting(self, choice: str, c: Candidate, ways: tuple[Way, ...], schedules: Schedules) -> dict[Way, int]:
        """The ways to keep activations in which layouts may fit, with their least bytes. Where none is left they are rejected."""
        sizes, limit = self.engine.least_bytes.least_of_ways(c, ways, schedules), self.engine.cluster.memory_bytes
        found = {way: size for way, size in zip(ways, sizes, strict=True) if size <= limit}
        if not found:
            missing = min(sizes) - limit
            self.rejections.append(too_large(c, missing, limit, choice, self._count(c, choice)))
        return found

    def _quickest(self, c: Candidate, ways: Iterable[Way]) -> Iterator[Candidate]:
        """`c` with the ways of which one takes least time: computing again only adds time, and so does a way to the host."""
        for policy, offload in ways:
            yield c.changed({"checkpointing": policy, "offload": offload})
            if not offload:
                return

    @cached_property
    def _ways(self) -> tuple[Way, ...]:
        """Ways to keep activations, those that compute less first, without those that rules refuse whatever else is chosen."""
        root, own = self.space.root(), {name for choice in WAY for name in CHOICES[choice]}
        asked = [each for choice in WAY for each in self.constraints.by_choice[choice] if own.issuperset(each.fields)]
        found = [c for policy in self.space.children(WAY[0], root) for c in self.space.children(WAY[1], policy)]
        legal = [c for c in found if all(each.refuse(c) is None for each in asked)]
        return tuple((c.checkpointing, c.offload) for c in legal or found)

    def _schedules(self, c: Candidate) -> Schedules:
        """Schedules, with the stages of a rank, that a division of the ranks may have."""
        if c.pp not in self._schedules_of:
            own = {"pp", *CHOICES[SCHEDULE]}
            asked = [each for each in self.constraints.by_choice[SCHEDULE] if own.issuperset(each.fields)]
            found = self.space.children(SCHEDULE, c)
            legal = [each for each in found if all(one.refuse(each) is None for one in asked)]
            self._schedules_of[c.pp] = tuple((each.schedule, each.virtual) for each in legal)
        return self._schedules_of[c.pp]

    # --- bounds

    def _value(self, ranked: Ranked) -> float:
        """The ranked and bounded value."""
        return ranked.bytes if self.by == "memory" else ranked.step_s

    def _is_excluded(self, bound: float, mesh: Mesh) -> bool:
        """Whether no layout of such a bound, on this mesh, can be one that is wanted."""
        least = bound * ROUNDING
        if len(self.ranked) < self.best or least <= self._value(self.ranked[self.best - 1][1]):
            return False
        if self.within and least <= self._value(self.ranked[0][1]) * (1 + self.within):
            return False
        if not self.meshes or (mesh in self._firsts and least > self._value(self._firsts[mesh][1])):
            return True
        values = sorted(self._value(each) for _, each in self._firsts.values())
        return len(values) >= self.meshes and least > values[self.meshes - 1]


def mesh_of(c: Candidate) -> Mesh:
    """The degrees of a layout. Layouts of one mesh are near-duplicates: they differ in microbatches, ZeRO, or what is kept."""
    return c.dp, c.tp, c.pp, c.cp, c.ep


def _with_states(stages: Candidate, options: StateOptions, which: int) -> Candidate:
    return stages.changed(dict(zip(("zero", "shard", "offload"), options.states[which], strict=True)))


def rank_layout(c: Candidate) -> tuple[object, ...]:
    """Among equals the layout that divides less, and keeps more on the device, comes first."""
    degrees = (c.pp, c.cp, c.tp, c.ep, c.zero, c.shard, len(c.offload), c.virtual, c.schedule, c.checkpointing)
    return (*degrees, not c.sequence, c.ulysses, c.is_gather, c.expert_tp, c.sequences, *sorted(c.offload))
