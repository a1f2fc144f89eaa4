"""Forward-only microbatches where the ranks of a schedule are idle (the idea of PipeFill, Arfeen et al. 2024).

A rank's gaps are known before anything runs: they are the times between its simulated actions, until the last rank ends. Each
extra microbatch goes stage by stage into the first gap that has room after its arrival, and only if it gets through all stages.
Training actions keep their times, so the step takes no longer. A forward-only microbatch holds nothing but hidden states.
"""

from collections.abc import Sequence
from dataclasses import replace

from framework.parallel.pipeline.actions import Action, Schedule, V
from framework.parallel.pipeline.simulate import Costs, Timed, simulate

Gaps = tuple[tuple[float, float], ...]

# Relative to the length of the step. Costs are floats and times their sums, so a gap of exactly one forward may be an ulp short.
ROUNDING = 1e-9


def fill_bubbles(schedule: Schedule, costs: Costs, most: int | None = None) -> Schedule:
    """The schedule with forward-only microbatches, numbered after its own: as many as there is room for, or `most`."""
    timeline = simulate(schedule, costs)
    end = max((rank[-1].end for rank in timeline.ranks if rank), default=0.0)
    gaps = [_find_gaps(rank, end) for rank in timeline.ranks]
    lists = [list(rank) for rank in timeline.ranks]
    count = 0
    while count != most and (found := _find_room(schedule.rank_of_stage, costs, gaps, end * ROUNDING)) is not None:
        starts, gaps = found
        for stage, start in enumerate(starts):
            action = Action(stage, V, schedule.num_microbatches + count)
            lists[schedule.rank_of_stage[stage]].append(Timed(action, start, start + costs.of(V, stage)))
        count += 1
    # By end as well: of two actions that start together one has cost 0, and goes first.
    ordered = (sorted(rank, key=lambda each: (each.start, each.end)) for rank in lists)
    return replace(
        schedule, actions=tuple(tuple(each.action for each in rank) for rank in ordered), num_validation=count
    )


def _find_gaps(rank: Sequence[Timed], end: float) -> Gaps:
    starts, ends = [each.start for each in rank], [each.end for each in rank]
    return tuple((start, stop) for start, stop in zip([0.0, *ends], [*starts, end], strict=True) if stop > start)


def _find_room(
    rank_of_stage: Sequence[int], costs: Costs, gaps: Sequence[Gaps], rounding: float
) -> tuple[list[float], list[Gaps]] | None:
    """The times at which one more microbatch starts in each stage, and the gaps that are left; None if there is no room."""
    # First fit. Gaps are tuples that are replaced, not changed: one that fails half way leaves nothing behind.
    left, starts, ready = list(gaps), [], 0.0
    for stage, rank in enumerate(rank_of_stage):
        if stage and rank_of_stage[stage - 1] != rank:
            ready += costs.message
        length = costs.of(V, stage)
        # Earliest possible on each rank in turn: later would only take room from the stages after it.
        fits = (
            (at, max(low, ready))
            for at, (low, high) in enumerate(left[rank])
            if max(low, ready) + length <= high + rounding
        )
        at, start = next(fits, (-1, 0.0))
        if at < 0:
            return None
        ready = start + length
        low, high = left[rank][at]
        rest = tuple(gap for gap in ((low, start), (ready, high)) if gap[1] > gap[0])
        left[rank] = (*left[rank][:at], *rest, *left[rank][at + 1 :])
        starts.append(start)
    return starts, left
