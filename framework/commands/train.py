"""`meshwright train`: check the recipe and train it on this machine, as a new run or as the next part of an old one.

check -> data -> run directory, lock, recipe.yaml -> ranks -> the command that goes on with the run

A sweep (`train -m`) has a folder that `meshwright status` reads, `runs/NAME-sweep-001`, and beside it those of its runs, each
trained by a process of its own.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from framework.commands.arguments import add_multirun
from framework.commands.status import describe_sweep
from framework.errors import EXIT_DONE, EXIT_RESUME, LeaseLost, MeshwrightError, ModelError, RecipeError, RunError
from framework.host import describe_software
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory
from framework.launch.parts import begin, go_on
from framework.launch.places import explain_errors, refuse_unreachable, refuse_unwritable
from framework.launch.process import let_threads_sleep, may_use_gpus, report_error
from framework.launch.resume import compose_branch, compose_run, find_saved, require_subject, resume_command, saved_step
from framework.lease import Lease
from framework.monitor.goodput import find_age_s, note_gone, note_launch
from framework.monitor.progress import Phase, PhaseBar
from framework.output import first_line
from framework.plan.auto import require_layout
from framework.recipe.compose import compose, expand_sweep
from framework.recipe.derive import derive, has_range
from framework.recipe.environment import fill, hide_override
from framework.recipe.schema import Recipe
from framework.start import is_of_launcher, python_words
from framework.train import program


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_multirun(parser, "one after another")


def run(arguments: argparse.Namespace) -> int:
    """Train; the exit code of the run, or the first of a sweep that is not 0."""
    if arguments.multirun:
        return train_sweep(arguments.overrides, arguments.recipes)
    recipe = compose_run(arguments.overrides, arguments.recipes)
    if not may_use_gpus(recipe.launch):  # a single rank lives in this process, which is about to import torch
        let_threads_sleep()
    bar = PhaseBar((Phase.LIBRARIES,))
    bar.begin(Phase.LIBRARIES)
    with loading_libraries():
        import framework.launch.agent  # noqa: F401

    bar.close()
    return train(recipe, arguments.overrides, arguments.recipes)


def train(recipe: Recipe, overrides: list[str], recipe_dirs: list[Path]) -> int:
    """Train `recipe` as a new run, or go on with the run that `recipe.run.id` names; returns the exit code.

    overrides, recipe_dirs: the origin of `recipe`; on a resume they are applied to the saved recipe. Raises RunError, and other
    errors that the user can mend, before the ranks start; errors of the ranks are printed.
    """
    if recipe.launch.kind != "local":
        raise RecipeError(
            f"launch.kind={recipe.launch.kind}: queue it with `meshwright submit`; to train it here: launch.kind=local"
            f" launch.ranks={derive(recipe).world}"
            + " launch.nodes=null" * has_range(recipe.launch)
            + " launch.spares=0" * (recipe.launch.spares > 0)
        )
    rank_variables(recipe)
    if (saved := find_saved(recipe.run)) is not None:
        held = go_on(RunDirectory(saved.parent), overrides, recipe_dirs)
    else:
        refuse_unwritable(Path(recipe.run.root))
        refuse_unreachable(recipe.checkpoint.root)
        held = begin(recipe)
    with held as (run, lease, part):
        part.note(run, lease, overrides, **describe_software())
        return _run_ranks(run, lease, part.recipe, part.step)


def rank_variables(recipe: Recipe) -> dict[str, str]:
    """launch.environment as the ranks on this machine get it. Raises RecipeError where it refers to what is not set here."""
    return fill(recipe.launch.environment, os.environ)


def _run_ranks(run: RunDirectory, lease: Lease, recipe: Recipe, from_step: int) -> int:
    from framework.launch.agent import Outcome, run_ranks

    print(f"run      {run.path}" + (f", from step {from_step:,}" if from_step else ""), flush=True)
    world, variables = derive(recipe).world, rank_variables(recipe)
    with suppress(OSError, LeaseLost):  # a full disk, or another start's run: goodput begins with the ranks
        lease.check()
        note_launch(run.path, find_age_s())
    # The ranks are this launcher's, which says itself who they are.
    for name in filter(is_of_launcher, tuple(os.environ)):
        del os.environ[name]
    errors: list[Exception] = []

    def report(error: Exception) -> int:
        errors.append(error)
        return report_error(error)

    if world == 1 and not variables:
        outcome = Outcome(program.main(run.path, lease, report))
    else:  # variables are for a process that starts with them: libraries read theirs when they are loaded
        outcome = run_ranks(python_words(program.__name__, str(run.path), str(lease.epoch)), world, run.log, variables)
    with suppress(OSError, LeaseLost):  # the next start infers when this one ended
        lease.check()
        note_gone(run.path, outcome.code)
        _note_error(run, lease, outcome.message or "".join(f"{type(each).__name__}: {each}" for each in errors))
    if outcome.message:
        print(outcome.message, file=sys.stderr)
    print(conclude(run, recipe, outcome.code), flush=True)
    if outcome.code == EXIT_DONE and recipe.train.sample is not None:
        _show_sample(run, lease, recipe, recipe.train.sample)
    return outcome.code


def _note_error(run: RunDirectory, lease: Lease, error: str) -> None:
    """Keep the error with which the ranks have ended, for `meshwright status`; remove that of an earlier launch."""
    if error:
        lease.write(run.error, f"{error}\n".encode())
    else:
        lease.remove(run.error)


def _show_sample(run: RunDirectory, lease: Lease, recipe: Recipe, prompt: str) -> None:
    """Export the run and let it continue a text, or answer one, which a newcomer wants to see. The run is done, whether that
    works or not."""
    from framework.commands.generate import EXPORT_FOLDER, generate_command
    from framework.commands.trained_model import export_model

    folder, chat = run.path / EXPORT_FOLDER, recipe.data.has_conversations
    try:
        with explain_errors(folder), lease.replacing(folder) as made:
            export_model(run.path, made, name=folder, text=True)
    except RunError as error:  # a full disk
        print(f"no sample: {error}", file=sys.stderr)
        return
    how = "what the model answers" if chat else "how the model goes on"
    print(f"sample   the text of train.sample, and {how}:\n", flush=True)
    # transformers loads an adapter's folder only where peft is installed.
    shown = run.path if recipe.adapter.is_used else folder
    try:
        generate_command(shown, prompt, max_new_tokens=80, temperature=0.0 if chat else 0.7, chat=chat)
    except ModelError as error:
        print(f"no sample: {error}", file=sys.stderr)


def conclude(run: RunDirectory, recipe: Recipe, code: int) -> str:
    """The end of the run, its folder, and the command that goes on with it."""
    try:
        step = saved_step(run)
    except MeshwrightError as error:
        return f"run      {run.path} ended with exit code {code}\nsaved    {first_line(error)}"
    if code == EXIT_DONE:
        return f"run      {run.path}\nlonger   {resume_command(run, recipe, f'train.steps={2 * step}')}"
    how = "saved" if code == EXIT_RESUME else f"ended with exit code {code}; the newest checkpoint is"
    if step == 0 and code != EXIT_RESUME:
        return f"run      {run.path} ended with exit code {code} before its first checkpoint"
    return f"run      {run.path} {how} at step {step:,}\nresume   {resume_command(run, recipe)}"


def train_sweep(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> int:
    """Train every combination of a multirun's values in turn. All are checked before the first one starts."""
    recipes, combinations = compose_sweep(overrides, recipe_dirs)
    _refuse_shared_id(recipes)
    with loading_libraries():  # which a mistake in a recipe need not wait for
        from framework.plan.check import check_layouts

    check_layouts(recipes)
    runs = begin_sweep(recipes)
    names = [[] if recipe.run.id else [f"run.id={run.id}"] for recipe, run in zip(recipes, runs, strict=True)]
    folders = [part for folder in recipe_dirs for part in ("--recipes", str(folder))]
    code = run_in_turn([["train", *folders, *words, *name] for words, name in zip(combinations, names, strict=True)])
    print(*describe_sweep(runs), sep="\n")
    if len(begun := [run for run in runs if run.recipe.is_file()]) > 1:
        print(f"compare  meshwright diff {begun[0].path} {begun[1].path}")
    return code


def compose_sweep(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> tuple[list[Recipe], list[list[str]]]:
    """The recipe and the overrides of every combination. RecipeError with the mistakes of all of them."""
    recipes, mistakes, combinations = [], [], expand_sweep(overrides)
    for combination in combinations:
        try:
            composition = compose(combination, recipe_dirs)
            if composition.draft.run.start_from is not None:
                recipes.append(compose_branch(composition, combination, recipe_dirs))
            else:
                recipes.append(require_layout(composition, combination, recipe_dirs))
        except RecipeError as error:
            mistakes.append(f"{' '.join(map(hide_override, combination))}\n{error}")
    if mistakes:
        raise RecipeError("\n\n".join(mistakes))
    if not all(find_saved(recipe.run) or recipe.run.start_from for recipe in recipes):
        require_subject(combinations[0], recipe_dirs)  # they differ in values and not in keys
    return recipes, combinations


def _refuse_shared_id(recipes: Sequence[Recipe]) -> None:
    ids = [recipe.run.id for recipe in recipes]
    taken = next((run_id for run_id in ids if run_id is not None and ids.count(run_id) > 1), None)
    if taken is not None:
        raise RecipeError(
            f"run.id={taken} would name {ids.count(taken)} runs of this sweep: leave it out, or give each its own"
        )


def begin_sweep(recipes: Sequence[Recipe]) -> list[RunDirectory]:
    """The runs, `NAME-sweep-001-0` and so on where the recipes give no id. Their folders are made, so that they differ from
    mistyped ones, and the sweep's run.json names them."""
    name = f"{recipes[0].run.name}-sweep"
    sweep = RunDirectory.create(Path(recipes[0].run.root), None, name)
    ids = [recipe.run.id or f"{sweep.id}-{index}" for index, recipe in enumerate(recipes)]
    runs = [
        RunDirectory.create(Path(recipe.run.root), run_id, name) for recipe, run_id in zip(recipes, ids, strict=True)
    ]
    with sweep.lock() as lease:
        sweep.note_launch([], {}, lease, runs=[run.id for run in runs])
    print(f"sweep    {sweep.path}, {len(runs)} runs; how they stand: meshwright status {sweep.path}", flush=True)
    return runs


def run_in_turn(commands: Sequence[Sequence[str]]) -> int:
    """Run each command in a process of its own, so that none leaves device memory or process groups to the next. A failure
    does not stop the others, Ctrl-C does, after the run has saved. Returns the first exit code that is not 0."""
    codes: list[int] = []
    for number, command in enumerate(commands, start=1):
        print(f"[{number}/{len(commands)}] meshwright {shlex.join(command)}", flush=True)
        code, interrupted = run_process([sys.executable, *python_words("framework", *command)])
        codes.append(code)
        if interrupted:
            break
    for command, code in zip(commands, codes, strict=False):
        print(f"{'done' if code == EXIT_DONE else f'exit {code}':8} meshwright {shlex.join(command)}")
    return next((code for code in codes if code != EXIT_DONE), EXIT_DONE)


def run_process(command: Sequence[str]) -> tuple[int, bool]:
    """(exit code, whether Ctrl-C was pressed). The terminal sends Ctrl-C to the process as well; it saves, and is waited for."""
    pressed = []
    former = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        return subprocess.run(command, check=False).returncode, bool(pressed)
    finally:
        signal.signal(signal.SIGINT, former)
