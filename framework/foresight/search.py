"""The search: all legal layouts of a recipe on its ranks, ranked by what is foretold of them.

Layouts are millions, so they are not all forecast. A layout's choices fall into two parts: what its ranks compute (degrees, how
sequences are divided, microbatches, schedule, checkpointing), and where states lie (ZeRO, shards, offload). Time that the second
part cannot save is a lower bound for all layouts that share the first; so is, for all schedules and all checkpointing, the time
of one rank that computes all layers divided by the number of stages. Where a bound is above the time of the last of the best so
far, nothing behind it is forecast. So the ranking is that of brute force, and a test says so; what was left out is counted.
"""

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from time import process_time
from typing import Literal

from framework.foresight.candidate import Candidate
from framework.foresight.engine import Engine
from framework.foresight.forecast import Forecast
from framework.foresight.rejections import Constraints, Rejection, too_large
from framework.foresight.space import CHOICES, Space

By = Literal["time", "cost", "memory"]
WORK = ("context", "sequence", "experts", "microbatch")
STAGES = ("schedule", "checkpointing", "activations")
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
    """by: what it is ranked by. ranked: the best, in order; others: what else was forecast and fits, in order. rejections: each
    with the number of layouts that it stands for. num_layouts: of the space; num_slower: of those that bounds exclude, not
    forecast; num_forecast: layouts whose time was foretold. cpu_s: of the search."""

    by: By
    space: Space
    ranked: tuple[Ranked, ...]
    others: tuple[Ranked, ...]
    rejections: tuple[Rejection, ...]
    num_layouts: int
    num_slower: int
    num_forecast: int
    cpu_s: float

    @property
    def num_rejected(self) -> int:
        """Layouts that no recipe may have, or that do not fit."""
        return sum(each.count for each in self.rejections)


@dataclass
class Search:
    """One search. best: as many layouts as are wanted, in order; all that is known of a layout is less than the last of them."""

    space: Space
    constraints: Constraints
    engine: Engine
    by: By = "time"
    best: int = 20
    price: float = 0.0
    ranked: list[tuple[tuple[object, ...], Ranked]] = field(default_factory=list)
    rejections: list[Rejection] = field(default_factory=list)
    num_layouts: int = 0
    num_slower: int = 0
    num_forecast: int = 0
    _layers: dict[tuple[object, ...], float] = field(default_factory=dict)

    def run(self) -> SearchResult:
        """All layouts. Never raises for a layout: it is rejected."""
        began = process_time()
        works = sorted(
            ((self._bound_of_work(c), rank_layout(c), c) for c in self._find_works()), key=lambda each: each[:2]
        )
        for bound, _, work in works:
            if self._is_excluded(bound):
                self.num_slower += self._count(work, "microbatch")
            else:
                self._try_work(work)
        found = [each for _, each in self.ranked]
        return SearchResult(
            self.by,
            self.space,
            tuple(found[: self.best]),
            tuple(found[self.best :]),
            tuple(self.rejections),
            self.num_layouts,
            self.num_slower,
            self.num_forecast,
            process_time() - began,
        )

    # --- layouts

    def _find_works(self) -> Iterator[Candidate]:
        """What ranks may compute: all choices up to the microbatch, where no rule is against them."""
        for c in self.space.children("degrees", self.space.root()):
            self.num_layouts += self._count(c, "degrees")
            if self._is_legal("degrees", c):
                yield from self._expand(c, WORK)

    def _try_work(self, work: Candidate) -> None:
        """All layouts of a work, by rising bounds."""
        stages = sorted(
            ((self._bound_of_stages(c), rank_layout(c), c) for c in self._expand(work, STAGES)),
            key=lambda each: each[:2],
        )
        for bound, _, c in stages:
            if self._is_excluded(bound):
                self.num_slower += self._count(c, "activations")
            elif self._fits(c, self.engine.most_spare(c), "activations"):
                for layout in self._expand(c, STATES):
                    self._try(layout)

    def _try(self, c: Candidate) -> None:
        if not self._fits(c, self.engine.spare(c), "states"):
            return
        ranked = Ranked(c, Forecast(self.engine.memory(c), self.engine.time(c)), self.price * self.space.world)
        self.num_forecast += 1
        insort(self.ranked, (self._key(ranked), ranked), key=lambda each: each[0])

    def _fits(self, c: Candidate, spare: int, choice: str) -> bool:
        """Whether a layout fits a device, or any that shares the choices of `c` so far."""
        if spare < 0:
            rejection = too_large(c, -spare, self.engine.cluster.memory_bytes, choice)
            self.rejections.append(replace(rejection, count=self._count(c, choice)))
        return spare >= 0

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
            self.rejections.append(replace(found, count=self._count(c, choice)))
        return found is None

    def _count(self, c: Candidate, choice: str) -> int:
        """Layouts that share the choices of `c` up to this one: how many values the later ones have depends on degrees alone."""
        names = list(CHOICES)
        return prod(len(self.space.values(name, c)) for name in names[names.index(choice) + 1 :])

    # --- order and bounds

    def _key(self, ranked: Ranked) -> tuple[object, ...]:
        first, second = self._value(ranked), ranked.step_s if self.by == "memory" else ranked.bytes
        return first, second, rank_layout(ranked.candidate)

    def _value(self, ranked: Ranked) -> float:
        """What is ranked by, and bounded. All layouts have the same ranks and tokens, so the cheapest is the fastest."""
        return ranked.bytes if self.by == "memory" else ranked.step_s

    def _is_excluded(self, bound: float) -> bool:
        """Whether no layout of such a bound can be among the best."""
        return len(self.ranked) >= self.best and bound * ROUNDING > self._value(self.ranked[self.best - 1][1])

    def _bound_of_work(self, c: Candidate) -> float:
        """Seconds of the layers of one rank without a pipeline, divided by the stages: the mean rank, and the slowest takes no
        less. 0 where layouts are ranked by memory."""
        if self.by == "memory":
            return 0.0
        alone = replace(c, pp=1, dp=c.dp * c.pp, accumulation=1)
        key = (
            alone.cp,
            alone.tp,
            alone.ulysses,
            alone.is_gather,
            alone.sequence,
            alone.ep,
            alone.expert_tp,
            alone.sequences,
        )
        if key not in self._layers:
            self._layers[key] = self.engine.layer_seconds(alone)
        return self._layers[key] * c.accumulation / c.pp

    def _bound_of_stages(self, c: Candidate) -> float:
        """Seconds of all that states do not change. 0 where layouts are ranked by memory."""
        return 0.0 if self.by == "memory" else self.engine.least_seconds(c)


def rank_layout(c: Candidate) -> tuple[object, ...]:
    """Among equals the layout that divides less, and keeps more on the device, comes first."""
    degrees = (c.pp, c.cp, c.tp, c.ep, c.zero, c.shard, len(c.offload), c.virtual, c.schedule, c.checkpointing)
    return (*degrees, not c.sequence, c.ulysses, c.is_gather, c.expert_tp, c.sequences, *sorted(c.offload))
