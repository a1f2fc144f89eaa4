"""`meshwright check`: every mistake of a recipe at once, or the recipe in full and the numbers that follow from it."""

import argparse
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from framework.errors import EXIT_DONE, DataError, StorageError
from framework.imports import loading_libraries
from framework.mesh.topology import place
from framework.plan.auto import require_layout
from framework.recipe.compose import compose
from framework.recipe.convert import to_yaml
from framework.recipe.derive import derive
from framework.recipe.describe import (
    describe_blend,
    describe_compilation,
    describe_derived,
    describe_keys,
    describe_sources,
)
from framework.recipe.environment import hide_secrets
from framework.recipe.schema import Recipe
from framework.recipe.stages import describe_stage, split_stages


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--sources", action="store_true", help="say which file or override set each value")
    parser.add_argument(
        "--model", action="store_true", help="build the model and lay every rank out too, without memory: some seconds"
    )
    parser.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="WORD",
        help="explain all keys, or those with WORD in their name or meaning; composes nothing",
    )
    parser.add_argument(
        "--from",
        dest="from_file",
        type=Path,
        metavar="FILE",
        help="print a file of torchtitan, nanotron, axolotl, LLaMA-Factory or HF TrainingArguments as an experiment, checked",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the recipe, or raise RecipeError with all its mistakes."""
    if arguments.keys is not None:
        print(describe_keys(arguments.keys))
        return EXIT_DONE
    if arguments.from_file is not None:
        from framework.recipe.foreign_files import convert_command

        return convert_command(arguments.from_file, arguments.overrides, arguments.recipes)
    composition = compose(arguments.overrides, arguments.recipes)
    recipe = require_layout(composition, arguments.overrides, arguments.recipes)
    need = _describe_need(recipe, composition.origins) if arguments.model else ""
    text = describe_sources(recipe, composition.origins) if arguments.sources else to_yaml(recipe).rstrip()
    print(hide_secrets(text))
    print()
    print(f"{describe_derived(derive(recipe))}\ndata          {describe_data(recipe)}{need}")
    for stage in split_stages(recipe) if recipe.train.stages and recipe.train.epochs is None else ():
        print(f"stage {stage.name:7} {describe_stage(stage)}")
    if compilation := describe_compilation(recipe):
        print(compilation)
    if advice := place(derive(recipe)).advise_experts():
        print(f"experts       {advice}")
    return EXIT_DONE


def describe_data(recipe: Recipe) -> str:
    """The shares of the sources, which may follow from data that is prepared already."""
    tokens: dict[str, int] = {}
    if recipe.data.blends_by_tokens:
        from framework.data.prepared import find_prepared  # takes a second

        with suppress(DataError, StorageError):
            tokens = {each.name: each.meta.splits["train"].num_tokens for each in find_prepared(recipe).sources}
    return describe_blend(recipe.data, tokens)


def _describe_need(recipe: Recipe, origins: Mapping[str, str]) -> str:
    with loading_libraries():
        from framework.plan.check import check_layout, check_weights, describe_need

    plan = check_layout(recipe, origins)
    check_weights(plan)
    return f"\nmodel         {describe_need(plan)}"
