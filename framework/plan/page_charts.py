"""Charts of the pages, as Vega-Lite specifications by altair. Each names the rows that it shows; the page has them.

Bars lie on their side, so that names have room on a narrow screen. Red is for what exceeds the device's memory, and for nothing
else. Colours of text and lines are the page's (page.js), which has two sets of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from framework.parallel.pipeline.draw import COLORS as PICTURE_COLORS
from framework.parallel.pipeline.simulate import ActionKind
from framework.plan.forecast_memory import OUTSIDE, SLACK

Row = Mapping[str, Any]
Rows = Mapping[str, Sequence[Row]]

# Okabe and Ito's colours, which the colour-blind tell apart, without their red; then Tol's muted ones. A kind of bytes has
# the same on every page.
KINDS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "master": "#009E73",
    "optimizer": "#E69F00",
    "gathered": "#F0E442",
    "activations": "#CC79A7",
    "logits": "#7a5195",
    "temporaries": "#999933",
    "communication": "#44AA99",
    "workspace": "#DDCC77",
    OUTSIDE: "#9aa0a6",
    SLACK: "#5f6670",
}
BLUE, PALE, ORANGE = KINDS["parameters"], KINDS["gradients"], KINDS["optimizer"]
OTHER = "#117733"
RED = "#d62839"
IDLE = "#8883"
WORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT: "backward, inputs",
    ActionKind.WEIGHT: "backward, weights",
    ActionKind.VALIDATION: "validation",
}
# The colours of `pipeline/draw.py`.
ACTIONS = {WORDS[kind]: color for kind, color in PICTURE_COLORS.items()}
ROW_PX = 26
TALL_PX = 280
# For words behind the longest bar.
ROOM = {"left": 5, "top": 5, "bottom": 5, "right": 95}


def is_near(total: float, limit: float) -> bool:
    """Whether a bar of `total` can be seen on an axis that reaches the limit."""
    return total * 50 >= limit


def memory_chart(rows: Rows) -> alt.LayerChart:
    """Bytes of a rank at each place of the pipeline, by kind, with the device's limit."""
    kinds = _names(rows["memory"], "kind")
    x = alt.X("gb:Q", title="GiB", stack="zero", scale=alt.Scale(nice=False))
    y = alt.Y("place:N", sort=None, title=None)
    bars = of_rows("memory").mark_bar().encode(
        x, y, _kind(kinds), alt.Order("order:Q"), tooltip=["place:N", "kind:N", _two("gb", "GiB")]
    )  # fmt: skip
    totals = of_rows("totals").encode(y=y)
    details = ["place:N", _two("over", "GiB over")]
    red = (
        totals.transform_calculate(end="datum.limit + datum.over")
        .mark_bar(color=RED)
        .encode(x="limit:Q", x2="end:Q", tooltip=details)
    )
    words = totals.mark_text(style="over", align="left", dx=5).encode(x="total:Q", text="words:N")
    limit = totals.mark_tick(thickness=2, size=ROW_PX, color=RED).encode(x="limit:Q")
    layers = (
        (bars, red, words, limit) if any(is_near(row["total"], row["limit"]) for row in rows["totals"]) else (bars,)
    )
    return alt.layer(*layers).properties(height=height_of(rows["totals"]), padding=ROOM)


def phases_chart(rows: Rows) -> alt.LayerChart:
    """Bytes by kind at each phase of a step, of the place of the pipeline that a menu chooses."""
    kinds, places = _names(rows["memory"], "kind"), _names(rows["totals"], "place")
    fullest = max(rows["totals"], key=lambda row: row["total"])["place"]
    menu = alt.binding_select(options=places, name="ranks ")
    place = alt.param("place", value=fullest, bind=menu)
    x = alt.X("phase:N", sort=None, title=None, axis=alt.Axis(labelAngle=0, labelLimit=110, labelOverlap="greedy"))
    y = alt.Y("gb:Q", title="GiB", stack="zero")
    bars = of_rows("phases").mark_bar().encode(
        x, y, _kind(kinds), alt.Order("order:Q"), tooltip=["place:N", "phase:N", "kind:N", _two("gb", "GiB")]
    )  # fmt: skip
    sums = of_rows("phase_totals").encode(x=x)
    red = sums.transform_calculate(end="datum.limit + datum.over").mark_bar(color=RED).encode(y="limit:Q", y2="end:Q")
    limit = of_rows("phase_totals").mark_rule(color=RED, strokeWidth=2).encode(y="min(limit):Q")
    layers = (bars, red, limit) if any(is_near(row["total"], row["limit"]) for row in rows["totals"]) else (bars,)
    chosen = [each.transform_filter("datum.place === place") for each in layers]
    return alt.layer(*chosen).add_params(place).properties(height=TALL_PX)


def parts_chart(rows: Rows, words: str = "words") -> alt.LayerChart:
    """Seconds of each part of a step. words: the field that is written behind its bar."""
    x = alt.X("seconds:Q", title="seconds", scale=alt.Scale(nice=False))
    base = (
        of_rows("parts")
        .transform_calculate(short="format(datum.seconds, '.3~s') + 's'")
        .encode(alt.Y("part:N", sort=None, title=None))
    )
    bars = base.mark_bar(color=BLUE).encode(x, tooltip=["part:N", f"{words}:N"])
    return (bars + base.mark_text(align="left", dx=5).encode(x, text=f"{words}:N")).properties(
        height=height_of(rows["parts"]), padding=ROOM
    )


def links_chart(rows: Rows) -> alt.LayerChart:
    """Seconds in which the links of each axis are busy in a step, hidden and exposed; bytes and load beside."""
    shades = alt.Scale(domain=["hidden", "exposed"], range=[PALE, ORANGE])
    y = alt.Y("axis:N", sort=None, title=None, axis=alt.Axis(labelLimit=240))
    x = alt.X("seconds:Q", title="seconds of a step", stack="zero", scale=alt.Scale(nice=False))
    color = alt.Color("how:N", scale=shades, title=None, legend=alt.Legend(orient="top"))
    details = ["axis:N", "how:N", _two("seconds", "seconds"), "bytes:N", "load:N"]
    order = alt.Order("how:N", sort="descending")
    bars = of_rows("links").mark_bar().encode(x, y, color, order, tooltip=details)
    words = of_rows("link_totals").mark_text(align="left", dx=5).encode(alt.X("seconds:Q"), y, text="words:N")
    return (bars + words).properties(height=height_of(rows["link_totals"]), padding=ROOM)


def timeline_chart(rows: Rows) -> alt.LayerChart:
    """Actions of each rank of a pipeline over a step. Grey is idle."""
    kinds, y = _names(rows["timeline"], "kind"), alt.Y("rank:O", title="rank of pp")
    x = alt.X("start:Q", title="seconds", axis=alt.Axis(grid=False), scale=alt.Scale(nice=False))
    idle = of_rows("lanes").mark_bar(color=IDLE).encode(x, alt.X2("end:Q"), y, tooltip=["rank:N", "idle:N"])
    # A rank's second, third ... stage is paler.
    chunks = sorted({row["chunk"] for row in rows["timeline"]})
    shades = alt.Scale(domain=chunks, range=[1 / (1 + 0.7 * chunk) for chunk in chunks])
    pale = alt.Opacity("chunk:O", scale=shades, legend=None)
    colors = alt.Scale(domain=kinds, range=[ACTIONS[kind] for kind in kinds])
    color = alt.Color("kind:N", scale=colors, title=None, legend=alt.Legend(orient="top"))
    details = ["rank:N", "kind:N", "stage:N", "microbatch:N", _two("start", "starts"), _two("end", "ends")]
    base = of_rows("timeline").encode(x, alt.X2("end:Q"), y, tooltip=details)
    bars = base.mark_bar(stroke="#fffa", strokeWidth=0.6).encode(color, pale)
    return (idle + bars).properties(height=max(60, min(22 * len(rows["lanes"]), 520)))


def mesh_chart(rows: Rows) -> alt.LayerChart:
    """Ranks on their nodes, coloured by their position along the axis that a menu chooses."""
    axes = [axis for axis in ("pp", "dp", "cp", "tp", "ep") if any(row[axis] for row in rows["mesh"])] or ["pp"]
    axis = alt.param("axis", value=axes[0], bind=alt.binding_select(options=axes, name="position along "))
    x = alt.X("node:O", title="node", axis=alt.Axis(labelAngle=0, labelOverlap="greedy"))
    y = alt.Y("slot:O", title="rank of the node")
    base = of_rows("mesh").transform_calculate(position="datum[axis]").encode(x, y)
    shade = alt.Color(
        "position:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(title=None, format="d", tickMinStep=1)
    )
    cells = base.mark_rect(stroke="#8886", strokeWidth=0.5).encode(
        shade, tooltip=["rank:N", "node:N", "pp:N", "dp:N", "cp:N", "tp:N", "ep:N"]
    )
    layers: list[Any] = [cells]
    if len(rows["mesh"]) <= 64:
        largest = {axis: max(row[axis] for row in rows["mesh"]) for axis in axes}
        is_light = f"datum.position > 0.6 * {largest}[axis]"
        ink = alt.condition(is_light, alt.value("black"), alt.value("white"))
        layers.append(base.mark_text(fontSize=10).encode(text="rank:N", color=ink))
    slots = 1 + max(row["slot"] for row in rows["mesh"])
    return alt.layer(*layers).add_params(axis).properties(height=max(60, min(24 * slots, 400)))


def plan_charts(rows: Rows) -> dict[str, alt.LayerChart | alt.Chart]:
    """Charts of a plan's page, by the id of their place on it."""
    makers = (
        ("memory", memory_chart),
        ("phases", phases_chart),
        ("parts", parts_chart),
        ("timeline", timeline_chart),
        ("links", links_chart),
        ("mesh", mesh_chart),
    )
    return {name: make(rows) for name, make in makers if rows.get(name)}


def layouts_charts(kinds: Sequence[str]) -> dict[str, alt.LayerChart]:
    """Charts of a search's page: all layouts, and the picked one's memory and step, whose rows come as the reader picks."""
    return {
        "scatter": scatter_chart(),
        "picked_memory": memory_chart({"memory": [{"kind": kind} for kind in kinds], "totals": [{}]}),
        "picked_parts": parts_chart({"parts": [{}] * 12}, "short"),
    }


def scatter_chart() -> alt.LayerChart:
    """Each layout by the memory of its fullest rank and its step time; red where it does not fit; the picked one in a ring."""
    x = alt.X("gb:Q", title="GiB of the fullest rank", scale=alt.Scale(zero=False))
    y = alt.Y("step_s:Q", title="seconds of a step", scale=alt.Scale(type="log", nice=False))
    seen = alt.condition("datum.on", alt.value(0.75), alt.value(0.06))
    red = alt.condition("datum.over > 0", alt.value(RED), alt.value(BLUE))
    names = {
        "number": "#",
        "layout": "layout",
        "step": "step",
        "memory_words": "memory",
        "verdict": "verdict",
        "mfu": "MFU",
    }
    details = [alt.Tooltip(f"{field}:N", title=title) for field, title in names.items()]
    ring = alt.condition("datum.picked", alt.value(ORANGE), alt.value(None))
    size = alt.condition("datum.picked", alt.value(190), alt.value(36))
    points = of_rows("layouts").mark_circle(strokeWidth=3).encode(
        x, y, color=red, opacity=seen, size=size, stroke=ring, tooltip=details
    )  # fmt: skip
    limit = of_rows("layouts").mark_rule(color=RED, strokeDash=[5, 4]).encode(x="max(limit):Q")
    return (limit + points).properties(height=380)


def of_rows(name: str) -> alt.Chart:
    """A chart of rows that come later."""
    return alt.Chart(alt.NamedData(name=name))


def _names(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def _kind(names: Sequence[str]) -> alt.Color:
    """Kinds of bytes in their colours."""
    scale = alt.Scale(domain=list(names), range=[KINDS.get(name, OTHER) for name in names])
    return alt.Color("kind:N", scale=scale, title=None, legend=alt.Legend(orient="top"))


def _two(field: str, title: str) -> alt.Tooltip:
    """Three digits of a number, as the text beside the charts has them."""
    return alt.Tooltip(f"{field}:Q", title=title, format=".3~r")


def height_of(rows: Sequence[Any]) -> int:
    return max(60, ROW_PX * len(rows))
