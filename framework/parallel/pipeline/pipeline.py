"""A run's pipeline: how layers are split into stages, and what ranks do in a step with a given number of microbatches.

Layers are split by their FLOPs, or by measured seconds of units. The step track.timeline_step of any run writes RUN/units.json:
seconds of the forward and of the whole backward of embedding, layers and head, of one microbatch. They tell what FLOPs do not:
how fast a mixer's recurrence is on this machine, a mixture's grouped matmul, a loss over a large vocabulary.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, permutations
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from framework.errors import RecipeError
from framework.model.stage import StageBounds, split_stages
from framework.parallel.pipeline.lower import Frequency, Lowered, lower
from framework.parallel.pipeline.schedules import make_schedule, read_table
from framework.parallel.pipeline.simulate import Action, ActionKind, Costs, Schedule, Timeline, fill_bubbles, simulate
from framework.recipe import schema
from framework.recipe.derive import count_virtual_stages

UNITS_FILE = "units.json"
# Splits that are simulated at the most, some milliseconds each.
MOST = 2000
# Microbatches that go through the pipeline together where there are forwards alone.
FORWARDS_AT_ONCE = 64


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of each unit with one microbatch, by name. source: the file, as the recipe names it."""

    source: str
    forward: Mapping[str, float]
    backward: Mapping[str, float]

    @property
    def layers(self) -> list[float]:
        """Seconds of each layer, forward and backward."""
        return [self.forward[name] + self.backward[name] for name in self.forward if name.startswith("layers.")]

    @property
    def ends(self) -> tuple[float, float]:
        """Seconds of the embedding and of the head, forward and backward."""
        first, last = (self.forward.get(name, 0.0) + self.backward.get(name, 0.0) for name in ("embedding", "head"))
        return first, last

    def of_stages(self, stages: Sequence[StageBounds]) -> Costs:
        """Costs of stages. Of a backward that a schedule divides, input and weights are taken to be a half each."""
        forward, backward = (
            [
                sum(times[f"layers.{number}"] for number in range(each.start, each.stop))
                + times.get("embedding", 0.0) * each.is_first
                + times.get("head", 0.0) * each.is_last
                for each in stages
            ]
            for times in (self.forward, self.backward)
        )
        # Both halves have as many matmuls; hooks, which see only the input's gradient, cannot time them apart.
        half = [seconds / 2 for seconds in backward]
        return Costs(forward, half, half)


def encode_unit_times(model: str, numel: int, units: Mapping[str, tuple[float, float]]) -> bytes:
    """The file's text. model, numel: by which another one is told; units: (forward, backward) seconds."""
    return f"{json.dumps({'model': model, 'parameters': numel, 'units': units}, indent=1)}\n".encode()


def read_unit_times(named: str, model: str, numel: int, names: Sequence[str]) -> UnitTimes:
    """Read the times of a run, or of a file. names: the units of this model, in order. Raises RecipeError for another model's."""
    key, path = f"pipeline.layers={named}", Path(named).expanduser()
    if not path.exists() and len(path.parts) == 1:
        path = Path(schema.Run().root) / path  # a run's id
    path = path / UNITS_FILE if path.is_dir() else path
    way = "train a few steps of this model with track.timeline_step=5, or set pipeline.layers=null, to cut by FLOPs"
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        units = {name: tuple(map(float, times)) for name, times in found["units"].items()}
        measured, size = str(found["model"]), int(found["parameters"])
    except OSError as error:
        raise RecipeError(f"{key}: {path} cannot be read ({error.strerror}): {way}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"{key}: {path} is no file of unit times: {way}") from error
    # Layers are compared by number and the model by its size: a unit's name alone would take any model of as many layers.
    if (measured, size, sorted(units)) != (model, numel, sorted(names)):
        raise RecipeError(
            f"{key} has measured another model, {measured} with {size:,} parameters in {len(units)} units; this one is {model}"
            f" with {numel:,} in {len(names)}: {way}"
        )
    pairs = [each for each in units.values() if len(each) == 2 and all(isfinite(s) and s >= 0 for s in each)]
    # Forwards without a time would fit into a bubble in any number.
    if len(pairs) < len(units) or not any(forward for forward, _ in pairs):
        raise RecipeError(f"{key}: {path} has times that are no pairs of seconds: {way}")
    return UnitTimes(named, *({name: units[name][place] for name in names} for place in (0, 1)))


@dataclass(frozen=True)
class PipelinePlan:
    """The plan of a run's pipeline; equal on all ranks."""

    stages: tuple[StageBounds, ...]
    """The layers of each stage."""
    rank_of_stage: tuple[int, ...]
    costs: Costs
    """Simulated times, in FLOPs, or in seconds where they were measured."""
    make: Callable[[int], Schedule]
    """The schedule with a given number of microbatches."""
    unshard: Frequency = "step"
    reduce: Frequency = "step"
    """Frequency of reductions; see `lower`."""
    known: dict[tuple[int, int], Lowered] = field(default_factory=dict)
    """Results computed before, as `rooms`."""
    rooms: dict[int, int] = field(default_factory=dict)
    gain: str = ""
    """Words on a split by measured times: its step beside that of the split by FLOPs; empty without one."""

    def schedule(self, num_microbatches: int, num_validation: int = 0) -> Schedule:
        """The schedule of a training step with `num_validation` microbatches, at most `room`, in its bubbles; with no training
        microbatches, that of a validation alone."""
        if not num_microbatches:
            return forward_only(self.rank_of_stage, num_validation)
        return fill_bubbles(self.make(num_microbatches), self.costs, num_validation)

    def simulated(self, num_microbatches: int, measured: Timeline) -> Timeline:
        """The simulated timeline of the schedule that a measured step has run, validation in its bubbles included."""
        actions = (each.action for rank in measured.ranks for each in rank)
        validated = {action.microbatch for action in actions if action.kind is ActionKind.VALIDATION}
        return simulate(self.schedule(num_microbatches, len(validated)), self.costs)

    def room(self, num_microbatches: int) -> int:
        """The number of validation microbatches that the bubbles of a training step hold."""
        if num_microbatches not in self.rooms:
            self.rooms[num_microbatches] = fill_bubbles(self.make(num_microbatches), self.costs).num_validation
        return self.rooms[num_microbatches]

    def lowered(self, num_microbatches: int, num_validation: int = 0) -> Lowered:
        """The lowered schedule, computed once for each pair of numbers."""
        # A run meets few pairs, and lowering a thousand microbatches takes longer than a small model's step.
        key = num_microbatches, num_validation
        if key not in self.known:
            self.known[key] = lower(self.schedule(*key), self.costs, self.unshard, self.reduce)
        return self.known[key]


def forward_only(rank_of_stage: tuple[int, ...], num_microbatches: int) -> Schedule:
    """The schedule of a validation alone: microbatch m is in stage s at time m + s."""
    # Where a rank has two stages due at one time, the later stage goes first: its output is waited for, further on.
    times = range(num_microbatches + len(rank_of_stage) - 1)
    lists = [
        tuple(
            Action(stage, ActionKind.VALIDATION, at - stage)
            for at in times
            for stage in reversed(range(len(rank_of_stage)))
            if rank_of_stage[stage] == rank and 0 <= at - stage < num_microbatches
        )
        for rank in range(max(rank_of_stage) + 1)
    ]
    return Schedule("forward only", 0, rank_of_stage, tuple(lists), num_microbatches)


def plan_pipeline(
    settings: schema.Pipeline,
    num_ranks: int,
    num_microbatches: int,
    unit_costs: Mapping[str, float],
    zero: schema.Zero,
    times: UnitTimes | None = None,
) -> PipelinePlan:
    """The pipeline of a recipe; a pure function, so all ranks plan the same one.

    unit_costs: forward time of each of the model's units, in any unit of time, in order of computation (`model.flops`).
    times: measured ones, which pipeline.layers names.
    Raises RecipeError or ScheduleError where model, microbatches and stages do not fit.
    """
    if settings.table is not None:
        make: Callable[[int], Schedule] = partial(read_table, Path(settings.table), num_ranks)
    else:
        virtual_stages = count_virtual_stages(settings)
        make = partial(make_schedule, settings.schedule, num_ranks, virtual_stages=virtual_stages)
    schedule = make(num_microbatches)
    layers = [cost for unit, cost in unit_costs.items() if unit.startswith("layers.")]
    ends = unit_costs.get("embedding", 0.0), unit_costs.get("head", 0.0)
    counts = count_layers(settings, layers, ends, schedule.rank_of_stage)
    # I and W each have as many matmuls as F, so one list of costs serves for all three. Messages count as free: their time is
    # not known before the run, and `lower` starts them early enough to hide them.
    stages, gain = tuple(split_stages(counts)), ""
    own = [sum(layers[each.start : each.stop]) + ends[0] * each.is_first + ends[1] * each.is_last for each in stages]
    costs = Costs(own, own, own)
    if times is not None and len(stages) > 1:
        by_flops = tuple(counts)
        counts, gain = _split_by_times(times, by_flops, make, num_microbatches, is_fixed=settings.table is not None)
        stages = tuple(split_stages(counts))
        costs = times.of_stages(stages)
    return PipelinePlan(
        stages,
        schedule.rank_of_stage,
        costs,
        make,
        # Parameters that are not kept are unsharded for each use. Gradients that accumulate as shards are reduced before those of
        # the next microbatch come, which go into the same buffer.
        "microbatch" if zero.stage == 3 and not zero.keep_gathered else "step",
        "microbatch" if zero.stage >= 2 and zero.accumulate == "sharded" else "step",
        gain=gain,
    )


# Beyond so many microbatches for each rank a step is taken to grow evenly.
STEADY = 4


def _split_by_times(
    times: UnitTimes, by_flops: tuple[int, ...], make: Callable[[int], Schedule], num_microbatches: int, is_fixed: bool
) -> tuple[tuple[int, ...], str]:
    """(the split with the shortest simulated step, what it gains). by_flops: the split without measurements; is_fixed: the
    schedule is made for this number of microbatches alone."""
    whole = make(num_microbatches)
    num_ranks, owners = whole.num_ranks, whole.rank_of_stage
    # The middle of a step repeats: its length is that of a short one and so many more rounds, of a microbatch for each rank, as
    # groups of an interleaved schedule are.
    fewer = STEADY * num_ranks + num_microbatches % num_ranks
    if is_fixed or num_microbatches <= fewer:
        parts, rest = [whole], 0.0
    else:
        parts, rest = [make(fewer), make(fewer + num_ranks)], (num_microbatches - fewer) / num_ranks

    def length_of(counts: tuple[int, ...]) -> float:
        lengths = [simulate(part, times.of_stages(split_stages(counts))).length for part in parts]
        return lengths[0] + rest * (lengths[-1] - lengths[0])

    # The slowest rank decides but for the ends of a step, so the best is near the split that makes it fastest.
    even = balance_ranks(split_by_cost(times.layers, *times.ends, len(owners)), times.layers, *times.ends, owners)
    found = fastest_split([tuple(even), by_flops], length_of)
    step_s, flops_s = length_of(found), length_of(by_flops)
    return found, (
        f"layers {list(found)} take {step_s:.4g} s a step by the times of {times.source}, and {list(by_flops)}, the split by"
        f" FLOPs, {flops_s / step_s - 1:.1%} more"
    )


def refuse_few_layers(num_layers: int, rank_of_stage: Sequence[int]) -> None:
    """Raises RecipeError where there are fewer layers than stages."""
    num_stages = len(rank_of_stage)
    if num_stages > max(num_layers, 1):
        raise RecipeError(
            f"parallel.pp={max(rank_of_stage) + 1} makes {num_stages} stages, and the model has {num_layers} layers, of which"
            " each stage needs one: lower parallel.pp or pipeline.virtual_stages"
        )


def count_layers(
    settings: schema.Pipeline, layers: Sequence[float], ends: tuple[float, float], rank_of_stage: Sequence[int]
) -> Sequence[int]:
    """Layers of each stage. layers, ends: costs of each layer, of embedding and head. Raises RecipeError where there are fewer
    layers than stages, or pipeline.layers says others."""
    num_stages = len(rank_of_stage)
    if num_stages == 1:
        return [len(layers)]
    refuse_few_layers(len(layers), rank_of_stage)
    if settings.layers is None or isinstance(settings.layers, str):
        return balance_ranks(split_by_cost(layers, *ends, num_stages), layers, *ends, rank_of_stage)
    if len(settings.layers) != num_stages or sum(settings.layers) != len(layers):
        raise RecipeError(
            f"pipeline.layers={settings.layers} makes {len(settings.layers)} stages of {sum(settings.layers)} layers; the model"
            f" has {len(layers)} layers in {num_stages} stages. Use null, to cut by cost"
        )
    return settings.layers


def split_by_cost(layers: Sequence[float], first: float, last: float, num_stages: int) -> list[int]:
    """Number of layers of each stage, at least one, that minimises the largest cost of a stage; among equals the one with the
    least sum of squares, that is the most even one.

    layers: cost of each layer, in order. first, last: additional cost of the first stage (embedding) and the last (head).
    """
    # Dynamic programming over (stages so far, layers so far): at most S L^2 steps, whereas the number of splits is exponential.
    # No stage of the best split costs more than the slowest one of an even split, so most steps are left out.
    sums = [0.0, *accumulate(layers)]
    num_layers = len(layers)
    assert num_stages <= num_layers, f"{num_stages} stages of {num_layers} layers"

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == num_stages - 1)

    even = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    most = max(map(cost, range(num_stages), even, even[1:]))
    # best[stop]: (largest cost, sum of squares, split) of the stages so far over the first `stop` layers.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        rest = num_stages - 1 - stage
        for start, (largest, squares, split) in best.items():
            for stop in range(start + 1, num_layers - rest + 1):
                own = cost(stage, start, stop)
                if own > most:
                    break
                # Tuples compare by the largest cost, then by squares, then by the split itself: all ranks find the same one.
                found = (max(largest, own), squares + own * own, (*split, stop - start))
                if stop not in after or found < after[stop]:
                    after[stop] = found
        best = after
    return list(best[num_layers][2])


def balance_ranks(
    counts: Sequence[int], layers: Sequence[float], first: float, last: float, rank_of_stage: Sequence[int]
) -> list[int]:
    """The split `counts` with layers moved between stages as long as the slowest rank gets faster, or all get more even.

    A rank runs its virtual stages in turn, so its cost is their sum. In a V embedding and head are on one rank: stages that are
    even make that rank the slowest.
    """
    sums, num_ranks = np.array([0.0, *accumulate(layers)]), max(rank_of_stage) + 1

    def measure(splits: np.ndarray) -> np.ndarray:
        """(largest cost of a rank, sum of squares, largest of a stage) of each split [splits, stages]."""
        stops = np.cumsum(splits, axis=1)
        costs = sums[stops] - sums[stops - splits]
        costs[:, 0] += first
        costs[:, -1] += last
        ranks, squares = np.zeros((len(splits), num_ranks)), np.zeros(len(splits))
        # One after another, and not by a sum of numpy's, whose order would round otherwise for other numbers of stages.
        for stage, rank in enumerate(rank_of_stage):
            ranks[:, rank] += costs[:, stage]
        for rank in range(num_ranks):
            squares += ranks[:, rank] * ranks[:, rank]
        return np.stack([ranks.max(axis=1), squares, costs.max(axis=1)], axis=1)

    # Single moves of one layer, until none helps: few, because the stages are even already.
    best = np.array(counts)
    slowness = measure(best[None])[0].tolist()
    while True:
        sources, targets = np.nonzero((best > 1)[:, None] & ~np.eye(len(best), dtype=bool))
        if not len(sources):
            return best.tolist()
        moves = np.tile(best, (len(sources), 1))
        rows = np.arange(len(sources))
        moves[rows, sources] -= 1
        moves[rows, targets] += 1
        measured = measure(moves)
        # The first of equals.
        found = np.lexsort(measured.T[::-1])[0]
        if measured[found].tolist() >= slowness:
            return best.tolist()
        best, slowness = moves[found], measured[found].tolist()


def fastest_split(
    starts: Sequence[tuple[int, ...]], length_of: Callable[[tuple[int, ...]], float], most: int = MOST
) -> tuple[int, ...]:
    """Layers of each stage, at least one, with which a step is shortest; of equals the one that is found first.

    Best first: from the shortest known split one layer is moved between any two stages, and so on until all splits are known, or
    `most`. starts: splits of all layers to begin with. length_of: a step of a split.
    """
    # Greedy descent stops where no single move helps: of some V schedules 6% above the best bubble. Going on from the next best
    # found the best of all that were enumerated.
    known = {split: length_of(split) for split in starts}
    waiting = [(length, split) for split, length in known.items()]
    heapify(waiting)
    while waiting and len(known) < most:
        for split in _moves(heappop(waiting)[1]):
            if split not in known:
                known[split] = length_of(split)
                heappush(waiting, (known[split], split))
    return min(known, key=lambda split: known[split])


def _moves(split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for source, target in permutations(range(len(split)), 2):
        if split[source] > 1:
            yield tuple(count + (stage == target) - (stage == source) for stage, count in enumerate(split))
