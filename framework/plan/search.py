"""The search: all legal layouts of a recipe on its ranks, ranked by what is foretold of them.

Layouts are millions, so they are not all forecast. Choices are made in an order (`CHOICES`), and all layouts that share the
first ones have lower bounds of bytes and of seconds: of the mean rank's work, then of a schedule's, then of where states lie,
then of the simulated schedule. Bytes come first: what recomputes nothing is fast, and most of it is too large, so that its time
says nothing of the layouts that fit. Whatever has the least bound is opened next, until that is above the last of the best so
far. So the ranking is that of brute force, and a test says so; what was left out is counted.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import prod
from operator import itemgetter
from time import process_time
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from framework.plan.candidate import Candidate
from framework.plan.engine import Engine
from framework.plan.forecast import Forecast
from framework.plan.memory_bounds import Way
from framework.plan.memory_states import StateOptions, States
from framework.plan.rejections import Constraints, Rejection, read_field, too_large, too_large_for_node
from framework.plan.space import CHOICES, Space

By = Literal["time", "memory"]
Mesh = tuple[int, int, int, int, int]
DIVISION, WORK, SCHEDULE = ("context", "sequence", "experts"), "microbatch", "schedule"
WAY = ("checkpointing", "activations")
STATES = ("zero", "states")
# Sums in another order differ in the last digits: a bound is not to exclude what is equal.
ROUNDING = 1 - 1e-9


@dataclass(frozen=True)
class Ranked:
    """A layout that fits, with what is foretold. price: of its ranks for an hour, 0 where unknown."""

    candidate: Candidate
    forecast: Forecast
    price: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.forecast.time.step_s

    @property
    def cost_per_token(self) -> float:
        """In the unit of the price."""
        return self.price / 3600 / self.forecast.time.tokens_per_s

    @property
    def bytes(self) -> int:
        """Of the fullest rank."""
        return self.forecast.memory.fullest.reserved


@dataclass(frozen=True)
class SearchResult:
    """by: what it is ranked by. ranked: the best, in order; others: what else was forecast and fits, in order. of_meshes: the
    best of each mesh, as many as were wanted, in order. rejections: each with the number of layouts that it stands for.
    num_layouts: of the space; num_slower: of those that bounds exclude, not forecast; num_forecast: layouts whose time was
    foretold. cpu_s: of the search. engine: what foretold them."""

    by: By
    space: Space
    ranked: tuple[Ranked, ...]
    others: tuple[Ranked, ...]
    of_meshes: tuple[Ranked, ...]
    rejections: tuple[Rejection, ...]
    num_layouts: int
    num_slower: int
    num_forecast: int
    cpu_s: float
    engine: Engine

    @property
    def num_rejected(self) -> int:
        """Layouts that no recipe may have, or that do not fit."""
        return sum(each.count for each in self.rejections)


@dataclass
class Options:
    """Layouts that differ in where states lie alone, and fit. least: a bound of all; states: by rising bound of each; place: of
    the first that is not opened yet."""

    least: float
    states: Sequence[States]
    bounds: Sequence[float]
    place: int = 0

    @property
    def count(self) -> int:
        """Those that are not opened yet."""
        return len(self.states) - self.place


@dataclass
class Places:
    """Where rules allow states, of all layouts that agree in what these read. against: the first such layout's rejections;
    times: such layouts."""

    options: StateOptions
    against: Sequence[Rejection]
    times: int = 0

    def refused(self) -> Iterator[Rejection]:
        """One for each reason, of all of the layouts."""
        by_reason: dict[tuple[str, str, str], list[Rejection]] = {}
        for each in self.against:
            by_reason.setdefault((each.choice, each.key, each.reason), []).append(each)
        for alike in by_reason.values():
            yield replace(alike[0], count=self.times * sum(each.count for each in alike))


@dataclass
class Search:
    """One search. best: as many layouts as are wanted, in order; meshes: as many meshes, of each its best layout; within: all
    layouts that exceed the best one by no more than this share. What is excluded is known to be none of these."""

    space: Space
    constraints: Constraints
    engine: Engine
    by: By = "time"
    best: int = 20
    price: float = 0.0
    meshes: int = 0
    within: float = 0.0
    ranked: list[tuple[tuple[object, ...], Ranked]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    num_layouts: int = 0
    num_slower: int = 0
    num_forecast: int = 0
    _firsts: dict[Mesh, tuple[tuple[object, ...], Ranked]] = field(default_factory=dict, repr=False)
    _open: list[tuple[float, int, str, Candidate, Options | None]] = field(default_factory=list, repr=False)
    _numbers: Iterator[int] = field(default_factory=count, repr=False)
    _places: dict[Any, Places] = field(default_factory=dict, repr=False)
    _options: dict[Any, StateOptions] = field(default_factory=dict, repr=False)
    _added: dict[Any, dict[int, tuple[float, float]]] = field(default_factory=dict, repr=False)
    _simulated: dict[Candidate, float] = field(default_factory=dict, repr=False)
    _counts: dict[Any, int] = field(default_factory=dict, repr=False)
    _schedules_of: dict[int, tuple[tuple[str, int], ...]] = field(default_factory=dict, repr=False)

    def run(self) -> SearchResult:
        """All layouts. Never raises for a layout: it is rejected."""
        began = process_time()
        for c in self._find_divisions():
            self._consider_division(c)
        while self._open:
            bound, _, choice, c, options = heappop(self._open)
            if self._is_excluded(bound, c):
                self.num_slower += self._count_open(c, choice, options)
            elif options is not None:
                self._open_options(c, options)
            else:
                self._OPENED[choice](self, bound, c)
        for places in self._places.values():
            self.rejections += places.refused()
        found = [each for _, each in self.ranked]
        return SearchResult(
            self.by,
            self.space,
            tuple(found[: self.best]),
            tuple(found[self.best :]),
            tuple(each for _, each in sorted(self._firsts.values(), key=lambda each: each[0])[: self.meshes]),
            tuple(self.rejections),
            self.num_layouts,
            self.num_slower,
            self.num_forecast,
            process_time() - began,
            self.engine,
        )

    # --- layouts

    def legal_layouts(self) -> Iterator[Candidate]:
        """All layouts that no rule is against, whether they fit or not."""
        for c in self._find_divisions():
            yield from self._expand(c, (WORK, SCHEDULE, *WAY, *STATES))

    def choose_layout(self, rejection: Rejection) -> Candidate | None:
        """One of the layouts that are rejected as too large: that with the first legal values of what is left to choose, and with
        states where they leave most. None where no rule allows any."""
        names = list(CHOICES)
        rest = names[names.index(rejection.choice) + 1 :]
        if not rest:
            return rejection.candidate
        stages = next(self._expand(rejection.candidate, tuple(name for name in rest if name not in STATES)), None)
        places = None if stages is None else self._place_states(stages)
        if stages is None or places is None or not places.options.states:
            return None
        nearest = int(np.argmax(self.engine.spare_of_options(stages, places.options)))
        return stages.changed(states_as(places.options.states[nearest]))

    def _find_divisions(self) -> Iterator[Candidate]:
        """How ranks may divide what they compute: all choices before the microbatch, where no rule is against them."""
        for c in self.space.children("degrees", self.space.root()):
            self.num_layouts += self._count(c, "degrees")
            if self._is_legal("degrees", c):
                yield from self._expand(c, DIVISION)

    def _push(self, bound: float, choice: str, c: Candidate, options: Options | None = None) -> None:
        """Open layouts that share the choices of `c` up to this one, unless their bound excludes them already."""
        if self._is_excluded(bound, c):
            self.num_slower += self._count_open(c, choice, options)
        else:
            # Among equals in the order in which they are found, which is always the same.
            heappush(self._open, (bound, next(self._numbers), choice, c, options))

    def _count_open(self, c: Candidate, choice: str, options: Options | None) -> int:
        return self._count(c, choice) if options is None else options.count

    def _open_division(self, bound: float, c: Candidate) -> None:
        for child in self._expand(c, (WORK,)):
            self._consider(WORK, child, self._ways, self._schedules(c))

    def _open_work(self, bound: float, c: Candidate) -> None:
        for child in self._expand(c, (SCHEDULE,)):
            self._consider(SCHEDULE, child, self._ways, ((child.schedule, child.virtual),))

    def _open_schedule(self, bound: float, c: Candidate) -> None:
        for child in self._expand(c, WAY):
            self._consider(WAY[-1], child, ((child.checkpointing, child.offload),), ((c.schedule, c.virtual),))

    def _open_stages(self, bound: float, c: Candidate) -> None:
        """Where states may lie."""
        places = self._place_states(c)
        if not len(places.options.states):
            places.times += 1
            return
        limit = self.engine.cluster.memory_bytes
        # First what states take and add at the least, of those that may fit: it is known for many layouts at once.
        table = self.engine.states_of_options(c, places.options)
        least = table.outside + table.in_backward + self.engine.least_bytes.activations(c)
        fitting = np.flatnonzero(least <= limit)
        if not len(fitting):
            self._refuse_size(WAY[-1], c, int(least.min()) - limit)
            return
        own = 0.0 if self.by == "memory" else self.engine.least_time.least(c, ((c.schedule, c.virtual),))
        bounds = least[fitting] if self.by == "memory" else own + self._least_of_states(c, places, fitting)
        if bounds.min() > bound:
            self._push(float(bounds.min()), WAY[-1], c)
            return
        places.times += 1
        spare = self.engine.spare_of_options(c, places.options)
        over = np.flatnonzero(spare < 0)
        if len(over):
            nearest = over[np.argmax(spare[over])]
            layout = c.changed(states_as(places.options.states[nearest]))
            self.rejections.append(too_large(layout, -int(spare[nearest]), limit, "states", len(over)))
        host = self.engine.host_spare_of_options(c, places.options)
        over = np.flatnonzero((spare >= 0) & (host < 0))
        if len(over):
            nearest = over[np.argmax(host[over])]
            layout = c.changed(states_as(places.options.states[nearest]))
            self.rejections.append(too_large_for_node(layout, self.engine.memory(layout).node, len(over)))
        bounds = limit - spare[fitting] if self.by == "memory" else bounds
        keeps = (spare[fitting] >= 0) & (host[fitting] >= 0)
        fitting, bounds = fitting[keeps], bounds[keeps]
        order = np.argsort(bounds, kind="stable")
        if len(order):
            states = [places.options.states[fitting[each]] for each in order]
            found = Options(own, states, bounds[order].tolist())
            self._push(found.bounds[0], "states", c, found)

    def _open_options(self, c: Candidate, options: Options) -> None:
        """The next option, and the others behind it."""
        layout, bound = c.changed(states_as(options.states[options.place])), options.bounds[options.place]
        options.place += 1
        if options.count:
            self._push(options.bounds[options.place], "states", c, options)
        self._push(bound if self.by == "memory" else self._bound_of_states(layout, options.least), "states", layout)

    def _least_of_states(self, c: Candidate, places: Places, which: np.ndarray) -> np.ndarray:
        """Seconds that states in these places add at the least, which layouts with equal stages share."""
        known = self._added.setdefault(
            (places.options, c.pp, c.schedule, c.virtual, c.tp, c.ep, c.expert_tp, c.sequence), {}
        )
        for each in which.tolist():
            if each not in known:
                layout = c.changed(states_as(places.options.states[each]))
                known[each] = self.engine.least_time.least_of_states(layout)
        return np.array([c.accumulation * known[each][0] + known[each][1] for each in which.tolist()])

    def _place_states(self, c: Candidate) -> Places:
        """Where rules allow states of `c`: asked once for all that agree in what they read."""
        names = self._read_for_states
        key = (c.dp * c.cp, c.tp, c.offload, *[read_field(c, name) for name in names])
        if key not in self._places:
            known = len(self.rejections)
            found = tuple([(each.zero, each.shard, each.offload) for each in self._expand(c, STATES)])
            options = self._options.setdefault((c.dp * c.cp, c.tp, found), StateOptions(found))
            self._places[key] = Places(options, self.rejections[known:])
            del self.rejections[known:]
        return self._places[key]

    @cached_property
    def _read_for_states(self) -> tuple[str, ...]:
        """The fields that rules about states read, of those that are chosen before."""
        own = {name for choice in STATES for name in CHOICES[choice]}
        asked = [each for choice in STATES for each in self.constraints.by_choice[choice]]
        return tuple(dict.fromkeys(name for each in asked for name in each.fields if name not in own))

    def _forecast(self, bound: float, c: Candidate) -> None:
        if self.by != "memory" and c.pp > 1:
            # Of one stage the bound knows the schedule already; of several it is simulated, once for all places of states.
            least = self._bound_of_states(c, self._simulate(c))
            if least > bound:
                self._push(least, "states", c)
                return
        memory = self.engine.memory(c)
        if not memory.node.fits:
            self.rejections.append(too_large_for_node(c, memory.node))
            return
        ranked = Ranked(c, Forecast(memory, self.engine.time(c)), self.price * self.space.world)
        self.num_forecast += 1
        entry = (self._key(ranked), ranked)
        insort(self.ranked, entry, key=lambda each: each[0])
        if self.meshes:
            first = self._firsts.setdefault(mesh_of(c), entry)
            self._firsts[mesh_of(c)] = min(first, entry, key=lambda each: each[0])

    def _simulate(self, c: Candidate) -> float:
        stages = c.changed({"zero": 0, "shard": 1, "offload": c.offload & {"activations"}})
        if stages not in self._simulated:
            self._simulated[stages] = self.engine.least_seconds(stages)
        return self._simulated[stages]

    # What becomes of layouts whose choices are made up to this one, in the order of their bounds.
    _OPENED: ClassVar[Mapping[str, Callable[["Search", float, Candidate], None]]] = MappingProxyType(
        {
            DIVISION[-1]: _open_division,
            WORK: _open_work,
            SCHEDULE: _open_schedule,
            WAY[-1]: _open_stages,
            "states": _forecast,
        }
    )

    def _refuse_size(self, choice: str, c: Candidate, missing: int) -> None:
        """All layouts that share the choices of `c` up to this one lack so many bytes at the least."""
        limit = self.engine.cluster.memory_bytes
        self.rejections.append(too_large(c, missing, limit, choice, self._count(c, choice)))

    def _expand(self, c: Candidate, choices: tuple[str, ...]) -> Iterator[Candidate]:
        """`c` with all values of these choices that nothing is against."""
        if not choices:
            yield c
            return
        for child in self.space.children(choices[0], c):
            if self._is_legal(choices[0], child):
                yield from self._expand(child, choices[1:])

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

    # --- order and bounds

    def _key(self, ranked: Ranked) -> tuple[object, ...]:
        first, second = self._value(ranked), ranked.step_s if self.by == "memory" else ranked.bytes
        return first, second, rank_layout(ranked.candidate)

    def _value(self, ranked: Ranked) -> float:
        """The ranked and bounded value."""
        return ranked.bytes if self.by == "memory" else ranked.step_s

    def _is_excluded(self, bound: float, c: Candidate) -> bool:
        """Whether no layout of such a bound, on the mesh of `c`, can be one that is wanted."""
        if len(self.ranked) < self.best:
            return False
        least = bound * ROUNDING
        if least <= self._value(self.ranked[self.best - 1][1]):
            return False
        if self.within and least <= self._value(self.ranked[0][1]) * (1 + self.within):
            return False
        return not self.meshes or self._is_behind_meshes(least, mesh_of(c))

    def _is_behind_meshes(self, least: float, mesh: Mesh) -> bool:
        """Whether so much is behind the best of this mesh that is known, or behind as many meshes as are wanted."""
        values = sorted(self._value(each) for _, each in self._firsts.values())
        if len(values) >= self.meshes and least > values[self.meshes - 1]:
            return True
        return mesh in self._firsts and least > self._value(self._firsts[mesh][1])

    def _consider_division(self, c: Candidate) -> None:
        """Of its microbatches the smallest needs least bytes, and the largest least time."""
        works = sorted(self.space.values(WORK, c), key=itemgetter("sequences"))
        smallest, schedules = c.changed(works[0]), self._schedules(c)
        if not schedules:
            refused = list(self._expand(c, (WORK, SCHEDULE)))  # each for a reason of its own
            assert not refused, refused
            return
        fitting = self._fitting(DIVISION[-1], smallest, self._ways, schedules)
        if not fitting:
            return
        least, largest = self.engine.least_time, c.changed(works[-1])
        bound: float = min(fitting.values())
        if self.by != "memory":
            # Where curves are measured nothing is known before each size is asked.
            gains = least.gains_by_size and all(largest.sequences % each["sequences"] == 0 for each in works)
            layouts = self._quickest(largest, fitting) if gains else ()
            bound = min((least.least_mean(each, smallest) for each in layouts), default=0.0)
        self._push(bound, DIVISION[-1], c)

    def _consider(
        self, choice: str, c: Candidate, ways: tuple[Way, ...], schedules: tuple[tuple[str, int], ...]
    ) -> None:
        """Layouts that share the choices of `c` up to this one, to be opened in their turn if any may fit. ways, schedules: what
        is left to choose of these."""
        fitting = self._fitting(choice, c, ways, schedules)
        if fitting:
            bound: float = min(fitting.values())
            if self.by != "memory":
                bound = min(self.engine.least_time.least(each, schedules) for each in self._quickest(c, fitting))
            self._push(bound, choice, c)

    def _fitting(
        self, choice: str, c: Candidate, ways: tuple[Way, ...], schedules: tuple[tuple[str, int], ...]
    ) -> dict[Way, int]:
        """The ways in which layouts may fit, with their bytes at the least. Where there is none they are rejected."""
        sizes, limit = self.engine.least_bytes.least_of_ways(c, ways, schedules), self.engine.cluster.memory_bytes
        found = {way: size for way, size in zip(ways, sizes, strict=True) if size <= limit}
        if not found:
            self._refuse_size(choice, c, min(sizes) - limit)
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

    def _schedules(self, c: Candidate) -> tuple[tuple[str, int], ...]:
        """Those that a division of the ranks may have, with stages of a rank, but for those that have too many stages."""
        if c.pp not in self._schedules_of:
            own = {"pp", *CHOICES[SCHEDULE]}
            asked = [each for each in self.constraints.by_choice[SCHEDULE] if own.issuperset(each.fields)]
            found = [
                each for each in self.space.children(SCHEDULE, c) if all(one.refuse(each) is None for one in asked)
            ]
            self._schedules_of[c.pp] = tuple((each.schedule, each.virtual) for each in found)
        return self._schedules_of[c.pp]

    def _bound_of_states(self, c: Candidate, bound: float) -> float:
        """Seconds of a layout at the least, of which it is known what it takes wherever states lie."""
        return self.engine.least_time.least_with_states(c, bound)


def mesh_of(c: Candidate) -> Mesh:
    """The degrees of a layout. Layouts of one mesh are near-duplicates: they differ in microbatches, ZeRO, or what is kept."""
    return c.dp, c.tp, c.pp, c.cp, c.ep


def states_as(states: States) -> dict[str, Any]:
    """As fields of a candidate."""
    return dict(zip(("zero", "shard", "offload"), states, strict=True))


def rank_layout(c: Candidate) -> tuple[object, ...]:
    """Among equals the layout that divides less, and keeps more on the device, comes first."""
    degrees = (c.pp, c.cp, c.tp, c.ep, c.zero, c.shard, len(c.offload), c.virtual, c.schedule, c.checkpointing)
    return (*degrees, not c.sequence, c.ulysses, c.is_gather, c.expert_tp, c.sequences, *sorted(c.offload))
