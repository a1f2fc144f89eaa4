"""`meshwright prepare`: text to token store, resumable and on all cores."""

import argparse

from framework.commands.arguments import at_least, compose_recipe


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes (default: one per core)")
    parser.add_argument(
        "--show", type=at_least(1), metavar="N", help="print conversation N, from 1, with what is trained marked"
    )


def run(arguments: argparse.Namespace) -> int:
    """Make the token stores of the recipe's data."""
    recipe = compose_recipe(arguments)
    from framework.data.prepare import prepare_command

    return prepare_command(recipe, workers=arguments.workers, show=arguments.show)
