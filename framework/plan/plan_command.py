"""`meshwright plan`: what a recipe will hold, take and cost, before any device is touched."""

from collections.abc import Iterator, Sequence

from framework.errors import EXIT_DONE, EXIT_MEMORY
from framework.plan.advice import FittingChange, describe_savings, find_changes
from framework.plan.check import check_stages, check_weights
from framework.plan.forecast_plan import PlanForecast, forecast_plan
from framework.plan.page import describe_layouts, describe_ranks, describe_schedule, save_schedule
from framework.plan.page_html import require_page, write_html
from framework.plan.plan import Plan
from framework.plan.plan_stages import join_stages, plan_within
from framework.plan.plan_text import Wanted, describe_plan
from framework.recipe.schema import Recipe
from framework.recipe.stages import split_stages


def plan_command(recipe: Recipe, wanted: Wanted) -> int:
    """Print the screen and what is wanted, and write the files. Raises what the recipe or the model has wrong."""
    if wanted.html is not None:
        require_page(wanted.html, wanted.overwrite)
    first, *plans = check_stages(recipe)
    check_weights(first)
    stages = split_stages(recipe)
    forecasts = [forecast_plan(plan_within(*each)) for each in zip(stages, plans or [first], strict=True)]
    found, table = join_stages(stages, forecasts)
    plan, changes = found.plan, find_changes(found)
    for line in (*table, *describe_plan(found, changes), *_describe_details(plan, wanted)):
        print(line)
    for line in _write(found, changes, wanted):
        print(line)
    return EXIT_DONE if all(each.forecast.memory.fits for each in forecasts) else EXIT_MEMORY


def _describe_details(plan: Plan, wanted: Wanted) -> Iterator[str]:
    if wanted.ranks:
        yield ""
        yield from describe_ranks(plan)
    if wanted.layouts:
        yield ""
        yield from describe_layouts(plan)
    if wanted.schedule:
        yield ""
        yield describe_schedule(plan)
    if wanted.options:
        fullest = max(plan.topology.ranks("pp", 0), key=lambda rank: plan.memory(rank).reserved)
        yield ""
        yield from describe_savings(plan, fullest)


def _write(found: PlanForecast, changes: Sequence[FittingChange], wanted: Wanted) -> Iterator[str]:
    plan = found.plan
    if wanted.schedule_to is not None:
        save_schedule(wanted.schedule_to, plan.pipeline, plan.derived.accumulation, plan.title)
        yield f"wrote the schedule to {wanted.schedule_to}"
    if wanted.html is not None:
        from framework.plan.page_of_plan import make_page

        write_html(wanted.html, make_page(found, changes))
        yield f"wrote {wanted.html}"
