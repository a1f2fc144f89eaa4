"""The recipe that `train` and `submit` are given: refused where nothing says what to train, or which run to go on with."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.types import Override

from framework.errors import RecipeError
from framework.launch.directory import RunDirectory
from framework.launch.resume import refuse_missing
from framework.plan.auto import require_layout
from framework.recipe.compose import compose
from framework.recipe.describe import describe_experiments
from framework.recipe.files import search_path
from framework.recipe.keys import flatten
from framework.recipe.overrides import parse_overrides
from framework.recipe.problem import render_problems
from framework.recipe.run_rules import find_run_root_problems
from framework.recipe.schema import Recipe, Run

# What says what is trained: recipes of these groups, values below these keys. Where data lies, or how a model computes, do not.
SUBJECT_GROUPS = ("experiment", "model", "data")
SUBJECT_KEYS = ("model.family", "model.weights", "model.config_file", "model.config", "data.sources")


def compose_run(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Recipe:
    """The recipe to train. `train run.id=X train.steps=500` goes on with what run X saved rather than with config.yaml's
    defaults, so its values are judged beside those; a command that chooses recipes says itself what it wants."""
    composition = compose(overrides, recipe_dirs)
    run = composition.draft.run
    if problems := list(find_run_root_problems(composition.draft)):  # before anybody looks for the run there
        raise RecipeError(render_problems(problems))
    if (saved := find_saved(run)) is None:
        if run.id is not None and not recipe_dirs and not has_subject(overrides):
            refuse_missing(run)
        composition.require()
        require_subject(overrides, recipe_dirs)
        return require_layout(composition, overrides, recipe_dirs)
    if not parse_overrides(overrides, search_path(recipe_dirs)).choices:
        composition = compose(overrides, recipe_dirs, base=saved)
    return composition.require()


def find_saved(run: Run) -> Path | None:
    """The recipe of the run that run.id names, None where there is none. A sweep's folders have none before they begin."""
    if run.id is None:
        return None
    saved = RunDirectory(Path(run.root, run.id)).recipe
    return saved if saved.is_file() else None


def require_subject(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> None:
    """Raises RecipeError where nothing says what to train: config.yaml's own model is no first run, it takes hours. Recipes of
    the user's own may have a config.yaml that says it."""
    if not recipe_dirs and not has_subject(overrides):
        raise RecipeError(
            "nothing says what to train: choose an experiment, or a model and data. The first run, of a minute or so, is\n\n"
            f"  meshwright train experiment=quickstart\n\nexperiments:\n{describe_experiments(search_path())}\n\n"
            "`meshwright train --help-recipe` lists all recipes."
        )


def has_subject(overrides: Sequence[str]) -> bool:
    """Whether overrides of one run say what to train. Those with a mistake in them may: composing names the mistake."""
    command = parse_overrides(overrides, search_path())
    if command.problems or any(choice.key_or_group in SUBJECT_GROUPS for choice in command.choices if _sets(choice)):
        return True
    keys = [key for value in command.values if _sets(value) for key in _list_keys(value)]
    return any(key == subject or key.startswith(f"{subject}.") for key in keys for subject in SUBJECT_KEYS)


def _sets(override: Override) -> bool:
    return not override.is_delete()


def _list_keys(override: Override) -> list[str]:
    """The keys that a value sets: `data={root: x}` sets data.root, and no sources."""
    return list(flatten({override.key_or_group: override.value()}))
