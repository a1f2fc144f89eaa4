"""The search: all legal layouts of a recipe on its ranks, ranked by forecast.

Layouts are millions, so not all are forecast. Choices are made in an order (`CHOICES`), in four steps, and all layouts that share
the first ones have lower bounds of bytes and of seconds (bounds.py):

    division     degrees, context, sequence, experts                            the mean rank's work
    work         its microbatches                                               the same, exactly
    stages       schedule, activation checkpointing, offload of activations     the same, then the schedule's least time
    states       ZeRO and offload of states                                     all but the simulated schedule

Bytes come first: layouts that recompute nothing are fast, and most of them do not fit, so that their time says nothing of the
layouts that do. The node with the least bound is expanded next, until that is above the last of the best so far. So the ranking
is that of brute force, and a test says so; what was left out is counted.
"""

import re
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count
from math import prod
from operator import itemgetter
from typing import Literal

import numpy as np

from framework.output import show_bytes
from framework.plan.bounds import Engine, Schedules, Way
from framework.plan.candidate import Candidate, method_of, remember
from framework.plan.forecast_memory import NodeForecast, describe_shortages
from framework.plan.space import CHOICES, Constraints, Kind, Space
from framework.plan.state_bytes import Places, place_states
from framework.plan.time import Forecast

By = Literal["time", "memory"]
Mesh = tuple[int, int, int, int, int]
DIVISION, WORK, SCHEDULE = ("context", "sequence", "experts"), "microbatch", "schedule"
WAY = ("checkpointing", "activations")
STATES = ("zero", "states")
# Sums in another order differ in the last digits: a bound must not exclude an equal layout.
ROUNDING = 1 - 1e-9
# Rejections for lack of memory or disk.
SIZES = ("memory", "node")
_NUMBERS = re.compile(r"\d+(\.\d+)?|=\[.*?\]|=[a-z_]+")


@dataclass(frozen=True)
class Rejection:
    """Layouts that are refused alike. candidate: what they share, chosen up to `choice`; reason: in a line; key: of the recipe,
    where a rule refuses it; missing: bytes that do not fit on the fullest rank, at the least; count: of layouts."""

    kind: Kind
    candidate: Candidate
    choice: str
    reason: str
    key: str = ""
    missing: int = 0
    count: int = 1

    @property
    def layout(self) -> str:
        """The choices so far, in words."""
        return describe(self.candidate, self.choice)

    @property
    def line(self) -> str:
        """Layout and reason in a line."""
        return f"{self.layout}: {self.reason}"


def describe(c: Candidate, choice: str = "states") -> str:
    """A candidate in words, up to a choice: degrees of 1 and what is off are left out."""
    method = method_of(c)
    shards = f"/{c.shard}" if c.zero and c.shard != c.batch else ""
    words: dict[str, list[str]] = {
        "degrees": [f"{name}={getattr(c, name)}" for name in ("dp", "cp", "tp", "pp") if getattr(c, name) > 1],
        "context": ["x".join(map(str, method)) if isinstance(method, list) else method] * (c.cp > 1),
        "sequence": ["no-sp"] * (c.tp > 1 and not c.sequence),
        "experts": [f"ep={c.ep}"] * (c.ep > 1)
        + [f"expert_tp={c.expert_tp}"] * (c.expert_tp != (1 if c.ep > 1 else c.tp)),
        "microbatch": [f"mb={c.sequences}"],
        "schedule": [c.schedule + f"x{c.virtual}" * (c.schedule == "interleaved")] * (c.pp > 1),
        "checkpointing": [c.checkpointing] * (c.checkpointing != "none"),
        "activations": ["offload-activations"] * c.offloads_activations,
        "zero": [f"zero={c.zero}{shards}"],
        "states": [f"offload-{name}" for name in ("optimizer", "parameters") if name in c.offload],
    }
    names = list(CHOICES)
    return " ".join(word for name in names[: names.index(choice) + 1] for word in words[name]) or "one rank"


def too_large(c: Candidate, missing: int, limit: int, choice: str = "states", count: int = 1) -> Rejection:
    """Rejection of layouts whose fullest rank needs more than it may use: by at least so much where later choices are open, or
    for several layouts, of which `c` is the nearest."""
    least = "" if choice == "states" and count == 1 else "at least "
    reason = f"does not fit: {least}{show_bytes(missing)} over the {show_bytes(limit)} of a device"
    return Rejection("memory", c, choice, reason, missing=missing, count=count)


def too_large_for_node(c: Candidate, node: NodeForecast, count: int = 1) -> Rejection:
    """The rejection of layouts whose ranks take more of a node's memory or disk than it has; of several the nearest."""
    reason = "; ".join(describe_shortages(node))
    return Rejection("node", c, "states", f"does not fit: {reason}", missing=max(1, -node.spare), count=count)


def group_rejections(rejections: Iterable[Rejection]) -> list[tuple[Rejection, int]]:
    """One of each reason, with the number of layouts, the most frequent first. Reasons that differ in numbers only are one, as
    which the smallest layout's is shown; of those that do not fit the one that comes nearest."""
    counts: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], Rejection] = {}
    for each in rejections:
        group = (each.kind, "" if each.kind in SIZES else _NUMBERS.sub("0", each.reason))
        counts[group] += each.count
        if group not in shown or (each.kind in SIZES and each.missing < shown[group].missing):
            shown[group] = each
    ordered = sorted(counts, key=lambda group: (-counts[group], group))
    return [(shown[group], counts[group]) for group in ordered]


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

    @property
    def missing(self) -> int:
        """Bytes of it that do not fit."""
        return max(0, -self.forecast.memory.spare)


@dataclass
class Search:
    """One search, and once it has run what became of all layouts."""

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
    rejections: list[Rejection] = field(default_factory=list)
    """Each with the number of layouts that it stands for."""
    num_layouts: int = 0
    num_slower: int = 0
    """Layouts that bounds exclude: not forecast."""
    num_forecast: int = 0
    cpu_s: float = 0.0
    _found: list[tuple[tuple[object, ...], Ranked]] = field(default_factory=list, repr=False)
    _firsts: dict[Mesh, tuple[tuple[object, ...], Ranked]] = field(default_factory=dict, repr=False)
    _open: list[tuple[float, int, int, Mesh, Callable[[], None]]] = field(default_factory=list, repr=False)
    _numbers: Iterator[int] = field(default_factory=count, repr=False)

    @property
    def ranked(self) -> list[Ranked]:
        """The best, in order."""
        return [each for _, each in self._found[: self.best]]

    @property
    def others(self) -> list[Ranked]:
        """Others that were forecast and fit, in order."""
        return [each for _, each in self._found[self.best :]]

    @property
    def of_meshes(self) -> list[Ranked]:
        """The best layout of each mesh, as many as were wanted, in order."""
        return [each for _, each in sorted(self._firsts.values(), key=itemgetter(0))[: self.meshes]]

    @property
    def _limit(self) -> int:
        return self.engine.cluster.memory_bytes

    @property
    def num_rejected(self) -> int:
        """Layouts that no recipe may have, or that do not fit."""
        return sum(each.count for each in self.rejections)

    def run(self) -> "Search":
        """Search all layouts. Raises for no layout: it is rejected."""
        for c in self.divisions():
            self._consider(c)
        while self._open:
            bound, _, num_layouts, mesh, expand = heappop(self._open)
            if self._is_excluded(bound, mesh):
                self.num_slower += num_layouts
            else:
                expand()
        return self

    def choose_layout(self, rejection: Rejection) -> Candidate | None:
        """One of the layouts that are rejected as too large: the first legal values of what is left to choose, with states where
        they leave most. None where no rule allows any."""
        names = list(CHOICES)
        rest = names[names.index(rejection.choice) + 1 :]
        if not rest:
            return rejection.candidate
        stages = next(self.expand(rejection.candidate, tuple(name for name in rest if name not in STATES)), None)
        places = () if stages is None else self._places_of_states(stages)
        if stages is None or not places:
            return None
        spare = self.engine.bytes.spare(stages, places, self._limit)
        return place_states(stages, places[int(np.argmax(spare))])

    # --- nodes

    def divisions(self) -> Iterator[Candidate]:
        """Divisions of the computation that no rule is against: all choices before the microbatch."""
        for c in self.space.children("degrees", self.space.root()):
            self.num_layouts += self._count(c, "degrees")
            if self._is_legal("degrees", c):
                yield from self.expand(c, DIVISION)

    def _consider(self, division: Candidate) -> None:
        """Bound a division: its smallest microbatches need least bytes, its largest ones least time."""
        if not self._schedules(division):
            refused = list(self.expand(division, (WORK, SCHEDULE)))  # each for a reason of its own
            assert not refused, refused
            return
        works = sorted(self.space.values(WORK, division), key=itemgetter("sequences"))
        smallest, largest, least = division.changed(works[0]), division.changed(works[-1]), self.engine.least_time
        sizes = self._sizes(smallest, DIVISION[-1])
        if sizes is not None:
            # Where curves are measured nothing is known before each size is asked.
            gains = least.gains_by_size and all(largest.sequences % each["sequences"] == 0 for each in works)
            bound = self._bound(largest, sizes, smallest) if gains or self.by == "memory" else 0.0
            self._push(bound, DIVISION[-1], division, partial(self._open_division, division))

    def _open_division(self, division: Candidate) -> None:
        for work in self.expand(division, (WORK,)):
            sizes = self._sizes(work, WORK)
            if sizes is not None:
                self._push(self._bound(work, sizes, work), WORK, work, partial(self._open_work, work, sizes))

    def _sizes(self, c: Candidate, choice: str) -> np.ndarray | None:
        """[schedules, ways]: the least bytes of layouts of this work. Where none may fit they are rejected: None."""
        sizes, limit = self.engine.least_bytes.least_of_ways(c, self._schedules(c), self._ways), self._limit
        least = int(sizes.min())
        if least > limit:
            self.rejections.append(too_large(c, least - limit, limit, choice, self._count(c, choice)))
        return None if least > limit else sizes

    def _bound(self, c: Candidate, sizes: np.ndarray, smallest: Candidate) -> float:
        """Lower bound of layouts of this work. sizes, smallest: of the smallest microbatches that it is for."""
        if self.by == "memory":
            return float(sizes.min())
        # Computing again only adds time, and so does a way to the host: the first that stays on the device is the quickest.
        fitting = [self._ways[place] for place in np.flatnonzero(sizes.min(axis=0) <= self._limit)]
        here = next((place for place, (_, offload) in enumerate(fitting) if not offload), len(fitting))
        layouts = [c.changed({"checkpointing": policy, "offload": offload}) for policy, offload in fitting[: here + 1]]
        return min(self.engine.least_time.mean_rank(each, smallest) for each in layouts)

    def _open_work(self, work: Candidate, sizes: np.ndarray) -> None:
        limit, schedules = self._limit, self._schedules(work)
        for c in self.expand(work, (SCHEDULE, *WAY)):
            place = schedules.index((c.schedule, c.virtual)), self._ways.index((c.checkpointing, c.offload))
            size = int(sizes[place])
            if size > limit:
                self.rejections.append(too_large(c, size - limit, limit, WAY[-1], self._count(c, WAY[-1])))
            elif self.by == "memory":
                self._push(size, WAY[-1], c, partial(self._open_stages, c))
            else:  # the cheap bound first: most of them are never expanded
                self._push(self.engine.least_time.mean_rank(c), WAY[-1], c, partial(self._open_way, c))

    def _open_way(self, c: Candidate) -> None:
        self._push(self.engine.least_time.stages(c), WAY[-1], c, partial(self._open_stages, c))

    def _open_stages(self, stages: Candidate) -> None:
        """Consider the places of states: those that fit, by their bounds."""
        engine, limit, places = self.engine, self._limit, self._places_of_states(stages)
        if not places:
            return
        spare = engine.bytes.spare(stages, places, limit)
        host = engine.bytes.host_spare(stages, places, engine.cluster)
        over = np.flatnonzero(spare < 0)
        if len(over):
            nearest = over[np.argmax(spare[over])]
            layout = place_states(stages, places[nearest])
            self.rejections.append(too_large(layout, -int(spare[nearest]), limit, "states", len(over)))
        over = np.flatnonzero((spare >= 0) & (host < 0))
        if len(over):
            layout = place_states(stages, places[over[np.argmax(host[over])]])
            node = engine.bytes.forecast(layout, engine.cluster).node
            self.rejections.append(too_large_for_node(layout, node, len(over)))
        for which in np.flatnonzero((spare >= 0) & (host >= 0)).tolist():
            layout = place_states(stages, places[which])
            bound = limit - int(spare[which]) if self.by == "memory" else engine.least_time.states(layout)
            self._push(bound, "states", layout, partial(self._forecast, layout))

    def _places_of_states(self, stages: Candidate) -> Places:
        """Legal places of the states of a layout."""
        return tuple([(each.zero, each.shard, each.offload) for each in self.expand(stages, STATES)])

    def _forecast(self, c: Candidate) -> None:
        forecast = self.engine.forecast(c)
        if not forecast.memory.node.fits:
            self.rejections.append(too_large_for_node(c, forecast.memory.node))
            return
        ranked = Ranked(c, forecast, self.price * self.space.world)
        self.num_forecast += 1
        first, second = self._value(ranked), ranked.step_s if self.by == "memory" else ranked.bytes
        entry = ((first, second, rank_layout(c)), ranked)
        insort(self._found, entry, key=itemgetter(0))
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

    # --- legality

    def expand(self, c: Candidate, choices: tuple[str, ...]) -> Iterator[Candidate]:
        """`c` with all values of these choices that nothing is against."""
        if not choices:
            yield c
            return
        for child in self.space.children(choices[0], c):
            if self._is_legal(choices[0], child):
                yield from self.expand(child, choices[1:])

    def _is_legal(self, choice: str, c: Candidate) -> bool:
        for asked in self.constraints[choice]:
            if (found := asked.refuse(c)) is not None:
                key, reason = found
                self.rejections.append(Rejection(asked.kind, c, choice, reason, key, count=self._count(c, choice)))
                return False
        return True

    @remember("dp", "cp", "tp", "pp")
    def _count(self, c: Candidate, choice: str) -> int:
        """Layouts that share the choices of `c` up to this one: how many values the later ones have depends on degrees alone."""
        names = list(CHOICES)
        return prod(len(self.space.values(name, c)) for name in names[names.index(choice) + 1 :])

    @cached_property
    def _ways(self) -> tuple[Way, ...]:
        """Ways to keep activations, those that compute less first, without those that rules refuse whatever else is chosen."""
        root, own = self.space.root(), {name for choice in WAY for name in CHOICES[choice]}
        asked = [each for choice in WAY for each in self.constraints[choice] if own.issuperset(each.fields)]
        found = [c for policy in self.space.children(WAY[0], root) for c in self.space.children(WAY[1], policy)]
        legal = [c for c in found if all(each.refuse(c) is None for each in asked)]
        return tuple((c.checkpointing, c.offload) for c in legal or found)

    @remember("pp")
    def _schedules(self, c: Candidate) -> Schedules:
        """Schedules, with the stages of a rank, that a division of the ranks may have."""
        own = {"pp", *CHOICES[SCHEDULE]}
        asked = [each for each in self.constraints[SCHEDULE] if own.issuperset(each.fields)]
        found = self.space.children(SCHEDULE, c)
        legal = [each for each in found if all(one.refuse(each) is None for one in asked)]
        return tuple((each.schedule, each.virtual) for each in legal)

    # --- bounds

    def _value(self, ranked: Ranked) -> float:
        """The ranked and bounded value."""
        return ranked.bytes if self.by == "memory" else ranked.step_s

    def _is_excluded(self, bound: float, mesh: Mesh) -> bool:
        """Whether no layout of such a bound, on this mesh, can be one that is wanted."""
        least = bound * ROUNDING
        if len(self._found) < self.best or least <= self._value(self._found[self.best - 1][1]):
            return False
        if self.within and least <= self._value(self._found[0][1]) * (1 + self.within):
            return False
        if not self.meshes or (mesh in self._firsts and least > self._value(self._firsts[mesh][1])):
            return True
        values = sorted(self._value(each) for _, each in self._firsts.values())
        return len(values) >= self.meshes and least > values[self.meshes - 1]


def mesh_of(c: Candidate) -> Mesh:
    """The degrees of a layout. Layouts of one mesh are near-duplicates: they differ in microbatches, ZeRO, or what is kept."""
    return c.dp, c.tp, c.pp, c.cp, c.ep


def rank_layout(c: Candidate) -> tuple[object, ...]:
    """Among equals the layout that divides less, and keeps more on the device, comes first."""
    degrees = (c.pp, c.cp, c.tp, c.ep, c.zero, c.shard, len(c.offload), c.virtual, c.schedule, c.checkpointing)
    return (*degrees, not c.sequence, c.ulysses, c.is_gather, c.expert_tp, c.sequences, *sorted(c.offload))
