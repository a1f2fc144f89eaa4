"""A real SLURM cluster on this machine, and a desk in front of it: submit, watch, and do harm at a known moment.

Runs are a tiny model and a few steps. So that a fault finds a run in the middle, however fast the machine is, its ranks are
stopped (SIGSTOP) at a step first; SLURM's own SIGCONT, or ours, lets them go on.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from framework.checkpoint.commit import newest_checkpoint
from framework.checkpoint.load import Reader
from framework.checkpoint.storage import checkpoints_of
from framework.commands.trained_model import _read
from tests import tiny_run
from tests.unit.test_track_wandb import steps_in_wandb

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "local_cluster.sh"
STEPS = 120
SEQUENCES = 12  # of a step
NODES = 13  # n4 is for preemption, n5 to n12 are to die, n13 to freeze; nothing else runs there
RECIPE = (
    *tiny_run.RECIPE,
    f"train.steps={STEPS}",
    f"batch.sequences_per_step={SEQUENCES}",  # else one rank is through before a test can stop it in the middle
    "batch.sequences_per_microbatch=1",
)
SLURM = (
    "launch=slurm",
    "launch.gres=null",
    "launch.ranks_per_node=1",
    'launch.time="00:10:00"',
    "launch.signal_seconds_before_end=20",
)
APART = 'launch.sbatch=["--exclude=n[4-13]"]'


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Desk:
    """`place` has the corpus and the runs; relative paths of recipes hold there."""

    place: Path
    environment: dict[str, str]

    def meshwright(self, *arguments: str) -> Answer:
        """The program, in a process of its own: scenarios run side by side."""
        command = [sys.executable, "-m", "framework", *arguments]
        done = subprocess.run(
            command, cwd=self.place, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def submit(self, run: str, *overrides: str) -> str:
        """Queue a new run; returns the job's id (of a chain the first)."""
        answer = self.meshwright("submit", *RECIPE, *SLURM, APART, f"run.id={run}", *overrides)
        assert answer.code == 0, answer
        return re.search(r"^job +(\d+)", answer.out, re.M)[1]

    def resume(self, run: str, *overrides: str) -> str:
        answer = self.meshwright("submit", f"run.id={run}", *overrides)
        assert answer.code == 0, answer
        return re.search(r"^job +(\d+)", answer.out, re.M)[1]

    def ledger(self, *pauses: int) -> str:
        """The override that has ranks write down what they train on, for `read_starts`, and stop themselves after these steps."""
        cursors = ",".join(str(step * SEQUENCES) for step in pauses)
        program = self.place / f"ledger-{len(pauses)}"
        program.write_text(f'#!/bin/bash\nexec {sys.executable} -m tests.slurm.ledger {cursors} "${{@:2}}"\n')
        program.chmod(0o755)
        return f"launch.python={program}"

    def train_here(self, run: str, *overrides: str) -> None:
        """The same recipe on this machine, without SLURM, in a process of its own."""
        command = [sys.executable, "-m", "framework", "train", *RECIPE, f"run.id={run}", *overrides]
        subprocess.run(command, cwd=self.place, env=self.environment, check=True, capture_output=True, timeout=240)

    def cluster(self, *words: str) -> str:
        """scripts/local_cluster.sh."""
        return call(str(SCRIPT), *words)

    # --- what a run has left behind

    def folder(self, run: str) -> Path:
        return self.place / "runs" / run

    def log(self, run: str) -> str:
        path = self.folder(run) / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def records(self, run: str) -> list[dict]:
        """Of metrics.jsonl, as far as it is written."""
        path = self.folder(run) / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def losses(self, run: str) -> list[tuple[int, float]]:
        return [(record["step"], record["loss"]) for record in self.records(run)]

    def weights(self, run: str) -> dict[str, torch.Tensor]:
        reader = Reader(newest_checkpoint(checkpoints_of(self.folder(run))))
        return _read(reader, "", [name for name in reader.manifest.entries if name.startswith("weight/")])

    def history(self, run: str) -> list[dict]:
        """slurm/history as dicts: time (seconds), job, restart, what (start, end) and its values."""
        path = self.folder(run) / "slurm" / "history"
        return [parse_note(line) for line in path.read_text().splitlines()] if path.exists() else []

    def ends(self, run: str) -> list[int]:
        return [note["code"] for note in self.history(run) if note["what"] == "end"]

    def starts(self, run: str) -> list[dict]:
        return [note for note in self.history(run) if note["what"] == "start"]

    # --- watching and doing harm

    def pids(self, run: str, restart: int | None = None) -> dict[int, int]:
        """Rank -> process, of the ranks that live now. restart: of the job's, None for any."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"framework.train.program" in words and str(self.folder(run)).encode() in words:
                    variables = dict(re.findall(rb"(\w+)=([^\0]*)", (process / "environ").read_bytes()))
                    is_meant = restart in (None, int(variables.get(b"SLURM_RESTART_COUNT", b"0")))
                    if words[0].endswith((b"python", b"python3")) and b"SLURM_PROCID" in variables and is_meant:
                        found[int(variables[b"SLURM_PROCID"])] = int(process.name)
        return found

    def launchers(self, run: str) -> list[int]:
        """The processes of `srun` that start the run's ranks, on the host of its script."""
        return self._find(lambda words: words[0].endswith(b"srun") and str(self.folder(run)).encode() in words)

    def scripts(self, job: str) -> list[int]:
        """The batch script of a job."""
        folder = f"/job{int(job):05d}/slurm_script".encode()
        return self._find(lambda words: any(word.endswith(folder) for word in words[:2]))

    def _find(self, is_meant: Callable[[list[bytes]], bool]) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if is_meant((process / "cmdline").read_bytes().split(b"\0")) and lives(int(process.name)):
                    found.append(int(process.name))
        return found

    def pause(
        self, run: str, at_step: int, unless: Callable[[], bool] = lambda: False, restart: int | None = None
    ) -> dict[int, int]:
        """Stop the run's ranks once it has reported `at_step`; returns them."""

        def is_there() -> bool:
            return unless() or any(record["step"] >= at_step for record in self.records(run)[-1:])

        wait_for(is_there, f"{run} at step {at_step}", tell=lambda: self.log(run))
        pids = {} if unless() else self.pids(run, restart)
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        return pids

    def wait_for_pause(self, run: str, step: int, ranks: int) -> dict[int, int]:
        """Until the ranks have stopped themselves after a step of `ledger`; returns them."""
        names = [self.folder(run) / "ledger" / f"paused-{step * SEQUENCES}-{rank}" for rank in range(ranks)]
        wait_for(lambda: all(name.exists() for name in names), f"{run} after step {step}", tell=lambda: self.log(run))
        return self.pids(run)

    def let_go(self, pids: dict[int, int]) -> None:
        for pid in pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def wait_until_said(self, run: str, text: str, times: int = 1, timeout_s: float = 300) -> None:
        """Until the job's log has the text so many times."""
        wait_for(lambda: self.log(run).count(text) >= times, f"{run} says {text!r}", timeout_s, lambda: self.log(run))

    def wait_until_gone(self, job: str, timeout_s: float = 300) -> None:
        """Until the job neither waits nor runs."""
        wait_for(lambda: job_state(job) not in ("PENDING", "RUNNING", "COMPLETING"), f"the end of job {job}", timeout_s)

    def seconds_to_vanish(self, pids: dict[int, int]) -> float:
        """How long it takes until none of these processes lives."""
        started = time.monotonic()
        wait_for(lambda: not any(lives(pid) for pid in pids.values()), f"the end of {pids}")
        return time.monotonic() - started


def parse_note(line: str) -> dict:
    stamp, *words = line.split()
    values = dict(word.split("=", 1) for word in words if "=" in word)
    note = {"time": time.mktime(time.strptime(stamp[:19], "%Y-%m-%dT%H:%M:%S")), "job": values["job"]}
    note |= {name: int(values[name]) for name in ("restart", "from", "code", "step") if name in values}
    return note | {"what": words[2], "nodes": values.get("nodes", ""), "node": values.get("node", "")}


def job_field(job: str, name: str) -> str:
    return re.search(rf"\b{name}=(\S*)", call("scontrol", "--oneliner", "show", "job", job))[1]


def job_state(job: str) -> str:
    return job_field(job, "JobState")


def call(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def lives(pid: int) -> bool:
    """A zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def wait_for(
    condition: Callable[[], bool], what: str, timeout_s: float = 300, tell: Callable[[], str] = lambda: ""
) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {timeout_s:.0f} s\n{tell()}"
        time.sleep(0.1)


def wandb_segments(run_dir: Path, run_id: str) -> list[list[int]]:
    """The steps of each offline segment of a run, oldest first."""
    return [steps_in_wandb(segment) for segment in sorted(run_dir.glob(f"wandb/offline-run-*-{run_id}"))]
