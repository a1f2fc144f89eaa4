"""Places that a recipe names for a run: whether they can be written to, and errors of the file system in words."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.checkpoint.storage import CHECKPOINTS, KEY, POINTER, find_probe_error
from framework.errors import RunError
from framework.files import PRIVATE, write_file
from framework.object_store import LASTING, ObjectPath, open_place, storage_error

RUN_ROOT = "run.root"
# Errors of a file system without file locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def place_checkpoints(run: Path, root: str | None) -> None:
    """Note in a new run's folder where its checkpoints lie, as checkpoint.root says: a link to a folder, or a file with a URL.
    Called before anybody takes the run's lease, which has a workplace there."""
    link, pointer = run / CHECKPOINTS, run / POINTER
    place = None if root is None else open_place(root)
    with explain_errors(link):
        pointer.unlink(missing_ok=True)
        if link.is_symlink():
            link.unlink()
        if isinstance(place, ObjectPath):
            write_file(pointer, f"{place / run.name}\n".encode(), PRIVATE)
        elif place is not None:
            target = place.expanduser().absolute() / run.name
            target.mkdir(parents=True, exist_ok=True)
            if link.is_dir():
                link.rmdir()
            link.symlink_to(target)


def refuse_unreachable(root: str | None, key: str = KEY) -> None:
    """Raises RunError where `root`, which `key` of the recipe says, cannot be written to: it tries, and leaves nothing."""
    place = None if root is None else open_place(root, key=key)
    if isinstance(place, Path):
        refuse_unwritable(place.expanduser(), key)
    elif place is not None and (problem := find_probe_error(place)) is not None:
        raise RunError(
            f"{key}={root}: an object cannot be written there, read and removed ({problem}). Is the bucket there, are the"
            " credentials and the endpoint in the environment or in fsspec's configuration? docs/checkpoint.md"
        )


def refuse_unwritable(root: Path, key: str = RUN_ROOT) -> None:
    """Raises RunError where no folder can be made below `root`, which `key` of the recipe says. It tries, for permissions do not
    tell on every file system, and leaves nothing: data is prepared first, which may take hours. A missing root is not made:
    two launchers that begin at once would remove it under each other."""
    place = next(each for each in (root.absolute(), *root.absolute().parents) if each.exists())
    if not place.is_dir():
        raise RunError(f"{key}={root}: {place} is no folder. Set {key} to a folder of yours")
    with explain_errors(root, key):
        Path(tempfile.mkdtemp(prefix=".try-", dir=place)).rmdir()


@contextmanager
def explain_errors(path: Path, key: str = RUN_ROOT) -> Iterator[None]:
    """Turn an OSError of writing at `path`, which `key` of the recipe says, into a RunError where only the user can mend it, else
    into a StorageError: a job that an EIO or a stale handle has ended is started again."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"no room at {place} ({error.strerror}): free space, or set {key} to a larger disk"
            ) from error
        if error.errno in LASTING or error.errno in NO_LOCKS:
            raise RunError(f"cannot write at {place} ({error.strerror}): set {key} to a folder of yours") from error
        raise storage_error(error, "use", Path(place)) from error
