"""The command `meshwright search`: search and print, try, or read what was tried."""

import argparse

from framework.errors import EXIT_DONE
from framework.launch.machine import check_measured
from framework.launch.search import ask, show


def search_command(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    asked = ask(arguments)
    check_measured(asked.recipe)
    if arguments.tried is None and arguments.try_best is None:
        show(asked)
        return EXIT_DONE
    from framework.launch.try_layouts import read_tried, try_layouts

    return try_layouts(asked) if arguments.tried is None else read_tried(asked)
