"""`meshwright inject`: inject a fault into a run."""

import argparse

from framework.errors import RunError
from framework.launch.directory import find_run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or folder")
    parser.add_argument(
        "words", nargs="*", metavar="FAULT", help="a fault and where it acts, such as: kill rank=1 step=30"
    )
    parser.add_argument("--list", action="store_true", help="explain the faults, or list those of RUN")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Inject the fault, or list what there is."""
    from framework.launch.inject import inject_command, list_command

    if arguments.list or not arguments.run:
        return list_command(find_run(arguments.run) if arguments.run else None)
    if not arguments.words:
        raise RunError(
            "inject RUN FAULT: say which fault, such as kill rank=1 step=30; `meshwright inject --list` explains them"
        )
    return inject_command(find_run(arguments.run), words=arguments.words, here=arguments.here)
