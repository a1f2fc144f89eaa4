"""`meshwright inspect`: the content of a checkpoint or a token store, every byte verified."""

import argparse

from framework.launch.directory import find_run
from framework.object_store import is_url, open_place


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint's folder or URL, a run's id or folder: its newest, or a token store"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what is at the path."""
    from framework.checkpoint.load import inspect_command

    return inspect_command(open_place(arguments.path) if is_url(arguments.path) else find_run(arguments.path))
