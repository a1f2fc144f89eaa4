"""The next part of a run, decided by its launcher before anything is written: a new run, or one that goes on.

recipe -> settled, laid out (`check`), its data prepared -> `RunPart` -> written under the run's lock -> ranks, or a job
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from framework.data.prepare import describe_rows, prepare, summarize_data
from framework.data.prepared import Prepared
from framework.errors import RunError
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory
from framework.launch.identity import describe_identity, keep_tokenizer
from framework.launch.nodes import describe_counts, legal_counts, plan_counts
from framework.launch.places import explain_errors, place_checkpoints
from framework.launch.resume import (
    RecipeChanges,
    find_changes,
    find_origin,
    refuse_other_shapes,
    resume_command,
    resume_recipe,
    saved_step,
)
from framework.launch.settle import keep_pretrained, settle, settle_steps, settle_tokens
from framework.lease import Lease
from framework.mesh.topology import place
from framework.optim.disk_file import refuse_folder
from framework.recipe.compose import load_recipe, save_recipe
from framework.recipe.derive import derive
from framework.recipe.describe import describe_blend
from framework.recipe.plugins import describe_plugins, find_changed
from framework.recipe.problem import show
from framework.recipe.schema import Recipe
from framework.recipe.stages import count_tokens, describe_stage, split_stages


@dataclass(frozen=True)
class CheckedLayout:
    """A recipe whose ranks were laid out."""

    model_type: str
    lines: Sequence[str] = ()  # printed below the summary
    counts: Sequence[int] = ()  # numbers of nodes on which the run may start; empty for a run of this machine


def check_ranks(recipes: Sequence[Recipe], is_new: bool = True) -> CheckedLayout:
    """Lay every rank of each recipe out before anything is written. Raises what ranks would raise, perhaps after the queue.

    The result is the first recipe's, but for the line on memory, which is the largest layout's. is_new: the runs begin with their
    pretrained weights, if they have any, and not with a checkpoint."""
    with loading_libraries():
        from framework.plan.advice import caution_of_fit
        from framework.plan.check import check_layouts, check_machine, check_weights, describe_need

    first, plan = recipes[0], check_layouts(recipes)
    if is_new:
        check_weights(plan)
    if first.launch.kind == "local":  # of this machine: a cluster's nodes look for themselves
        check_machine(plan)
        if first.memory.offload.disk_path is not None:
            refuse_folder(Path(first.memory.offload.disk_path))
        return CheckedLayout(plan.config.model_type)
    if caution := caution_of_fit(plan):
        print(f"caution  {caution}", file=sys.stderr)
    counts = plan_counts(first)
    lines = [f"plan     {describe_need(plan)}", *filter(None, [describe_counts(first, counts)])]
    return CheckedLayout(plan.config.model_type, lines, legal_counts(first, counts))


@dataclass(frozen=True)
class RunPart:
    """The next part of a run."""

    recipe: Recipe
    step: int  # the step from which it goes on
    tokenizer: Path | None  # the tokenizer of its data, None for a run that has trained and keeps its own
    counts: Sequence[int]  # numbers of nodes, as of `CheckedLayout`
    changes: RecipeChanges = field(default_factory=dict)  # keys that the command line changes in a run that goes on
    is_saved: bool = False  # recipe.yaml has this recipe already

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
        if self.recipe.plugins:
            print("".join(f"{line}\n" for line in find_changed(self.recipe.plugins, run.find_record())), end="")
            more["plugins"] = describe_plugins(self.recipe.plugins)
        if self.recipe.run.start_from is not None:
            more["start_from"] = self.recipe.run.start_from
        if self.tokenizer is None:
            del identity["tokenizer"]
        run.note_launch(overrides, {key: now for key, (_, now) in self.changes.items()}, lease, **identity, **more)


def decide_new(recipe: Recipe) -> RunPart:
    """The first part of a new run, which is printed. Raises what speaks against it."""
    step, changes = 0, {}
    if recipe.run.start_from is not None:
        origin = find_origin(recipe.run.start_from)
        was, step = load_recipe(origin.run.recipe), origin.step
        print(f"branch   of {origin.run.path}, from step {step:,}")
        refuse_other_shapes(origin, recipe)
        changes = find_changes(was, replace(recipe, run=was.run))
    return replace(_decide(recipe, step, changes, True, None), is_saved=False)


def decide_next(run: RunDirectory, overrides: list[str], recipe_dirs: list[Path]) -> RunPart:
    """The next part of a run, under the saved recipe and the changes that it allows. Raises what speaks against it. Called under
    the run's lock, before its epoch is raised: a new epoch would end a start that runs, and whose lock is not seen here."""
    recipe, changes = resume_recipe(run, overrides, recipe_dirs)
    recipe, prepared = settle_steps(recipe)
    if prepared is not None:  # recipe.yaml keeps no epochs
        keys = ("train.steps", "train.epochs")
        length = find_changes(load_recipe(run.recipe), recipe)
        others = {key: pair for key, pair in changes.items() if key not in keys}
        changes = {key: length[key] for key in keys if key in length} | others
    step = saved_step(run)
    if step >= recipe.train.steps:
        more = resume_command(run, recipe, f"train.steps={2 * step}")
        raise RunError(
            f"{run.path} is finished: {step:,} of {recipe.train.steps:,} steps are done. To train on: {more}"
        )
    return _decide(recipe, step, changes, not run.has_trained, prepared)


def _decide(chosen: Recipe, step: int, changes: RecipeChanges, is_open: bool, prepared: Prepared | None) -> RunPart:
    """The part of a run from `step` on. is_open: nothing was trained, so the tokenizer may still change. prepared: the data, if
    it is known already."""
    recipe = settle(chosen)
    checked = check_ranks([recipe], step == 0)
    if prepared is None:
        recipe, prepared = settle_steps(recipe)
    print("\n".join([summarize(recipe, checked.model_type), *checked.lines]))
    for key, (was, now) in changes.items():
        print(f"changed  {key}: {show(was)} -> {show(now)}")
    prepared = prepared or prepare(recipe)
    for stage in split_stages(recipe) if recipe.train.stages else ():
        describe_rows(prepare(stage.recipe), stage.recipe)  # refuses rows that a stage has nothing for
    num_tokens = 0 if recipe.train.stages else count_tokens(recipe)
    summary = summarize_data(prepared, recipe.data.validation, num_tokens)
    print("\n".join([summary, *describe_rows(prepared, recipe, num_tokens)]))
    if is_open:
        recipe = settle_tokens(recipe, prepared.tokenizer)
    tokenizer = prepared.tokenizer if is_open else None
    return RunPart(recipe, step, tokenizer, checked.counts, changes, is_saved=not changes and recipe == chosen)


@contextmanager
def begin(recipe: Recipe) -> Iterator[tuple[RunDirectory, Lease, RunPart]]:
    """A new run, decided and written, whose lock is held meanwhile. Its folder is made once its data is there: bad data leaves no
    run behind."""
    part, keys = decide_new(recipe), recipe.run
    run = RunDirectory.create(Path(keys.root), keys.id, keys.name)
    part = replace(part, recipe=replace(part.recipe, run=replace(keys, id=run.id)))
    with run.lock(partial(claim, run, recipe.checkpoint.root)) as lease:
        part.write(run, lease)
        yield run, lease, part


@contextmanager
def go_on(
    run: RunDirectory,
    overrides: list[str],
    recipe_dirs: list[Path],
    refuse: Callable[[RunDirectory], None] = lambda run: None,
) -> Iterator[tuple[RunDirectory, Lease, RunPart]]:
    """The next part of a run, decided and written, whose lock is held meanwhile. refuse: raises what speaks against it, asked
    before anything is decided and once more under the lock."""
    refuse(run)

    @cache
    def decide() -> RunPart:
        refuse(run)
        return decide_next(run, overrides, recipe_dirs)

    with run.lock(decide) as lease:
        decide().write(run, lease)
        yield run, lease, decide()


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
        "data": f"{describe_blend(recipe.data)}, {count_tokens(recipe):,} tokens in {recipe.train.steps:,} steps",
        "batch": f"{derived.sequences_per_step} sequences of {derived.context} tokens = {derived.accumulation} x"
        f" {derived.sequences_per_microbatch} on "
        + (f"each of {derived.dp} data-parallel ranks" if derived.dp != 1 else "the only data-parallel rank"),
        "layout": f"{derived.world} {'rank' if derived.world == 1 else 'ranks'}, {degrees}, zero {recipe.zero.stage}",
        "device": f"{recipe.launch.device}, {recipe.precision.compute}",
    }
    for stage in split_stages(recipe) if recipe.train.stages else ():
        lines[f"stage {stage.name}"] = describe_stage(stage)
    if recipe.adapter.is_used:
        lines["adapter"] = f"{recipe.adapter.kind} of rank {recipe.adapter.rank} beside the frozen model" + (
            f", kept in {recipe.adapter.base}" * (recipe.adapter.base != "bf16")
        )
    if (recipe.launch.device, recipe.precision.compute) == ("cpu", "fp8"):
        lines["device"] += " emulated, as CPUs have none: the same numbers, slower than bf16"
    if recipe.plugins:
        lines["plugins"] = ", ".join(f"{name} ({code})" for name, code in describe_plugins(recipe.plugins).items())
    if recipe.launch.kind == "slurm":
        lines["nodes"] = place(derived).describe()
        lines |= {"experts": advice} if (advice := place(derived).advise_experts()) else {}
    return "\n".join(f"{name:<8} {text}" for name, text in lines.items())
