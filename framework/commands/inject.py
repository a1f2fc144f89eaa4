"""`meshwright inject RUN FAULT`: inject a fault into a run, to see how it recovers before a real fault comes.

Each rank of a run with `run.allow_faults=true` has an injector (faults.py): the command writes the fault into the run's
plan, and the rank injects it itself, exactly at the stated step, phase or point of a save. A checkpoint of any run is damaged
here.
"""

import argparse
import os
import time
from pathlib import Path

from framework.checkpoint.commit import RANK_POINTS, SAVE_POINTS, newest_checkpoint, step_of
from framework.checkpoint.index import MANIFEST
from framework.errors import EXIT_DONE, RunError
from framework.faults import KINDS, LOG_FILE, PHASES, Fault, note_fault, parse_fault, plan_faults, read_log, read_plan
from framework.launch.directory import RunDirectory, find_run
from framework.launch.jobs import find_jobs, is_running
from framework.launch.places import explain_errors
from framework.recipe.compose import load_recipe
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.track.jsonl import METRICS_FILE, read_records

# Seconds between two looks at the run's checkpoints while one is waited for.
POLL_S = 0.05
# The fault that is done here, to files.
DAMAGE = "corrupt-checkpoint"
PLACES = {"phase": tuple(PHASES), "point": SAVE_POINTS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or folder")
    parser.add_argument(
        "words", nargs="*", metavar="FAULT", help="a fault and where it acts, such as: kill rank=1 step=30"
    )
    parser.add_argument("--list", action="store_true", help="explain the faults, or list those of RUN")


def run(arguments: argparse.Namespace) -> int:
    """Inject the fault, or list what there is. Raises RunError where a run cannot be reached, or does not take the fault."""
    if arguments.list or not arguments.run:
        return _list_faults(find_run(arguments.run) if arguments.run else None)
    if not arguments.words:
        raise RunError(
            "inject RUN FAULT: say which fault, such as kill rank=1 step=30; `meshwright inject --list` explains them"
        )
    run = RunDirectory.open(find_run(arguments.run))
    recipe, fault = load_recipe(run.recipe), parse_fault(arguments.words, SAVE_POINTS)
    _check(run, recipe, fault)
    if fault.kind == DAMAGE:
        return _corrupt(run, fault)
    with explain_errors(run.path):
        plan_faults(run.path, [fault])
    print(f"planned  {fault.describe()}; {run.path / LOG_FILE} will say when it was injected")
    return EXIT_DONE


def _list_faults(path: Path | None) -> int:
    """Print the kinds of faults, or the faults planned for a run and injected into it."""
    if path is None:
        width = max(map(len, KINDS))
        for name, kind in KINDS.items():
            options = " ".join(f"{each}=" for each in ("rank", "step", "times", *kind.options))
            print(f"{name:<{width}}  {kind.meaning}\n{'':<{width}}  {options}")
        print("\n".join(f"{name}= one of {', '.join(words)}" for name, words in PLACES.items()))
        return EXIT_DONE
    run = RunDirectory.open(path)
    planned = list(read_plan(run.path))
    if not planned:
        print(f"no faults were planned for {run.path}; `meshwright inject --list` explains them")
    for fault in planned:
        print(f"planned  {fault.describe()}")
    for record in read_log(run.path):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["unix_s"]))
        print(
            f"injected {record['fault']}: {when}, rank {record['rank']} on {record['host']}, step {record.get('step', '?')}"
        )
    return EXIT_DONE


def _check(run: RunDirectory, recipe: Recipe, fault: Fault) -> None:
    derived = derive(recipe)
    if fault.rank >= derived.world:
        raise RunError(f"rank={fault.rank}: the run has {derived.world} ranks, 0 to {derived.world - 1}")
    if fault.point is not None and fault.rank and fault.point not in RANK_POINTS:
        raise RunError(f"point={fault.point}: only rank 0 comes there; the other ranks to {', '.join(RANK_POINTS)}")
    if not recipe.run.allow_faults and fault.kind != DAMAGE:
        raise RunError(
            f"only a rank itself can inject {fault.kind}, and the recipe of {run.path} does not allow it: start or resume the run"
            " with run.allow_faults=true"
        )
    reported = _reported_step(run)
    if fault.step is not None and fault.step > recipe.train.steps:
        raise RunError(f"step={fault.step}: the run has train.steps={recipe.train.steps}")
    if fault.step is not None and fault.step <= reported and is_running(run, find_jobs(run)):
        raise RunError(f"step={fault.step}: the run has reported step {reported:,} already; say a later one")


def _reported_step(run: RunDirectory) -> int:
    last = list(read_records(run.path / METRICS_FILE, last=1))
    return last[-1]["step"] if last else 0


def _corrupt(run: RunDirectory, fault: Fault) -> int:
    """Damage the newest checkpoint, of the step or a later one."""
    while (found := newest_checkpoint(run.checkpoints)) is None or step_of(found) < (fault.step or 0):
        if fault.step is None or not is_running(run, find_jobs(run)):
            raise RunError(
                f"{run.path} has no whole checkpoint" + (f" of step {fault.step:,} or later" if fault.step else "")
            )
        time.sleep(POLL_S)
    if not isinstance(found, Path):
        raise RunError(f"{found} is in an object store: only a checkpoint in a folder is damaged on request")
    how = fault.how or "flip"
    file = found / (MANIFEST if how == "manifest" else f"rank-{fault.rank:05d}.bin")
    note_fault(run.path, fault, fault.rank, step=step_of(found))
    with explain_errors(file):
        damage(file, how)
    print(f"injected {fault.describe()}: {how} of {found.name}/{file.name}")
    return EXIT_DONE


def damage(file: Path, how: str) -> None:
    """Cut a file's end, flip a bit in its middle, empty it, remove it. manifest: cut."""
    size = file.stat().st_size
    if how == "remove":
        file.unlink()
    elif how == "flip":
        with open(file, "r+b") as opened:
            opened.seek(size // 2)
            byte = opened.read(1)[0]
            opened.seek(size // 2)
            opened.write(bytes([byte ^ 1]))
    else:
        os.truncate(file, 0 if how == "zero" else size - 1)
