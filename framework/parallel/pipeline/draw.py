"""Schedules and timelines as text and as pictures."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from framework.errors import ScheduleError
from framework.lease import Lease
from framework.parallel.pipeline.schedules import SCHEDULES, make_schedule
from framework.parallel.pipeline.simulate import ActionKind, Costs, Schedule, Timeline, peak_live, simulate, unit_costs

if TYPE_CHECKING:  # colors are asked for where there is no torch
    from framework.parallel.pipeline.pipeline import PipelinePlan

# One hue for each kind; a rank's second, third ... stage is paler.
COLORS = {
    ActionKind.FORWARD: "#3b6fb6",
    ActionKind.BACKWARD: "#3f9b6c",
    ActionKind.INPUT: "#5bb5a2",
    ActionKind.WEIGHT: "#c98a2b",
    ActionKind.VALIDATION: "#9a7fb8",
}


def draw_grid(schedule: Schedule, width: int = 120) -> str:
    """Text with a line for each rank and a cell for each unit of time, F = I = W = 1, so that a whole backward takes two cells.

    Where ranks have several stages an action is printed with its stage. Lines end after `width` characters.
    """
    timeline = simulate(schedule, unit_costs(schedule.num_stages))
    has_virtual = schedule.num_stages > schedule.num_ranks
    names = [
        [str(each.action) if has_virtual else f"{each.action.kind.value}{each.action.microbatch}" for each in rank]
        for rank in timeline.ranks
    ]
    cell = max((len(name) for rank in names for name in rank), default=1) + 1
    lines = []
    for number, (rank, texts) in enumerate(zip(timeline.ranks, names, strict=True)):
        line = ""
        for each, text in zip(rank, texts, strict=True):
            line = line.ljust(round(each.start) * cell, ".") + text.ljust(round(each.end - each.start) * cell)
        line = line.ljust(round(timeline.length) * cell, ".")
        head = f"rank {number:<2} "
        room = width - len(head)
        lines.append(head + (line if len(line) <= room else line[: room - 4] + " ..."))
    return "\n".join(lines)


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture. unit: of its times, as its axis says."""

    name: str
    timeline: Timeline
    unit: str


SIMULATED_UNIT = "FLOPs for each token of a microbatch; messages cost nothing"
MEASURED_UNIT = "seconds by the ranks' clocks, from the first action"


def save_picture(path: Path, title: str, panels: Sequence[Panel], num_ranks: int) -> None:
    """Draw timelines one above the other, each on its own scale. The file's suffix chooses SVG, PNG or PDF."""
    # A second to import, which no run should pay that draws nothing.
    from matplotlib.figure import Figure

    # Figure, not pyplot: pyplot keeps figures alive in global state and looks for a display.
    figure = Figure(figsize=(14, (0.5 * num_ranks + 1.5) * len(panels) + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for panel, drawn in zip(axes, panels, strict=True):
        timeline = drawn.timeline
        # Measured times are of a clock with any origin.
        first = min((rank[0].start for rank in timeline.ranks if rank), default=0.0)
        for number, rank in enumerate(timeline.ranks):
            for each in rank:
                alpha = 1.0 / (1 + each.action.stage // num_ranks)
                panel.barh(
                    number, each.end - each.start, left=each.start - first, height=0.9, alpha=alpha, linewidth=0.4,
                    color=COLORS[each.action.kind], edgecolor="white",
                )  # fmt: skip
                if each.end - each.start > timeline.length / 80:  # a number fits into the bar
                    middle = (each.start + each.end) / 2 - first
                    color = "white" if alpha == 1.0 else "black"
                    panel.text(
                        middle, number, str(each.action.microbatch), ha="center", va="center", fontsize=7, color=color
                    )
        panel.set_xlabel(drawn.unit, fontsize=8)
        panel.set_title(f"{drawn.name}: bubble {timeline.bubble:.1%}", fontsize=9, loc="left")
        panel.set_yticks(range(num_ranks), [f"rank {number}" for number in range(num_ranks)])
        panel.invert_yaxis()
        panel.margins(x=0.0)
        panel.spines[["top", "right"]].set_visible(False)
    actions = [each.action for drawn in panels for rank in drawn.timeline.ranks for each in rank]
    there = {action.kind for action in actions}
    # The legend shows the kinds that occur. Bars of width 0 stand for them, since no drawn bar has the hue of a whole kind.
    handles = [
        axes[0].barh(0, 0, color=color, label=f"{kind.value} {kind.name.lower()}")
        for kind, color in COLORS.items()
        if kind in there
    ]
    if any(action.stage >= num_ranks for action in actions):
        handles.append(axes[0].barh(0, 0, color="white", label="paler: a rank's later stages; numbers: microbatches"))
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), fontsize=7, frameon=False)
    figure.savefig(path)


def save_timeline(lease: Lease, title: str, simulated: Timeline, measured: Timeline) -> None:
    """Write timeline.json, a trace of the measured timeline, and timeline.png, both timelines, into the run."""
    with lease.replacing(lease.run / "timeline.json") as made:
        save_trace(made, measured)
    panels = [Panel("simulated", simulated, SIMULATED_UNIT), Panel("measured", measured, MEASURED_UNIT)]
    with lease.replacing(lease.run / "timeline.png") as made:
        save_picture(made, title, panels, len(measured.ranks))


def save_trace(path: Path, timeline: Timeline) -> None:
    """Write a measured timeline, in seconds, as a Chrome trace (chrome://tracing, ui.perfetto.dev) with a row for each rank."""
    first = min((rank[0].start for rank in timeline.ranks if rank), default=0.0)
    events = [
        {
            "name": str(each.action),
            "cat": each.action.kind.name.lower(),
            "ph": "X",
            # The format counts in microseconds.
            "ts": (each.start - first) * 1e6,
            "dur": (each.end - each.start) * 1e6,
            "pid": 0,
            "tid": number,
        }
        for number, rank in enumerate(timeline.ranks)
        for each in rank
    ]
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def describe_bubble(pipeline: "PipelinePlan", num_microbatches: int) -> str:
    """The schedule in a line, and how idle it leaves all ranks together, those with short stages as well; stages take as long as
    their FLOPs say, or measured times."""
    schedule = pipeline.make(num_microbatches)
    stages, ranks = schedule.num_stages, schedule.num_ranks
    idle = simulate(schedule, pipeline.costs).bubble
    return (
        f"pipeline      {schedule.name}: {stages} stage{'s' * (stages != 1)} on {ranks} rank{'s' * (ranks != 1)},"
        f" {num_microbatches} microbatch{'es' * (num_microbatches != 1)}"
        + (f", bubble {idle:.1%} of all ranks' time" if ranks > 1 else "")
        + (f" by {'measured times' if pipeline.gain else 'FLOPs'}" if ranks > 1 else "")
        + (f"; {pipeline.gain}" if pipeline.gain else "")
    )


def describe_pipeline(pipeline: "PipelinePlan", num_microbatches: int) -> str:
    """Lines about a step with `num_microbatches`: what `meshwright plan --schedule` prints."""
    schedule = pipeline.make(num_microbatches)
    costs = pipeline.costs
    own = [sum(each) for each in zip(costs.forward, costs.input, costs.weight, strict=True)]
    lines = [
        describe_bubble(pipeline, num_microbatches),
        f"{'stage':<7}{'rank':<6}{'layers':<12}time of the slowest",
    ]
    for bounds, rank, cost in zip(pipeline.stages, schedule.rank_of_stage, own, strict=True):
        ends = "".join([" + embedding"] * bounds.is_first + [" + head"] * bounds.is_last)
        lines.append(
            f"{bounds.index:<7}{rank:<6}{f'{bounds.start} to {bounds.stop - 1}':<12}{cost / max(own):.0%}{ends}"
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
        f"parameters    unsharded once per {pipeline.unshard} (zero.stage, zero.keep_gathered)",
        f"gradients     reduced once per {pipeline.reduce} (zero.stage, zero.accumulate)",
        "",
        *_compare(pipeline, schedule.num_ranks, num_microbatches),
    ]
    return "\n".join(lines)


def _compare(pipeline: "PipelinePlan", num_ranks: int, num_microbatches: int) -> Iterator[str]:
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
