"""The places that a recipe names for a run: whether they can be written to, and what the file system says against it in words."""

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from framework.checkpoint.storage import KEY, LASTING, find_probe_error, open_place, storage_error
from framework.errors import RunError
from framework.launch.remote import URL_FILE
from framework.recipe.place_rules import RUN_ROOT

# A file system without file locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def refuse_unreachable(root: str | None, key: str = KEY) -> None:
    """Raises RunError where `root`, which `key` of the recipe says, is a place that cannot be written to: it tries, and leaves
    nothing."""
    place = None if root is None else open_place(root, key=key)
    if isinstance(place, Path):
        refuse_unwritable(place.expanduser(), key)
    elif place is not None and (problem := find_probe_error(place)) is not None:
        raise RunError(
            f"{key}={root}: an object cannot be written there, read and removed ({problem}). Is the bucket there, are the"
            " credentials and the endpoint in the environment or in fsspec's configuration? docs/checkpoint.md"
        )


def refuse_unwritable(root: Path, key: str = RUN_ROOT) -> None:
    """Raises RunError where no run can be made below `root`, which `key` of the recipe says. It tries, for what permissions say
    does not hold on every file system, and leaves nothing: data is prepared first, which may take hours. A root that is not there
    is not made: two launchers that begin at once would remove it under each other."""
    place = next(each for each in (root.absolute(), *root.absolute().parents) if each.exists())
    if not place.is_dir():
        raise RunError(f"{key}={root}: {place} is no folder. Set {key} to a folder of yours")
    with explain_errors(root, key):
        Path(tempfile.mkdtemp(prefix=".try-", dir=place)).rmdir()


def find_key(path: Path) -> str:
    """The key of the recipe that says where a run directory is."""
    return "run.work" if (path / URL_FILE).exists() else RUN_ROOT


@contextmanager
def explain_errors(path: Path, key: str | None = None) -> Iterator[None]:
    """What the file system says against writing at `path`: a RunError where only the user can mend it, else a StorageError, for
    a job that an EIO or a stale handle has ended is to be started again."""
    try:
        yield
    except OSError as error:
        place, key = error.filename or path, key or find_key(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"no room at {place} ({error.strerror}): free space, or set {key} to a larger disk"
            ) from error
        if error.errno in LASTING or error.errno in NO_LOCKS:
            raise RunError(f"cannot write at {place} ({error.strerror}): set {key} to a folder of yours") from error
        raise storage_error(error, "use", Path(place)) from error
