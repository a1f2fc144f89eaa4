"""`meshwright save` and `meshwright stop`: requests to a run that runs, on this machine or in a job.

A request is a file in the run's folder, which rank 0 looks for: it needs no signal that reaches every rank, and no KillWait of
SLURM's ends a save that takes long.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from framework.commands.arguments import add_run
from framework.errors import EXIT_DONE, EXIT_FAILED, RunError
from framework.launch.directory import RunDirectory, find_run
from framework.launch.jobs import find_jobs, find_starting, has_ended, is_running
from framework.launch.places import explain_errors
from framework.launch.resume import resume_command, saved_step
from framework.monitor.progress import SAVE_FILE, STOP_FILE
from framework.recipe.compose import load_recipe
from framework.start import slurm_environment

# Wait for an answer: a step, a save, and the time of a network file system to show a file.
ANSWER_S = 600.0
POLL_S = 0.2
# Seconds between two questions whether anybody is left to answer, which go to SLURM's controller.
ENDED_POLL_S = 5.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> int:
    """Stop the run, or have it save."""
    path = find_run(arguments.run)
    return save_command(path) if arguments.command == "save" else stop_command(path)


def save_command(path: Path) -> int:
    """Have the run save at the end of its step, and wait for that. Raises RunError where it does not run."""
    run = RunDirectory.open(path)
    jobs = find_jobs(run)
    if not is_running(run, jobs):
        if starting := find_starting(jobs):
            raise RunError(f"{path} is starting or ending: {', '.join(starting)}. Ask again once it trains")
        raise RunError(f"{path} does not run: its newest checkpoint is of step {saved_step(run):,}")
    return _ask(run, SAVE_FILE, "saved", ANSWER_S)


def stop_command(path: Path, answer_s: float = ANSWER_S) -> int:
    """Have the run save and end, and cancel its jobs that still wait. Raises RunError where there is nothing to stop."""
    run = RunDirectory.open(path)
    jobs = find_jobs(run)
    waiting = [job for job, state in jobs if state and state.state == "PENDING"]
    if waiting:
        subprocess.run(["scancel", *waiting], env=slurm_environment(os.environ), check=False)
        print(f"cancelled {' '.join(waiting)}, waiting in the queue")
    if is_running(run, jobs) or find_starting(jobs):
        return _ask(run, STOP_FILE, "stopped", answer_s)
    if not waiting:
        raise RunError(f"{path} does not run: its newest checkpoint is of step {saved_step(run):,}")
    return EXIT_DONE


def _wait_until_taken(run: RunDirectory, file: Path, answer_s: float) -> bool:
    """Wait for the request to be removed; returns whether it was in time. If the run has ended, it is removed here: the
    next start must not find it."""
    now = time.monotonic()
    deadline, look = now + answer_s, now + ENDED_POLL_S
    while file.exists() and time.monotonic() < deadline:
        if time.monotonic() >= look:
            if has_ended(run):
                file.unlink(missing_ok=True)
            look = time.monotonic() + ENDED_POLL_S
        time.sleep(POLL_S)
    return not file.exists()


def _ask(run: RunDirectory, name: str, answer: str, answer_s: float) -> int:
    """Leave the request, wait until it has been removed, and print the outcome."""
    file, before = run.path / name, saved_step(run)
    with explain_errors(run.path):
        file.touch()
    print(f"asked    {run.path}, which answers after its step; Ctrl-C ends only this waiting", flush=True)
    if not _wait_until_taken(run, file, answer_s):
        print(f"waiting  no answer in {answer_s:.0f} s: see `meshwright status {run.path}`", file=sys.stderr)
        return EXIT_FAILED
    step = saved_step(run)
    if step == before:
        print(f"ended    without a newer checkpoint than that of step {before:,}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{answer:<8} step {step:,}")
    if name == STOP_FILE:
        print(f"resume   {resume_command(run, load_recipe(run.recipe))}")
    return EXIT_DONE
