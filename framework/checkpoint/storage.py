"""A file system that fails for a moment: work on it is tried again, and an error that stays ends the rank, not the checkpoint.

A file server that restarts, a stale NFS handle or a full table of descriptors says nothing of the bytes on the disk. Only what
was read can be damaged (`DamagedCheckpoint`); what could not be read is a StorageError, and the next start tries it again.
"""

import errno
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from framework.errors import StorageError

T = TypeVar("T")

# Seconds before each further attempt, growing: a failover of a file server takes seconds, a lost packet much less.
PAUSES_S = (0.1, 0.5, 2.0, 8.0)

# Errors that waiting does not mend. They pass as they are: the caller knows what they mean.
LASTING = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.ENOTEMPTY,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EFBIG,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
    }
)


def retry(work: Callable[[], T], doing: str, path: object, sleep: Callable[[float], None] = time.sleep) -> T:
    """The result of `work`, which is called again after each of `PAUSES_S` while it raises an OSError that may pass.

    `work` begins afresh at each call: it opens the file itself, because a stale handle stays stale. doing: for messages, such as
    "read"; path: of what, a Path or an ObjectPath. Raises StorageError when the last attempt fails too, and at once an OSError
    whose errno is in LASTING.
    """
    for pause_s in PAUSES_S:
        try:
            return work()
        except OSError as error:
            if error.errno in LASTING:
                raise
            words = f"cannot {doing} {path}: {error_text(error)}; trying again in {pause_s:g} s"
            print(words, file=sys.stderr, flush=True)
        sleep(pause_s)
    try:
        return work()
    except OSError as error:
        if error.errno in LASTING:
            raise
        raise storage_error(error, doing, path, attempts=len(PAUSES_S) + 1) from error


def read(work: Callable[[], T], path: object, sleep: Callable[[float], None] = time.sleep) -> T:
    """`retry` for work that reads: FileNotFoundError passes, for the caller to judge; every other error is a StorageError."""
    try:
        return retry(work, "read", path, sleep)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, "read", path) from error


def storage_error(error: OSError, doing: str, path: object, attempts: int = 1) -> StorageError:
    """The StorageError for an error of the file system."""
    tried = f" ({attempts} attempts)" if attempts > 1 else ""
    look = "the file system (is it mounted, is its server up?), at the disk, and at `ulimit -n`"
    if "://" in str(path):
        look = "the object store: does this node reach it, with this endpoint and these credentials?"
    return StorageError(
        f"cannot {doing} {path}: {error_text(error)}{tried}. Nothing was renamed or removed, and the next start tries again. Look"
        f" at {look}"
    )


def error_text(error: OSError) -> str:
    """`EIO, Input/output error` for an OSError."""
    name = errno.errorcode.get(error.errno or 0, "")
    text = error.strerror or str(error) or os.strerror(error.errno or 0)
    return f"{name}, {text}" if name else text
