"""Rows of the page's charts: what a plan and its forecasts say, as flat records. Charts only show; all numbers are made here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from framework.parallel.pipeline.actions import ActionKind
from framework.parallel.pipeline.simulate import Timeline
from framework.plan.forecast import MemoryForecast, StageMemory, TimeForecast

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]

GIB = 2**30
SLACK = "allocator slack"
OUTSIDE = "outside torch"
WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward, inputs",
    ActionKind.WEIGHT: "backward, weights",
    ActionKind.VALIDATION: "validation",
}
# Boxes that a browser draws without the reader waiting for it.
MOST_ACTIONS = 4000
MOST_RANKS = 1024


def memory_rows(memory: MemoryForecast, places: Sequence[str]) -> Rows:
    """Of each place of the pipeline: bytes by kind where it holds most, sums beside the limit, and both at each phase."""
    kinds = _kinds(memory.stages)
    rows: dict[str, list[Row]] = {"memory": [], "totals": [], "phases": [], "phase_totals": []}
    for place, stage in zip(places, memory.stages, strict=True):
        rows["memory"] += _by_kind(stage.held, stage, kinds, {"place": place})
        rows["totals"].append({"place": place, **_beside_limit(stage.reserved, memory.limit)})
        for phase, held in stage.phases.items():
            rows["phases"] += _by_kind(held, stage, kinds, {"place": place, "phase": phase})
            total = sum(held.values()) + stage.slack + stage.outside
            rows["phase_totals"].append({"place": place, "phase": phase, **_beside_limit(total, memory.limit)})
    return rows


def _kinds(stages: Iterable[StageMemory]) -> list[str]:
    """Those that take anything anywhere, in the order in which they are stacked, slack last."""
    counted = (held for stage in stages for held in (stage.held, *stage.phases.values()))
    return [*dict.fromkeys(kind for held in counted for kind, size in held.items() if size), OUTSIDE, SLACK]


def _by_kind(held: Mapping[str, int], stage: StageMemory, kinds: Sequence[str], common: Row) -> Iterator[Row]:
    sizes = all_kinds(held, stage)
    for order, kind in enumerate(kinds):
        if sizes.get(kind):
            yield {**common, "kind": kind, "order": order, "gb": sizes[kind] / GIB}


def all_kinds(held: Mapping[str, int], stage: StageMemory) -> dict[str, int]:
    """Bytes by kind, with those that are not tensors'."""
    return {**held, OUTSIDE: stage.outside, SLACK: stage.slack}


def _beside_limit(total: int, limit: int) -> Row:
    over = max(0, total - limit)
    words = f"{over / GIB:,.1f} GiB over" if over else ""
    return {"total": total / GIB, "limit": limit / GIB, "over": over / GIB, "words": words}


def part_rows(time: TimeForecast) -> Rows:
    """Seconds of each part of a step, and their share of it."""
    parts = {part: seconds for part, seconds in time.parts.items() if seconds > 0}
    return {
        "parts": [
            {"part": part, "seconds": seconds, "words": f"{show_seconds(seconds)}, {seconds / time.step_s:.1%}"}
            for part, seconds in parts.items()
        ]
    }


def timeline_rows(timeline: Timeline, rank_of_stage: Sequence[int]) -> Rows:
    """A bar for each action, a lane for each rank. Times as the timeline has them."""
    chunks = {stage: sum(owner == rank for owner in rank_of_stage[:stage]) for stage, rank in enumerate(rank_of_stage)}
    end = timeline.length
    actions: list[Row] = [
        {
            "rank": rank,
            "start": each.start,
            "end": each.end,
            "kind": WORDS[each.action.kind],
            "stage": each.action.stage,
            "chunk": chunks[each.action.stage],
            "microbatch": each.action.microbatch,
        }
        for rank, own in enumerate(timeline.ranks)
        for each in own
    ]
    idle = (end - sum(each.end - each.start for each in own) for own in timeline.ranks)
    lanes: list[Row] = [
        {"rank": rank, "start": 0.0, "end": end, "idle": f"idle for {seconds / end:.1%}"}
        for rank, seconds in enumerate(idle)
    ]
    return {"timeline": actions, "lanes": lanes}


def show_seconds(seconds: float) -> str:
    """Three digits: 12.3 s, 45.6 ms, 789 us."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.0f} {name}" if seconds >= 100 * unit else f"{seconds / unit:#.3g} {name}"
    return f"{seconds * 1e6:.0f} us"
