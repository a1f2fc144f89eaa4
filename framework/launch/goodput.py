"""The record of a start: what it knows of its job and its launcher, and rank 0's first word on it."""

import os
import re
from datetime import datetime
from functools import partial
from pathlib import Path

from framework.launch.task import is_task
from framework.lease import Lease
from framework.monitor.phases import Phases
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.track.goodput_log import GoodputLog, Job
from framework.track.observers import Observers
from framework.train.goodput import Goodput

_START = re.compile(r"\S+ job=\d+ restart=\d+ start from=.*")
QUEUED = "MESHWRIGHT_QUEUED"
_END = re.compile(r"(\S+) job=\d+ restart=\d+ end code=(\d+) .*")

_LEFT_OUT = re.compile(r"\S+ job=\d+ restart=\d+ left out .*")


def open_goodput(recipe: Recipe, run_dir: Path, phases: Phases, lease: Lease | None) -> Goodput:
    """The goodput of a rank, of which rank 0 keeps the record. Before ranks are connected: one that never is has spent time.
    lease: of the run, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return Goodput(phases)
    world = int(os.environ.get("WORLD_SIZE", derive(recipe).world))
    log, contain = GoodputLog(run_dir, world), Observers().contain
    log.lease = lease
    contain("goodput", partial(_begin, log, run_dir, phases))
    return Goodput(phases, log, contain)


def _begin(log: GoodputLog, run_dir: Path, phases: Phases) -> None:
    job = read_job(run_dir / "slurm" / "history", os.environ.get(QUEUED, "")) if is_task() else Job()
    log.begin(sum(phases.so_far().values()), job)


def find_age_s() -> float:
    """How long ago this process began, by the kernel; nothing where there is no /proc."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not (stat.is_file() and uptime.is_file()):
        return 0.0
    started_ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return max(0.0, float(uptime.read_text().split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK"))


def read_job(history: Path, queued: str) -> Job:
    """What a job's script knows. queued: when the job was submitted and began, nothing where SLURM does not say. history: what it
    noted of the end before the newest start: nothing of a node that was lost."""
    noted = history.read_text().splitlines() if history.is_file() else []
    lines = [line for line in noted if not _LEFT_OUT.fullmatch(line)]  # between an end and the start that follows it
    starts = [index for index, line in enumerate(lines) if _START.fullmatch(line)]
    end = _END.fullmatch(lines[starts[-1] - 1]) if starts and starts[-1] else None
    gone = (_unix_s(end[1]), int(end[2])) if end else (None, None)
    moments = [float(word) for word in queued.split() if word.isdigit()]
    return Job(*(moments if len(moments) == 2 else (None, None)), *gone)


def _unix_s(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S%z").timestamp()
