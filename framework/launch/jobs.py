"""Commands of SLURM: queue a script, and find the state of a run's jobs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.recipe.problem import Problem
from framework.recipe.schema import Launch
from framework.start import slurm_environment

# States in which a job may still train.
WAITING_OR_RUNNING = (
    *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"),
    *("REQUEUED", "SUSPENDED", "RESIZING", "STAGE_OUT"),
)
# States of a job that has nodes, or had them a moment ago and is requeued: its ranks will see a request.
HAS_NODES = frozenset(WAITING_OR_RUNNING) - {"PENDING"}

_NOTE = re.compile(r"(?P<time>\S+) job=\d+ restart=\d+ (?P<what>start|end|left out) (?P<values>.*)")


@dataclass(frozen=True)
class JobState:
    """State of a job now. restarts: how often it was requeued."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    nodes: str = ""
    start: str = ""


@dataclass(frozen=True)
class HistoryLine:
    """A line of slurm/history. what: start, end or left out; values: as in `code=85 step=95` of an end."""

    time: str
    what: str
    values: dict[str, str]


def submit_script(script: Path, after: str | None = None) -> str:
    """Queue a script; returns the job's id. after: the job whose end it waits for. Raises RunError with sbatch's reason."""
    require_sbatch()
    if ignored := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        fix = (
            "what a job is asked for with is in the recipe: launch.partition, launch.account, launch.sbatch and others"
        )
        print(f"note     sbatch does not get {', '.join(ignored)} of this shell: {fix}", file=sys.stderr)
    dependency = [f"--dependency=afterany:{after}"] if after else []
    result = call(["sbatch", "--parsable", *dependency, str(script)])
    if result.returncode:
        raise RunError(f"sbatch refused the job: {_reason(result)}\nThe script is {script}")
    return result.stdout.strip().partition(";")[0]


def require_sbatch() -> None:
    """Raises RunError where this machine has no sbatch."""
    if shutil.which("sbatch") is None:
        raise RunError(
            "there is no sbatch on the path: submit on a login node of your cluster. To try it on this machine:"
            " scripts/local_cluster.sh (docs/slurm.md); to train here without SLURM: launch=local"
        )


def find_option_problems(launch: Launch) -> Iterator[Problem]:
    """A problem where launch.segment asks for an option of sbatch that this machine's SLURM does not have; none where nobody says
    its version."""
    if launch.segment is None or shutil.which("sbatch") is None:
        return
    found = re.search(r"slurm\S* (\d+)\.(\d+)", call(["sbatch", "--version"]).stdout)
    if found is not None and tuple(map(int, found.groups())) < (23, 11):
        message = f"needs SLURM 23.11 or later, and here is {found[1]}.{found[2]}"
        fix = "launch.segment=null; launch.switches=1 for a tree topology"
        yield Problem("launch.segment", launch.segment, message, fix)


def find_job(job_id: str) -> JobState | None:
    """State of a job by the controller, else by accounting; None if neither knows it, or there is no SLURM here.

    For an array the least advanced task stands for all.
    """
    if shutil.which("scontrol") is None:
        return None
    result = call(["scontrol", "--oneliner", "show", "job", job_id])
    records = [_fields(line) for line in result.stdout.splitlines()]
    if result.returncode == 0 and records and "JobState" in records[0]:
        fields = min(records, key=lambda each: each["JobState"] not in WAITING_OR_RUNNING)
        return JobState(
            job_id,
            fields["JobState"],
            fields.get("Reason", ""),
            int(fields.get("Restarts", "0")),
            fields.get("NodeList", "").replace("(null)", ""),
            fields.get("StartTime", ""),
        )
    return _find_in_accounting(job_id)


def reach() -> str | None:
    """The reason why the controller cannot be asked; None if it answers."""
    result = call(["scontrol", "ping"])
    return None if result.returncode == 0 and "UP" in result.stdout else _reason(result)


def partitions() -> str:
    """Each partition: name, nodes that are up, GPUs of a node."""
    result = call(["sinfo", "--noheader", "--format=%R %D nodes %G"])
    return "; ".join(line.strip() for line in result.stdout.splitlines())


def find_jobs(run: RunDirectory) -> list[tuple[str, JobState | None]]:
    """The jobs of the newest launch, with their states."""
    return [(job, find_job(job)) for job in run.last_launch.get("jobs", [])]


def is_running(run: RunDirectory, jobs: list[tuple[str, JobState | None]]) -> bool:
    """Whether a job of the run runs, or a process holds it."""
    return any(state and state.state == "RUNNING" for _, state in jobs) or run.find_holder() is not None


def find_starting(jobs: list[tuple[str, JobState | None]]) -> list[str]:
    """`job ID is STATE` of jobs whose ranks will see a request, though they may not train now."""
    return [f"job {job} is {state.state}" for job, state in jobs if state and state.state in HAS_NODES]


def has_ended(run: RunDirectory) -> bool:
    """Whether nothing runs or will run that could answer a request. False while SLURM does not tell."""
    states = [state and state.state for _, state in find_jobs(run)]
    return not run.find_holder() and all(state is not None and state not in WAITING_OR_RUNNING for state in states)


def read_history(file: Path) -> list[HistoryLine]:
    """The notes of a job's script on starts and ends of its ranks; nothing for a run that no job has started."""
    lines = file.read_text().splitlines() if file.is_file() else []
    notes = filter(None, map(_NOTE.fullmatch, lines))
    return [HistoryLine(note["time"], note["what"], _fields(note["values"])) for note in notes]


def _find_in_accounting(job_id: str) -> JobState | None:
    if shutil.which("sacct") is None:
        return None
    result = call(
        ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,NodeList", f"--jobs={job_id}"]
    )
    first = result.stdout.splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None
    if first is None:
        return None
    state, _, nodes = first.partition("|")
    return JobState(job_id, state.split()[0], nodes=nodes)


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def call(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, env=slurm_environment(os.environ), check=False, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _reason(result: "subprocess.CompletedProcess[str]") -> str:
    text = (result.stderr or result.stdout).strip()
    return re.sub(r"^\w+: error: ", "", text, flags=re.MULTILINE) or f"{result.args[0]} ended with {result.returncode}"
