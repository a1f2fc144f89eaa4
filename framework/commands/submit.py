"""`meshwright submit`: a run, or a sweep of runs, from the recipe into SLURM's queue.

check -> data -> run directory: recipe.yaml, code/, slurm/job.sh -> sbatch -> the commands for the run
"""

import argparse
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import framework
from framework.commands.arguments import add_multirun
from framework.data.prepare import prepare
from framework.errors import EXIT_DONE, RecipeError, RunError
from framework.files import PRIVATE, write_file
from framework.host import describe_software
from framework.launch.directory import RunDirectory
from framework.launch.identity import describe_identity
from framework.launch.jobs import WAITING_OR_RUNNING, find_job, find_option_problems, require_sbatch, submit_script
from framework.launch.nodes import legal_counts, plan_counts
from framework.launch.parts import RunPart, begin, check_ranks, claim, go_on, refuse_begun, refuse_leftovers, summarize
from framework.launch.places import explain_errors, refuse_unreachable, refuse_unwritable
from framework.launch.resume import compose_run, resume_command, resume_recipe
from framework.launch.settle import settle, settle_steps, settle_tokens
from framework.launch.slurm import find_script_problems, render
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
        from framework.commands.train import compose_sweep

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
        return _show([resume_recipe(run, overrides, recipe_dirs)[0] if goes_on else recipe], run.path)
    held = go_on(run, overrides, recipe_dirs, _refuse_busy) if goes_on else begin(recipe)
    with held as (run, lease, part):
        return _queue(run, lease, part, overrides)


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
    legal = [legal_counts(recipe, plan_counts(recipe)) for recipe in recipes]
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
        return _show(recipes, path, len(recipes))
    recipes = [settle(recipe) for recipe in recipes]
    checked = check_ranks(recipes)
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
            part = RunPart(recipe, 0, tokenizers[index], legal[index])
            part.write(run, lease)
            _write(run, lease, part)
    with sweep.lock() as lease:
        job = submit_script(sweep.script)
        sweep.note_launch([], {}, lease, jobs=[job], runs=[run.id for run in runs], **describe_software())
    for index, run in enumerate(runs):
        identity = describe_identity(run, load_recipe(run.recipe))
        run.note_launch(combinations[index], {}, **identity, jobs=[f"{job}_{index}"], **describe_software())
        print(f"run      {run.path}: {shlex.join(combinations[index])}")
    print(_next_steps(sweep, [job], [f"runs     {len(runs)}, at once {first.launch.at_once or len(runs)}"]))
    return EXIT_DONE


def check_machine(recipe: Recipe, dry_run: bool) -> None:
    """Raises RecipeError or RunError where this is no recipe for SLURM, named files are not there, there is no sbatch, or runs
    cannot be written. A dry run needs no sbatch and no folder."""
    if recipe.launch.kind != "slurm":
        raise RecipeError("launch.kind=local has nothing to submit: choose launch=slurm, or `meshwright train`")
    container = recipe.launch.container
    problems = [*find_script_problems(recipe, Path.cwd()), *find_option_problems(recipe.launch)]
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
    """Write what the job reads beside its recipe: the package and the script."""
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
    try:
        _write(run, lease, part)
        # For the script, which ends or awaits what is left of its chain: another run's jobs may bear the same name.
        with explain_errors(run.path), run.jobs.open("w") as ids:
            for _ in range(part.recipe.launch.chain):
                jobs.append(submit_script(run.script, after=jobs[-1] if jobs else None))
                print(jobs[-1], file=ids, flush=True)
    finally:  # also where sbatch refuses: recipe.yaml is written, and the first jobs of a chain may be queued
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


def _show(recipes: Sequence[Recipe], path: Path, array: int | None = None) -> int:
    """Print a dry run: on stdout the script and nothing else, so that it can be kept; the lines that matter on stderr. array: as
    of `render`."""
    checked = check_ranks(recipes)
    script = render(recipes[0], path.absolute(), Path.cwd(), array, checked.counts)
    print(*checked.lines, sep="\n", file=sys.stderr)
    print(script.text, end="")
    print(f"\nwould submit this script; its ranks start with\n  {script.srun}", file=sys.stderr)
    return EXIT_DONE


def _is_file_name(image: str) -> bool:
    """A path, and not the name of an image in a registry (docker://..., nvcr.io#nvidia/pytorch:...)."""
    return (
        "://" not in image and "#" not in image and (image.startswith((".", "/")) or image.endswith((".sif", ".sqsh")))
    )
