"""`meshwright inject RUN FAULT`: inject a fault into a run, to see how it recovers before a real fault comes.

Each rank of a run with `run.allow_faults=true` has an injector (faults/injector.py): the command writes the fault into the run's
plan, and the rank injects it itself, exactly at the stated step, phase or point of a save. Any other run is reached from outside:
signals to its processes, on their node through srun, and damage to its files. The command then waits for a step, and acts some
steps late.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from framework.checkpoint.commit import RANK_POINTS, SAVE_POINTS, newest_checkpoint, step_of
from framework.checkpoint.index import MANIFEST
from framework.errors import EXIT_DONE, RunError
from framework.faults.injector import SIGNALS, send_signal
from framework.faults.plan import (
    KINDS,
    LOG_FILE,
    PHASES,
    Fault,
    note_fault,
    parse_fault,
    plan_faults,
    read_log,
    read_plan,
)
from framework.launch.directory import RunDirectory, find_run
from framework.launch.jobs import find_jobs, has_ended, is_running, read_history
from framework.launch.order import NODES, find_rank, read_order
from framework.launch.places import explain_errors
from framework.launch.slurm import RANK_PROGRAM
from framework.mesh.placement import place
from framework.recipe.compose import load_recipe
from framework.recipe.derive import at_nodes, derive
from framework.recipe.schema import Recipe
from framework.start import python_words, slurm_environment
from framework.track.jsonl import METRICS_FILE, read_records

# Seconds between two looks at the run's files while a step is waited for.
POLL_S = 0.05
# Between attempts to find a rank's process: ranks that are started again are gone for seconds.
FIND_S, FIND_POLL_S = 60.0, 0.5
PLACES = {"phase": tuple(PHASES), "point": SAVE_POINTS}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or folder")
    parser.add_argument(
        "words", nargs="*", metavar="FAULT", help="a fault and where it acts, such as: kill rank=1 step=30"
    )
    parser.add_argument("--list", action="store_true", help="explain the faults, or list those of RUN")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)


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
    if arguments.here:  # signals to processes of this machine only
        return _signal_here(run, fault)
    _check(run, recipe, fault)
    is_at_a_place = fault.step is not None or fault.phase is not None or fault.point is not None
    if fault.kind == "corrupt-checkpoint":
        return _corrupt(run, fault)
    if recipe.run.allow_faults and fault.node is None and (is_at_a_place or not KINDS[fault.kind].from_outside):
        with explain_errors(run.path):
            plan_faults(run.path, [fault])
        print(f"planned  {fault.describe()}; {run.path / LOG_FILE} will say when it was injected")
        return EXIT_DONE
    return _signal(run, recipe, fault)


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
    for fault in read_plan(run.path):
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
    if not recipe.run.allow_faults and not KINDS[fault.kind].from_outside:
        raise RunError(
            f"only a rank itself can inject {fault.kind}, and the recipe of {run.path} does not allow it: start or resume the run"
            " with run.allow_faults=true"
        )
    if not recipe.run.allow_faults and (fault.phase or fault.point or fault.times > 1):
        raise RunError(
            "phase=, point= and times= need ranks that inject faults themselves: start or resume the run with"
            " run.allow_faults=true. From outside a fault acts at once, or once the run has reported a step"
        )
    reported = _reported_step(run)
    if fault.step is not None and fault.step > recipe.train.steps:
        raise RunError(f"step={fault.step}: the run has train.steps={recipe.train.steps}")
    if fault.step is not None and fault.step <= reported and is_running(run, find_jobs(run)):
        raise RunError(f"step={fault.step}: the run has reported step {reported:,} already; say a later one")


def _reported_step(run: RunDirectory) -> int:
    last = list(read_records(run.path / METRICS_FILE, last=1))
    return last[-1]["step"] if last else 0


def _wait_for_step(run: RunDirectory, step: int | None) -> None:
    """Return once the run has reported the step before, so that the step is about to begin. Raises RunError if it ends."""
    look = time.monotonic()
    while step is not None and _reported_step(run) < step - 1:
        if time.monotonic() > look + FIND_S and has_ended(run):
            raise RunError(f"{run.path} has ended at step {_reported_step(run):,}, before step {step:,}")
        time.sleep(POLL_S)


def _signal(run: RunDirectory, recipe: Recipe, fault: Fault) -> int:
    """A signal from outside to a rank, or to all ranks of a node."""
    if fault.node is None and fault.step is None and not is_running(run, find_jobs(run)):
        raise RunError(f"{run.path} does not run: a signal would reach no process")
    _wait_for_step(run, fault.step)
    running = [state for _, state in find_jobs(run) if state and state.state == "RUNNING"]
    if not running:
        return _signal_here(run, fault)
    job = running[0]
    # The nodes of the newest start: a job may have spare nodes, and have lost others.
    started = [note.values["nodes"] for note in read_history(run.history) if "nodes" in note.values]
    expand = ["scontrol", "show", "hostnames", started[-1] if started else job.nodes]
    environment = slurm_environment(os.environ)
    nodes = subprocess.run(expand, env=environment, capture_output=True, text=True, check=False)
    names = nodes.stdout.split()
    answers = run.nodes.read_text().strip() if run.nodes.exists() else ""
    node = _choose_node(at_nodes(recipe, len(names)), fault, names, job.job_id, answers)
    step = ["srun", f"--jobid={job.job_id}", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--quiet"]
    words = [f"{name}={value}" for name in ("rank", "seconds", "node") if (value := getattr(fault, name)) is not None]
    inject = python_words("framework", "inject", str(run.path.absolute()), fault.kind, *words, "--here")
    done = subprocess.run([*step, sys.executable, *inject], env=environment, check=False)
    if done.returncode:
        raise RunError(f"srun could not reach rank {fault.rank} on {node}: it ended with {done.returncode}")
    return EXIT_DONE


def _choose_node(recipe: Recipe, fault: Fault, names: Sequence[str], job_id: str, answers: str = "") -> str:
    """The node of the fault, among the nodes that the run has now: these may be fewer than the recipe's most. answers: of these
    nodes, by which ranks have taken them in another order than SLURM's."""
    if fault.node is None:
        derived = derive(recipe)
        number = place(derived).node(fault.rank)
        if order := read_order(derived, {NODES: answers}):
            names = [order.names[node] for node in order.nodes]
        if number >= len(names):
            raise RunError(
                f"rank={fault.rank}: it would be on node {number} of the run, which has {len(names)} now: {', '.join(names)}"
            )
        return names[number]
    if fault.node not in names:
        raise RunError(f"node={fault.node}: job {job_id} runs on {', '.join(names)}")
    return fault.node


def _signal_here(run: RunDirectory, fault: Fault) -> int:
    """Signal the rank, or with a node all ranks that run here."""
    deadline = time.monotonic() + FIND_S
    while not (victims := _find_victims(run, fault)):
        if time.monotonic() > deadline or not is_running(run, find_jobs(run)):
            who = f"rank {fault.rank}" if fault.node is None else "a rank"
            raise RunError(f"{run.path} has no process of {who} on this machine")
        time.sleep(FIND_POLL_S)
    for rank, pid in victims.items():
        note_fault(run.path, fault, rank, step=_reported_step(run) + 1, victim=pid)
        send_signal(fault, pid)
        print(f"injected {fault.describe()}: {SIGNALS[fault.kind].name} to rank {rank}, process {pid}", flush=True)
    return EXIT_DONE


def _find_victims(run: RunDirectory, fault: Fault) -> dict[int, int]:
    ranks = find_ranks(run.path)
    if not ranks and (holder := re.match(r"process (\d+) on ", run.find_holder() or "")):
        ranks = {0: int(holder[1])}  # a single rank lives in the process that was started
    return ranks if fault.node is not None else {rank: pid for rank, pid in ranks.items() if rank == fault.rank}


def find_ranks(run_dir: Path) -> dict[int, int]:
    """The processes of the run's ranks that live in this machine's, or container's, PID namespace, by rank."""
    found = {}
    here, wanted = os.readlink("/proc/self/ns/pid"), run_dir.resolve()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended, or is no Python with a module
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # Near the front, behind options and start.py: srun and torchrun have the rank's words behind their own.
            starts = words[:4] if Path(words[0]).name.startswith("python") else []
            is_meant = (process / "cwd" / words[starts.index(RANK_PROGRAM) + 1]).resolve() == wanted
            if not is_meant or os.readlink(process / "ns/pid") != here:
                continue
            variables = dict(re.findall(rb"(\w+)=([^\0]*)", (process / "environ").read_bytes()))
            if (rank := variables.get(b"RANK", variables.get(b"SLURM_PROCID"))) is not None:
                found[_rank_of(run_dir, int(rank), variables)] = int(process.name)
    return found


def _rank_of(run_dir: Path, launched: int, variables: Mapping[bytes, bytes]) -> int:
    """The rank of a process by the number with which it was launched, and its environment."""
    answers, nodes = variables.get(NODES.encode()), variables.get(b"SLURM_STEP_NUM_NODES")
    if answers is None or nodes is None:
        return launched
    recipe = at_nodes(load_recipe(RunDirectory(run_dir).recipe), int(nodes))
    return find_rank(derive(recipe), launched, {NODES: answers.decode()})


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
