"""A file that is written past the page cache has the bytes that it was given, whatever they are aligned to."""

import errno
import fcntl
import os

import pytest
import torch

from framework.checkpoint import storage as direct
from framework.checkpoint.storage import ALIGNMENT, DirectFile, address
from framework.comm.transfer import segment_on_host

CPU = torch.device("cpu")


def segment(size, seed=0):
    """Bytes to write, staged as a save does."""
    values = segment_on_host(size, CPU)
    values.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return values.numpy().data


def write(path, views):
    """Whether each view was written directly."""
    were_direct = []
    with DirectFile(path) as file:
        for view in views:
            file.write(view)
            were_direct.append(file.is_direct)
        file.sync()
    assert path.read_bytes() == b"".join(map(bytes, views))
    return were_direct


def takes_direct_writes(folder):
    with DirectFile(folder / "probe") as file:
        return file.is_direct


@pytest.mark.parametrize("size", [1, ALIGNMENT - 1, ALIGNMENT, 5 * ALIGNMENT + 77])
def test_a_staged_segment_of_any_size_is_aligned(size):
    view = segment(size)
    assert len(view) == size
    assert address(view) % ALIGNMENT == 0


def test_whole_pages_are_written_directly_and_the_rest_through_the_page_cache(tmp_path):
    if not takes_direct_writes(tmp_path):
        pytest.skip("this file system has no direct writes")
    views = [
        segment(3 * ALIGNMENT, 1),
        segment(2 * ALIGNMENT + 5, 2),
        memoryview(b"a tree of hashes"),
        segment(ALIGNMENT),
    ]
    assert write(tmp_path / "file", views) == [True, False, False, False]


def test_memory_that_is_not_aligned_is_written_as_well(tmp_path):
    views = [segment(2 * ALIGNMENT + 3)[3:], segment(ALIGNMENT), memoryview(b"")]
    assert write(tmp_path / "file", views) == [False, False, False]


def test_a_file_system_that_refuses_the_flag_or_the_write_gets_it_through_the_page_cache(tmp_path, monkeypatch):
    plain_fcntl, plain_write, refused = fcntl.fcntl, os.write, []

    def refuse_flag(descriptor, command, *flags):
        if command == fcntl.F_SETFL and flags[0] & direct.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_fcntl(descriptor, command, *flags)

    def refuse_write(descriptor, view):
        if plain_fcntl(descriptor, fcntl.F_GETFL) & direct.O_DIRECT:
            refused.append(len(view))
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain_write(descriptor, view)

    with monkeypatch.context() as patch:
        patch.setattr(direct.fcntl, "fcntl", refuse_flag)
        assert write(tmp_path / "flag", [segment(2 * ALIGNMENT)]) == [False]
    with monkeypatch.context() as patch:
        patch.setattr(direct.os, "write", refuse_write)
        assert write(tmp_path / "write", [segment(2 * ALIGNMENT), segment(ALIGNMENT)]) == [False, False]
    assert refused in ([2 * ALIGNMENT], [])  # not again for the second


def test_a_short_write_goes_on_where_it_ended(tmp_path, monkeypatch):
    plain = os.write
    monkeypatch.setattr(
        direct.os, "write", lambda descriptor, view: plain(descriptor, view[: max(512, len(view) // 2)])
    )
    write(tmp_path / "file", [segment(8 * ALIGNMENT), segment(100)])


def test_an_error_of_the_disk_is_passed_on(tmp_path, monkeypatch):
    def fail(descriptor, view):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(direct.os, "write", fail)
    with pytest.raises(OSError, match="No space"), DirectFile(tmp_path / "file") as file:
        file.write(segment(ALIGNMENT))


def test_a_file_that_is_there_is_not_overwritten(tmp_path):
    (tmp_path / "file").write_text("former")
    with pytest.raises(FileExistsError):
        DirectFile(tmp_path / "file")
