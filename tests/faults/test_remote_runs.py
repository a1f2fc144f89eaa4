"""`meshwright` with run.root in a bucket: a run whose machine is lost, and one that is frozen while another machine goes on."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from framework.track.sample_ledger import find_ledger_problems, read_lineage
from tests.faults.meshwright import losses, run_meshwright
from tests.tiny_run import RECIPE, write_corpus

STEPS, EVERY, SEEN_S = 300, 30, 120.0
# Samples of a step, by RECIPE.
BATCH = 16
WORDS = (
    *(word for word in RECIPE if not word.startswith("checkpoint")),
    "launch.ranks=2",
    "launch.device=cpu",
    "zero.stage=1",
    f"batch.sequences_per_step={BATCH}",
    f"checkpoint.every_steps={EVERY}",
    "checkpoint.keep=2",
    "track.sample_ledger=true",
    f"train.steps={STEPS}",
)


class Machine:
    """A disk of its own, on which runs of the bucket have their working folders."""

    def __init__(self, name, url):
        self.words = (f"run.root={url}", f"run.work={name}", "run.id=x")
        self.folder = Path(name) / "s3" / url.removeprefix("s3://") / "x"

    def train(self, *words):
        return run_meshwright("train", *words, *self.words)

    def start(self, *words):
        command = [sys.executable, "-m", "framework", "train", *words, *self.words]
        with open(f"{self.folder.parts[0]}.log", "w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait_for_step(self, step, process):
        until = time.monotonic() + SEEN_S
        while not (self.folder / "metrics.jsonl").exists() or max(losses(self.folder), default=0) < step:
            assert process.poll() is None, Path(f"{self.folder.parts[0]}.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.02)

    def said(self):
        return Path(f"{self.folder.parts[0]}.log").read_text()


def processes_of(pid):
    """A process and all that descend from it."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


def send(pids, number):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture
def bucket(tmp_path, s3, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_corpus(Path("corpus"))
    return f"s3://bucket/{tmp_path.name}/runs"


def check_equal(folder, whole):
    """The run in `folder` is the one that nothing disturbed, with each sample once."""
    assert losses(folder) == losses(whole)
    assert len(losses(whole)) == STEPS
    assert find_ledger_problems(read_lineage(folder), STEPS * BATCH, read_lineage(whole)) == []


@pytest.mark.grid
def test_a_run_whose_machine_is_lost_goes_on_from_its_bucket(bucket):
    first, second, third = (Machine(name, bucket) for name in ("first", "second", "third"))
    process = first.start(*WORDS)
    try:
        first.wait_for_step(2 * EVERY + EVERY // 2, process)
        # Its ranks stand still, so that it lasts; the launcher is heard of. None is stopped while it writes the start's record,
        # which would keep the launcher from it.
        with open(first.folder / "lock.record-1", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            send(processes_of(process.pid)[1:], signal.SIGSTOP)
        code, said = third.train()
        assert code == 86, said
        assert f"is in use by process {process.pid} on" in said
    finally:
        send(processes_of(process.pid)[::-1], signal.SIGKILL)
        process.wait()
    had = max(losses(first.folder))
    assert had < STEPS, "killed too late to show anything"
    shutil.rmtree("first")
    code, said = second.train()
    assert code == 0, said
    assert "taken over" in said
    assert "from step" in said
    code, said = run_meshwright("train", *WORDS, "run.id=whole")
    assert code == 0, said
    check_equal(second.folder, Path("runs/whole"))
    check_commands(f"{bucket}/x")


def check_commands(url):
    """What takes a run takes its URL, on a machine that has nothing of it."""
    for words, answer in (
        (("status", url), f"step {STEPS:,}"),
        (("inspect", url), "every hash fits"),
        (("diff", url, "runs/whole"), "whole"),
        (("generate", url, "--prompt", "mesh", "--max-new-tokens", "2"), "mesh"),
        (("export", url, "--to", "model"), "model"),
    ):
        code, said = run_meshwright(*words)
        assert code == 0, said
        assert answer in said
    code, said = run_meshwright("export", "runs/whole", "--to", "whole-model")
    assert code == 0, said
    assert Path("model/model.safetensors").read_bytes() == Path("whole-model/model.safetensors").read_bytes()


@pytest.mark.grid
def test_a_start_that_was_frozen_changes_nothing_once_it_thaws(bucket):
    first, second, third = (Machine(name, bucket) for name in ("first", "second", "third"))
    process = first.start(*WORDS)
    frozen = []
    try:
        first.wait_for_step(EVERY + EVERY // 2, process)
        frozen = processes_of(process.pid)
        send(frozen, signal.SIGSTOP)
        assert max(losses(first.folder)) < STEPS, "frozen too late to show anything"
        code, said = second.train()
        assert code == 0, said
        send(frozen, signal.SIGCONT)
        assert process.wait(SEEN_S) != 0
    finally:
        send(frozen or processes_of(process.pid), signal.SIGKILL)
        process.wait()
    assert "was taken over by process" in first.said()
    code, said = third.train("train.steps=301")
    assert code == 0, said
    done = losses(third.folder)
    assert {step: loss for step, loss in done.items() if step <= STEPS} == losses(second.folder)
