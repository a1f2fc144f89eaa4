"""`train -m`: a sweep on this machine. It has a folder that `meshwright status` reads, `runs/NAME-sweep-001`, and beside it
those of its runs, each trained by a process of its own."""

import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from framework.commands.status import describe_sweep
from framework.errors import EXIT_DONE, RecipeError
from framework.imports import loading_libraries
from framework.launch.branch import compose_branch
from framework.launch.directory import RunDirectory
from framework.launch.resume import find_saved, require_subject
from framework.plan.auto import require_layout
from framework.recipe.compose import compose, expand_sweep
from framework.recipe.environment import hide_override
from framework.recipe.schema import Recipe
from framework.start import python_words


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
