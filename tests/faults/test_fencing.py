"""A start of a run that was frozen, held for dead and thawed: wherever it wakes up it changes nothing of what the next start
wrote, and ends with who has the run.

On one machine the kernel keeps the lock of a frozen process. A lost lock is one that the next start does not ask for, or, where
whole launches are tested, one whose file has gone.
"""

import builtins
import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from framework import lease as lease_module
from framework.checkpoint.commit import Retention, find_newest, set_aside, step_of
from framework.checkpoint.held import HeldSteps
from framework.checkpoint.load import load_newest
from framework.checkpoint.neighbors import CopyKeeper, Neighbours
from framework.checkpoint.node_memory import HeldName, NodeMemory, memory_of
from framework.checkpoint.save import CPU, Goal, Saver
from framework.checkpoint.staging import Entry, StagingMemory
from framework.comm.communicator import Communicator
from framework.errors import EXIT_USER, LeaseLost, MeshwrightError
from framework.launch.directory import RunDirectory
from framework.lease import Holder, Lease, read_lease, take
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from framework.monitor.progress import SAVE_FILE
from framework.track.jsonl import METRICS_FILE, Jsonl, read_records
from framework.track.report import Observers, RunInfo, StepReport, save_run_info
from tests import tiny_run
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

ALONE = Communicator(Axis("world", 1, 0))
OLD, NEW = Holder("n1", 11, "then", "4", 0), Holder("n2", 22, "now", "4", 1)
# What changes a file system, and so may be where a process wakes up. Files are opened by `open`, pathlib's by `io.open`.
OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
NUMEL = 500


def entries(step, epoch):
    return [Entry("weight/w", Layout((NUMEL,)), torch.arange(NUMEL, dtype=torch.float32) + step + 1000 * epoch)]


def report_of(step, epoch):
    return StepReport(
        step=step, samples=step, tokens=step, loss=float(epoch), gradient_norm=1.0, lr=0.1, step_s=1.0, tokens_per_s=1.0,
        tokens_per_s_per_rank=(1.0,), data_wait_s=0.0, mfu=None, memory_bytes=1,
    )  # fmt: skip


class Training:
    """What rank 0 of a start writes into its run, without the model: metrics, checkpoints of each step, reports, requests."""

    def __init__(self, lease):
        self.lease, self.root = lease, lease.run / "checkpoints"
        found = find_newest(self.root)
        self.step = step_of(found.newest) if found.newest else 0
        info = RunInfo(lease.run.name, {}, total_steps=9, start_step=self.step)
        save_run_info(lease.run, info, lease)
        self.observers = Observers([Jsonl(lease.run, lease=lease)], print, lease)
        self.observers.open(info)
        memory = StagingMemory(CPU, 1 << 20, segment_bytes=1 << 10)
        self.saver = Saver(self.root, ALONE, Retention(1), memory, is_async=False, lease=lease)

    def take_step(self):
        self.step += 1
        self.observers.report(report_of(self.step, self.lease.epoch))
        self.saver.start(
            self.step, entries(self.step, self.lease.epoch), {"step": self.step, "epoch": self.lease.epoch}
        )

    def end(self):
        """As runs do at their ends, and once more what follows a step, so that whoever is stale notices."""
        self.lease.write(self.lease.run / "report.txt", b"a report")
        self.lease.remove(self.lease.run / SAVE_FILE)
        self.observers.close(0)
        self.observers.report(report_of(self.step + 1, self.lease.epoch))


class FreezeAt:
    """Stops this process right before the operation of a number that changes the file system."""

    def __init__(self, number):
        self.number, self.count = number, 0

    def watched(self, plain):
        def operate(*args, **named):
            self.come()
            return plain(*args, **named)

        return operate

    def opened(self, plain):
        def operate(path, mode="r", *args, **named):
            if set(mode) & set("wax+"):
                self.come()
            return plain(path, mode, *args, **named)

        return operate

    def come(self):
        self.count += 1
        if self.count - 1 == self.number:
            # To this thread: of a process with several another may take it, and this one goes on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def watching(self):
        stack = ExitStack()
        for name in OPERATIONS:
            stack.enter_context(patch.object(os, name, self.watched(getattr(os, name))))
        plain = io.open
        stack.enter_context(patch.object(io, "open", self.opened(plain)))
        stack.enter_context(patch.object(builtins, "open", self.opened(plain)))
        return stack


def live(work, said, number):
    """A process: `work` after an operation has frozen it; what it says and its exit code."""
    freeze, code = FreezeAt(number), 0
    try:
        with freeze.watching():
            work()
        said.put((freeze.count, "all done"))
    except MeshwrightError as error:
        said.put((freeze.count, str(error)))
        code = error.exit_code
    except BaseException:
        said.put((freeze.count, traceback.format_exc()))
        code = 1
    said.close()
    said.join_thread()
    os._exit(code)


class Frozen:
    """A process that has stopped before the operation of a number, if it has so many."""

    def __init__(self, work, number):
        context = multiprocessing.get_context("fork")
        self._said = context.Queue()
        self._process = context.Process(target=live, args=(work, self._said, number))
        self._process.start()
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        self.is_frozen = os.WIFSTOPPED(status)

    def thaw(self):
        """What it said at its end, and its exit code."""
        os.kill(self._process.pid, signal.SIGCONT)
        _, said = self._said.get(timeout=20)
        _, status = os.waitpid(self._process.pid, 0)
        return said, os.waitstatus_to_exitcode(status)

    def close(self):
        if self.is_frozen:
            try:
                os.kill(self._process.pid, signal.SIGKILL)
                os.waitpid(self._process.pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass


def tree(run):
    """All names of a run, and the bytes of its files."""
    return {
        str(path.relative_to(run)): path.read_bytes() if path.is_file() else None for path in sorted(run.rglob("*"))
    }


def begin(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    lease = take(run, OLD)
    training = Training(lease)
    training.take_step()
    training.observers.close(0)
    return lease


def check_frozen(lease, work, number):
    """Freeze `work` of a start before an operation, if it has so many. The next start trains on, then this one thaws."""
    frozen = Frozen(work, number)
    try:
        if not frozen.is_frozen:
            return False
        training = Training(take(lease.run, NEW))
        for _ in range(3):
            training.take_step()
        before = tree(lease.run)
        said, code = frozen.thaw()
        after = tree(lease.run)
        changed = {name for name in before.keys() | after.keys() if before.get(name, "") != after.get(name, "")}
        assert not changed, f"changed by a stale process: {changed}"
        check_end(lease.run, training, said, code)
    finally:
        frozen.close()
    return True


def check_end(run, training, said, code):
    assert code == EXIT_USER, said
    assert "process 22 on n2 since now (job 4, restart 1)" in said
    filled = [Entry("weight/w", Layout((NUMEL,)), torch.zeros(NUMEL))]
    state = load_newest(run / "checkpoints", filled, ALONE)
    assert state == {"step": training.step, "epoch": 2}
    assert torch.equal(filled[0].data, entries(training.step, 2)[0].data)
    rows = [(record["step"], record["loss"]) for record in read_records(run / METRICS_FILE)]
    began = training.step - 3
    assert rows == [(step, 1.0 if step <= began else 2.0) for step in range(1, training.step + 1)]
    training.take_step()


def stale_life(lease):
    """A start that has just taken its lease trains two steps and ends."""
    training = Training(lease)
    training.take_step()
    training.take_step()
    training.end()


# More than there are; `test_every_operation_is_met` says so if that is no longer true.
MOST_OPERATIONS = 140


@pytest.mark.parametrize("first", few_of(range(0, MOST_OPERATIONS, 10), lambda first: first in (20, 50)))
def test_a_start_that_was_frozen_anywhere_changes_nothing_and_names_the_holder(tmp_path, first):
    for number in range(first, first + 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        lease = begin(folder)
        if not check_frozen(lease, lambda lease=lease: stale_life(lease), number):
            break


def test_every_operation_is_met(tmp_path):
    lease = begin(tmp_path)
    frozen = Frozen(lambda: stale_life(lease), MOST_OPERATIONS)
    assert not frozen.is_frozen, "there are more operations than the test before this one freezes"


def find_operation(tmp_path, name):
    """The number of a stale start's first operation of this name that renames a checkpoint."""
    numbers = []

    def look(number, path):
        numbers.extend([number] * (name in str(path)))

    freeze = FreezeAt(-1)
    plain = os.rename

    def rename(source, target, **named):
        look(freeze.count - 1, f"{source} {target}")
        return plain(source, target, **named)

    lease = begin(tmp_path)
    with patch.object(os, "rename", rename), freeze.watching():
        stale_life_alone(lease)
    return numbers[0]


def stale_life_alone(lease):
    training = Training(lease)
    training.take_step()
    training.take_step()


def test_sabotaged_workplaces_that_stay_are_noticed(tmp_path, monkeypatch):
    """Without the fence a rename that a check has allowed before the freeze is made after it."""
    (tmp_path / "counted").mkdir()
    number = find_operation(tmp_path / "counted", "step-00000002")
    monkeypatch.setattr(lease_module, "_fence_older", lambda *args: None)
    lease = begin(tmp_path)
    with pytest.raises(AssertionError, match=r"changed by a stale process|rows ==|exists already"):
        check_frozen(lease, lambda: stale_life(lease), number)


def test_sabotaged_a_lease_that_is_not_checked_before_the_commit_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Lease, "check", lambda lease: None)
    (tmp_path / "counted").mkdir()
    number = find_operation(tmp_path / "counted", "step-00000002")
    lease = begin(tmp_path)
    with pytest.raises(AssertionError, match="process 22 on n2"):
        check_frozen(lease, lambda: stale_life(lease), number)


class Copying:
    """What a start does in the memory of its node."""

    def __init__(self, lease, name):
        self.epoch, shm = lease.epoch, lease.run.parent / "shm"
        shm.mkdir(exist_ok=True)
        self.memory, neighbours = memory_of(lease.run, "n1", shm, lease.epoch), Neighbours(("n1",), 1)
        self.copies = HeldSteps(self.memory, neighbours, ALONE)
        self.held = self.copies.find_start(lease.run, lease.run / "checkpoints").held
        keeper, staging = CopyKeeper(self.memory, neighbours, name, ALONE), StagingMemory(CPU, 1 << 20)
        self.saver = Saver(lease.run / "checkpoints", ALONE, Retention(1), staging, is_async=False, hold=keeper.hold)

    def copy(self, step):
        self.saver.start(step, entries(step, self.epoch), {"step": step}, goal=Goal.MEMORY)


def stale_copies(lease):
    """A start that has just taken its lease holds a step, then another one in its place, and ends."""
    copying = Copying(lease, "old")
    copying.copy(2)
    copying.copy(3)
    copying.copies.leave()


def check_copies(tmp_path, number):
    """As `check_frozen`, of what nodes hold. Both starts are on one node, as where a rank freezes and its node does not."""
    (tmp_path / "run").mkdir(parents=True)
    lease = take(tmp_path / "run", OLD)
    frozen = Frozen(partial(stale_copies, lease), number)
    try:
        if not frozen.is_frozen:
            return False
        training = Copying(take(lease.run, NEW), "new")
        training.copies.clear()
        training.copy(4)
        training.copy(5)
        before = tree(training.memory.place)
        frozen.thaw()
        after = tree(training.memory.place)
        assert list(training.memory.list()) == [HeldName(5, "new")], "changed by a stale process"
        changed = {name for name in before.keys() | after.keys() if before.get(name, "") != after.get(name, "")}
        assert not changed, f"changed by a stale process: {changed}"
    finally:
        frozen.close()
    return True


def check_everywhere(tmp_path):
    """`check_copies` before each operation; how many there are."""
    return next(number for number in range(200) if not check_copies(tmp_path / str(number), number))


def test_a_rank_that_was_frozen_while_it_copied_leaves_what_the_next_start_holds(tmp_path):
    assert check_everywhere(tmp_path) > 10, "copies are made of more operations"


def test_sabotaged_copies_that_all_starts_keep_in_one_place_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(NodeMemory, "place", property(lambda memory: memory.path))
    with pytest.raises(AssertionError, match="changed by a stale process"):
        check_everywhere(tmp_path)


def test_a_damaged_checkpoint_is_set_aside_by_the_newer_start_alone(tmp_path):
    """Frozen before the rename to `.bad`, a stale start must not take the checkpoint that has the name since."""
    lease = begin(tmp_path)
    path = lease.run / "checkpoints" / "step-00000001"
    for number in range(3):
        frozen = Frozen(partial(set_aside, path, lease), number)
        if not frozen.is_frozen:
            break
        lease = take(lease.run, NEW)
        before = tree(lease.run / "checkpoints")
        said, code = frozen.thaw()
        assert code == EXIT_USER
        assert "process 22 on n2" in said
        assert tree(lease.run / "checkpoints") == before
    assert number == 2, "two renames: into the workplace, and out of it"


def test_what_was_committed_before_the_next_start_counts(tmp_path):
    """A save that is frozen after its commit: the next start goes on from there."""
    lease = begin(tmp_path)
    training = Training(lease)
    training.take_step()
    later = Training(take(lease.run, NEW))
    assert later.step == 2
    with pytest.raises(LeaseLost, match="process 22 on n2"):
        training.take_step()


def test_each_rank_checks_before_its_file(tmp_path):
    lease = begin(tmp_path)
    saver = Training(lease).saver

    def overtaken(point):
        if point == "begun":
            take(lease.run, NEW)

    saver._fault = overtaken
    before = tree(lease.run / "checkpoints")
    with pytest.raises(LeaseLost, match="process 22 on n2"):
        saver.start(2, entries(2, 1), {"step": 2})
    after = tree(lease.run / "checkpoints")
    assert {name for name in after if "epoch" not in name} == {name for name in before if "epoch" not in name}
    assert not any("rank-" in name for name in after if "epoch" in name)


def test_epochs_are_taken_once_each_however_many_take_them_at_once(tmp_path):
    """As without locks, or with those of one node only."""
    (tmp_path / "run").mkdir()
    context = multiprocessing.get_context("fork")
    found = context.Queue()

    def race():
        for _ in range(5):
            try:
                found.put(take(tmp_path / "run", OLD).epoch)
            except (LeaseLost, OSError):
                found.put(None)
        found.close()
        found.join_thread()
        os._exit(0)

    racers = [context.Process(target=race) for _ in range(4)]
    for racer in racers:
        racer.start()
    epochs = [found.get(timeout=30) for _ in range(20)]
    for racer in racers:
        racer.join()
    taken = [epoch for epoch in epochs if epoch is not None]
    assert len(set(taken)) == len(taken)
    last = take(tmp_path / "run", NEW)
    assert last.epoch > max(taken)
    assert read_lease(tmp_path / "run") == (last.epoch, NEW)


def test_a_lease_that_cannot_be_read_is_nobodys(tmp_path):
    lease = begin(tmp_path)
    for text in ("", "{}", "[1]", '{"epoch": 1, "who": 2}'):
        (lease.run / "lease").write_text(text)
        with pytest.raises(LeaseLost):
            lease.check()
    (lease.run / "lease").unlink()
    with pytest.raises(LeaseLost):
        lease.check()
    assert take(lease.run, NEW).epoch == 2, "the workplace of epoch 1 is still there"


def test_evidence_on_its_way_stays(tmp_path):
    lease = begin(tmp_path)
    lease.withdraw(lease.run / "checkpoints" / "step-00000001", "step-00000001.bad", lease.run / "checkpoints")
    take(lease.run, NEW)
    assert (lease.run / "checkpoints" / "step-00000001.bad" / "manifest.json").exists()


def test_a_second_launcher_fences_one_whose_lock_was_lost(tmp_path):
    run = RunDirectory.create(tmp_path, "x", "run")
    with run.lock() as first:
        first.write(run.path / "a", b"first")
        (run.path / "lock").unlink()  # as a server of locks does that believes the holder is dead
        with run.lock() as second:
            second.write(run.path / "a", b"second")
            with pytest.raises(LeaseLost, match=f"process {os.getpid()} on"):
                first.write(run.path / "a", b"first again")
            with pytest.raises(LeaseLost):
                run.note_launch([], {}, first)
        assert (run.path / "a").read_bytes() == b"second"
    assert not list(run.path.glob(".epoch-*")), "given back"


def pids_of(folder):
    """Processes that work in a folder, the launcher and its ranks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if process.joinpath("cwd").resolve() == folder and b"framework" in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    return found


def train(folder, *words):
    command = [sys.executable, "-m", "framework", "train", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.grid
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_whole_launch_that_was_frozen_and_lost_its_lock_ends_with_86(tmp_path, ranks):
    """With its lock a second launch is refused within 5 s; without, it goes on, and the first changes nothing."""
    tiny_run.write_corpus(tmp_path / "corpus")
    words = [*tiny_run.RECIPE, "run.id=x", f"launch.ranks={ranks}", "train.steps=2000", "checkpoint.every_steps=20"]
    first = train(tmp_path, *words, "batch.sequences_per_step=2", "batch.sequences_per_microbatch=1")
    run = tmp_path / "runs" / "x"
    frozen = []
    try:
        deadline = time.monotonic() + 120
        while not (run / "checkpoints.json").exists():
            assert first.poll() is None, first.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        frozen = pids_of(tmp_path)
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        assert len(frozen) == (1 if ranks == 1 else 1 + ranks)
        refused = train(tmp_path, "run.id=x")
        said, _ = refused.communicate(timeout=60)
        assert refused.returncode == EXIT_USER
        assert f"is in use by process {first.pid} on" in said
        for name in ("lock", "lock.ranks"):
            (run / name).unlink()
        step = step_of(find_newest(run / "checkpoints").newest)
        second = train(tmp_path, "run.id=x", f"train.steps={step + 30}")
        said, _ = second.communicate(timeout=240)
        assert second.returncode == 0, said
        before = {name: text for name, text in tree(run).items() if not name.startswith("log")}
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        said, _ = first.communicate(timeout=120)
        assert first.returncode == EXIT_USER, said
        assert f"was taken over by process {second.pid} on" in said
        after = {name: text for name, text in tree(run).items() if not name.startswith("log")}
        changed = {name for name in before.keys() | after.keys() if before.get(name, "") != after.get(name, "")}
        assert not changed
    finally:
        for pid in (*frozen, first.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        first.wait()
