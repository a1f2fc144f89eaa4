"""Saves behind training: killed at every point on every rank, under power loss, failing, and while the tensors change."""

import errno
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

from framework import object_store
from framework.checkpoint import folder as checkpoint_folder
from framework.checkpoint import save, staging
from framework.checkpoint.blocks import BlockHashes
from framework.checkpoint.commit import COMMITTED_POINTS, RANK_POINTS, SAVE_POINTS, Retention, list_checkpoints, step_of
from framework.checkpoint.index import BLOCK_BYTES, DamagedCheckpoint
from framework.checkpoint.load import load_checkpoint, load_newest
from framework.checkpoint.save import CPU, Saver
from framework.checkpoint.staging import Entry, StagedFile, StagingMemory
from framework.checkpoint.storage import DirectFile
from framework.comm.communicator import Communicator
from framework.comm.transfer import Moment
from framework.errors import CheckpointError
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from tests.faults.saving_ranks import EVERY, STEPS, WORLD, Death, train
from tests.grid import few_of

ALONE = Communicator(Axis("world", 1, 0))
WHENS = ("at once", "next step", "next due")


def deaths():
    """Every point of each rank at each time: before a save has its bytes, no update runs and no next save is due."""
    for rank, points in enumerate((SAVE_POINTS, RANK_POINTS)):
        for point in points:
            early = SAVE_POINTS.index(point) < SAVE_POINTS.index("staged")
            yield from (Death(rank, point, when) for when in WHENS if not (early and when == "next due"))


def run_ranks(folder, death=None, is_whole=True, root=None):
    """Both ranks, each a process of its own: exit codes, and what each has returned. root: of the checkpoints, if elsewhere."""
    context = multiprocessing.get_context("fork")
    found, rendezvous = context.Queue(), folder / f"rendezvous-{len(os.listdir(folder))}"
    rendezvous.parent.mkdir(exist_ok=True)

    def body(rank):
        found.put((rank, train(rank, rendezvous, root or folder / "checkpoints", death, is_whole)))
        found.close()
        found.join_thread()
        os._exit(0)  # as ranks end: past Python's teardown, which waits for the thread that saves

    ranks = [context.Process(target=body, args=(rank,)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    codes = [process.exitcode for process in ranks]
    return codes, dict(found.get(timeout=5) for code in codes if code == 0)


def check_death(folder, death, is_whole=True, root=None):
    """The rank dies, the other ends, and a resume goes on from whole steps, at most one interval back, to the known end."""
    codes, _ = run_ranks(folder, death, is_whole, root)
    assert codes[death.rank] == -signal.SIGKILL
    assert codes[1 - death.rank] not in (0, None, -signal.SIGKILL)
    codes, found = run_ranks(folder, root=root)
    assert codes == [0, 0]
    [began] = {step for step, _ in found.values()}
    assert all(is_right for _, is_right in found.values())
    if death.rank == 0:
        assert began == (death.step if death.point in COMMITTED_POINTS else death.step - EVERY)
    else:  # rank 0 may commit without it, and then even the next
        assert began in (death.step - EVERY, death.step)


@pytest.mark.parametrize(
    "death",
    few_of(
        deaths(),
        lambda death: death in (Death(0, "writing", "next step"), Death(1, "written", "next due")),
    ),
    ids=lambda death: f"rank {death.rank} {death.point} {death.when}",
)
def test_a_rank_that_is_killed_in_a_save_loses_at_most_one_interval(tmp_path, death):
    check_death(tmp_path, death)


@pytest.mark.grid
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("point", ["staging", "writing", "gathered"])
def test_in_the_last_save_for_which_all_wait(tmp_path, rank, point):
    check_death(tmp_path, Death(rank, point, "at once", step=STEPS))


@pytest.mark.grid
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("point", ["staging", "writing", "written"])
def test_where_memory_is_short_as_well(tmp_path, rank, point):
    check_death(tmp_path, Death(rank, point, "next step"), is_whole=False)


def one_entry(step, numel=5_000):
    return [Entry("weight/w", Layout((numel,)), torch.arange(numel, dtype=torch.float32) + step)]


def loaded(root):
    """The step of the newest checkpoint, None without one; all of it is seen to be of that step."""
    filled = [Entry(entry.name, entry.layout, torch.zeros_like(entry.data)) for entry in one_entry(0)]
    state = load_newest(root, filled, ALONE)
    if state is None:
        return None
    assert torch.equal(filled[0].data, one_entry(state["step"])[0].data), "values of another step"
    return state["step"]


def open_saver(root, is_whole=True, **options):
    memory = StagingMemory(CPU, 1 << 30 if is_whole else 0, segment_bytes=1 << 12)
    return Saver(root, ALONE, Retention(1), memory, **options)


class Blocked:
    """A save that stops at a point until it is let go on."""

    def __init__(self, point):
        self._point, self.has_come, self.may_go_on = point, threading.Event(), threading.Event()

    def __call__(self, point):
        if point == self._point:
            self.has_come.set()
            assert self.may_go_on.wait(20)


def check_changing_tensors(root, is_whole):
    """Training changes its tensors as soon as it may, while their bytes are on the way."""
    saver = open_saver(root, is_whole)
    for step in (1, 2, 3):
        entries = one_entry(step)
        saver.start(step, entries, {"step": step})
        saver.wait_until_staged()
        entries[0].data.zero_()
    saver.finish()
    assert loaded(root) == 3


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_saved_is_what_the_tensors_were_when_the_save_began(tmp_path, is_whole):
    check_changing_tensors(tmp_path / "checkpoints", is_whole)


@pytest.mark.parametrize("is_whole", [True, False])
def test_sabotaged_a_loop_that_does_not_wait_for_staging_is_noticed(tmp_path, monkeypatch, is_whole):
    plain = StagedFile._fill

    def fill_late(*args):
        time.sleep(0.2)
        yield from plain(*args)

    monkeypatch.setattr(StagedFile, "_fill", fill_late)
    monkeypatch.setattr(Saver, "wait_until_staged", lambda saver: None)
    with pytest.raises(AssertionError, match="values of another step"):
        check_changing_tensors(tmp_path / "checkpoints", is_whole)


def test_training_goes_on_while_a_save_is_written_and_the_next_one_waits(tmp_path, capsys):
    root, fault = tmp_path / "checkpoints", Blocked("written")
    saver = open_saver(root, fault=fault)
    saver.start(1, one_entry(1), {"step": 1})
    saver.wait_until_staged()
    assert fault.has_come.wait(20)
    assert list_checkpoints(root) == []
    threading.Timer(0.3, fault.may_go_on.set).start()
    before = saver.stalled_s
    saver.start(2, one_entry(2), {"step": 2})
    assert saver.stalled_s - before > 0.2
    assert "step 2 is due while that of step 1 is still being written" in capsys.readouterr().err
    saver.start(3, one_entry(3), {"step": 3})
    saver.finish()
    assert capsys.readouterr().err == "", "said once"
    assert loaded(root) == 3


class FailingSaves:
    """A file system without room, for so many saves."""

    def __init__(self, *steps, number=errno.ENOSPC):
        self.steps, self.number, self.count = steps, number, 0

    def __call__(self, point):
        self.count += point == "planned"
        if point == "writing" and self.count in self.steps:
            raise OSError(self.number, os.strerror(self.number))


def test_a_save_that_fails_is_said_and_tried_again_with_the_next(tmp_path, capsys):
    root, ended = tmp_path / "checkpoints", []
    saver = open_saver(root, fault=FailingSaves(2, 3), max_failures=3, on_end=lambda *each: ended.append(each))
    for step in (1, 2, 3, 4):
        saver.start(step, one_entry(step), {"step": step})
        assert [path.name for path in list_checkpoints(root)] in ([], ["step-00000001"])
    said = capsys.readouterr().err
    assert "step 2 was not saved (1 in a row, 3 end the run); training goes on, and the next save tries again" in said
    assert "no room for a checkpoint" in said
    saver.finish()
    assert (saver.failures, saver.failures_in_a_row, ended) == (2, 0, [(1, True), (2, False), (3, False), (4, True)])
    assert loaded(root) == 4


@pytest.mark.parametrize("is_async", [True, False])
def test_saves_that_fail_in_a_row_end_the_run(tmp_path, is_async):
    root = tmp_path / "checkpoints"
    saver = open_saver(root, fault=FailingSaves(2, 3, 4), max_failures=3, is_async=is_async)
    fails_at = 5 if is_async else 4
    for step in range(1, fails_at):
        saver.start(step, one_entry(step), {"step": step})
    with pytest.raises(CheckpointError, match="no room for a checkpoint"):
        saver.start(fails_at, one_entry(fails_at), {"step": fails_at})
    assert loaded(root) == 1


def test_the_last_save_of_a_run_must_not_fail(tmp_path):
    saver = open_saver(tmp_path / "checkpoints", fault=FailingSaves(2), max_failures=3)
    saver.start(1, one_entry(1), {"step": 1})
    saver.start(2, one_entry(2), {"step": 2}, is_last=True)
    with pytest.raises(CheckpointError, match="no room"):
        saver.finish()
    assert loaded(tmp_path / "checkpoints") == 1


def test_an_error_that_passes_is_written_over_from_what_was_staged(tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,) * 4)
    failures = iter([errno.EIO, errno.ESTALE])

    def fault(point):
        if point == "written" and (number := next(failures, None)):
            raise OSError(number, os.strerror(number))

    root, entries = tmp_path / "checkpoints", one_entry(1)
    saver = open_saver(root, fault=fault)
    saver.start(1, entries, {"step": 1})
    saver.wait_until_staged()
    entries[0].data.zero_()
    saver.finish()
    assert loaded(root) == 1


def test_an_error_that_ends_the_run_waits_for_a_save_under_way_but_not_for_long(tmp_path):
    root, fault = tmp_path / "checkpoints", Blocked("written")
    saver = open_saver(root, fault=fault)
    saver.start(1, one_entry(1), {"step": 1})
    assert fault.has_come.wait(20)
    saver.abandon(patience_s=0.01)
    assert list_checkpoints(root) == []
    fault.may_go_on.set()
    saver.abandon(patience_s=20.0)
    assert loaded(root) == 1


def test_memory_that_is_short_is_said_once(tmp_path, capsys):
    saver = open_saver(tmp_path / "checkpoints", is_whole=False)
    for step in (1, 2):
        saver.start(step, one_entry(step), {"step": step})
    saver.finish()
    assert capsys.readouterr().err.count("updates wait until a checkpoint is written") == 1


def test_another_error_is_raised_where_the_next_save_is_due(tmp_path):
    saver = open_saver(tmp_path, fault=lambda point: {}["no such key"], max_failures=3)
    saver.start(1, one_entry(1), {"step": 1})
    with pytest.raises(KeyError):
        saver.start(2, one_entry(2), {"step": 2})


class ChangedOnTheWay:
    """A file whose writes change a bit of the memory that they are given before it is written."""

    def __init__(self, file):
        self._file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.__exit__(*error)

    def write(self, view):
        if len(view) > 100:
            view[100] ^= 1
        self._file.write(view)

    def __getattr__(self, name):
        return getattr(self._file, name)


def check_changed_memory(root, monkeypatch):
    """Memory that is changed between staging and the disk does not become a checkpoint that looks whole."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "DirectFile", lambda path: ChangedOnTheWay(DirectFile(path)))
        saver = open_saver(root)
        saver.start(1, one_entry(1), {"step": 1})
        saver.finish()
    [path] = list_checkpoints(root)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(path, one_entry(0), ALONE)


def test_bytes_that_change_between_staging_and_the_disk_are_noticed(tmp_path, monkeypatch):
    check_changed_memory(tmp_path / "checkpoints", monkeypatch)


def test_sabotaged_hashes_of_the_file_are_noticed(tmp_path, monkeypatch):
    plain = save.write_file

    def write_then_hash(path, staged, fault):
        plain(path, staged, fault)
        hashes = BlockHashes(BLOCK_BYTES)
        hashes.add(memoryview(path.read_bytes()[: staged.num_bytes]))
        tree, staged.root = hashes.finish()
        with open(path, "r+b") as file:
            file.seek(staged.num_bytes)
            file.write(tree)

    monkeypatch.setattr(save, "write_file", write_then_hash)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_changed_memory(tmp_path / "checkpoints", monkeypatch)


def test_a_layout_that_stays_is_planned_once(tmp_path, monkeypatch):
    plans, plain = [], save.plan_save
    monkeypatch.setattr(save, "plan_save", lambda *args: plans.append(args) or plain(*args))
    saver = open_saver(tmp_path)
    for step, numel in ((1, 50), (2, 50), (3, 60), (4, 60)):
        saver.start(step, one_entry(step, numel), {"step": step})
    saver.finish()
    assert len(plans) == 2
    filled = one_entry(0, 60)
    load_newest(tmp_path, filled, ALONE)
    assert torch.equal(filled[0].data, one_entry(4, 60)[0].data)


def test_staging_takes_memory_once_and_no_more_than_it_may(monkeypatch):
    entries, moment = one_entry(0, 100_000), Moment(CPU)
    for max_bytes, most in ((1 << 20, 400_000), (300_000, 2 * 4096)):
        memory = StagingMemory(CPU, max_bytes, segment_bytes=4096)
        for _ in range(3):
            staged = StagedFile(entries, memory, moment)
            staged.stage()
            assert sum(map(len, staged.views())) >= 400_000
        assert memory.num_bytes == most
    more = StagedFile(one_entry(0, 100_001), StagingMemory(CPU, 1 << 20, segment_bytes=1 << 19), moment)
    for staged in (StagedFile(one_entry(0, 10), more._memory, moment), more):
        staged.stage()
        assert sum(map(len, staged.views())) >= staged.num_bytes
    assert more._memory.num_bytes == 400_004
    monkeypatch.setattr(staging, "free_bytes", lambda: 1000)
    assert StagingMemory(CPU, num_neighbours=2).holds(250)
    assert not StagingMemory(CPU, num_neighbours=2).holds(251)


def test_checkpoints_of_steps_that_keep_every_divides_stay(tmp_path):
    for step in range(1, 8):
        saver = Saver(tmp_path, ALONE, Retention(keep=2, keep_every=3))
        saver.start(step, one_entry(step), {"step": step})
        saver.finish()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [7, 6, 3]
