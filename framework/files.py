"""Small files of a run or a store: whole and durable under their names, or not there; what is found damaged is named.

    write   beside the name -> fsync -> rename -> fsync of the folder

Without the first fsync a power loss may leave an empty file under the new name, without the second the old file or none.
Inside a workplace of a lease the rename to the final name is the lease's (lease.py), which syncs that folder.
"""

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

# The mode of a file that only the user reads: it may have values of launch.environment.
PRIVATE = 0o600


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of writing or syncing, which knows descriptors only."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def unfinished_path(path: Path) -> Path:
    """The name under which a long file is written before it appears under `path`."""
    return path.with_name(path.name + ".unfinished")


@contextmanager
def write_atomically(path: Path, mode: int = 0o666, unfinished: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a file that appears under `path` when the block ends well, and not at all otherwise.

    An OSError (full disk, quota) leaves with the path in it and takes the unfinished file away. unfinished: the name until then;
    None: that of `unfinished_path`, for writers that exclude one another.
    """
    unfinished = unfinished or unfinished_path(path)
    try:
        with name_errors(path):
            # One that a killed process has left would keep the mode that it was made with.
            unfinished.unlink(missing_ok=True)
            with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
            sync(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def create_file(path: Path, data: bytes) -> None:
    """Write a file whose name nobody reads yet; durable on return, but for the name."""
    with name_errors(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a small file whole; processes and threads that do so at once replace each other's, and never mix."""
    made = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with write_atomically(path, mode, made) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON, equal bytes for equal values. For writers that exclude one another."""
    with write_atomically(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def sync(path: Path) -> None:
    """Make the bytes of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make a folder durable that others have filled, before it gets its name."""
    for path in (*folder.rglob("*"), folder):
        with name_errors(path):
            sync(path)


def try_lock(file: int | TextIO) -> bool:
    """Whether the lock of an open file could be had for this process, without a wait."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
