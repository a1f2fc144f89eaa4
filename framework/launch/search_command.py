"""The command `meshwright search`: search and print, compare numbers of nodes, try, or read what was tried."""

import argparse

from framework.errors import EXIT_DONE
from framework.launch.machine import check_measured
from framework.launch.search import ask, find, show


def search_command(arguments: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    if arguments.nodes is not None:
        from framework.launch.search_nodes import compare_nodes

        return compare_nodes(arguments)
    asked = ask(arguments)
    check_measured(asked.recipe)
    if arguments.tried is None and arguments.try_best is None:
        show(asked, find(asked))
        return EXIT_DONE
    from framework.launch.try_layouts import read_tried, try_layouts

    return try_layouts(asked) if arguments.tried is None else read_tried(asked)
