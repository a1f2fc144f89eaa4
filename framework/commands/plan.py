"""`meshwright plan`: memory, time and cost of a recipe, without any device."""

import argparse
from collections.abc import Collection, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from framework.commands.check import describe_data
from framework.errors import EXIT_DONE, EXIT_MEMORY
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory, find_run
from framework.recipe.schema import Recipe

if TYPE_CHECKING:
    from framework.plan.plan import Plan

DETAILS = MappingProxyType(
    {
        "ranks": "memory and messages of each rank",
        "layouts": "the units and parameters of a rank",
        "schedule": "the pipeline's stages and actions, and all schedules compared",
        "options": "savings and cost of options that lower memory",
    }
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--schedule-to",
        type=Path,
        metavar="FILE",
        help="also write the schedule: .svg, .png or .pdf as a picture, .csv as a table for pipeline.table",
    )
    for name, words in DETAILS.items():
        parser.add_argument(f"--{name}", action="store_true", help=f"also print {words}")
    parser.add_argument("--loads", metavar="RUN", help="a run: experts get the tokens that it has recorded last")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser, in one file")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that no plan or search has written, too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan, and write the files that the options name."""
    from framework.plan.auto import require_layout
    from framework.recipe.compose import compose_for_nodes

    composition = compose_for_nodes(arguments.overrides, arguments.recipes)
    recipe = require_layout(composition, arguments.overrides, arguments.recipes)
    with loading_libraries():
        from framework.commands.measure import check_measured

    check_measured(recipe)
    return print_plan(
        recipe,
        [name for name in DETAILS if getattr(arguments, name)],
        schedule_to=arguments.schedule_to,
        html=arguments.html,
        overwrite=arguments.overwrite,
        loads=arguments.loads,
    )


def print_plan(
    recipe: Recipe,
    details: Collection[str] = (),
    *,
    schedule_to: Path | None = None,
    html: Path | None = None,
    overwrite: bool = False,
    loads: str | None = None,
) -> int:
    """Print what a recipe will hold, take and cost, and write the files. Raises what the recipe or the model has wrong.

    details: of `DETAILS`; overwrite: replace a page's file that is not ours; loads: a run that has recorded those of
    experts."""
    with loading_libraries():
        from framework.plan.advice import find_changes
        from framework.plan.forecast_plan import forecast_run
        from framework.plan.page_html import require_page, write_html
        from framework.plan.plan_text import describe_plan, save_schedule
        from framework.track.summary import read_loads

    if html is not None:
        require_page(html, overwrite)
    found, table = forecast_run(recipe, None if loads is None else read_loads(RunDirectory.open(find_run(loads)).path))
    plan, changes = found.plan, find_changes(found)
    if recipe.data.blends_by_tokens:
        print(f"data          {describe_data(recipe)}")
    for line in (*table, *describe_plan(found, changes), *_describe_details(plan, details)):
        print(line)
    if schedule_to is not None:
        save_schedule(schedule_to, plan.pipeline, plan.derived.accumulation, plan.title)
        print(f"wrote the schedule to {schedule_to}")
    if html is not None:
        from framework.plan.pages import make_page

        write_html(html, make_page(found, changes))
        print(f"wrote {html}")
    return EXIT_DONE if found.forecast.memory.fits else EXIT_MEMORY


def _describe_details(plan: "Plan", details: Collection[str]) -> Iterator[str]:
    from framework.plan.advice import describe_savings
    from framework.plan.plan_text import describe_layouts, describe_ranks, describe_schedule

    makers = {
        "ranks": describe_ranks,
        "layouts": describe_layouts,
        "schedule": describe_schedule,
        "options": describe_savings,
    }
    for name, describe in makers.items():
        if name in details:
            yield ""
            yield from describe(plan)
