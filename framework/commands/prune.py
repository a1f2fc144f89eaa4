"""`meshwright prune`: remove old checkpoints of runs that do not run. Without --yes it says which, and removes nothing.

A run keeps its newest whole checkpoints, the best one (`checkpoint.keep_best`), those of `checkpoint.keep_every`, those that runs
beside it have begun with or compare their answers with, and all damaged ones. Nothing else in its folder is touched.
"""

import argparse
from pathlib import Path

from framework.checkpoint.commit import Retention, find_newest, find_old, retain, step_of
from framework.commands.arguments import at_least
from framework.errors import EXIT_DONE, MeshwrightError, RunError
from framework.launch.directory import RunDirectory, find_run, list_runs
from framework.launch.jobs import WAITING_OR_RUNNING, find_jobs
from framework.object_store import Place
from framework.output import show_bytes
from framework.recipe.compose import load_recipe
from framework.recipe.schema import Run


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("runs", nargs="*", metavar="RUN", help="ids or folders of runs; all runs where none is given")
    parser.add_argument(
        "--keep", type=at_least(1), default=1, metavar="N", help="the newest N stay of each run (default: 1)"
    )
    parser.add_argument("--yes", action="store_true", help="remove them; without it nothing is removed")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each run, and remove what it says."""
    root = Path(Run().root)
    runs = [RunDirectory.open(find_run(name)) for name in arguments.runs] or list_runs(root)
    if not runs:
        raise RunError(f"there are no runs in {root}: give a run's folder")
    total = sum(_prune(each, keep=arguments.keep, removes=arguments.yes) for each in runs)
    print(
        f"{show_bytes(total)} {'are' if arguments.yes else 'would be'} free"
        + " (--yes removes them)" * (not arguments.yes)
    )
    return EXIT_DONE


def _prune(run: RunDirectory, *, keep: int, removes: bool) -> int:
    """Bytes of the run's old checkpoints; a run that runs or waits for its turn, has no whole checkpoint, or lies beside a recipe
    that cannot be read is left alone."""
    if run.find_holder() or any(state and state.state in WAITING_OR_RUNNING for _, state in find_jobs(run)):
        print(f"{run.path}: runs or is queued, left alone")
        return 0
    try:
        manifest = find_newest(run.checkpoints).manifest
        keep_every, origins = load_recipe(run.recipe).checkpoint.keep_every, _find_origins(run)
    except MeshwrightError as error:
        print(f"{run.path}: left alone: {error}")
        return 0
    best_step = manifest.state.get("best_step") if manifest else None
    retention = Retention(keep, keep_every, lambda step: step in origins)
    old = find_old(run.checkpoints, retention, best_step)
    num_bytes = sum(map(_count_bytes, old))
    steps = ", ".join(f"{step_of(path):,}" for path in reversed(old))
    print(f"{run.path}: " + (f"steps {steps}: {show_bytes(num_bytes)}" if old else "nothing is old"))
    if removes and old:
        # The lock and the lease of a start: a launch meanwhile waits or is refused, and nothing is removed below its feet.
        try:
            with run.lock() as lease:
                retain(run.checkpoints, lease, retention, best_step=best_step)
        except RunError as error:  # a launch has come between
            print(f"{run.path}: left alone: {error}")
            return 0
    return num_bytes


def _find_origins(run: RunDirectory) -> set[int]:
    """Steps of the run that runs beside it have begun with, or compare their answers with: a start anew reads them again.
    RunError where the recipe of one beside it cannot be read: it may need any step."""
    found = set()
    for beside in list_runs(run.path.parent):
        try:
            other = load_recipe(beside.recipe)
        except (MeshwrightError, OSError, UnicodeDecodeError) as error:
            raise RunError(
                f"{beside.recipe}, which may begin with a checkpoint of it, cannot be read: {error}"
            ) from error
        for named in (other.run.start_from, other.loss.reference):
            name, _, step = str(named or "").rpartition("@")
            if step.isdigit() and find_run(name).resolve() == run.path.resolve():
                found.add(int(step))
    return found


def _count_bytes(checkpoint: Place) -> int:
    if isinstance(checkpoint, Path):
        return sum(path.stat().st_size for path in checkpoint.iterdir())
    return sum(checkpoint.list().values())
