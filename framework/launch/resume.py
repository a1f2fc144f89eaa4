"""The recipe of a command line: that of a new run, or the saved one of a run that goes on, with the changes that are allowed.

Every value of a run's recipe has shaped its weights, so a run whose recipe changes is another run. A resume may change values
that do not touch the training run itself (layouts, places, rhythms), or that only add to it (more steps).
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

from framework.checkpoint.commit import newest_checkpoint, step_of
from framework.errors import RecipeError, RunError
from framework.launch.branch import compose_branch, find_origin
from framework.launch.directory import RunDirectory, list_runs
from framework.launch.identity import ABSENT, MAY_CHANGE, find_edits, may_change, read_recorded, refuse_edits, values_of
from framework.launch.settle import keep_settled
from framework.output import align
from framework.plan.auto import require_layout
from framework.recipe.check import with_layout_of
from framework.recipe.compose import compose, load_recipe
from framework.recipe.describe import describe_experiments
from framework.recipe.environment import HIDDEN, is_secret
from framework.recipe.files import search_path
from framework.recipe.keys import flatten, nearest
from framework.recipe.overrides import parse_overrides, write_override, write_resume
from framework.recipe.problem import render_problems, show
from framework.recipe.run_rules import find_run_root_problems
from framework.recipe.schema import Recipe, Run

SHOWN_RUNS = 10
# Keys that the run's folder states.
OWN_KEYS = ("run.root", "run.id", "run.name")


# A command line that has a recipe of these groups, or a value below these keys, says what to train. The place of data, or the way
# in which a model computes, does not.
SUBJECT_GROUPS = ("experiment", "model", "data")
SUBJECT_KEYS = ("model.family", "model.weights", "model.config_file", "model.config", "data.sources")


# Keys whose values differ from the saved recipe's: (was, now).
RecipeChanges = dict[str, tuple[Any, Any]]


def compose_run(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Recipe:
    """The recipe to train. `train run.id=X train.steps=500` goes on with the saved recipe of run X rather than with
    config.yaml's defaults, so its values are checked beside those. A command that chooses recipes composes anew."""
    composition = compose(overrides, recipe_dirs)
    run = composition.draft.run
    if problems := list(find_run_root_problems(composition.draft)):  # before anybody looks for the run there
        raise RecipeError(render_problems(problems))
    if (saved := find_saved(run)) is None:
        if run.start_from is not None:
            return compose_branch(composition, overrides, recipe_dirs)
        if run.id is not None and not recipe_dirs and not has_subject(overrides):
            refuse_missing(run)
        composition.require()
        require_subject(overrides, recipe_dirs)
        return require_layout(composition, overrides, recipe_dirs)
    if not parse_overrides(overrides, search_path(recipe_dirs)).choices:
        return compose(overrides, recipe_dirs, base=saved).require()
    if (start_from := load_recipe(saved).run.start_from) is not None:
        return compose_again(start_from, overrides, recipe_dirs)
    return composition.require()


def compose_again(start_from: str, overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Recipe:
    """The recipe of a branch that exists, with the choices of a command line: composed from its origin as at first."""
    words = [*overrides, write_override("run.start_from", start_from)]
    return compose_branch(compose(words, recipe_dirs), words, recipe_dirs)


def find_saved(run: Run) -> Path | None:
    """The recipe of the run that run.id names, None where there is none. A sweep's folders have none before they begin."""
    if run.id is None:
        return None
    saved = RunDirectory(Path(run.root, run.id)).recipe
    return saved if saved.is_file() else None


def require_subject(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> None:
    """Raises RecipeError where no override says what to train: config.yaml's own model is no first run, it takes hours. A
    user's own recipes may have a config.yaml that says it."""
    if not recipe_dirs and not has_subject(overrides):
        raise RecipeError(
            "nothing says what to train: choose an experiment, or a model and data. The first run, of a minute or so, is\n\n"
            f"  meshwright train experiment=quickstart\n\nexperiments:\n{describe_experiments(search_path())}\n\n"
            "`meshwright train --help-recipe` lists all recipes."
        )


def has_subject(overrides: Sequence[str]) -> bool:
    """Whether overrides of one run say what to train. True for overrides with a mistake: composing explains it."""
    command = parse_overrides(overrides, search_path())
    groups = [choice.key_or_group for choice in command.choices if not choice.is_delete()]
    if command.problems or any(group in SUBJECT_GROUPS for group in groups):
        return True
    values = {value.key_or_group: value.value() for value in command.values if not value.is_delete()}
    keys = flatten(values)  # of `data={root: x}` data.root, which is no source
    return any(key == subject or key.startswith(f"{subject}.") for key in keys for subject in SUBJECT_KEYS)


def resume_recipe(run: RunDirectory, overrides: list[str], recipe_dirs: list[Path]) -> tuple[Recipe, RecipeChanges]:
    """The recipe that the run goes on with, and what it changes. Raises RunError for a change that makes another run.

    Values of the command line are set in the saved recipe. Its group choices (`experiment=quickstart`) were made when the
    run began: they must still say the same of all that cannot change; of the rest the saved values stay. A run that has not
    trained a step may change in anything: its recipe may be the mistake that ended it.
    """
    saved, chooses = load_recipe(run.recipe), bool(parse_overrides(overrides, search_path(recipe_dirs)).choices)
    resumed = _compose_settled(saved, overrides, recipe_dirs, run.recipe)
    if (start_from := saved.run.start_from) is not None and chooses:  # a branch is composed from its origin
        composed = keep_settled(saved, compose_again(start_from, overrides, recipe_dirs))
    else:
        composed = _compose_settled(saved, overrides, recipe_dirs) if chooses else resumed
    refuse_other_origin(run, resumed.run.start_from, start_from)
    is_open = (
        composed.parallel.layout == "auto"
    )  # by a choice of recipes, parallel=auto, which the beginning has followed
    if is_open:
        composed = with_layout_of(composed, saved)
    recorded = read_recorded(run)["recipe"]
    edits = find_edits(recorded, values_of(saved))
    restored = edits.keys() - find_edits(recorded, values_of(resumed)).keys()
    changes = find_changes(saved, resumed)
    if not run.has_trained:  # what is typed takes the place of all that was recorded
        restored |= changes.keys()
    refuse_edits(run, {key: values for key, values in edits.items() if key not in restored})
    refused = {
        key: pair
        for key, pair in (find_changes(saved, composed) | changes).items()
        if not may_change(key) and key not in restored
    }
    if refused and run.has_trained:
        raise RunError(explain_refusal(run, refused, saved.launch.kind))
    if refused:  # nothing was trained under the saved recipe, so this one takes its place as a whole
        if is_open:
            composed = require_layout(compose(overrides, recipe_dirs), overrides, recipe_dirs)
            composed = keep_settled(saved, composed)
        resumed, changes = composed, find_changes(saved, composed)
    resumed = replace(resumed, run=replace(name_run(run.path, resumed.run), start_from=start_from))
    return resumed, {key: pair for key, pair in changes.items() if key not in OWN_KEYS}


def refuse_other_origin(run: RunDirectory, typed: str | None, saved: str | None) -> None:
    """Raises RunError where a resume says that the run begins with another checkpoint than it did."""
    if typed == saved:
        return
    found = str(find_origin(typed)) if typed is not None else ""
    # Without a step it means the newest one, which may be another by now.
    is_same = found == saved or ("@" not in str(typed) and found.rpartition("@")[0] == str(saved).rpartition("@")[0])
    if not is_same:
        raise RunError(
            f"run.start_from={typed}: {run.path} has begun {f'with {saved}' if saved else 'without another run'}. Leave the key"
            " out to go on with it, or give the branch a run.id that is not taken"
        )


def _compose_settled(saved: Recipe, overrides: list[str], dirs: list[Path], base: Path | None = None) -> Recipe:
    composition = compose(overrides, dirs, base)
    # parallel.layout=auto that is typed chooses anew, for the ranks that the run goes on with.
    recipe = composition.require() if base is None else require_layout(composition, overrides, dirs)
    return keep_settled(saved, recipe, composition.origins)


def name_run(path: Path, saved: Run) -> Run:
    """`run.*` of the run in a folder, which may be a copy of the folder in which the recipe was saved: its id is the folder's
    name. run.root keeps its spelling where it names the same folder."""
    keys = RunDirectory(path).keys
    is_own = Path(saved.root).absolute() == Path(keys.root).absolute()
    return replace(saved, id=keys.id, root=saved.root if is_own else keys.root)


def resume_command(run: RunDirectory, recipe: Recipe, *more: str) -> str:
    """The command that goes on with the run."""
    return write_resume(recipe.launch.kind, run.keys, *more)


def saved_step(run: RunDirectory) -> int:
    """Step of the newest whole checkpoint, from which the run goes on; 0 if it has never saved.

    Raises CheckpointError when it has saved and no checkpoint is whole, StorageError when that cannot be found out now.
    """
    newest = newest_checkpoint(run.checkpoints)
    return step_of(newest) if newest else 0


def refuse_missing(run: Run) -> NoReturn:
    """Raises RunError for a command line that can only be a resume, of a run that is not there or has not begun."""
    folder = Path(run.root, str(run.id))
    if (folder / "run.json").is_file():
        raise RunError(
            f"{folder}/recipe.yaml is gone, so the run cannot go on: put it back, from a copy or by hand; run.json has its values"
            " under `recipe`"
        )
    there = [each.id for each in list_runs(Path(run.root))]
    near = nearest(str(run.id), there)
    shown = ", ".join(there[-SHOWN_RUNS:]) + (f" and {len(there) - SHOWN_RUNS} more" if len(there) > SHOWN_RUNS else "")
    raise RunError(
        f"there is no run {run.root}/{run.id} to go on with"
        + (f"; did you mean run.id={near[0]}?" if near else ".")
        + f" Runs there: {shown or 'none'}. For a new run of this name say what it trains, such as experiment=quickstart"
    )


def find_changes(saved: Recipe, other: Recipe) -> RecipeChanges:
    """All keys whose values differ, ABSENT where one of the two has no such key."""
    was, now = flatten(asdict(saved)), flatten(asdict(other))
    pairs = {key: (was.get(key, ABSENT), now.get(key, ABSENT)) for key in was | now}
    return {key: (_shown(key, one), _shown(key, two)) for key, (one, two) in pairs.items() if one != two}


def _shown(key: str, value: Any) -> Any:
    """A value as it is printed and kept in run.json: without a secret of a run from before secrets were refused."""
    return HIDDEN if is_secret(key.rpartition(".")[2], value) and key.startswith("launch.environment") else value


def explain_refusal(run: RunDirectory, refused: RecipeChanges, kind: str) -> str:
    """Table of the refused changes, and the ways out."""
    rows = [("key", "was", "now"), *((key, show(was), show(now)) for key, (was, now) in refused.items())]
    table = [f"  {line}" for line in align(rows)]
    return "\n".join(
        [
            f"{run.path} was begun with another recipe, and these keys cannot change within a run:",
            *table,
            f"to go on with the saved recipe:  {write_resume(kind, run.keys)}",
            "for a run of the new recipe:     leave run.id out, or give one that is not taken",
            f"what may change on resume:       {', '.join(pattern for pattern, _ in MAY_CHANGE)}",
        ]
    )
