"""Recipes to one checked Recipe: Hydra composes the files, our own code judges the result.

Hydra's compose API has no side effects (no output folder, no logging, no change of directory). It composes untyped; then
come the command line's values, interpolations, the strict conversion to dataclasses and the cross-field rules, and the
mistakes of all of them are one list.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from framework.errors import RecipeError
from framework.recipe.alternatives import drop_unchosen_model, let_microbatch_follow, let_statements_win
from framework.recipe.check import check_recipe
from framework.recipe.cluster_file import apply_cluster
from framework.recipe.convert import to_recipe
from framework.recipe.files import compose_files, search_path
from framework.recipe.keys import flatten
from framework.recipe.layout_file import apply_layout
from framework.recipe.origins import origin_of
from framework.recipe.overrides import apply_values, expand_sweep, parse_overrides
from framework.recipe.problem import Problem, render_problems
from framework.recipe.resolve import resolve
from framework.recipe.saved import load_recipe, read_base, save_recipe
from framework.recipe.schema import Recipe

__all__ = ["Composition", "compose", "expand_sweep", "load_recipe", "save_recipe"]


@dataclass(frozen=True)
class Composition:
    """What the files and the command line say together.

    `recipe` is None if there are problems. `draft` is always there, with the schema's default where a value is wrong; it is
    for messages and for looking up the run's folder, never for running. `origins`: each dotted key to
    `recipes/optim/adamw.yaml:3`, `command line` or `default`.
    """

    recipe: Recipe | None
    draft: Recipe
    problems: list[Problem]
    origins: dict[str, str]

    def require(self) -> Recipe:
        """The recipe; RecipeError with all problems where there are any."""
        if self.recipe is None:
            raise RecipeError(render_problems(self.problems))
        return self.recipe


def compose(overrides: Iterable[str], recipe_dirs: Sequence[Path] = (), base: Path | None = None) -> Composition:
    """Composes `config.yaml` with the command line's overrides and checks the result.

    recipe_dirs: users' own recipes; they are searched before the shipped ones and may extend those (`defaults: [adamw]`).
    base: a saved recipe that takes the place of config.yaml. Only value overrides apply to it, group choices do not: what
    they chose is in the saved recipe already. To compare the two, compose again without `base`.
    """
    folders = search_path(recipe_dirs)
    command = parse_overrides(overrides, folders)
    tree, origins, unread = compose_files(folders, command.choices) if base is None else read_base(base)
    misplaced = [problem for file in command.layouts for problem in apply_layout(tree, file, origins)]
    misplaced += [problem for file in command.clusters for problem in apply_cluster(tree, file, origins)]
    misplaced += apply_values(tree, command.values, origins)
    if base is None:
        drop_unchosen_model(tree, origins, folders, [choice.key_or_group for choice in command.choices])
    plain, unresolved = resolve(tree, origins)
    ambiguous = let_statements_win(plain, origins)
    recipe, wrong = to_recipe(plain, origins)
    failed = {problem.key for problem in unresolved}
    # A key is not missing if its interpolation failed, nor if the files could not be read and it may well be in them.
    wrong = [problem for problem in wrong if not (problem.missing and (unread or problem.key in failed))]
    problems = [*command.problems, *unread, *misplaced, *unresolved, *wrong, *ambiguous]
    if not (command.problems or unread):  # a rule that fails while a recipe is left out would blame the wrong key
        if not problems:
            recipe = let_microbatch_follow(recipe, origins)
        problems += check_recipe(recipe, origins, broken=[problem.key for problem in problems])
    origins = {key: origin_of(origins, key) for key in flatten(asdict(recipe))}
    return Composition(None if problems else recipe, recipe, problems, origins)
