"""Seconds of stages for one microbatch, and the length of a pipeline's step: the simulator's timeline, memoized as its critical
path.

A timeline is as long as its longest path through actions that wait for one another, and which path that is changes little where
costs change little. So each schedule is simulated once for costs that are rounded, and what is stored is the path: how many
forwards and backwards of each stage, and how many messages, lie on it. The length with exact costs is the path's, and no less
than the busiest rank's own work. Of many microbatches the last ones only repeat: lengths grow by the same amount for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from framework.model.stage import StageBounds
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import ActionKind, B, Costs, F, I, Schedule, Timeline, W, simulate
from framework.plan.exposure import Exposure
from framework.plan.operators import UnitWork, Work
from framework.plan.sharding import ShardedUnit

# Beyond so many microbatches for each rank of the pipeline lengths are taken to grow evenly.
STEADY = 3
# Schedules whose backwards are whole, in which stages lie in a loop.
WHOLE_BACKWARDS = ("gpipe", "1f1b", "interleaved")
# Steps in which costs are rounded, of the mean forward.
ROUNDED = 0.125
Seconds = dict[str, float]
# Elements of a unit: (dense, of experts, trained dense, trained of experts).
Elements = tuple[float, float, float, float]


@dataclass(frozen=True)
class StageForm:
    """A stage as far as its time depends on it. layers: (kind, number of them), in order; bounds: of one such stage."""

    is_first: bool
    is_last: bool
    layers: tuple[tuple[int, int], ...]
    bounds: StageBounds = field(compare=False)


@dataclass(frozen=True)
class UnitTime:
    """A unit for one microbatch. exposures: of its messages, by axis. grouped: share of its forwards that run a second time to
    bring back the input of another layer (activation checkpointing by groups). launched: seconds in which the host launches a
    forward, which cannot take less; a backward takes the host twice as long. has_backward: whether it has one, which no unit has
    below the first trained one."""

    work: UnitWork
    exposures: Mapping[str, Exposure] = field(default_factory=dict)
    grouped: float = 0.0
    launched: float = 0.0
    has_backward: bool = True

    @cached_property
    def again(self) -> Work:
        """Recomputation."""
        return self.work.again + self.work.forward.times(self.grouped) if self.grouped else self.work.again

    @cached_property
    def forward(self) -> float:
        """Seconds of its forward."""
        return max(self._forward, self.launched)

    @property
    def _forward(self) -> float:
        return self.work.forward.total + sum([each.forward for each in self.exposures.values()])

    @cached_property
    def input(self) -> float:
        """Seconds of its input gradient, recomputation included."""
        return max(self._input, 2 * self.launched * self.has_backward - self.work.weight.total)

    @property
    def _input(self) -> float:
        messages = sum([each.backward + self.grouped * each.forward for each in self.exposures.values()])
        return self.work.input.total + self.again.total + messages

    @property
    def late(self) -> float:
        """Seconds in which the device waits for the host."""
        return self.forward - self._forward + self.input - self._input

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward where no group of layers is computed again."""
        whole = self.work.total + sum([each.forward + each.backward for each in self.exposures.values()])
        return max(whole, (1 + 2 * self.has_backward) * self.launched)


@dataclass
class StageTime:
    """A stage for one microbatch, and what it takes once a step."""

    forward: float = 0.0
    """Seconds of its forward; `input`, `weight`: of its input and weight gradients."""
    input: float = 0.0
    weight: float = 0.0
    parts: Seconds = field(default_factory=dict)
    """The same seconds by part; `hidden`: of messages under computation, by axis."""
    hidden: Seconds = field(default_factory=dict)
    units: list[ShardedUnit] = field(default_factory=list)
    """Units that ZeRO shards, in order of computation."""
    once: Seconds = field(default_factory=dict)
    """Seconds of a step, whatever the number of microbatches; `hidden_once` likewise."""
    hidden_once: Seconds = field(default_factory=dict)
    owned: float = 0.0
    """Parameters (elements) that the rank's optimizer updates."""

    @property
    def microbatch(self) -> float:
        """Seconds of one microbatch."""
        return self.forward + self.input + self.weight

    def add(self, unit: UnitTime, count: int, elements: Elements, end: str = "") -> None:
        """Add equal units. elements: of one on a rank, before ZeRO; end: embedding or head, "" for layers."""
        work, again = unit.work, unit.again
        self.forward += count * unit.forward
        self.input += count * unit.input
        self.weight += count * work.weight.total
        computed = work.forward + work.input + work.weight
        for name, seconds in (
            ("matmuls", computed.matmuls - work.uneven),
            ("imbalance", work.uneven),
            ("attention", computed.attention),
            ("elementwise", computed.elementwise),
            ("recomputation", again.total),
            ("host", unit.late),
            *((axis, each.forward * (1 + unit.grouped) + each.backward) for axis, each in unit.exposures.items()),
        ):
            self.parts[name] = self.parts.get(name, 0.0) + count * seconds
        for axis, each in unit.exposures.items():
            self.hidden[axis] = self.hidden.get(axis, 0.0) + count * each.hidden
        backward = unit.input + work.weight.total
        self.units.append(ShardedUnit(*elements, unit.forward, backward, count, end == "embedding", end == "head"))


@dataclass(frozen=True)
class PipelineTimes:
    """All ranks of a pipeline. stages: in order; by rank: seconds of its microbatches (busy), of what comes once a step (late),
    the update's parts, elements that it updates."""

    stages: Sequence[StageTime]
    busy: Sequence[float]
    late: Sequence[float]
    updates: Sequence[Mapping[str, float]]
    owned: Sequence[float]

    @cached_property
    def slowest(self) -> int:
        """The rank whose own work takes longest."""
        totals = [busy + late for busy, late in zip(self.busy, self.late, strict=True)]
        return totals.index(max(totals))


@dataclass(frozen=True)
class Path:
    """The longest path of a timeline: its actions by stage, and its messages between ranks."""

    forwards: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[int, ...]
    messages: int

    def length(self, costs: Costs) -> float:
        """Length of the path with these costs."""
        total = self.messages * costs.message
        for counts, times in ((self.forwards, costs.forward), (self.inputs, costs.input), (self.weights, costs.weight)):
            total += sum(count * time for count, time in zip(counts, times, strict=True) if count)
        return total


def find_length(name: str, num_ranks: int, num_microbatches: int, costs: Costs) -> float:
    """Length of the named schedule, in the unit of `costs`: one for each stage. Raises ScheduleError like `make_schedule`."""
    if name == "gpipe":
        return _gpipe(num_ranks, num_microbatches, costs)
    steady = STEADY * num_ranks
    if num_microbatches <= steady + num_ranks:
        return _simulate(name, num_ranks, num_microbatches, *_round(costs)).length(costs)
    # The groups of an interleaved schedule have num_ranks microbatches: the rest must be that of the whole.
    fewer = steady - num_ranks + num_microbatches % num_ranks
    short, more = (_simulate(name, num_ranks, n, *_round(costs)).length(costs) for n in (fewer, fewer + num_ranks))
    return short + (more - short) * (num_microbatches - fewer) / num_ranks


@lru_cache(maxsize=2**14)
def _simulate(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    forward: tuple[float, ...],
    inputs: tuple[float, ...],
    weights: tuple[float, ...],
    message: float,
) -> Path:
    """The longest path of a schedule with such costs."""
    schedule = make_schedule(name, num_ranks, num_microbatches, len(forward) // num_ranks)
    timeline = simulate(schedule, Costs(forward, inputs, weights, message))
    return find_path(schedule, timeline)


def least_length(name: str, owners: Sequence[int], num_microbatches: int, costs: Costs) -> float:
    """Lower bound of the named schedule's length: a rank's work behind the forwards that its first action waits for,
    and the way of a microbatch to the last stage and back, on which all microbatches follow one another. owners: the rank of each
    stage."""
    starts: dict[int, float] = {}
    busy, before = [0.0] * (max(owners) + 1), 0.0
    totals = [sum(each) for each in zip(costs.forward, costs.input, costs.weight, strict=True)]
    for stage, owner in enumerate(owners):
        starts.setdefault(owner, before)
        before += costs.forward[stage]
        busy[owner] += num_microbatches * totals[stage]
    most = max(starts[rank] + own for rank, own in enumerate(busy))
    is_whole = name in WHOLE_BACKWARDS
    passages = totals if is_whole else [f + i for f, i in zip(costs.forward, costs.input, strict=True)]
    most = max(most, sum(passages[:-1]) + num_microbatches * passages[-1])
    # Behind the last action of the last rank, a backward of its first stage, gradients go back through the stages before.
    return max(most, sum(totals[: len(busy) - 1]) + busy[-1]) if is_whole else most


def _gpipe(num_ranks: int, num_microbatches: int, costs: Costs) -> float:
    """All forwards, then all backwards: each is a line of stages, as long as one passage and the slowest stage's other ones."""
    backward = [more + weight for more, weight in zip(costs.input, costs.weight, strict=True)]
    passage = sum(costs.forward) + sum(backward) + 2 * (num_ranks - 1) * costs.message
    return passage + (num_microbatches - 1) * (max(costs.forward) + max(backward))


def _round(costs: Costs) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], float]:
    """Costs over the mean forward, in steps; none becomes nothing."""
    unit = sum(costs.forward) / len(costs.forward) * ROUNDED or 1.0

    def steps(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(round(time / unit), 1) * ROUNDED for time in times)

    return steps(costs.forward), steps(costs.input), steps(costs.weight), round(costs.message / unit) * ROUNDED


def find_path(schedule: Schedule, timeline: Timeline) -> Path:
    """The longest path of a timeline, from its last end back to time 0."""
    places = {
        (timed.action.stage, _pass_of(timed.action.kind), timed.action.microbatch): (rank, position)
        for rank, line in enumerate(timeline.ranks)
        for position, timed in enumerate(line)
        if timed.action.kind is not W
    }
    counts: dict[ActionKind, list[int]] = {kind: [0] * schedule.num_stages for kind in (F, I, W)}
    messages, tolerance = 0, 1e-9 * max(timeline.length, 1.0)
    ends = [line[-1].end if line else 0.0 for line in timeline.ranks]
    rank = ends.index(max(ends))
    position = len(timeline.ranks[rank]) - 1
    while position >= 0:
        timed = timeline.ranks[rank][position]
        stage, kind, microbatch = timed.action
        for each in (I, W) if kind is B else (kind,):
            counts[each][stage] += 1
        if timed.start <= tolerance:
            break
        if position and timeline.ranks[rank][position - 1].end >= timed.start - tolerance:
            position -= 1
            continue
        source = _source(stage, kind, schedule.num_stages)
        other, position = places[source, _pass_of(F if kind is F or source == stage else I), microbatch]
        messages += other != rank
        rank = other
    return Path(tuple(counts[F]), tuple(counts[I]), tuple(counts[W]), messages)


def _pass_of(kind: ActionKind) -> bool:
    """Whether it is a forward; B and I are both backwards."""
    return kind is F


def _source(stage: int, kind: ActionKind, num_stages: int) -> int:
    """The stage whose action an action waits for that its own rank did not delay."""
    if kind is F:
        return stage - 1
    return min(stage + 1, num_stages - 1)
