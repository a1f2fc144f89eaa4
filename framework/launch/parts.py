"""The next part of a run, decided by its launcher before anything is written: a new run, or one that goes on.

recipe -> settled, laid out (`check`), its data prepared -> `RunPart` -> written under the run's lock -> ranks, or a job
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from framework.data.prepare import prepare, summarize_data
from framework.data.prepared import Prepared
from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.launch.identity import describe_identity, keep_tokenizer
from framework.launch.places import explain_errors, place_checkpoints
from framework.launch.resume import RecipeChange, find_changes, resume_command, resume_recipe, saved_step
from framework.launch.settle import keep_pretrained, settle, settle_steps, settle_tokens
from framework.lease import Lease
from framework.mesh.placement import place
from framework.recipe.compose import load_recipe, save_recipe
from framework.recipe.derive import derive
from framework.recipe.describe import describe_blend
from framework.recipe.schema import Recipe


@dataclass(frozen=True)
class CheckedLayout:
    """A recipe whose ranks were laid out."""

    model_type: str
    # Printed below the summary.
    lines: Sequence[str] = ()
    # Numbers of nodes on which the run may start; empty for a run of this machine.
    counts: Sequence[int] = ()


# Lays every rank out, and raises what ranks would raise. The flag: the run begins with its pretrained weights, if it has any.
CheckLayout = Callable[[Recipe, bool], CheckedLayout]


@dataclass(frozen=True)
class RunPart:
    """The next part of a run."""

    recipe: Recipe
    # The step from which it goes on.
    step: int
    # The tokenizer of its data, None for a run that has trained and keeps its own.
    tokenizer: Path | None
    # Numbers of nodes, as of `CheckedLayout`.
    counts: Sequence[int]
    # Keys that the command line changes in a run that goes on.
    changes: Sequence[RecipeChange] = field(default=())
    # recipe.yaml has this recipe already.
    is_saved: bool = False

    def write(self, run: RunDirectory, lease: Lease) -> None:
        """Write the files that ranks and exports read."""
        if self.tokenizer is not None:
            keep_tokenizer(run, lease, self.tokenizer)
            keep_pretrained(run, lease, self.recipe.model)
        if not self.is_saved:
            with explain_errors(run.path), lease.replacing(run.recipe) as made:
                save_recipe(self.recipe, made)

    def note(self, run: RunDirectory, lease: Lease, overrides: list[str], **more: Any) -> None:
        """Add the launch to run.json; the tokenizer stays what it was when the run was begun."""
        identity = describe_identity(run, self.recipe)
        if self.tokenizer is None:
            del identity["tokenizer"]
        run.note_launch(overrides, {each.key: each.now for each in self.changes}, lease, **identity, **more)


def decide_new(recipe: Recipe, check: CheckLayout) -> RunPart:
    """The first part of a new run, which is printed. Raises what speaks against it."""
    return replace(_decide(recipe, check, 0, [], True, None), is_saved=False)


def decide_next(run: RunDirectory, overrides: list[str], recipe_dirs: list[Path], check: CheckLayout) -> RunPart:
    """The next part of a run, under the saved recipe and the changes that it allows. Raises what speaks against it. Called under
    the run's lock, before its epoch is raised: a new epoch would end a start that runs, and whose lock is not seen here."""
    recipe, changes = resume_recipe(run, overrides, recipe_dirs)
    recipe, prepared = settle_steps(recipe)
    if prepared is not None:  # recipe.yaml keeps no epochs
        keys = ("train.steps", "train.epochs")
        length = [change for change in find_changes(load_recipe(run.recipe), recipe) if change.key in keys]
        changes = [*length, *(change for change in changes if change.key not in keys)]
    step = saved_step(run)
    if step >= recipe.train.steps:
        more = resume_command(run, recipe, f"train.steps={2 * step}")
        raise RunError(
            f"{run.path} is finished: {step:,} of {recipe.train.steps:,} steps are done. To train on: {more}"
        )
    return _decide(recipe, check, step, changes, not run.has_trained, prepared)


def _decide(
    chosen: Recipe,
    check: CheckLayout,
    step: int,
    changes: list[RecipeChange],
    is_open: bool,
    prepared: Prepared | None,
) -> RunPart:
    """The part of a run from `step` on. is_open: nothing was trained, so the tokenizer may still change. prepared: the data, if
    it is known already."""
    recipe = settle(chosen)
    checked = check(recipe, step == 0)
    if prepared is None:
        recipe, prepared = settle_steps(recipe)
    print("\n".join([summarize(recipe, checked.model_type), *checked.lines]))
    for change in changes:
        print(f"changed  {change.key}: {change.was} -> {change.now}")
    prepared = prepared or prepare(recipe)
    print(summarize_data(prepared, recipe.data.validation))
    if is_open:
        recipe = settle_tokens(recipe, prepared.tokenizer)
    tokenizer = prepared.tokenizer if is_open else None
    return RunPart(recipe, step, tokenizer, checked.counts, changes, is_saved=not changes and recipe == chosen)


def create_run(part: RunPart) -> tuple[RunDirectory, RunPart]:
    """The folder of a new run, once its data is there, and the part with its id: bad data leaves no run behind."""
    keys = part.recipe.run
    run = RunDirectory.create(Path(keys.root), keys.id, keys.name)
    return run, replace(part, recipe=replace(part.recipe, run=replace(keys, id=run.id)))


def claim(run: RunDirectory, root: str | None) -> None:
    """Refuse a new run whose folder has one, and note where its checkpoints lie, as checkpoint.root says. Called under the run's
    lock, before its epoch is raised, which would end a start that runs. Raises RunError."""
    refuse_begun(run)
    if not run.has_trained:
        place_checkpoints(run.path, root)
    refuse_leftovers(run)


def refuse_begun(run: RunDirectory) -> None:
    """Raises RunError where another process has begun the run, and perhaps trains it."""
    if run.recipe.exists():
        raise RunError(
            f"{run.path} is a run already, or was begun by another process meanwhile: go on with it by its run.id, move it"
            " away, or choose another run.id or run.name"
        )


def refuse_leftovers(run: RunDirectory) -> None:
    """Raises RunError when a new run's folder has checkpoints: its ranks would go on with them under another recipe."""
    if saved_step(run):
        raise RunError(
            f"{run.path} has checkpoints and no recipe.yaml. Restore the recipe to go on with the run; for a new one leave run.id"
            " out, or give one that is not taken"
        )


def summarize(recipe: Recipe, model_type: str) -> str:
    """Model, data, batch, layout and device in a few lines. model_type: the model's own, for pretrained weights know theirs."""
    derived = derive(recipe)
    degrees = " ".join(f"{axis}={size}" for axis, size in derived.degrees.items())
    origin = f"weights of {recipe.model.weights}" if recipe.model.weights else f"from scratch, seed {recipe.train.seed}"
    lines = {
        "model": f"{model_type}, {origin}",
        "data": f"{describe_blend(recipe.data)}, {derived.total_tokens:,} tokens in {recipe.train.steps:,} steps",
        "batch": f"{derived.sequences_per_step} sequences of {derived.context} tokens = {derived.accumulation} x"
        f" {derived.sequences_per_microbatch} on each of {derived.dp} data-parallel ranks",
        "layout": f"{derived.world} {'rank' if derived.world == 1 else 'ranks'}, {degrees}, zero {recipe.zero.stage}",
        "device": f"{recipe.launch.device}, {recipe.precision.compute}",
    }
    if (recipe.launch.device, recipe.precision.compute) == ("cpu", "fp8"):
        lines["device"] += " emulated, as CPUs have none: the same numbers, slower than bf16"
    if recipe.launch.kind == "slurm":
        lines["nodes"] = place(derived).describe()
        lines |= {"experts": advice} if (advice := place(derived).advise_experts()) else {}
    return "\n".join(f"{name:<8} {text}" for name, text in lines.items())
