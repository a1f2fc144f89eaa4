"""A printed description of a pipeline before anything runs: the split, the grid, the bubble, and all schedules compared."""

from collections.abc import Iterator

from framework.errors import ScheduleError
from framework.parallel.pipeline.draw import draw_grid
from framework.parallel.pipeline.pipeline import Pipeline
from framework.parallel.pipeline.schedules import SCHEDULES, make_schedule
from framework.parallel.pipeline.simulate import Costs, peak_live, simulate


def describe_bubble(pipeline: Pipeline, num_microbatches: int) -> str:
    """The schedule in a line, and how idle it leaves all ranks together, those with short stages as well; stages take as long as
    their FLOPs say."""
    schedule = pipeline.make(num_microbatches)
    stages, ranks = schedule.num_stages, schedule.num_ranks
    idle = simulate(schedule, pipeline.costs).bubble
    return (
        f"pipeline      {schedule.name}: {stages} stage{'s' * (stages != 1)} on {ranks} rank{'s' * (ranks != 1)},"
        f" {num_microbatches} microbatch{'es' * (num_microbatches != 1)}"
        + (f", bubble {idle:.1%} of all ranks' time by FLOPs" if ranks > 1 else "")
    )


def describe_pipeline(pipeline: Pipeline, num_microbatches: int) -> str:
    """Lines about a step with `num_microbatches`: what `meshwright plan --schedule` prints."""
    schedule = pipeline.make(num_microbatches)
    slowest = max(pipeline.costs.forward) or 1.0
    lines = [
        describe_bubble(pipeline, num_microbatches),
        f"{'stage':<7}{'rank':<6}{'layers':<12}time of the slowest",
    ]
    for bounds, rank, cost in zip(pipeline.stages, schedule.rank_of_stage, pipeline.costs.forward, strict=True):
        ends = "".join([" + embedding"] * bounds.is_first + [" + head"] * bounds.is_last)
        lines.append(
            f"{bounds.index:<7}{rank:<6}{f'{bounds.start} to {bounds.stop - 1}':<12}{cost / slowest:.0%}{ends}"
        )
    lines += [
        "",
        draw_grid(schedule),
        "",
        f"bubbles       have room for {pipeline.room(num_microbatches)} microbatches of validation (pipeline.fill_bubbles)",
    ]
    lowered = pipeline.lowered(num_microbatches).ranks[0]
    shown = " ".join(map(str, lowered[:24]))
    lines += [
        "",
        f"rank 0 does   {shown}{' ...' if len(lowered) > 24 else ''}",
        f"parameters    gathered once per {pipeline.unshard} (zero.stage, zero.keep_gathered)",
        f"gradients     reduced once per {pipeline.reduce} (zero.stage, zero.accumulate)",
        "",
        *_compare(pipeline, schedule.num_ranks, num_microbatches),
    ]
    return "\n".join(lines)


def _compare(pipeline: Pipeline, num_ranks: int, num_microbatches: int) -> Iterator[str]:
    """Lines that compare all schedules on as many ranks, with stages of equal cost: bubble and live microbatches."""
    yield "all schedules, as if stages cost alike: the bubble above is of this model's own stages, which do not"
    yield f"{'schedule':<14}{'stages':<8}{'bubble':<9}live microbatches on each rank, in layers of a rank"
    total = sum(pipeline.costs.forward)
    for name, spec in SCHEDULES.items():
        virtual = spec.virtual_stages or 2
        try:
            schedule = make_schedule(name, num_ranks, num_microbatches, virtual)
        except ScheduleError as error:
            yield f"{name:<14}{num_ranks * virtual:<8}{error}"
            continue
        # The same model for all: more stages are shorter ones, and a live microbatch of a shorter stage holds less.
        costs = [total / schedule.num_stages] * schedule.num_stages
        bubble = simulate(schedule, Costs(costs, costs, costs)).bubble
        live = " ".join(f"{count / virtual:g}" for count in peak_live(schedule))
        yield f"{name:<14}{schedule.num_stages:<8}{f'{bubble:.1%}':<9}{live}"
