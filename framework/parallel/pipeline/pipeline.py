"""A run's pipeline: where the model is cut, and what ranks do in a step of so many microbatches."""

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
    """stages: the layers of each; rank_of_stage: where each is. costs: of each stage. make: the schedule of so many microbatches.
    unshard, reduce: see `lower`. known, rooms: what has been asked for before."""

    stages: tuple[StageBounds, ...]
    rank_of_stage: tuple[int, ...]
    costs: Costs
    make: Callable[[int], Schedule]
    unshard: Frequency = "step"
    reduce: Frequency = "step"
    known: dict[tuple[int, int], Lowered] = field(default_factory=dict)
    rooms: dict[int, int] = field(default_factory=dict)

    def schedule(self, num_microbatches: int, num_validation: int = 0) -> Schedule:
        """A training step's, with so many microbatches of validation in its bubbles, at most `room`; or of these alone."""
        if not num_microbatches:
            return forward_only(self.rank_of_stage, num_validation)
        return fill_bubbles(self.make(num_microbatches), self.costs, num_validation)

    def simulated(self, num_microbatches: int, measured: Timeline) -> Timeline:
        """The schedule of a step that was measured, with the validation that ran in it."""
        actions = (each.action for rank in measured.ranks for each in rank)
        validated = {action.microbatch for action in actions if action.kind is Kind.VALIDATION}
        return simulate(self.schedule(num_microbatches, len(validated)), self.costs)

    def room(self, num_microbatches: int) -> int:
        """How many microbatches of validation the bubbles of a training step hold."""
        if num_microbatches not in self.rooms:
            self.rooms[num_microbatches] = fill_bubbles(self.make(num_microbatches), self.costs).num_validation
        return self.rooms[num_microbatches]

    def lowered(self, num_microbatches: int, num_validation: int = 0) -> Lowered:
        """What ranks do in that schedule."""
        key = num_microbatches, num_validation
        if key not in self.known:
            self.known[key] = lower(self.schedule(*key), self.costs, self.unshard, self.reduce)
        return self.known[key]


def forward_only(rank_of_stage: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Every microbatch through all stages; microbatch m is in stage s at time m + s, and what is further on goes first."""
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
    """The pipeline of a recipe. unit_costs: forward time of each unit of the model, in any unit, in order of computation.

    Raises RecipeError or ScheduleError where model, microbatches and stages do not fit.
    """
    if settings.table is not None:
        make: Callable[[int], Schedule] = partial(read_table, Path(settings.table), num_ranks)
    else:
        make = partial(_make, settings.schedule, num_ranks, count_virtual_stages(settings))
    schedule = make(num_microbatches)
    layers = [cost for unit, cost in unit_costs.items() if unit.startswith("layers.")]
    ends = unit_costs.get("embedding", 0.0), unit_costs.get("head", 0.0)
    counts = _count_layers(settings, layers, ends, schedule.rank_of_stage)
    stages = tuple(split_stages(counts))
    costs = [sum(layers[each.start : each.stop]) + ends[0] * each.is_first + ends[1] * each.is_last for each in stages]
    return Pipeline(
        stages,
        schedule.rank_of_stage,
        Costs(costs, costs, costs),
        make,
        "microbatch" if zero.stage == 3 and not zero.keep_gathered else "step",
        "microbatch" if zero.stage >= 2 and zero.accumulate == "sharded" else "step",
    )


def _make(name: str, num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    return make_schedule(name, num_ranks, num_microbatches, virtual_stages)


def _count_layers(
    settings: schema.Pipeline, layers: Sequence[float], ends: tuple[float, float], rank_of_stage: Sequence[int]
) -> Sequence[int]:
    num_stages = len(rank_of_stage)
    if num_stages == 1:
        return [len(layers)]
    if num_stages > len(layers):
        raise RecipeError(
            f"parallel.pp makes {num_stages} stages, and the model has {len(layers)} layers, of which each stage needs one:"
            " lower parallel.pp or pipeline.virtual_stages"
        )
    if settings.layers is None:
        return balance_ranks(split_by_cost(layers, *ends, num_stages), layers, *ends, rank_of_stage)
    if len(settings.layers) != num_stages or sum(settings.layers) != len(layers):
        raise RecipeError(
            f"pipeline.layers={settings.layers} makes {len(settings.layers)} stages of {sum(settings.layers)} layers; the model"
            f" has {len(layers)} layers in {num_stages} stages. Use null, to cut by cost"
        )
    return settings.layers
