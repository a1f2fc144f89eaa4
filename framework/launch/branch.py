"""Branches: a new run that begins with the weights and moments of another run's checkpoint (`run.start_from`).

The recipe of a branch is that of its origin with the changes of the command line; the launch prints them. Steps count on from the
origin's, and so do the learning-rate schedule and, where the data and its order are the same, the position in the data.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from framework.checkpoint.commit import list_checkpoints, locate, newest_checkpoint, open_checkpoint, step_of
from framework.errors import ModelError, RecipeError, RunError
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory, find_run
from framework.launch.places import explain_errors
from framework.lease import Lease
from framework.object_store import Place
from framework.recipe.check import check_recipe
from framework.recipe.compose import Composition, compose, load_recipe, with_choices
from framework.recipe.keys import value_of
from framework.recipe.problem import Problem, render_problems, show
from framework.recipe.schema import Recipe, Run
from framework.track.jsonl import LOADS_FILE, METRICS_FILE

# Keys on which the order of samples depends, beside the content of the data.
ORDER_KEYS = ("batch.context", "data.packing", "data.overlong", "data.mode", "train.seed")


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


def settle_reference(reference: str) -> str:
    """`loss.reference` as ranks read it: a folder of weights, fetched where it is a name of the hub, or RUN@STEP. Raises
    ModelError or RunError where there is none."""
    with loading_libraries():
        from framework.model.hub import resolve_folder

    if reference == "base" or is_folder_of_weights(reference):
        return reference
    try:
        origin = find_origin(reference, "loss.reference")
    except RunError:
        folder = find_run(reference.rpartition("@")[0] or reference)
        if folder.exists():
            raise
        try:
            return str(resolve_folder(reference, key="loss.reference"))
        except ModelError as error:
            raise ModelError(f"{error}. Nor is it a run: there is no folder {folder}") from error
    if origin.checkpoint is None:
        raise RunError(
            f"loss.reference={reference}: no checkpoint has the weights of step 0. Name a step that was saved"
        )
    if load_recipe(origin.run.recipe).adapter.is_used:
        raise RunError(
            f"loss.reference={reference} has an adapter, whose checkpoints lack the model: set it to the folder that"
            " `meshwright export RUN --merged` writes"
        )
    return str(origin)


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
    """Give a branch the metrics of its origin: its start drops those of steps beyond, so its curves begin at step 1."""
    for name in (METRICS_FILE, LOADS_FILE):
        if (origin.run.path / name).is_file():
            with explain_errors(run.path), lease.replacing(run.path / name) as made:
                shutil.copyfile(origin.run.path / name, made)


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
