"""Pages of a plan and of a search: forecasts as rows, charts over them, and words.

A plan's page shows where bytes and seconds go. A search's has layouts as points and rows, sliders that pick among those that
were forecast, and what was rejected.

`python -m framework.plan.pages RUN` writes the page of a run's saved recipe.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from framework.files import write_file
from framework.mesh.topology import Placement
from framework.output import GIB, show_bytes, show_hours, show_seconds
from framework.parallel.pipeline.simulate import Timeline, simulate
from framework.plan.advice import FittingChange, describe_changes, describe_verdict
from framework.plan.forecast_memory import OUTSIDE, SLACK, MemoryForecast, StageMemory
from framework.plan.forecast_plan import PlanForecast, forecast_run, measure_traffic
from framework.plan.page_charts import WORDS, Row, Rows, is_near, layouts_charts, plan_charts
from framework.plan.page_html import Page, Section, Table, render_html
from framework.plan.plan import Plan
from framework.plan.search import Ranked, Rejection, Search, describe, group_rejections
from framework.plan.time import TimeForecast
from framework.recipe.convert import load_recipe
from framework.recipe.plugins import import_plugins

# Boxes that a browser draws without the reader waiting for it.
MOST_ACTIONS = 4000
MOST_RANKS = 1024
MESH_AXES = ("pp", "dp", "cp", "tp", "ep")
# Messages of each parallelism: axes of the mesh, parts of a TimeForecast, kinds of traffic.
LINKS = {
    **{name: ((name,), (name,), (name,)) for name in ("tp", "cp", "ep", "pp")},
    "cp": (("ulysses", "ring"), ("cp",), ("cp",)),
    "ep": (("ep",), ("ep", "ep_outer", "ep_inner"), ("ep",)),
    "dp": (
        ("shard", "replica", "expert_shard", "expert_replica"),
        ("gathers", "reductions"),
        ("gathers", "gathers of copies", "reductions to shards", "to replicas", "matrices"),
    ),
}


def make_page(found: PlanForecast, changes: Sequence[FittingChange] = ()) -> Page:
    """Make the page."""
    plan, time, memory = found.plan, found.forecast.time, found.forecast.memory
    timeline, shown = draw_timeline(plan, found)
    rows = {
        **memory_rows(memory, name_places(plan)),
        **part_rows(time),
        **timeline,
        **link_rows(plan, found),
        **mesh_rows(plan),
    }
    charts = {name: chart.to_dict() for name, chart in plan_charts(rows).items()}
    words = _describe_sections(plan, found, shown)
    return Page(
        title=plan.title,
        verdict=describe_verdict(memory, found.cluster),
        is_over=not memory.fits,
        changes=tuple(describe_changes(found, changes)),
        facts=tuple(_list_facts(plan, found)),
        sections=tuple(Section(name, *words[name]) for name in charts),
        charts=charts,
        rows=rows,
        footer=f"meshwright plan; machine {found.cluster.name}. All numbers are predicted, none is measured.",
    )


def memory_rows(memory: MemoryForecast, places: Sequence[str]) -> Rows:
    """Bytes of each place of the pipeline by kind where it holds most, sums beside the limit, and both at each phase."""
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
    """Kinds that take anything anywhere, in the order in which they are stacked, slack last."""
    counted = (held for stage in stages for held in (stage.held, *stage.phases.values()))
    return [*dict.fromkeys(kind for held in counted for kind, size in held.items() if size), OUTSIDE, SLACK]


def _by_kind(held: Mapping[str, int], stage: StageMemory, kinds: Sequence[str], common: Row) -> Iterator[Row]:
    sizes = {**held, OUTSIDE: stage.outside, SLACK: stage.slack}
    for order, kind in enumerate(kinds):
        if sizes.get(kind):
            yield {**common, "kind": kind, "order": order, "gb": sizes[kind] / GIB}


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


def name_places(plan: Plan) -> list[str]:
    """The ranks at each place of the pipeline, which hold alike."""
    ranks = plan.derived.world // plan.derived.pp
    firsts = range(0, plan.derived.world, ranks)
    return [f"rank {first}" if ranks == 1 else f"ranks {first} to {first + ranks - 1}" for first in firsts]


def draw_timeline(plan: Plan, found: PlanForecast) -> tuple[Rows, int]:
    """Rows of the pipeline's timeline, and its number of microbatches: fewer than a step has where boxes would be too many."""
    total, pp = plan.derived.accumulation, plan.derived.pp
    # Whole rounds of the pipeline, as interleaved stages need them, and two at the least, as dualpipe_v does.
    actions = 2 * len(plan.pipeline.stages)
    most = max(2 * pp, MOST_ACTIONS // actions // pp * pp)
    shown = total if total <= most else most
    if plan.recipe.pipeline.table is None:
        timeline = simulate(plan.pipeline.make(shown), found.costs)
    else:  # a table has the actions of one number of microbatches: those that end first are drawn
        whole = simulate(plan.pipeline.make(total), found.costs)
        stop = sorted(each.end for own in whole.ranks for each in own)[:MOST_ACTIONS][-1]
        timeline = Timeline(tuple(tuple(each for each in own if each.end <= stop) for own in whole.ranks))
        shown = len({each.action.microbatch for own in timeline.ranks for each in own})
    return timeline_rows(timeline, plan.pipeline.rank_of_stage), shown


def link_rows(plan: Plan, found: PlanForecast) -> Rows:
    """Seconds of each kind of message in a step, hidden and exposed, with bytes and the share of the step."""
    placement, time = Placement(plan.topology, plan.derived.ranks_per_node), found.forecast.time
    traffic = [measure_traffic(plan, rank) for rank in plan.topology.ranks("pp", 0)]
    links: list[Row] = []
    totals: list[Row] = []
    for link, (axes, parts, kinds) in LINKS.items():
        exposed = sum(time.parts.get(part, 0.0) for part in parts)
        hidden = sum(time.hidden.get(part, 0.0) for part in (("shard",) if link == "dp" else parts))
        seconds = {"hidden": hidden, "exposed": exposed}
        sent = max(sum(own[kind] for kind in kinds) for own in traffic)
        if not sent and not any(seconds.values()):
            continue
        name = f"{link}, {_describe_span(placement, axes)}"
        load = f"{sum(seconds.values()) / time.step_s:.1%} of the step"
        common = {"axis": name, "bytes": show_bytes(sent), "load": load}
        links += [{**common, "how": how, "seconds": each} for how, each in seconds.items()]
        totals.append(
            {
                "axis": name,
                "words": f"{show_bytes(sent)}, {sum(seconds.values()) / time.step_s:.1%}",
                "seconds": sum(seconds.values()),
            }
        )
    return {"links": links, "link_totals": totals}


def _describe_span(placement: Placement, axes: tuple[str, ...]) -> str:
    nodes = max(placement.nodes_spanned(axis) for axis in axes)
    return "in a node" if nodes == 1 else f"over {nodes} nodes"


def mesh_rows(plan: Plan) -> Rows:
    """The coordinates of each rank and its place on its node; of the first nodes where there are many."""
    topology, on_node = plan.topology, plan.derived.ranks_per_node
    ranks = range(min(plan.derived.world, MOST_RANKS // on_node * on_node or on_node))
    rows = [
        {
            "rank": rank,
            "node": rank // on_node,
            "slot": rank % on_node,
            **{axis: topology.index(axis, rank) for axis in MESH_AXES},
        }
        for rank in ranks
    ]
    return {"mesh": rows}


def _list_facts(plan: Plan, found: PlanForecast) -> Iterator[tuple[str, str]]:
    time, memory = found.forecast.time, found.forecast.memory
    yield "fullest rank", show_bytes(memory.fullest.reserved)
    yield "device", show_bytes(memory.limit)
    yield "step time", show_seconds(time.step_s)
    yield "tokens/s", f"{time.tokens_per_s:,.0f}"
    yield "tokens/s of a rank", f"{time.tokens_per_s_and_rank:,.0f}"
    yield "MFU", f"{time.mfu:.1%}"
    yield "whole run", show_hours(time.hours)
    if time.cost:
        yield "cost", f"${time.cost:,.0f}"
    for axis, degree in plan.derived.degrees.items():
        if degree > 1:
            yield axis, str(degree)


def _describe_sections(plan: Plan, found: PlanForecast, shown: int) -> dict[str, tuple[str, str]]:
    """(heading, sentence) of each section, by its chart's id."""
    forecast, derived = found.forecast, plan.derived
    is_cut, is_large = shown < derived.accumulation, derived.world > MOST_RANKS
    fewer = f", drawn with {shown} of a step's {derived.accumulation} microbatches" if is_cut else ""
    first = f", the first of {derived.world // derived.ranks_per_node} nodes" if is_large else ""
    name, limit = plan.pipeline.make(derived.accumulation).name, show_bytes(forecast.memory.limit)
    has_line = is_near(forecast.memory.fullest.reserved, forecast.memory.limit)
    line = f" The line: {limit} of a device." if has_line else f" A device has {limit}."
    red = " Red is what a device does not have." * has_line
    bubble = forecast.time.parts.get("bubble", 0.0) / forecast.time.step_s
    sentences = {
        "Memory of each rank": f"Where a step needs most, by place in the pipeline.{line}",
        "Memory over a step": f"What ranks hold at each phase.{red}",
        "Parts of a step": "Of the rank that takes longest; they add up to the step time.",
        "Pipeline": f"Schedule {name}{fewer}. Grey is idle; the bubble is {bubble:.1%} of the step of the busiest rank.",
        "Links": "Messages of a step: behind computation, and what nothing hides; bytes that a rank sends, share of the step.",
        "Mesh": f"Ranks on their nodes{first}: point at one to see its coordinates.",
    }
    return dict(zip(("memory", "phases", "parts", "timeline", "links", "mesh"), sentences.items(), strict=True))


# Bytes of a page's rows; Vega takes 0.9 MB of the 2 that a page may have.
MOST_ROW_BYTES = 900_000
MOST_REASONS = 60
# Rows that the page fills in as the reader chooses.
FILLED = ("layouts", "picked", "memory", "totals", "parts")
# Sliders: field of a row, its name for readers.
CHOICES = (
    ("gpus", "GPUs"),
    ("dp", "dp"),
    ("tp", "tp"),
    ("pp", "pp"),
    ("cp", "cp"),
    ("ep", "ep"),
    ("zero", "ZeRO stage"),
    ("microbatch", "sequences of a microbatch"),
)
# Columns of the table: field, title, is it text, is it said of the picked layout.
COLUMNS = (
    ("number", "#", False, False),
    ("gpus", "GPUs", False, False),
    ("layout", "layout", True, False),
    ("step", "step", False, True),
    ("speed", "tokens/s a GPU", False, True),
    ("mfu", "MFU", False, True),
    ("memory_words", "memory", False, True),
    ("verdict", "", False, True),
    ("hours", "hours", False, True),
    ("cost", "cost", False, True),
)


def choice_of(layout: Ranked) -> tuple[int, ...]:
    """The layout's values of the sliders."""
    c = layout.candidate
    return (c.world, c.dp, c.tp, c.pp, c.cp, c.ep, c.zero, c.sequences)


def make_search_page(results: Sequence[Search], over: Sequence[Ranked] = ()) -> Page:
    """Make the page of searches on one or several numbers of GPUs, the wanted one first. over: layouts that do not fit.

    Layouts are numbered in the order of the first search's ranking. Where they are too many for a page it has the best of each
    setting of the sliders, then the best of all."""
    found = [each for result in results for each in (*result.ranked, *result.others)]
    ordered = sorted(found, key=lambda each: each.step_s)
    fields, values = choose_rows([*ordered, *over])
    first, shape = results[0], results[0].engine.shape
    best, world = first.ranked[0] if first.ranked else None, first.space.world
    batch = f"{first.space.sequences_per_step:,} sequences of {first.space.base.batch.context:,} tokens a step"
    verdict = f"none of {first.num_layouts:,} layouts fits on {world} GPUs"
    if best is not None:
        verdict = f"best by {first.by}: {describe(best.candidate)}, {show_seconds(best.step_s)} a step"
    names = _names([*ordered, *over])
    return Page(
        title=f"{shape.config.model_type}, {shape.size.total:,} parameters; {batch}; {world} x {first.engine.cluster.name}",
        verdict=verdict,
        is_over=best is None,
        facts=tuple(_list_search_facts(results[0])),
        sections=(),
        charts={name: chart.to_dict() for name, chart in layouts_charts(names["kinds"]).items()},
        rows={name: [] for name in FILLED},
        footer=f"meshwright search; machine {results[0].engine.cluster.name}. All numbers are predicted, none is measured.",
        tables=(_reject(results[0].rejections),),
        layouts={
            "fields": fields,
            "values": values,
            "wanted": results[0].space.world,
            "choices": [
                {"key": key, "name": name, "values": sorted({row[fields.index(key)] for row in values})}
                for key, name in CHOICES
            ],
            "columns": [dict(zip(("key", "name", "isText", "isFact"), each, strict=True)) for each in COLUMNS],
            **names,
        },
        layouts_words=_describe_shown(results, len(values), len(found) + len(over)),
    )


def choose_rows(layouts: Sequence[Ranked], most_bytes: int = MOST_ROW_BYTES) -> tuple[list[str], list[list[Any]]]:
    """(fields, values of each layout) of as many as a page holds, in the given order."""
    firsts: dict[tuple[int, ...], int] = {}
    for number, each in enumerate(layouts):
        firsts.setdefault(choice_of(each), number)
    chosen = set(firsts.values())
    order = [*firsts.values(), *(number for number in range(len(layouts)) if number not in chosen)]
    names, room = _names(layouts), most_bytes
    fields: list[str] = []
    kept: dict[int, list[Any]] = {}
    for number in order:
        row = _row(number + 1, layouts[number], names)
        room -= len(json.dumps(list(row.values())))
        if room < 0:
            break
        fields, kept[number] = list(row), list(row.values())
    return fields, [kept[number] for number in sorted(kept)]


def _names(layouts: Iterable[Ranked]) -> Mapping[str, list[str]]:
    """Kinds of bytes and parts of a step that any of them has, in the order of the numbers in its row."""
    kinds: dict[str, None] = {}
    parts: dict[str, None] = {}
    for each in layouts:
        fullest = each.forecast.memory.fullest
        kinds |= dict.fromkeys(kind for kind, size in fullest.held.items() if size)
        parts |= dict.fromkeys(part for part, seconds in each.forecast.time.parts.items() if seconds)
    return {"kinds": [*kinds, OUTSIDE, SLACK], "parts": list(parts)}


def _row(number: int, layout: Ranked, names: Mapping[str, list[str]]) -> dict[str, Any]:
    c, memory, time = layout.candidate, layout.forecast.memory, layout.forecast.time
    fullest = memory.fullest
    held = fullest.kinds
    over = f"{layout.missing / GIB:,.1f} GiB over"
    return {
        "number": number,
        **dict(zip((key for key, _ in CHOICES), choice_of(layout), strict=True)),
        "layout": describe(c),
        "step_s": _round(time.step_s),
        "gb": _round(fullest.reserved / GIB),
        "limit": _round(memory.limit / GIB),
        "over": _round(layout.missing / GIB),
        "over_words": over if layout.missing else "",
        "step": show_seconds(time.step_s),
        "speed": f"{time.tokens_per_s_and_rank:,.0f}",
        "mfu": f"{time.mfu:.1%}",
        "memory_words": show_bytes(fullest.reserved),
        "verdict": over if layout.missing else f"{memory.spare / GIB:,.1f} GiB to spare",
        "hours": f"{time.hours:,.1f}",
        "cost": f"${time.cost:,.0f}" if time.cost else "-",
        "memory": [_round(held.get(kind, 0) / GIB) for kind in names["kinds"]],
        "parts": [_round(time.parts.get(part, 0.0)) for part in names["parts"]],
    }


def _round(number: float) -> float:
    """Five digits: what a chart shows, and a third of the characters."""
    return float(f"{number:.5g}")


def _list_search_facts(result: Search) -> Iterator[tuple[str, str]]:
    yield "layouts", f"{result.num_layouts:,}"
    yield "forecast", f"{result.num_forecast:,}"
    yield "excluded by bounds", f"{result.num_slower:,}"
    yield "rejected", f"{result.num_rejected:,}"
    if result.ranked:
        time, memory = result.ranked[0].forecast.time, result.ranked[0].forecast.memory
        yield "best step", show_seconds(time.step_s)
        yield "tokens/s of a GPU", f"{time.tokens_per_s_and_rank:,.0f}"
        yield "MFU", f"{time.mfu:.1%}"
        yield "to spare", show_bytes(memory.spare)


def _describe_shown(results: Sequence[Search], shown: int, forecast: int) -> str:
    worlds = ", ".join(str(result.space.world) for result in results)
    left_out = forecast - shown
    words = f"{shown:,} layouts on {worlds} GPUs, each computed in full: sliders pick the fastest that matches, a click another."
    if left_out:
        words += f" {left_out:,} more were computed and have no room on this page: each setting of the sliders keeps its best."
    slower = sum(result.num_slower for result in results)
    if slower:
        words += f" {slower:,} are slower than these by a lower bound and were not computed."
    return words


def _reject(rejections: Sequence[Rejection]) -> Table:
    grouped = group_rejections(rejections)
    rows = tuple((f"{count:,}", each.layout, each.reason) for each, count in grouped[:MOST_REASONS])
    more = f" {len(grouped) - MOST_REASONS} rarer reasons are left out." if len(grouped) > MOST_REASONS else ""
    words = f"Layouts that no recipe may have, or that do not fit: how many, an example, why.{more}"
    return Table("Rejected", words, ("layouts", "such as", "reason"), rows)


def main(run_dir: Path) -> None:
    """Write RUN/plan.html, while the run trains."""
    recipe = load_recipe(run_dir / "recipe.yaml")
    import_plugins(recipe.plugins)
    found, _ = forecast_run(recipe)
    write_file(run_dir / "plan.html", render_html(make_page(found)).encode())


if __name__ == "__main__":
    os.nice(10)
    main(Path(sys.argv[1]))
