"""`meshwright train` on this machine: a new run or the next part of an old one, from the recipe to the exit code.

check -> data -> run directory, lock, recipe.yaml -> ranks -> what to type next
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from framework.data.prepare import prepare, summarize_data
from framework.errors import EXIT_DONE, EXIT_RESUME, LeaseLost, MeshwrightError, RecipeError, RunError
from framework.imports import loading_libraries
from framework.launch.agent import Outcome, run_ranks
from framework.launch.directory import RunDirectory
from framework.launch.epochs import settle_length, settle_steps
from framework.launch.identity import describe_identity, keep_tokenizer
from framework.launch.places import explain_errors, place_checkpoints, refuse_unreachable, refuse_unwritable
from framework.launch.record import describe_software
from framework.launch.resume import Change, resume_command, resume_recipe, saved_step
from framework.launch.settle import keep_pretrained, settle, settle_tokens
from framework.launch.slurm import RANK_PROGRAM
from framework.lease import Lease
from framework.mesh.placement import place
from framework.monitor.goodput import find_age_s
from framework.optim.disk_file import refuse_folder
from framework.recipe.compose import save_recipe
from framework.recipe.derive import derive, has_range
from framework.recipe.describe import describe_blend
from framework.recipe.environment import fill
from framework.recipe.schema import Recipe
from framework.start import is_of_launcher, python_words
from framework.track.goodput_log import note_gone, note_launch

# The program of a rank, `train/program.py`, where the only rank lives in this process.
RankProgram = Callable[[Path, Lease], int]


def train(recipe: Recipe, overrides: list[str], recipe_dirs: list[Path], run_rank: RankProgram) -> int:
    """Train `recipe` as a new run, or go on with the run that `recipe.run.id` names; returns the exit code.

    overrides, recipe_dirs: what `recipe` was composed from; on a resume they are applied to the saved recipe. run_rank: the
    program of a rank, which runs in this process where there is one rank. Raises RunError, and whatever else is the user's to
    mend, before the ranks start; what the ranks raise is printed.
    """
    if recipe.launch.kind != "local":
        raise RecipeError(
            f"launch.kind={recipe.launch.kind}: queue it with `meshwright submit`; to train it here: launch.kind=local"
            f" launch.ranks={derive(recipe).world}"
            + " launch.nodes=null" * has_range(recipe.launch)
            + " launch.spares=0" * (recipe.launch.spares > 0)
        )
    rank_variables(recipe)
    if recipe.run.id is not None and (run := RunDirectory(Path(recipe.run.root, recipe.run.id))).recipe.exists():
        return _resume(run, overrides, recipe_dirs, run_rank)
    return _begin(recipe, overrides, run_rank)


def check_model(recipe: Recipe, is_new: bool = True) -> str:
    """Lay every rank out before anything is written, and return the model's type. Raises what ranks would raise. is_new: the run
    begins with its pretrained weights, if it has any, and not with a checkpoint."""
    with loading_libraries():
        from framework.parallel.fp8_layers import require_torchao
        from framework.plan.check import check_layout, check_weights
        from framework.plan.host_memory import check_host_memory

    plan = check_layout(recipe)
    if is_new:
        check_weights(plan)
    if recipe.launch.kind == "local":  # of this machine: a cluster's nodes look for themselves
        check_host_memory(plan)
        if recipe.precision.compute == "fp8":
            require_torchao()
        if recipe.memory.offload.disk_path is not None:
            refuse_folder(Path(recipe.memory.offload.disk_path))
    return plan.config.model_type


def summarize(recipe: Recipe, model_type: str) -> str:
    """What is about to be trained, in a few lines. model_type: of the model itself, for pretrained weights know theirs."""
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


def rank_variables(recipe: Recipe) -> dict[str, str]:
    """launch.environment as the ranks on this machine get it. Raises RecipeError where it refers to what is not set here."""
    return fill(recipe.launch.environment, os.environ)


def _begin(recipe: Recipe, overrides: list[str], run_rank: RankProgram) -> int:
    """A new run. Its directory is made once the data is there: bad data leaves no run behind."""
    refuse_unwritable(Path(recipe.run.root))
    refuse_unreachable(recipe.checkpoint.root)
    recipe = settle(recipe)
    model_type = check_model(recipe)
    recipe, prepared = settle_steps(recipe)
    print(summarize(recipe, model_type))
    prepared = prepared or prepare(recipe)
    print(summarize_data(prepared, recipe.data.validation))
    recipe = settle_tokens(recipe, prepared.tokenizer)
    run = RunDirectory.create(Path(recipe.run.root), recipe.run.id, recipe.run.name)
    recipe = replace(recipe, run=replace(recipe.run, id=run.id))
    with run.lock(partial(claim, run, recipe.checkpoint.root)) as lease:
        keep_tokenizer(run, lease, prepared.tokenizer)
        keep_pretrained(run, lease, recipe.model)
        with explain_errors(run.path), lease.replacing(run.recipe) as made:
            save_recipe(recipe, made)
        run.note_launch(overrides, {}, lease, **describe_identity(run, recipe), **describe_software())
        return _launch(run, lease, recipe, run_rank, from_step=0)


@dataclass(frozen=True)
class NextPart:
    """The next part of a run: what it is trained with, and from which step on. tokenizer: that of its data, for a run that has
    never trained, else None. is_saved: whether recipe.yaml says the same."""

    recipe: Recipe
    changes: list[Change]
    step: int
    tokenizer: Path | None
    is_saved: bool


def _resume(run: RunDirectory, overrides: list[str], recipe_dirs: list[Path], run_rank: RankProgram) -> int:
    """Go on with a run, under the saved recipe and the changes that it allows. All that may refuse this comes before a new epoch,
    which would end a start that runs, and whose lock is not seen here."""
    decide = cache(partial(_decide, run, overrides, recipe_dirs))
    with run.lock(decide) as lease:
        part = decide()
        if part.tokenizer is not None:
            keep_tokenizer(run, lease, part.tokenizer)
            keep_pretrained(run, lease, part.recipe.model)
        if not part.is_saved:
            with explain_errors(run.path), lease.replacing(run.recipe) as made:
                save_recipe(part.recipe, made)
        changed = {each.key: each.now for each in part.changes}
        run.note_launch(overrides, changed, lease, **_describe(run, part), **describe_software())
        return _launch(run, lease, part.recipe, run_rank, from_step=part.step)


def _decide(run: RunDirectory, overrides: list[str], recipe_dirs: list[Path]) -> NextPart:
    """The next part, which is said; raises all that speaks against it."""
    chosen, changes = resume_recipe(run, overrides, recipe_dirs)
    chosen, changes, prepared = settle_length(run, chosen, changes)
    step = saved_step(run)
    if step >= chosen.train.steps:
        more = resume_command(run, chosen, f"train.steps={2 * step}")
        raise RunError(
            f"{run.path} is finished: {step:,} of {chosen.train.steps:,} steps are done. To train on: {more}"
        )
    recipe = settle(chosen)
    model_type = check_model(recipe, is_new=step == 0)
    print(summarize(recipe, model_type))
    for change in changes:
        print(f"changed  {change.key}: {change.was} -> {change.now}")
    prepared = prepared or prepare(recipe)
    print(summarize_data(prepared, recipe.data.validation))
    if not run.has_trained:
        recipe = settle_tokens(recipe, prepared.tokenizer)
    tokenizer = None if run.has_trained else prepared.tokenizer
    return NextPart(recipe, changes, step, tokenizer, is_saved=not changes and recipe == chosen)


def _describe(run: RunDirectory, part: NextPart) -> dict[str, Any]:
    """The recipe's record for run.json; the tokenizer stays what it was when the run was begun."""
    identity = describe_identity(run, part.recipe)
    return identity if part.tokenizer is not None else {"recipe": identity["recipe"]}


def _launch(run: RunDirectory, lease: Lease, recipe: Recipe, run_rank: RankProgram, from_step: int) -> int:
    print(f"run      {run.path}" + (f", from step {from_step:,}" if from_step else ""), flush=True)
    world, variables = derive(recipe).world, rank_variables(recipe)
    with suppress(OSError, LeaseLost):  # a full disk, or another start's run: goodput begins with the ranks
        lease.check()
        note_launch(run.path, find_age_s())
    for name in filter(is_of_launcher, tuple(os.environ)):  # the ranks are this launcher's: who they are it says itself
        del os.environ[name]
    if world == 1 and not variables:
        outcome = Outcome(run_rank(run.path, lease))
    else:  # variables are for a process that starts with them: libraries read theirs when they are loaded
        outcome = run_ranks(python_words(RANK_PROGRAM, str(run.path), str(lease.epoch)), world, run.log, variables)
    with suppress(OSError, LeaseLost):  # the next start infers when this one ended
        lease.check()
        note_gone(run.path, outcome.code)
    if outcome.message:
        print(outcome.message, file=sys.stderr)
    print(conclude(run, recipe, outcome.code), flush=True)
    if outcome.code == EXIT_DONE and recipe.train.sample is not None:
        _show_sample(run, lease, recipe.train.sample)
    return outcome.code


def _show_sample(run: RunDirectory, lease: Lease, prompt: str) -> None:
    """Export the run and let it continue a text: what a newcomer wants to see. Imported here, because it needs torch."""
    from framework.launch.export import export_command
    from framework.launch.generate import EXPORT_FOLDER, generate_command

    folder = run.path / EXPORT_FOLDER
    with lease.replacing(folder) as made:
        export_command(run.path, made, name=folder)
    print("sample   the text of train.sample, and how the model goes on:\n", flush=True)
    generate_command(folder, prompt, max_new_tokens=80, temperature=0.7)


def conclude(run: RunDirectory, recipe: Recipe, code: int) -> str:
    """How the run ended, where it lies, and how to go on with it."""
    try:
        step = saved_step(run)
    except MeshwrightError as error:
        return f"run      {run.path} ended with exit code {code}\nsaved    {str(error).splitlines()[0]}"
    if code == EXIT_DONE:
        return f"run      {run.path}\nlonger   {resume_command(run, recipe, f'train.steps={2 * step}')}"
    how = "saved" if code == EXIT_RESUME else f"ended with exit code {code}; the newest checkpoint is"
    if step == 0 and code != EXIT_RESUME:
        return f"run      {run.path} ended with exit code {code} before its first checkpoint"
    return f"run      {run.path} {how} at step {step:,}\nresume   {resume_command(run, recipe)}"


def claim(run: RunDirectory, root: str | None) -> None:
    """What a new run does under its lock, and before its epoch is raised, which would end a start that runs: refuse a run that is
    there, and note where this one's checkpoints lie, as checkpoint.root says. Raises RunError."""
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
