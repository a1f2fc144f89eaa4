"""Errors of the file system that pass, and those that do not."""

import errno

import pytest

from framework import object_store
from framework.errors import EXIT_FAILED, StorageError
from framework.object_store import retry


def failing(times, number):
    """Work that raises `number` so many times, then returns how often it was called."""
    calls = []

    def work():
        calls.append(None)
        if len(calls) <= times:
            raise OSError(number, "said the file system")
        return len(calls)

    return work


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.EAGAIN])
def test_work_that_fails_for_a_moment_is_done_again_after_growing_pauses(tmp_path, capsys, number):
    pauses = []
    assert retry(failing(3, number), "read", tmp_path, pauses.append) == 4
    assert pauses == sorted(pauses) == list(object_store.PAUSES_S[:3])
    assert f"cannot read {tmp_path}: {errno.errorcode[number]}, said the file system" in capsys.readouterr().err


def test_an_error_that_stays_is_a_storage_error_that_is_tried_again_by_the_job(tmp_path):
    pauses = []
    with pytest.raises(StorageError, match=r"cannot read .*: EIO, said the file system \(5 attempts\)") as caught:
        retry(failing(99, errno.EIO), "read", tmp_path, pauses.append)
    assert caught.value.exit_code == EXIT_FAILED
    assert str(tmp_path) in str(caught.value)
    assert pauses == list(object_store.PAUSES_S)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_an_error_that_waiting_does_not_mend_comes_at_once_and_as_it_is(tmp_path, number):
    with pytest.raises(OSError, match="said the file system") as caught:
        retry(failing(1, number), "write", tmp_path, pytest.fail)
    assert caught.value.errno == number
