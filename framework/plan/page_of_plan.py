"""The page of a plan: its forecasts as rows, charts over them, and words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from framework.mesh.placement import Placement
from framework.parallel.pipeline.simulate import simulate
from framework.plan.advice import FittingChange, describe_changes, describe_verdict
from framework.plan.forecast_plan import PlanForecast
from framework.plan.memory import show_bytes
from framework.plan.page_charts import plan_charts
from framework.plan.page_html import Page, Section
from framework.plan.page_rows import (
    MOST_ACTIONS,
    MOST_RANKS,
    Row,
    Rows,
    memory_rows,
    part_rows,
    show_seconds,
    timeline_rows,
)
from framework.plan.plan import Plan
from framework.plan.plan_text import show_hours
from framework.plan.traffic import measure_traffic


@dataclass(frozen=True)
class Link:
    """Messages of one parallelism. axes: over which they go; parts, hidden: what a TimeForecast calls their seconds; sent: what
    `Plan.traffic` calls their bytes."""

    name: str
    axes: tuple[str, ...]
    parts: tuple[str, ...]
    hidden: str
    sent: tuple[str, ...]


LINKS: tuple[Link, ...] = (
    Link("tp", ("tp",), ("tp",), "tp", ("tp",)),
    Link("cp", ("ulysses", "ring"), ("cp",), "cp", ("cp",)),
    Link("ep", ("ep",), ("ep",), "ep", ("ep",)),
    Link("pp", ("pp",), ("pp",), "pp", ("pp",)),
    Link(
        "dp",
        ("shard", "replica", "expert_shard", "expert_replica"),
        ("gathers", "reductions"),
        "shard",
        ("gathers", "reductions to shards", "to replicas"),
    ),
)
MESH_AXES = ("pp", "dp", "cp", "tp", "ep")


def make_page(found: PlanForecast, changes: Sequence[FittingChange] = ()) -> Page:
    """All of it."""
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
    words = dict(_describe_sections(plan, found, shown))
    return Page(
        title=plan.title,
        verdict=describe_verdict(memory, found.cluster),
        is_over=not memory.fits,
        changes=tuple(describe_changes(found, changes)),
        facts=tuple(_list_facts(plan, found)),
        sections=tuple(Section(name, *words[name]) for name in charts),
        charts=charts,
        rows=rows,
        footer=f"meshwright plan; machine {found.cluster.name}. All numbers are foretold, none is measured.",
    )


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
    timeline = simulate(plan.pipeline.make(shown), found.costs)
    return timeline_rows(timeline, plan.pipeline.rank_of_stage), shown


def link_rows(plan: Plan, found: PlanForecast) -> Rows:
    """Seconds of each kind of message in a step, hidden and exposed, with bytes and the share of the step."""
    placement, time = Placement(plan.topology, plan.derived.ranks_per_node), found.forecast.time
    traffic = [measure_traffic(plan, rank) for rank in plan.topology.ranks("pp", 0)]
    links: list[Row] = []
    totals: list[Row] = []
    for link in LINKS:
        exposed = sum(time.parts.get(part, 0.0) for part in link.parts)
        seconds = {"hidden": time.hidden.get(link.hidden, 0.0), "exposed": exposed}
        sent = max(sum(own[kind] for kind in link.sent) for own in traffic)
        if not sent and not any(seconds.values()):
            continue
        name = f"{link.name}, {_describe_span(placement, link.axes)}"
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
    yield "device", f"{show_bytes(memory.limit)}, {found.cluster.name}"
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


def _describe_sections(plan: Plan, found: PlanForecast, shown: int) -> Iterator[tuple[str, tuple[str, str]]]:
    """By the id of each chart: its heading and a sentence."""
    memory, derived = found.forecast.memory, plan.derived
    yield (
        "memory",
        (
            "Memory of each rank",
            f"Where a step needs most, by place in the pipeline. The line: {show_bytes(memory.limit)} of a device.",
        ),
    )
    yield "phases", ("Memory over a step", "What ranks hold at each phase. Red is what a device does not have.")
    yield "parts", ("Parts of a step", "Of the rank that takes longest; they add up to the step time.")
    fewer = (
        f", drawn with {shown} of a step's {derived.accumulation} microbatches" if shown < derived.accumulation else ""
    )
    name = plan.pipeline.make(shown).name
    bubble = found.forecast.time.parts.get("bubble", 0.0) / found.forecast.time.step_s
    yield (
        "timeline",
        (
            "Pipeline",
            f"Schedule {name}{fewer}. Grey is idle; the bubble is {bubble:.1%} of the step of the busiest rank.",
        ),
    )
    yield (
        "links",
        (
            "Links",
            "Messages of a step: behind computation, and what nothing hides; bytes that a rank sends, share of the step.",
        ),
    )
    fewer = "" if derived.world <= MOST_RANKS else f", the first of {derived.world // derived.ranks_per_node} nodes"
    yield "mesh", ("Mesh", f"Ranks on their nodes{fewer}: point at one to see its coordinates.")
