"""Stages of a run in a table: memory, time and cost of each, and of all."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from framework.output import align, show_bytes, show_hours, show_seconds
from framework.plan.check import check_stages, check_weights
from framework.plan.forecast_plan import PlanForecast, forecast_plan
from framework.plan.plan import Plan
from framework.recipe.schema import Recipe
from framework.recipe.stages import RunStage, split_stages

COLUMNS = ("stage", "steps", "tokens", "sequences", "context", "memory", "to spare", "step", "time", "cost")


def forecast_run(recipe: Recipe, loads: Mapping[str, Sequence[int]] | None = None) -> tuple[PlanForecast, list[str]]:
    """The forecast of a run, of its stages that with least room, and lines on all of them. loads: of experts, as recorded. Raises
    what the recipe or the model has wrong."""
    first, *plans = check_stages(recipe)
    check_weights(first)
    stages = split_stages(recipe)
    forecasts = [forecast_plan(_within(*each), loads) for each in zip(stages, plans or [first], strict=True)]
    return _join(stages, forecasts)


def _within(stage: RunStage, plan: Plan) -> Plan:
    """A stage's plan, with the tokens of its own steps."""
    return replace(plan, derived=replace(plan.derived, total_tokens=stage.num_tokens)) if stage.name else plan


def _join(stages: Sequence[RunStage], forecasts: Sequence[PlanForecast]) -> tuple[PlanForecast, list[str]]:
    """(the forecast of the stage with least memory to spare, with the hours and the cost of the whole run; lines with a table of
    all stages, none for a run without any)."""
    shares = [
        (stage.stop - stage.start, stage.stop, each.forecast.time)
        for stage, each in zip(stages, forecasts, strict=True)
    ]
    times = [(time.hours * steps / planned, time.cost * steps / planned) for steps, planned, time in shares]
    memories = [each.forecast.memory for each in forecasts]
    tightest = min(range(len(stages)), key=lambda place: (memories[place].fits, memories[place].spare))
    found, hours, cost = forecasts[tightest], sum(each[0] for each in times), sum(each[1] for each in times)
    time = replace(found.forecast.time, hours=hours, cost=cost)
    found = replace(found, forecast=replace(found.forecast, time=time))
    if not stages[0].name:
        return found, []
    rows = [_describe(*each) for each in zip(stages, forecasts, times, strict=True)]
    tokens = f"{sum(each.num_tokens for each in stages):,}"
    rows.append(("all", f"{stages[-1].stop:,}", tokens, "", "", "", "", "", show_hours(hours), _show_cost(cost)))
    others = [stage.name for stage, each in zip(stages, forecasts, strict=True) if not each.forecast.memory.fits]
    judged = [f"does not fit: {', '.join(others)}"] * bool(others)
    return found, [*align([COLUMNS, *rows], words=(0,)), *judged, "", f"stage {stages[tightest].name}:"]


def _describe(stage: RunStage, found: PlanForecast, time: tuple[float, float]) -> tuple[str, ...]:
    memory, derived = found.forecast.memory, found.plan.derived
    return (
        stage.name,
        f"{stage.start + 1:,} to {stage.stop:,}",
        f"{stage.num_tokens:,}",
        f"{derived.sequences_per_step:,}",
        f"{derived.context:,}",
        show_bytes(memory.fullest.reserved),
        show_bytes(memory.spare),
        show_seconds(found.forecast.time.step_s),
        show_hours(time[0]),
        _show_cost(time[1]),
    )


def _show_cost(cost: float) -> str:
    return f"${cost:,.0f}" if cost else "-"
