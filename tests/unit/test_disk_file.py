"""The file of offloaded states: allocated at once, locked while its process lives, gone after that."""

import errno
import fcntl
import gc
import multiprocessing
import os
import signal
import socket
import stat
from mmap import mmap

import pytest

from framework.errors import OffloadError, RunInUse, StorageError
from framework.optim import disk_file
from framework.optim.disk_file import PAGE_BYTES, DiskFile, file_system_of, refuse_folder

NUM_BYTES = 3 * PAGE_BYTES


def page(value=0):
    memory = mmap(-1, PAGE_BYTES)
    memory[:] = bytes([value]) * PAGE_BYTES
    return memory


def test_pages_come_back_and_only_the_user_reads_them(tmp_path):
    file = DiskFile(tmp_path, "rank-0", NUM_BYTES)
    assert file.path == tmp_path / socket.gethostname() / "rank-0"
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    file.write(memoryview(page(7)), PAGE_BYTES)
    found = page()
    for offset, expected in ((0, 0), (PAGE_BYTES, 7), (2 * PAGE_BYTES, 0)):
        file.read(memoryview(found), offset)
        assert found[:] == bytes([expected]) * PAGE_BYTES
    file.close()
    file.close()
    assert not tmp_path.exists()


@pytest.mark.parametrize("refuses_at", ["fcntl", "preadv"])
def test_without_direct_io_it_goes_through_the_page_cache_and_says_so(refuses_at, tmp_path, monkeypatch):
    """Some file systems refuse O_DIRECT when it is set, others when they are asked to read."""
    owner, call, said = (fcntl if refuses_at == "fcntl" else os), None, []
    call = getattr(owner, refuses_at)

    def refuse(fd, *args):
        if refuses_at == "preadv" or os.O_DIRECT in args:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(fd, *args)

    monkeypatch.setattr(owner, refuses_at, refuse)
    file = DiskFile(tmp_path, "rank-0", NUM_BYTES, said.append)
    monkeypatch.undo()
    assert not file.is_direct
    assert not fcntl.fcntl(file._fd, fcntl.F_GETFL) & os.O_DIRECT
    [line] = said
    assert "memory.offload.disk_path" in line
    assert "O_DIRECT" in line
    file.write(memoryview(page(9)), 0)
    found = page()
    file.read(memoryview(found), 0)
    assert found[:] == page(9)[:]
    file.close()


def test_a_disk_that_is_too_small_is_named_before_anything_is_taken(tmp_path):
    needed = 1 << 60
    with pytest.raises(
        OffloadError, match=r"memory\.offload\.disk_path.*need 1073741824\.000 GiB .* GiB are free"
    ) as raised:
        DiskFile(tmp_path / "run", "rank-0", needed)
    assert str(tmp_path / "run") in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_room_that_others_take_meanwhile_is_named_too(number, tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError, match=r"no room in .*12288 bytes"):
        DiskFile(tmp_path / "run", "rank-0", NUM_BYTES)
    assert not list(tmp_path.iterdir())


def test_a_real_disk_that_is_full(tmp_path):
    """All room is allocated before the first step: the second file finds none, and the first is untouched."""
    if os.system(f"mount -t tmpfs -o size=64k none {tmp_path} 2> /dev/null"):
        pytest.skip("mounting a small file system needs root")
    try:
        first = DiskFile(tmp_path / "run", "rank-0", 10 * PAGE_BYTES, lambda line: None)
        first.write(memoryview(page(5)), 0)
        with pytest.raises(OffloadError, match="no room in"):
            DiskFile(tmp_path / "run", "rank-1", 10 * PAGE_BYTES, lambda line: None)
        assert [each.name for each in first.path.parent.iterdir()] == ["rank-0"]
        found = page()
        first.read(memoryview(found), 0)
        assert found[:] == page(5)[:]
        first.close()
    finally:
        os.system(f"umount {tmp_path}")


def test_an_error_of_the_disk_may_pass_and_a_missing_right_does_not(tmp_path, monkeypatch):
    for number, kind in ((errno.EIO, StorageError), (errno.EROFS, OffloadError), (errno.EACCES, OffloadError)):

        def fail(*args, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(kind, match=rf"memory\.offload\.disk_path: cannot allocate .*{errno.errorcode[number]}"):
            DiskFile(tmp_path / "run", "rank-0", NUM_BYTES)
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=r"cannot make .*ENOTDIR"):
        DiskFile(tmp_path / "file", "rank-0", NUM_BYTES)


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("somebody's")
    folder = tmp_path / "scratch" / socket.gethostname()
    folder.mkdir(parents=True)
    (folder / "states").symlink_to(kept)
    with pytest.raises((OffloadError, StorageError), match="states"):
        DiskFile(tmp_path / "scratch", "states", PAGE_BYTES)
    assert kept.read_text() == "somebody's"


def test_a_living_process_keeps_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_file, "LOCK_WAIT_S", 0.1)
    file = DiskFile(tmp_path, "rank-0", NUM_BYTES)
    file.write(memoryview(page(3)), 0)
    with pytest.raises(RunInUse, match="held by a living process"):
        DiskFile(tmp_path, "rank-0", NUM_BYTES)
    other = DiskFile(tmp_path, "rank-1", NUM_BYTES)
    other.close()
    found = page()
    file.read(memoryview(found), 0)
    assert found[:] == page(3)[:]
    assert file.path.exists()
    file.close()


def test_files_of_killed_processes_go_when_the_run_starts_again(tmp_path):
    """Of a rank that is still one, and of one that is not: then there were more ranks, or they are on other hosts now."""
    living = DiskFile(tmp_path, "rank-7", NUM_BYTES)
    context = multiprocessing.get_context("fork")
    here = tmp_path / socket.gethostname()
    for name in ("rank-3", "rank-0"):
        process = context.Process(target=open_and_die, args=(tmp_path, name))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert {each.name for each in here.iterdir()} == {name, "rank-7"}
    file = DiskFile(tmp_path, "rank-0", NUM_BYTES)
    found = page(1)
    file.read(memoryview(found), 0)
    assert not any(found[:]), "what the killed process wrote is gone"
    file.close()
    living.close()
    assert not tmp_path.exists()


def test_a_file_that_nobody_holds_any_more_is_removed(tmp_path):
    """A run that is dropped, as `verify` drops its runs, leaves no file."""
    path = DiskFile(tmp_path / "run", "rank-0", NUM_BYTES).path
    gc.collect()
    assert not path.exists()
    assert not list(tmp_path.iterdir())


def open_and_die(folder, name):
    file = DiskFile(folder, name, NUM_BYTES)
    file.write(memoryview(page(8)), 0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_ranks_that_start_and_end_together_do_not_disturb_one_another(tmp_path):
    """One removes the folder that it left empty while another is about to make its file there."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=open_and_close, args=(tmp_path / "run", f"rank-{number}")) for number in range(4)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0, 0, 0, 0]
    assert not list(tmp_path.iterdir())


def open_and_close(folder, name):
    for _ in range(50):
        file = DiskFile(folder, name, NUM_BYTES)
        assert file.path.exists()
        file.close()


def test_a_folder_that_cannot_hold_the_states_is_refused_by_its_key(tmp_path):
    root, mounts = tmp_path / "a folder", tmp_path / "mounts"
    root.mkdir()
    escaped = str(root).replace(" ", "\\040")
    for kind in ("tmpfs", "ramfs"):
        mounts.write_text(f"/dev/vda / ext4 rw 0 0\nnone {escaped} {kind} rw 0 0\n")
        assert file_system_of(root, mounts) == kind
        with pytest.raises(
            OffloadError, match=rf"memory\.offload\.disk_path=.* is on a {kind}, which is the memory of"
        ):
            refuse_folder(root, mounts)
    mounts.write_text(f"none / tmpfs rw 0 0\n/dev/vda {tmp_path} xfs rw 0 0\n/dev/vdb {root / 'other'} ramfs rw 0 0\n")
    refuse_folder(root, mounts)
    with pytest.raises(OffloadError, match="no such folder on"):
        refuse_folder(tmp_path / "absent", mounts)
    assert not list(root.iterdir())


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    """root may write anywhere, so the answer of the system is given here."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\n")
    with pytest.raises(OffloadError, match="not writable on"):
        refuse_folder(tmp_path, mounts)
