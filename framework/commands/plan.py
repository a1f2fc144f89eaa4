"""`meshwright plan`: memory, time and cost of a recipe, without any device."""

import argparse
from pathlib import Path

from framework.imports import loading_libraries


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--schedule-to",
        type=Path,
        metavar="FILE",
        help="also write the schedule: .svg, .png or .pdf as a picture, .csv as a table for pipeline.table",
    )
    details = {
        "--ranks": "memory and messages of each rank, and what it leaves to its host",
        "--layouts": "the units and parameters of a rank",
        "--schedule": "the pipeline's stages and actions, and all schedules compared",
        "--options": "savings and cost of each option that lowers memory",
    }
    for option, words in details.items():
        parser.add_argument(option, action="store_true", help=f"also print {words}")
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
        from framework.plan.plan_command import plan_command
        from framework.plan.plan_text import Wanted

    check_measured(recipe)
    names = ("ranks", "layouts", "schedule", "options", "schedule_to", "html", "overwrite")
    return plan_command(recipe, Wanted(**{name: getattr(arguments, name) for name in names}))
