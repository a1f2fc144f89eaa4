"""Objects of a store that fsspec knows (s3://, gs://, abfs://, http:// ...) and paths of a file system, with retries.

Both are read alike: a `Place` is a `pathlib.Path` or an `ObjectPath`, which has those of its methods that readers use.

Storage may fail for a moment: a file server restarts, an NFS handle is stale, the table of descriptors is full. This says nothing
about the bytes on the disk, so work is retried, and an error that stays ends the rank as a StorageError, which the next start
tries again.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from framework.errors import MeshwrightError, RecipeError, StorageError

T = TypeVar("T")

# Seconds before each further attempt, growing: a failover of a file server takes seconds, a lost packet much less.
PAUSES_S = (0.1, 0.5, 2.0, 8.0)
# Errors that waiting does not mend. They are raised at once, as they are: the caller knows what they mean.
LASTING = frozenset(
    getattr(errno, name)
    for names in ("ENOENT EEXIST ENOTEMPTY ENOTDIR EISDIR ENAMETOOLONG", "ENOSPC EDQUOT EFBIG EACCES EPERM EROFS")
    for name in names.split()
)
MIB = 1 << 20


def retry(work: Callable[[], T], doing: str, path: object, sleep: Callable[[float], None] = time.sleep) -> T:
    """Return the result of `work`, which is called again after each of `PAUSES_S` while it raises an OSError that may pass.

    `work` begins afresh at each call: it opens the file itself, because a stale handle stays stale. doing: for messages, such as
    "read"; path: a Path or an ObjectPath, for messages. Raises StorageError when the last attempt fails too, and at once an
    OSError whose errno is in LASTING.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return work()
        except OSError as error:
            if error.errno in LASTING:
                raise
            if pause_s is None:
                raise storage_error(error, doing, path, attempts=len(PAUSES_S) + 1) from error
            words = f"cannot {doing} {path}: {error_text(error)}; trying again in {pause_s:g} s"
            print(words, file=sys.stderr, flush=True)
        sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def read(work: Callable[[], T], path: object) -> T:
    """`retry` for work that reads: FileNotFoundError is raised for the caller to judge; every other error is a StorageError."""
    try:
        return retry(work, "read", path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(error, "read", path) from error


def storage_error(error: OSError, doing: str, path: object, attempts: int = 1) -> StorageError:
    """The StorageError for an error of the file system or the object store."""
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


@dataclass(frozen=True, order=True)
class ObjectPath:
    """The URL of an object, or of a prefix that stands for a folder.

    Its methods raise OSError with an errno, whatever the store's library raises, and RecipeError if fsspec cannot make the
    store.
    """

    url: str
    run: Path | None = field(default=None, compare=False)
    """The run whose checkpoints lie there, if known."""
    key: str = field(default="checkpoint.root", compare=False)
    """The recipe's key for the URL."""
    shared: Any = field(default=None, compare=False, repr=False)
    """The opened store, of `share`."""

    def share(self) -> "ObjectPath":
        """This path, and those made of it, with one opened store for all threads of this process. fsspec opens one for each
        thread, which takes S3's library a second of CPU."""
        with self._open() as (store, _):
            return replace(self, shared=store)

    def __truediv__(self, name: str) -> "ObjectPath":
        return replace(self, url=f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        return replace(self, url=self.url.rpartition("/")[0])

    def with_name(self, name: str) -> "ObjectPath":
        return self.parent / name

    def exists(self) -> bool:
        with self._open() as (store, key):
            return bool(store.exists(key))

    def is_dir(self) -> bool:
        return bool(self.list())

    def list(self) -> dict[str, int]:
        """Names right below this, with the objects' bytes; -1 for a folder. Empty if there is nothing."""
        with self._open() as (store, key):
            try:
                found = store.ls(key, detail=True)
            except FileNotFoundError:
                return {}
        return {
            each["name"].rstrip("/").rpartition("/")[2]: -1 if each["type"] == "directory" else int(each["size"])
            for each in found
            if each["name"].strip("/") != key.strip("/")
        }

    def read_size(self) -> int:
        """The object's bytes."""
        with self._open() as (store, key):
            return int(store.size(key))

    def read_bytes(self) -> bytes:
        with self._open() as (store, key):
            return bytes(store.cat_file(key))

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer if the object ends before."""
        with self._open() as (store, key):
            return bytes(store.cat_file(key, start=start, end=stop))

    def write_bytes(self, data: bytes) -> None:
        """Put the object atomically: readers see the old object or the new one."""
        with self._open() as (store, key):
            store.pipe_file(key, data)

    def create(self, num_bytes: int) -> Any:
        """A file to write the object into, which appears when it is closed. num_bytes: its expected size."""
        with self._open() as (store, key):
            # A multipart upload of S3 has at most 10,000 parts.
            return store.open(key, "wb", block_size=max(16 << 20, -(-num_bytes // 9000 // MIB) * MIB))

    def unlink(self) -> None:
        """Remove the object, if it is there."""
        with self._open() as (store, key), suppress(FileNotFoundError):
            store.rm_file(key)

    def remove_all(self) -> None:
        """Remove everything below this."""
        with self._open() as (store, key), suppress(FileNotFoundError):
            store.rm(key, recursive=True)

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, str]]:
        """The store and the key in it, for a block whose errors become OSErrors."""
        if self.shared is not None:
            with as_os_errors():
                yield self.shared, self.shared._strip_protocol(self.url)
            return
        import fsspec  # only runs with checkpoints or data in a store need it

        try:
            # Cached listings would hide what others have put since.
            store, key = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise RecipeError(f"{self.key}: {self.url} cannot be opened: {error}") from error
        with as_os_errors():
            yield store, key


Place = Path | ObjectPath


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Turn every error of a store's library into an OSError with an errno, by which `retry` knows errors that may pass. Libraries
    have errors of their own, and not all of them are OSErrors."""
    kinds = {FileNotFoundError: errno.ENOENT, FileExistsError: errno.EEXIST, PermissionError: errno.EACCES}
    kinds |= {TimeoutError: errno.ETIMEDOUT}
    try:
        yield
    except OSError as error:
        if error.errno is None:
            error.errno = next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EIO)
        raise
    except MeshwrightError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def is_url(text: str) -> bool:
    """Whether a place is given as a URL of another protocol than file."""
    return "://" in text and not text.startswith("file://")


def open_place(text: str, run: Path | None = None, key: str = "checkpoint.root") -> Place:
    """The Place for a path, a file:// URL or an object store's URL. Nothing is accessed."""
    return ObjectPath(text.rstrip("/"), run, key) if is_url(text) else Path(text.removeprefix("file://"))


class Upload:
    """A new object, which appears as a whole when it is synced, and not at all after an error."""

    def __init__(self, path: ObjectPath, num_bytes: int) -> None:
        self._file = path.create(num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        # Closing the file, as the garbage collector does, would put what was written so far.
        with suppress(Exception), as_os_errors():
            self._file.discard()
        with suppress(AttributeError):
            self._file.closed = True

    def write(self, view: memoryview) -> None:
        with as_os_errors():
            self._file.write(view)

    def sync(self) -> None:
        with as_os_errors():
            self._file.close()
