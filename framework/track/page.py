"""RUN/track.html: one page of a run, a file that a browser shows without a server and reads again while the run lasts.

The code of the plan's page draws it (plan/page_html.py), from the values that other trackers get and from the run's files. Curves
are thinned as in the report's picture, so the page of a run of months is no larger.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import cache
from math import ceil, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import altair as alt

from framework.errors import EXIT_DONE
from framework.output import GIB
from framework.plan.page_charts import BLUE, KINDS, ORANGE, OTHER, RED, ROOM, Row, height_of, of_rows
from framework.plan.page_html import Page, Section, Table
from framework.track.console import format_count, format_duration
from framework.track.goodput import Account, TimePart, name_of, read_account
from framework.track.jsonl import LOADS_FILE, read_lines, read_records
from framework.track.report import HANGS_FILE, RANKS_FILE, Curve, RunInfo
from framework.track.summary import COLORS, LAST_LOADS, SHOWN_STARTS, add_loads, describe_title, thin

MOST_POINTS, MOST_CELLS, MOST_RANKS = 400, 4096, 256
# Charts of curves: id, title, unit of y, patterns of their values' names.
CURVES = (
    ("loss", "Loss", "nats per token", ("loss", "validation_loss", "average_validation_loss")),
    ("sources", "Loss by source", "nats per token", ("*loss/*",)),
    ("scores", "Scores on tasks", "share", ("eval/*/acc*",)),
    ("perplexities", "Perplexities on tasks", "", ("eval/*perplexity", "eval/*bits_per_byte")),
    ("preference", "Preferences", "", ("preference/*",)),
    ("rate", "Throughput of the whole run", "tokens/s", ("tokens_per_s",)),
    ("times", "Time of a step", "seconds", ("step_s", "data_wait_s", "exposed_communication_s", "save_stall_s")),
    ("lr", "Learning rate", "rate", ("lr",)),
    ("gradient_norm", "Gradient norm before clipping", "norm", ("gradient_norm", "gradient_norm_limit")),
    ("memory", "Memory of rank 0 at its peak", "GiB", ("memory_bytes",)),
    ("imbalance", "Imbalance of experts", "largest load / mean load", ("expert_imbalance_m*",)),
)
LINKS = ("recipe.yaml", "plan.html", "report.txt", "report.png", "goodput.png", "timeline.png", "metrics.jsonl")


def make_page(
    info: RunInfo,
    curves: Mapping[str, Curve],
    last: Mapping[str, float],
    run_dir: Path,
    exit_code: int | None = None,
    refresh_s: int | None = None,
) -> Page:
    """The page of a run. curves: those that are drawn, by name. last: the last value of each name. exit_code: of a run that has
    ended."""
    account, hangs = read_account(run_dir), list(read_lines(run_dir / HANGS_FILE))
    loads = add_loads(read_records(run_dir / LOADS_FILE, LAST_LOADS))
    rows: dict[str, list[Row]] = {chart[0]: list(curve_rows(curves, chart[3])) for chart in CURVES}
    step = int(last.get("step", info.start_step))
    rows["borders"] = [{"step": start, "stage": name} for name, start in info.stages.items() if start < step]
    charts: dict[str, Any] = {
        name: curve_chart(name, unit, bool(rows["borders"])) for name, _, unit, _ in CURVES if rows[name]
    }
    if account is not None:
        rows["goodput"] = list(goodput_rows(account))
        charts["goodput"] = goodput_chart(rows["goodput"])
    if loads:
        rows["loads"] = list(load_rows(loads))
        charts["loads"] = loads_chart(rows["loads"])
    titles = {name: title for name, title, _, _ in CURVES} | {
        "goodput": "Where the time of each start went",
        "loads": f"Load of experts, last {LAST_LOADS} reports",
    }
    verdict, is_over = _judge(info, step, exit_code, bool(hangs))
    return Page(
        title=describe_title(info),
        verdict=verdict,
        is_over=is_over,
        facts=tuple(_list_facts(info, curves, last, account)),
        sections=tuple(Section(name, titles[name], "") for name in charts),
        charts={name: chart.to_dict() for name, chart in charts.items()},
        rows=rows,
        footer=f"Meshwright, {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC. All numbers are measured: docs/metrics.md.",
        tables=tuple(_make_tables(info, hangs, run_dir if exit_code is None else None)),
        refresh_s=refresh_s,
        in_columns=True,
        links=tuple(name for name in LINKS if (run_dir / name).exists()),
    )


@cache
def is_drawn(name: str) -> bool:
    """Whether a value of this name has a curve."""
    return any(fnmatch(name, pattern) for chart in CURVES for pattern in chart[3])


def curve_rows(curves: Mapping[str, Curve], patterns: Sequence[str]) -> Iterator[Row]:
    """Points of the curves whose names match a pattern, thinned."""
    for name, (steps, values) in curves.items():
        if any(fnmatch(name, pattern) for pattern in patterns):
            scale = GIB if name == "memory_bytes" else 1
            for step, value in zip(*thin(steps, values, ceil(len(steps) / MOST_POINTS)), strict=True):
                if isfinite(value):
                    yield {"step": step, "value": float(f"{value / scale:.5g}"), "curve": name}


def curve_chart(name: str, unit: str, has_borders: bool) -> alt.LayerChart:
    """Curves over steps, with a line where each stage begins."""
    kind = "symlog" if name == "gradient_norm" else "linear"
    x = alt.X("step:Q", title="step", scale=alt.Scale(nice=False))
    y = alt.Y("value:Q", title=unit or None, scale=alt.Scale(zero=name in ("rate", "times", "memory"), type=kind))
    color = alt.Color(
        "curve:N",
        title=None,
        scale=alt.Scale(range=list(dict.fromkeys([BLUE, ORANGE, OTHER, *KINDS.values()]))),
        legend=alt.Legend(orient="top", labelLimit=300),
    )
    details = ["curve:N", alt.Tooltip("step:Q", format=",.0f"), alt.Tooltip("value:Q", format=".5~g")]
    base = of_rows(name).encode(x, y, color, tooltip=details)
    layers = [base.mark_line(strokeWidth=1.6), base.mark_point(filled=True, size=12)]
    if has_borders:
        borders = of_rows("borders").encode(alt.X("step:Q"))
        layers.append(borders.mark_rule(strokeDash=[3, 3], color="#888"))
        layers.append(borders.mark_text(align="left", dx=4, y=8).encode(text="stage:N"))
    return alt.layer(*layers).properties(height=220)


def goodput_rows(account: Account) -> Iterator[Row]:
    """Hours of each part of the last starts."""
    for number, row in list(enumerate(account.rows, 1))[-SHOWN_STARTS:]:
        for order, part in enumerate(TimePart):
            if row[part] > 0:
                yield {
                    "start": number,
                    "part": name_of(part),
                    "order": order,
                    "hours": float(f"{row[part] / 3600:.5g}"),
                }


def goodput_chart(rows: Sequence[Row]) -> alt.Chart:
    """A bar for each start, in the colours of goodput.png."""
    names = list(dict.fromkeys(row["part"] for row in sorted(rows, key=lambda row: row["order"])))
    colors = {name_of(part): color for part, color in COLORS.items()}
    scale = alt.Scale(domain=names, range=[colors[name] for name in names])
    color = alt.Color("part:N", scale=scale, title=None, legend=alt.Legend(orient="top"))
    most = max((row["hours"] for row in rows), default=0.0)
    unit, per_hour = ("hours", 1) if most >= 0.5 else ("minutes", 60)
    x = alt.X("time:Q", title=unit, stack="zero", scale=alt.Scale(nice=False))
    details = ["start:O", "part:N", alt.Tooltip("hours:Q", format=".3~g")]
    bars = (
        of_rows("goodput")
        .transform_calculate(time=f"datum.hours * {per_hour}")
        .mark_bar()
        .encode(x, alt.Y("start:O", title="start"), color, alt.Order("order:Q"), tooltip=details)
    )
    return bars.properties(height=height_of(sorted({row["start"] for row in rows})), padding=ROOM)


def load_rows(loads: Mapping[str, Sequence[int]]) -> Iterator[Row]:
    """Loads over the mean load of their layer; of many layers every so many."""
    every = ceil(sum(map(len, loads.values())) / MOST_CELLS)
    for layer, row in list(loads.items())[::every]:
        for expert, load in enumerate(row):
            yield {"layer": layer, "expert": expert, "load": round(load * len(row) / (sum(row) or 1), 3)}


def loads_chart(rows: Sequence[Row]) -> alt.Chart:
    """A heat map of layers x experts, white at the mean load."""
    largest = max(2.0, *(row["load"] for row in rows))
    scale = alt.Scale(domain=[0, 1, largest], range=[BLUE, "#ffffff", RED], interpolate="rgb")
    color = alt.Color("load:Q", scale=scale, legend=alt.Legend(title="load / mean"))
    y = alt.Y("layer:N", sort=None, title=None, axis=alt.Axis(labelOverlap="greedy"))
    cells = of_rows("loads").mark_rect().encode(alt.X("expert:O", axis=alt.Axis(labelOverlap=True)), y, color)
    num_layers = len({row["layer"] for row in rows})
    return cells.encode(tooltip=["layer:N", "expert:N", "load:Q"]).properties(height=max(80, min(420, 18 * num_layers)))


def _judge(info: RunInfo, step: int, exit_code: int | None, has_hung: bool) -> tuple[str, bool]:
    """The state of the run in a line, and whether it is to be red."""
    where = f"step {step:,} of {info.total_steps:,}"
    if exit_code is None:
        return f"running: {where}", False
    if exit_code == EXIT_DONE:
        return (f"done: {where}" if step >= info.total_steps else f"stopped and saved: {where}"), False
    return f"rank 0 ended with exit code {exit_code}: {where}{'; hang reports are below' if has_hung else ''}", True


def _list_facts(
    info: RunInfo, curves: Mapping[str, Curve], last: Mapping[str, float], account: Account | None
) -> Iterator[tuple[str, str]]:
    if not last:
        return
    yield "tokens", format_count(last["tokens"])
    for name, of_what in (
        ("loss", "loss"),
        ("validation loss", "validation_loss"),
        ("its average's", "average_validation_loss"),
    ):
        if of_what in last:
            yield name, f"{last[of_what]:.4f}"
    yield "tokens/s", format_count(last["tokens_per_s"])
    if "mfu" in last:
        yield "MFU", f"{last['mfu']:.1%}"
    if account is not None:
        yield "goodput", f"{account.ettr:.1%}"
    paces_s, left = list(filter(isfinite, curves["step_s"][1][-100:])), info.total_steps - last["step"]
    if left > 0 and paces_s:
        yield "left", format_duration(median(paces_s) * left)
    yield "memory of rank 0", f"{last['memory_bytes'] / GIB:.2f} GiB"
    for name in ("skipped_steps", "spikes", "rewinds", "failed_saves"):
        if last.get(name):
            yield name.replace("_", " "), f"{last[name]:.0f}"


def _make_tables(info: RunInfo, hangs: Sequence[Mapping[str, Any]], run_dir: Path | None) -> Iterator[Table]:
    """Hang reports, the newest first; stages; ranks of a run that goes on."""
    if hangs:
        words = "The verdict on each hang: the ranks that were behind, and where they were."
        reports = [(_say_time(each["unix_s"]), str(each["text"])) for each in reversed(hangs)]
        yield Table("Hang reports", words, ("when", "report"), tuple(reports))
    if info.stages:
        yield Table(
            "Stages", "", ("stage", "begins behind step"), tuple((name, f"{at:,}") for name, at in info.stages.items())
        )
    for found in read_lines(run_dir / RANKS_FILE) if run_dir is not None else ():
        head = ("rank", "on", "phase", "step", "seconds", "waits in")
        fields = ("rank", "host", "phase", "step", "seconds", "wait")
        lines = tuple(tuple(str(each[name]) for name in fields) for each in found["ranks"][:MOST_RANKS])
        yield Table("Ranks", f"What each rank did at {_say_time(found['unix_s'])}.", head, lines)


def _say_time(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"
