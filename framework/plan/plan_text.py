"""`meshwright plan` on one screen: the verdict, the model and its layout, memory of the fullest rank, step time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from framework.output import show_bytes, show_hours, show_seconds, wrap
from framework.plan.advice import FittingChange, describe_changes, describe_verdict
from framework.plan.forecast import MemoryForecast, TimeForecast
from framework.plan.forecast_plan import PlanForecast
from framework.plan.page import describe_run
from framework.plan.plan import Plan

# Share of a step below which a part is not named.
SMALL = 0.005
MORE = "more: --ranks, --layouts, --schedule, --options; as a page: --html FILE"


def describe_plan(found: PlanForecast, changes: Sequence[FittingChange]) -> Iterator[str]:
    """The screen, in lines of at most WIDTH columns."""
    for line in _describe(found, changes):
        yield from wrap(line)


def _describe(found: PlanForecast, changes: Sequence[FittingChange]) -> Iterator[str]:
    plan = found.plan
    yield describe_verdict(found.forecast.memory, found.cluster)
    for change in describe_changes(found, changes):
        yield f"  {change}"
    yield ""
    yield from describe_run(plan)
    yield ""
    yield _describe_memory(plan, found.forecast.memory)
    # The newest checkpoints, and the next one while it is written.
    size, keep = plan.memory_model.pipelines.checkpoint_bytes, plan.recipe.checkpoint.keep
    yield f"checkpoint    {show_bytes(size)}; on the disk at most {show_bytes((keep + 1) * size)} (checkpoint.keep={keep})"
    yield from describe_time(found.forecast.time)
    if found.context_methods:
        shown = [f"{name} {show_seconds(step_s)}" for name, step_s in found.context_methods]
        yield f"context       step time by parallel.context, the fastest first: {', '.join(shown)}"
    for caution in found.cautions:
        yield f"caution       {caution}"
    yield ""
    yield MORE


def _describe_memory(plan: Plan, memory: MemoryForecast) -> str:
    """The kinds of bytes of the fullest rank, the largest first."""
    place = memory.stages.index(memory.fullest)
    kinds = memory.fullest.kinds
    host = ""
    if memory.fullest.host:
        host = f"; on the host {show_bytes(memory.fullest.host)}, of a node {show_bytes(memory.node.offloaded)}"
    rank = plan.topology.ranks("pp", 0)[place]
    return (
        f"memory        {show_bytes(memory.fullest.reserved)} on rank {rank}: {_largest_first(kinds, show_bytes)}{host}"
    )


def describe_time(time: TimeForecast) -> Iterator[str]:
    """The step's parts, what communication is hidden, and what follows of the step."""

    def show(seconds: float) -> str:
        return f"{seconds / time.step_s:.1%}"

    small = SMALL * time.step_s
    rest = sum(seconds for seconds in time.parts.values() if seconds < small)
    shown = {name: seconds for name, seconds in time.parts.items() if seconds >= small} | {"others": rest}
    yield f"step time     {show_seconds(time.step_s)}: {_largest_first(shown, show)}"
    if time.parts.get("bubble"):
        yield "              of the rank that takes longest; its bubble is in seconds, that of the pipeline by FLOPs of all ranks"
    if any(time.hidden.values()):
        yield f"hidden        {_largest_first(time.hidden, show_seconds)} of communication behind computation"
    speed = f"{time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_s_and_rank:,.0f} of a rank, MFU {time.mfu:.1%}"
    yield f"throughput    {speed}"
    cost = f", ${time.cost:,.0f}" if time.cost else ""
    failures = f", {1 - time.goodput:.1%} of it for failures" if time.goodput < 0.999 else ""
    yield f"whole run     {show_hours(time.hours)}{cost}{failures}"
    if time.estimated:
        yield f"estimated     {time.estimated:.0%} of the layers' FLOPs: there are no formulas for their form"


def _largest_first(sizes: Mapping[str, Any], show: Callable[[Any], str]) -> str:
    whole = sum(sizes.values())
    found = sorted(((size, name) for name, size in sizes.items() if size * 10_000 > whole), reverse=True)
    return ", ".join(f"{name} {show(size)}" for size, name in found)
