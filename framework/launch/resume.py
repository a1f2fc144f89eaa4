"""The recipe of a command line: of a new run, of a run that goes on, or of a branch, with the changes that are allowed.

Every value of a run's recipe has shaped its weights, so a run whose recipe changes is another run. A resume may change values
that do not touch the training run itself (layouts, places, rhythms), or that only add to it (more steps).

A branch is a new run that begins with the weights and moments of another run's checkpoint (`run.start_from`). Its recipe is that
of its origin with the changes of the command line; the launch prints them. Steps count on from the origin's, and so do the
learning-rate schedule and, where the data and its order are the same, the position in the data.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from framework.checkpoint.commit import list_checkpoints, locate, newest_checkpoint, open_checkpoint, step_of
from framework.errors import RecipeError, RunError
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory, find_run, list_runs
from framework.launch.identity import ABSENT, MAY_CHANGE, find_edits, may_change, read_recorded, refuse_edits, values_of
from framework.launch.places import explain_errors
from framework.lease import Lease
from framework.object_store import Place
from framework.output import align
from framework.plan.auto import require_layout
from framework.recipe.check import check_recipe, with_layout_of
from framework.recipe.compose import Composition, compose, load_recipe, with_choices
from framework.recipe.describe import describe_experiments
from framework.recipe.environment import HIDDEN, is_secret
from framework.recipe.files import search_path
from framework.recipe.keys import TOKEN_IDS, flatten, nearest, value_of
from framework.recipe.overrides import parse_overrides, write_override, write_resume
from framework.recipe.problem import COMMAND_LINE, Problem, render_problems, show
from framework.recipe.run_rules import find_run_root_problems
from framework.recipe.schema import Recipe, Run
from framework.recipe.stages import settle_borders
from framework.track.jsonl import LOADS_FILE, METRICS_FILE, read_lines

SHOWN_RUNS = 10
# Keys that the run's folder states.
OWN_KEYS = ("run.root", "run.id", "run.name")
# A command line that has a recipe of these groups, or a value below these keys, says what to train. The place of data, or the way
# in which a model computes, does not.
SUBJECT_GROUPS = ("experiment", "model", "data")
SUBJECT_KEYS = ("model.family", "model.weights", "model.config_file", "model.config", "data.sources")
# Keys on which the order of samples depends, beside the content of the data.
ORDER_KEYS = ("batch.context", "data.packing", "data.overlong", "data.mode", "train.seed")
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
    # A choice of recipes says parallel=auto, which the beginning has followed.
    is_open = composed.parallel.layout == "auto"
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


def keep_settled(saved: Recipe, other: Recipe, origins: Mapping[str, str] | None = None) -> Recipe:
    """`other` with the values that the run's beginning has settled, where it leaves them open.

    origins: where each value of `other` was written. Token ids of a file may be those that the beginning has corrected; typed
    ones are the user's.
    """
    precision, model = other.precision, other.model
    if precision.compute == "auto":
        precision = replace(precision, compute=saved.precision.compute)
    if model.revision is None and model.weights == saved.model.weights:
        model = replace(model, revision=saved.model.revision)
    typed = {name for name in TOKEN_IDS if (origins or {}).get(f"model.config.{name}") == COMMAND_LINE}
    ids = {name: value for name, value in saved.model.config.items() if name in TOKEN_IDS and name not in typed}
    model = replace(model, config=model.config | ids)
    # Shares and tokens that are the borders of the run's stages, in its length.
    borders = settle_borders(replace(other, train=replace(other.train, steps=saved.train.steps))).train.stages
    stages = borders if borders == saved.train.stages else other.train.stages
    return replace(other, precision=precision, model=model, train=replace(other.train, stages=stages))


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


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a branch begins with; None at step 0, where it begins as its origin did."""

    run: RunDirectory
    checkpoint: Place | None

    @property
    def step(self) -> int:
        return step_of(self.checkpoint) if self.checkpoint is not None else 0

    def __str__(self) -> str:
        """The form in which a recipe keeps it: RUN@STEP."""
        return f"{self.run.path.absolute()}@{self.step}"


def find_origin(start_from: str, key: str = "run.start_from") -> Origin:
    """The checkpoint that a key, such as `run.start_from`, names: RUN or RUN@STEP, where RUN is a folder or the id of a run.
    RunError where there is none; RUN@0 is the beginning of a run."""
    name, _, step = start_from.rpartition("@") if start_from.rpartition("@")[2].isdigit() else (start_from, "", "")
    run = RunDirectory.open(find_run(name))
    found = locate(run.checkpoints, int(step)) if step else newest_checkpoint(run.checkpoints)
    if found is None and step != "0":
        steps = ", ".join(f"{step_of(each):,}" for each in reversed(list_checkpoints(run.checkpoints))) or "none"
        raise RunError(f"{key}={start_from}: {run.path} has no such checkpoint. Saved steps: {steps}")
    return Origin(run, found)


def is_folder_of_weights(reference: str) -> bool:
    """Whether `loss.reference`, as ranks read it, is a folder of weights; else it is a run."""
    return (Path(reference).expanduser() / "config.json").is_file()


def refuse_other_shapes(origin: Origin, recipe: Recipe) -> None:
    """Raises RecipeError where the model of a branch has other weights than the checkpoint."""
    with loading_libraries():
        from framework.model.hub import find_folder
        from framework.model.load import build_meta, load_config

    saved = open_checkpoint(origin.checkpoint).entries if origin.checkpoint is not None else {}
    for name, each in build_meta(load_config(recipe.model, find_folder)).named_parameters():
        record = saved.get(f"weight/{name}")
        if record is not None and record.shape != tuple(each.shape):
            raise RecipeError(
                f"{name} has the shape {list(each.shape)} here and {list(record.shape)} in {origin}: a branch keeps its origin's"
                " model; leave its keys out"
            )


def copy_curves(origin: Origin, run: RunDirectory, lease: Lease) -> None:
    """Give a branch the metrics of its origin: its start drops those of steps beyond, so its curves begin at step 1. It has gone
    back by no rewind yet, by whose number trackers name its curve."""
    for name in (METRICS_FILE, LOADS_FILE):
        if (origin.run.path / name).is_file():
            with explain_errors(run.path), lease.replacing(run.path / name) as made, made.open("w") as file:
                for record in read_lines(origin.run.path / name):
                    own = {"rewinds": 0} if "rewinds" in record else {}
                    file.write(json.dumps({**record, **own}) + "\n")


def compose_branch(fresh: Composition, overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Recipe:
    """The recipe of a branch: the origin's with the choices and values of the command line, under a name of its own.

    fresh: composed without the origin, from which chosen groups are taken. Raises RecipeError for mistakes, RunError as
    `find_origin`, and where nothing is left to train.
    """
    draft = fresh.draft
    assert draft.run.start_from is not None
    origin = find_origin(draft.run.start_from)
    composed = compose(overrides, recipe_dirs, base=origin.run.recipe)
    recipe, keys = with_choices(composed.draft, draft, overrides, recipe_dirs)
    was = load_recipe(origin.run.recipe)
    beside_adapters = ["adapter.base", "train.seed"] if recipe.adapter.is_used else []
    for key in ("model.weights", "adapter.weights", *beside_adapters):
        if value_of(recipe, key) != value_of(was, key):
            raise RecipeError(
                f"{key}={show(value_of(recipe, key))}: a branch has the weights of {origin.run.path}, also those that are frozen;"
                f" leave {key} out"
            )
    if recipe.train.steps <= origin.step:
        raise RunError(
            f"run.start_from={draft.run.start_from} begins behind step {origin.step:,}, and train.steps={recipe.train.steps:,}"
            f" counts from the origin's first step: set train.steps={2 * origin.step} or so"
        )
    name = draft.run.name if draft.run.name != Run().name else f"{origin.run.id}-branch"
    run = replace(recipe.run, id=draft.run.id, root=draft.run.root, name=name, start_from=str(origin))
    recipe = replace(recipe, run=run)

    def is_chosen(problem: Problem) -> bool:
        return any(problem.key == key or problem.key.startswith(f"{key}.") for key in keys)

    problems = [each for each in composed.problems if not is_chosen(each)] + list(filter(is_chosen, fresh.problems))
    if problems := problems or check_recipe(recipe, composed.origins):
        raise RecipeError(render_problems(problems))
    return recipe
