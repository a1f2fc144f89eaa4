"""`meshwright submit`: a run, or a sweep of runs, from the recipe into SLURM's queue.

check -> data -> run directory: recipe.yaml, code/, slurm/job.sh -> sbatch -> the commands for the run
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import framework
from framework.commands.arguments import add_multirun
from framework.data.prepare import prepare
from framework.errors import EXIT_DONE, RecipeError, RunError
from framework.files import PRIVATE, write_file
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory
from framework.launch.elastic import describe_counts, legal_counts, plan_counts
from framework.launch.identity import describe_identity
from framework.launch.jobs import WAITING_OR_RUNNING, find_job, require_sbatch, submit_script
from framework.launch.parts import (
    CheckedLayout,
    RunPart,
    claim,
    create_run,
    decide_new,
    decide_next,
    refuse_begun,
    refuse_leftovers,
    summarize,
)
from framework.launch.places import explain_errors, refuse_unreachable, refuse_unwritable
from framework.launch.record import describe_software
from framework.launch.resume import compose_run, resume_command, resume_recipe
from framework.launch.settle import settle, settle_steps, settle_tokens
from framework.launch.slurm import Script, find_script_problems, render
from framework.lease import Lease
from framework.recipe.compose import load_recipe
from framework.recipe.problem import Problem, render_problems
from framework.recipe.schema import Recipe


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script that would be submitted; change nothing"
    )
    add_multirun(parser, "as one job array of at most launch.at_once runs")


def run(arguments: argparse.Namespace) -> int:
    """Queue the run or the sweep."""
    if arguments.multirun:
        from framework.commands.sweep import compose_sweep

        recipes, combinations = compose_sweep(arguments.overrides, arguments.recipes)
        return submit_sweep(recipes, combinations, dry_run=arguments.dry_run)
    recipe = compose_run(arguments.overrides, arguments.recipes)
    return submit(recipe, arguments.overrides, arguments.recipes, dry_run=arguments.dry_run)


def submit(recipe: Recipe, overrides: list[str], recipe_dirs: list[Path], *, dry_run: bool) -> int:
    """Queue `recipe` as a new run, or go on with the run that `recipe.run.id` names; returns the exit code.

    dry_run: print the script and change nothing. Raises RecipeError and RunError for all that can be known beforehand.
    """
    check_machine(recipe, dry_run)
    root = Path(recipe.run.root)
    run = RunDirectory(root / (recipe.run.id or RunDirectory.next_id(root, recipe.run.name)))
    goes_on = recipe.run.id is not None and run.recipe.exists()
    if dry_run:
        return _show_run(run, resume_recipe(run, overrides, recipe_dirs)[0] if goes_on else recipe)
    if goes_on:
        return _resume(run, overrides, recipe_dirs)
    run, part = create_run(decide_new(recipe, _check_layout))
    with run.lock(partial(claim, run, recipe.checkpoint.root)) as lease:
        _write(run, lease, part)
        return _queue(run, lease, part, overrides)


def _resume(run: RunDirectory, overrides: list[str], recipe_dirs: list[Path]) -> int:
    """Queue the next part of a run, under the saved recipe and the changes that it allows."""
    _refuse_busy(run)

    @cache
    def decide() -> RunPart:
        _refuse_busy(run)  # once more under the lock: another `submit` may have queued a job since
        return decide_next(run, overrides, recipe_dirs, _check_layout)

    with run.lock(decide) as lease:
        _write(run, lease, decide())
        return _queue(run, lease, decide(), overrides)


def submit_sweep(recipes: Sequence[Recipe], combinations: Sequence[list[str]], *, dry_run: bool) -> int:
    """Queue runs as one job array; `combinations`: the overrides of each. They share a wandb group and all of `launch`.

    The sweep gets a folder, `runs/NAME-sweep-001`, each run its own beside it, `runs/NAME-sweep-001-0` and so on.
    """
    first = recipes[0]
    check_machine(first, dry_run)
    root, name = Path(first.run.root), f"{first.run.name}-sweep"
    path = root / (first.run.id or RunDirectory.next_id(root, name))
    if first.launch.chain > 1:
        raise RecipeError("launch.chain: a sweep is one job array, whose runs requeue themselves: set launch.chain=1")
    counts = [plan_counts(recipe) for recipe in recipes]
    legal = [legal_counts(*each) for each in zip(recipes, counts, strict=True)]
    scripts = [
        render(recipe, path.absolute(), Path.cwd(), len(recipes), each)
        for recipe, each in zip(recipes, legal, strict=True)
    ]
    different = next((index for index, script in enumerate(scripts) if script != scripts[0]), None)
    if different is not None:
        raise RecipeError(
            f"a sweep is one job array, whose runs have the same resources, and run {different} differs from run 0: sweep"
            " over other keys than those of launch and parallel, or submit the runs one by one"
        )
    if dry_run:
        return _show(recipes, scripts[0], describe_counts(first, counts[0]))
    recipes = [settle(recipe) for recipe in recipes]
    checked = _check_layouts(recipes)
    lengths = [settle_steps(recipe) for recipe in recipes]
    print("\n".join([summarize(lengths[0][0], checked.model_type), *checked.lines]))
    tokenizers = [(prepared or prepare(recipe)).tokenizer for recipe, prepared in lengths]
    recipes = [settle_tokens(each[0], tokenizer) for each, tokenizer in zip(lengths, tokenizers, strict=True)]
    sweep = RunDirectory.create(root, first.run.id, name)
    runs = [RunDirectory.create(root, f"{sweep.id}-{index}", name) for index in range(len(recipes))]
    for run in (sweep, *runs):  # none is begun where one cannot be
        refuse_begun(run)
        refuse_leftovers(run)
    with explain_errors(sweep.path):
        sweep.script.parent.mkdir(exist_ok=True)
        script = render(first, sweep.path.absolute(), Path.cwd(), len(recipes), legal[0])
        write_file(sweep.script, script.text.encode(), PRIVATE)
    for index, (run, recipe) in enumerate(zip(runs, recipes, strict=True)):
        wandb = replace(recipe.track.wandb, group=recipe.track.wandb.group or sweep.id)
        recipe = replace(recipe, run=replace(recipe.run, id=run.id), track=replace(recipe.track, wandb=wandb))
        with run.lock(partial(claim, run, recipe.checkpoint.root)) as lease:
            _write(run, lease, RunPart(recipe, 0, tokenizers[index], legal[index]))
    with sweep.lock() as lease:
        job = submit_script(sweep.script)
        sweep.note_launch([], {}, lease, jobs=[job], runs=[run.id for run in runs], **describe_software())
    for index, run in enumerate(runs):
        identity = describe_identity(run, load_recipe(run.recipe))
        run.note_launch(combinations[index], {}, **identity, jobs=[f"{job}_{index}"], **describe_software())
        print(f"run      {run.path}: {shlex.join(combinations[index])}")
    print(_next_steps(sweep, [job], [f"runs     {len(runs)}, at once {first.launch.at_once or len(runs)}"]))
    return EXIT_DONE


def _check_layout(recipe: Recipe, is_new: bool) -> CheckedLayout:
    return _check_layouts([recipe], is_new)


def _check_layouts(recipes: Sequence[Recipe], is_new: bool = True) -> CheckedLayout:
    """Raise now what the ranks of a job would raise after the queue. The result is the first recipe's, but for the line on
    memory, which is the largest layout's. is_new: the runs begin with their pretrained weights, if they have any, and not with a
    checkpoint."""
    with loading_libraries():  # they take seconds, which only what is queued pays
        from framework.plan.advice import caution_of_fit
        from framework.plan.check import check_layouts, check_weights, describe_need

    plan = check_layouts(recipes)
    if caution := caution_of_fit(plan):
        print(f"caution  {caution}", file=sys.stderr)
    if is_new:
        check_weights(plan)
    counts = plan_counts(recipes[0])
    lines = [f"plan     {describe_need(plan)}", *filter(None, [describe_counts(recipes[0], counts)])]
    return CheckedLayout(plan.config.model_type, lines, legal_counts(recipes[0], counts))


def check_machine(recipe: Recipe, dry_run: bool) -> None:
    """Raises RecipeError or RunError where this is no recipe for SLURM, named files are not there, there is no sbatch, or runs
    cannot be written. A dry run needs no sbatch and no folder."""
    if recipe.launch.kind != "slurm":
        raise RecipeError("launch.kind=local has nothing to submit: choose launch=slurm, or `meshwright train`")
    container = recipe.launch.container
    problems = list(find_script_problems(recipe, Path.cwd()))
    if (
        container.kind != "none"
        and container.image
        and _is_file_name(container.image)
        and not Path(container.image).exists()
    ):
        message, fix = "there is no such file", "build it (docker/README.md), or give the path that compute nodes see"
        problems.append(Problem("launch.container.image", container.image, message, fix))
    if problems:
        raise RecipeError(render_problems(problems))
    if not dry_run:
        require_sbatch()
        root = Path(recipe.run.root)
        refuse_unwritable(root)
        with explain_errors(root):
            root.mkdir(parents=True, exist_ok=True)
        if container.kind == "none":  # whose libraries and variables are not those of this machine
            refuse_unreachable(recipe.checkpoint.root)


def active_job(run: RunDirectory) -> str | None:
    """The job of this run that still waits or runs, None if there is none or nobody knows."""
    for job in reversed(run.last_launch.get("jobs", [])):
        state = find_job(job)
        if state is not None and state.state in WAITING_OR_RUNNING:
            return job
    return None


def _refuse_busy(run: RunDirectory) -> None:
    busy = active_job(run)
    if busy is not None:
        raise RunError(f"{run.path} has job {busy}, which waits or runs: let it, or first `meshwright stop {run.path}`")


def _write(run: RunDirectory, lease: Lease, part: RunPart) -> None:
    """Write all that the job reads."""
    part.write(run, lease)
    with explain_errors(run.path):
        with lease.replacing(
            run.code
        ) as made:  # a job may wait for days and start many times: later edits are not its own
            package = Path(framework.__file__ or "").parent
            shutil.copytree(package, made / package.name, ignore=shutil.ignore_patterns("__pycache__"))
        run.script.parent.mkdir(exist_ok=True)
        with lease.replacing(run.script) as made:
            script = render(part.recipe, run.path.absolute(), Path.cwd(), counts=part.counts)
            write_file(made, script.text.encode(), PRIVATE)


def _queue(run: RunDirectory, lease: Lease, part: RunPart, overrides: list[str]) -> int:
    jobs: list[str] = []
    # For the script, which ends or awaits what is left of its chain: another run's jobs may bear the same name.
    with explain_errors(run.path), run.jobs.open("w") as ids:
        for _ in range(part.recipe.launch.chain):
            jobs.append(submit_script(run.script, after=jobs[-1] if jobs else None))
            print(jobs[-1], file=ids, flush=True)
    part.note(run, lease, overrides, jobs=jobs, **describe_software())
    print(_next_steps(run, jobs, [f"log      {run.job_log}", f"resume   {resume_command(run, part.recipe)}"]))
    return EXIT_DONE


def _next_steps(run: RunDirectory, jobs: list[str], more: list[str]) -> str:
    chain = f", then {', '.join(jobs[1:])}" if len(jobs) > 1 else ""
    return "\n".join(
        [
            f"run      {run.path}",
            f"job      {jobs[0]}{chain}",
            *more,
            f"status   {shlex.join(['meshwright', 'status', str(run.path)])}",
            f"cancel   scancel {' '.join(jobs)}",
        ]
    )


def _show_run(run: RunDirectory, recipe: Recipe) -> int:
    counts = plan_counts(recipe)
    script = render(recipe, run.path.absolute(), Path.cwd(), counts=legal_counts(recipe, counts))
    return _show([recipe], script, describe_counts(recipe, counts))


def _show(recipes: Sequence[Recipe], script: Script, counts: str) -> int:
    """Print a dry run: on stdout the script and nothing else, so that it can be kept; the lines that matter on stderr."""
    if counts:
        print(counts, file=sys.stderr)
    _check_layouts(recipes)
    print(script.text, end="")
    print(f"\nwould submit this script; its ranks start with\n  {script.srun}", file=sys.stderr)
    return EXIT_DONE


def _is_file_name(image: str) -> bool:
    """A path, and not the name of an image in a registry (docker://..., nvcr.io#nvidia/pytorch:...)."""
    return (
        "://" not in image and "#" not in image and (image.startswith((".", "/")) or image.endswith((".sif", ".sqsh")))
    )
