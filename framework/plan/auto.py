"""The layout that a recipe leaves to `auto`, chosen once it is composed."""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from framework.errors import RecipeError
from framework.imports import loading_libraries
from framework.recipe.check import check_recipe
from framework.recipe.compose import Composition, find_pins
from framework.recipe.problem import render_problems
from framework.recipe.schema import Recipe


def require_layout(composition: Composition, overrides: Iterable[str], recipe_dirs: Sequence[Path]) -> Recipe:
    """The recipe with a layout: with parallel.layout=auto the chosen one, named in a line on stderr, for stdout may be parsed.
    So are choices of which an experiment has changed keys. RecipeError with all problems, or where no layout can be trained."""
    recipe = composition.require()
    for note in composition.notes:
        print(note, file=sys.stderr, flush=True)
    if recipe.parallel.layout == "stated":
        return recipe
    with loading_libraries():  # which a recipe that states its layout need not wait for
        from framework.plan.find import choose_layout

    chosen, line = choose_layout(recipe, find_pins(composition, overrides, recipe_dirs))
    print(line, file=sys.stderr, flush=True)
    problems = check_recipe(chosen, composition.origins)
    if problems:  # rules that no layout is asked: what they say is wrong whatever the layout is
        raise RecipeError(render_problems(problems))
    return chosen
