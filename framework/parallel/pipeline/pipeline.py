"""A run's pipeline: how layers are split into stages, and what ranks do in a step with a given number of microbatches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from framework.errors import RecipeError
from framework.model.stage import StageBounds, split_stages
from framework.parallel.pipeline.actions import Action, Kind, Schedule
from framework.parallel.pipeline.bubble_filling import fill_bubbles
from framework.parallel.pipeline.lower import Frequency, Lowered, lower
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import Costs, Timeline, simulate
from framework.parallel.pipeline.split import balance_ranks, split_by_cost
from framework.parallel.pipeline.table import read_table
from framework.recipe import schema
from framework.recipe.derive import count_virtual_stages


@dataclass(frozen=True)
class Pipeline:
    """The plan of a run's pipeline; equal on all ranks.

    stages: the layers of each stage. rank_of_stage: the rank of each. costs: simulated times, in FLOPs. make: the schedule with
    a given number of microbatches. unshard, reduce: how often, see `lower`. known, rooms: results computed before.
    """

    stages: tuple[StageBounds, ...]
    rank_of_stage: tuple[int, ...]
    costs: Costs
    make: Callable[[int], Schedule]
    unshard: Frequency = "step"
    reduce: Frequency = "step"
    known: dict[tuple[int, int], Lowered] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)

    def sends(self, index: int) -> bool:
        """Whether a stage's output goes to another rank."""
        return len(set(self.rank_of_stage[index : index + 2])) == 2

    def schedule(self, num_microbatches: int, num_validation: int = 0) -> Schedule:
        """The schedule of a training step with `num_validation` microbatches, at most `room`, in its bubbles; with no training
        microbatches, that of a validation alone."""
        if not num_microbatches:
            return forward_only(self.rank_of_stage, num_validation)
        return fill_bubbles(self.make(num_microbatches), self.costs, num_validation)

    def simulated(self, num_microbatches: int, measured: Timeline) -> Timeline:
        """The simulated timeline of the schedule that a measured step has run, validation in its bubbles included."""
        actions = (each.action for rank in measured.ranks for each in rank)
        validated = {action.microbatch for action in actions if action.kind is Kind.VALIDATION}
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
            Action(stage, Kind.VALIDATION, at - stage)
            for at in times
            for stage in reversed(range(len(rank_of_stage)))
            if rank_of_stage[stage] == rank and 0 <= at - stage < num_microbatches
        )
        for rank in range(max(rank_of_stage) + 1)
    ]
    return Schedule("forward only", 0, rank_of_stage, tuple(lists), num_microbatches)


def plan_pipeline(
    settings: schema.Pipeline, num_ranks: int, num_microbatches: int, unit_costs: Mapping[str, float], zero: schema.Zero
) -> Pipeline:
    """The pipeline of a recipe; a pure function, so all ranks plan the same one.

    unit_costs: forward time of each of the model's units, in any unit of time, in order of computation (`model.flops`).
    Raises RecipeError or ScheduleError where model, microbatches and stages do not fit.
    """
    if settings.table is not None:
        make: Callable[[int], Schedule] = partial(read_table, Path(settings.table), num_ranks)
    else:
        make = partial(_make, settings.schedule, num_ranks, count_virtual_stages(settings))
    schedule = make(num_microbatches)
    layers = [cost for unit, cost in unit_costs.items() if unit.startswith("layers.")]
    ends = unit_costs.get("embedding", 0.0), unit_costs.get("head", 0.0)
    counts = count_layers(settings, layers, ends, schedule.rank_of_stage)
    stages = tuple(split_stages(counts))
    # I and W each have as many matmuls as F, so one list of costs serves for all three. Messages count as free: their time is
    # not known before the run, and `lower` starts them early enough to hide them.
    costs = [sum(layers[each.start : each.stop]) + ends[0] * each.is_first + ends[1] * each.is_last for each in stages]
    return Pipeline(
        stages,
        schedule.rank_of_stage,
        Costs(costs, costs, costs),
        make,
        # Parameters that are not kept are gathered for each use. Gradients that accumulate as shards are reduced before those of
        # the next microbatch come, which go into the same buffer.
        "microbatch" if zero.stage == 3 and not zero.keep_gathered else "step",
        "microbatch" if zero.stage >= 2 and zero.accumulate == "sharded" else "step",
    )


def _make(name: str, num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    return make_schedule(name, num_ranks, num_microbatches, virtual_stages)


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
    if settings.layers is None:
        return balance_ranks(split_by_cost(layers, *ends, num_stages), layers, *ends, rank_of_stage)
    if len(settings.layers) != num_stages or sum(settings.layers) != len(layers):
        raise RecipeError(
            f"pipeline.layers={settings.layers} makes {len(settings.layers)} stages of {sum(settings.layers)} layers; the model"
            f" has {len(layers)} layers in {num_stages} stages. Use null, to cut by cost"
        )
    return settings.layers
