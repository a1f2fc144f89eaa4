"""Saves that are killed or run out of disk, at each moment of the commit: what was committed before is never lost."""

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys

import pytest
import torch

from framework.checkpoint.commit import COMMITTED_POINTS, SAVE_POINTS, Retention, list_checkpoints
from framework.checkpoint.load import load_newest
from framework.checkpoint.save import CPU, Saver
from framework.checkpoint.staging import Entry, StagingMemory
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.errors import CheckpointError
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis, Topology
from tests.grid import IN_TURN
from tests.saving import save_checkpoint

pytestmark = IN_TURN

ALONE = Communicator(Axis("world", 1, 0))
NUMEL = 70_000


def entries(step):
    return [
        Entry(f"weight/{number}", Layout((NUMEL,)), torch.full((NUMEL,), step + 0.25 * number)) for number in range(3)
    ]


def save(root, step, fault=lambda point: None):
    """In segments that are staged all at once."""
    memory = StagingMemory(CPU, 1 << 30, segment_bytes=1 << 17)
    saver = Saver(root, ALONE, Retention(1), memory, is_async=False, fault=fault)
    saver.start(step, entries(step), {"step": step})
    saver.finish()


def load(root):
    """The step of the newest checkpoint, once every element is seen to be that step's."""
    filled = [Entry(entry.name, entry.layout, torch.zeros_like(entry.data)) for entry in entries(0)]
    state = load_newest(root, filled, ALONE)
    if state is None:
        return None
    for entry, expected in zip(filled, entries(state["step"]), strict=True):
        assert torch.equal(entry.data, expected.data), entry.name
    return state["step"]


def save_and_die(root, step, point):
    def die(passed):
        if passed == point:
            os.kill(os.getpid(), signal.SIGKILL)

    save(root, step, die)


def in_child(body, *args):
    """Run `body` in a forked process; its exit code."""
    process = multiprocessing.get_context("fork").Process(target=body, args=args)
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_save_that_is_killed_leaves_a_whole_checkpoint(tmp_path, point):
    save(tmp_path, 1)
    assert in_child(save_and_die, tmp_path, 2, point) == -signal.SIGKILL
    assert load(tmp_path) == (2 if point in COMMITTED_POINTS else 1)
    save(tmp_path, 3)
    assert load(tmp_path) == 3
    assert os.listdir(tmp_path) == ["step-00000003"]


@pytest.mark.parametrize("point", SAVE_POINTS[: -len(COMMITTED_POINTS)])
def test_first_save_that_is_killed_leaves_no_checkpoint(tmp_path, point):
    assert in_child(save_and_die, tmp_path, 1, point) == -signal.SIGKILL
    assert load(tmp_path) is None


def save_in_pair(rank, root, rendezvous):
    """Two ranks; the second is killed in the middle of its file."""
    mesh = connect(Topology(dp=2), torch.device("cpu"), f"file://{rendezvous}", rank, timeout_s=30)
    layout = Layout((NUMEL,), interval=(rank * NUMEL // 2, (rank + 1) * NUMEL // 2))
    halves = [Entry(entry.name, layout, entry.data[: NUMEL // 2].clone()) for entry in entries(2)]

    def die(point):
        if rank == 1 and point == "writing":
            os.kill(os.getpid(), signal.SIGKILL)

    save_checkpoint(root, 2, halves, {"step": 2}, mesh.axis("world"), 1, die)


def test_rank_that_is_killed_in_a_save_leaves_the_former_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    save(root, 1)
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=save_in_pair, args=(rank, root, tmp_path / "rendezvous")) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert ranks[1].exitcode == -signal.SIGKILL
    assert ranks[0].exitcode == 1
    assert load(root) == 1


@contextlib.contextmanager
def small_disk(folder, num_bytes):
    """A file system of its own; skips the test where mounting is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_disk_known_to_be_too_small_is_an_error_before_writing(tmp_path):
    with small_disk(tmp_path / "disk", 5 << 19) as disk:
        save(disk, 1)
        with pytest.raises(
            CheckpointError, match=rf"no room for a checkpoint in {disk}: it needs 1,888,688 bytes, [\d,]+ are free"
        ):
            save(disk, 2)
        assert os.listdir(disk) == ["step-00000001"]
        assert load(disk) == 1


@pytest.mark.parametrize("point", ["begun", "writing", "gathered", "indexed"])
def test_disk_that_fills_up_during_a_save_leaves_the_former_checkpoint(tmp_path, point):
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        save(disk, 1)
        ballast = disk / "ballast"

        def fill(passed):
            if passed == point and not ballast.exists():
                with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass

        with pytest.raises(
            CheckpointError, match=rf"no room for a checkpoint in {disk}.*needs 1,888,688 bytes, [\d,]+ are free"
        ):
            save(disk, 2, fill)
        assert [path.name for path in disk.iterdir() if path != ballast] == ["step-00000001"]
        assert load(disk) == 1
        ballast.unlink()
        save(disk, 2)
        assert load(disk) == 2


def save_with_small_files_only(root):
    resource.setrlimit(resource.RLIMIT_FSIZE, (NUMEL, NUMEL))
    try:
        save(root, 2)
    except CheckpointError as error:
        sys.exit(0 if "File too large" in str(error) else 3)


def test_file_size_limit_is_an_error_that_leaves_the_former_checkpoint(tmp_path):
    save(tmp_path, 1)
    assert in_child(save_with_small_files_only, tmp_path) == 0
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert load(tmp_path) == 1


def test_folder_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"cannot save a checkpoint in {tmp_path}/file/checkpoints"):
        save(tmp_path / "file" / "checkpoints", 1)
