"""Where checkpoints lie: a folder of the file system, or an object store that fsspec knows (s3://, gs://, abfs://, ...).

    RUN/checkpoints             a folder, or a link to one on another disk
    RUN/checkpoints.url         in its place: the URL below which an object store has the checkpoints

What is read of a checkpoint is read alike from both: a `Place` is a `pathlib.Path` or an `ObjectPath`, which has the few of its
methods that readers use. How a checkpoint gets its name differs, and is in folder.py and object_folder.py.
"""

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from framework.checkpoint.storage import read
from framework.errors import CheckpointError, MeshwrightError

CHECKPOINTS = "checkpoints"
POINTER = "checkpoints.url"
KEY = "checkpoint.root"

# A reader fetches an object in pages of the size of a block of data, so that a block is one request and never two.
PAGE_BYTES = 1 << 20
# Pages that a reader holds, of them as many on their way at once as it is told of ahead (blocks.AHEAD_BYTES); the rest are the
# index's, of which each is read again and again.
MAX_PAGES = 32
FETCHES_AT_ONCE = 8


class ObjectStatus(NamedTuple):
    """What `ObjectPath.stat` tells."""

    st_size: int


@dataclass(frozen=True, order=True)
class ObjectPath:
    """The URL of an object, or of a prefix that stands for a folder. run: the run whose checkpoints lie there, None where nobody
    asks. key: of the recipe, which says where. Its methods raise OSError with an errno, whatever the store's library raises."""

    url: str
    run: Path | None = field(default=None, compare=False)
    key: str = field(default=KEY, compare=False)

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
        store, key = self.open()
        with as_os_errors():
            return bool(store.exists(key))

    def is_dir(self) -> bool:
        return bool(self.list())

    def stat(self) -> ObjectStatus:
        store, key = self.open()
        with as_os_errors():
            return ObjectStatus(int(store.info(key)["size"]))

    def list(self) -> dict[str, int]:
        """Names right below this, with the objects' bytes; -1 for what is a folder. Empty where there is nothing."""
        store, key = self.open()
        with as_os_errors():
            try:
                found = store.ls(key, detail=True)
            except FileNotFoundError:
                return {}
        return {
            each["name"].rstrip("/").rpartition("/")[2]: -1 if each["type"] == "directory" else int(each["size"])
            for each in found
            if each["name"].strip("/") != key.strip("/")
        }

    def read_bytes(self) -> bytes:
        store, key = self.open()
        with as_os_errors():
            return bytes(store.cat_file(key))

    def read_range(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer where the object ends before."""
        store, key = self.open()
        with as_os_errors():
            return bytes(store.cat_file(key, start=start, end=stop))

    def write_bytes(self, data: bytes) -> None:
        """Put the object, as a whole: who reads it sees what was there, or this."""
        store, key = self.open()
        with as_os_errors():
            store.pipe_file(key, data)

    def create(self, num_bytes: int) -> Any:
        """A file to write the object into, which appears when it is closed. num_bytes: about so many will come."""
        store, key = self.open()
        with as_os_errors():
            # A multipart upload of S3 has at most 10,000 parts.
            return store.open(key, "wb", block_size=max(16 << 20, -(-num_bytes // 9000 // PAGE_BYTES) * PAGE_BYTES))

    def unlink(self) -> None:
        """Remove the object, if it is there."""
        store, key = self.open()
        with as_os_errors(), suppress(FileNotFoundError):
            store.rm_file(key)

    def remove_all(self) -> None:
        """Remove all below this."""
        store, key = self.open()
        with as_os_errors(), suppress(FileNotFoundError):
            store.rm(key, recursive=True)

    def open(self) -> tuple[Any, str]:
        """The store and the key in it. Raises CheckpointError, with the fix, where fsspec cannot make the store."""
        import fsspec  # not for those whose checkpoints lie in a folder

        try:
            # Listings of a former moment would hide what others have put since.
            return fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"{self.key}: {self.url} cannot be opened: {error}") from error


Place = Path | ObjectPath


@contextmanager
def as_os_errors() -> Iterator[None]:
    """What a store's library raises as an OSError with an errno, which says what may pass. Libraries have errors of their own,
    and not all of them are OSErrors."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            error.errno = _errno_of(error)
        raise
    except MeshwrightError:
        raise
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


def _errno_of(error: OSError) -> int:
    kinds = {
        FileNotFoundError: errno.ENOENT,
        FileExistsError: errno.EEXIST,
        PermissionError: errno.EACCES,
        TimeoutError: errno.ETIMEDOUT,
    }
    return next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EIO)


def is_url(text: str) -> bool:
    """Whether a place is named by a URL: of another protocol than file."""
    return "://" in text and not text.startswith("file://")


def open_place(text: str, run: Path | None = None, key: str = KEY) -> Place:
    """A folder for a path or a file:// URL, else an object store's. Nothing is looked at."""
    return ObjectPath(text.rstrip("/"), run, key) if is_url(text) else Path(text.removeprefix("file://"))


def checkpoints_of(run: Path) -> Place:
    """Where the checkpoints of the run at `run` lie. Raises StorageError."""
    pointer = run / POINTER
    try:
        return open_place(read(pointer.read_text, pointer).strip(), run)
    except FileNotFoundError:
        return run / CHECKPOINTS


def sizes_in(path: Place) -> Callable[[str], int]:
    """The bytes of the files in a folder, by name. Asking raises FileNotFoundError or KeyError for what is not there."""
    if isinstance(path, ObjectPath):
        return read(path.list, path).__getitem__  # of all at once: a request for each would take its time
    return lambda name: read((path / name).stat, path / name).st_size


def find_probe_error(root: ObjectPath) -> str | None:
    """Why no run can keep checkpoints below `root`, None if it can. It writes an object, reads it and removes it."""
    probe = root / f".try-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        probe.write_bytes(b"try")
        found = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None if found == b"try" else f"{probe} has other bytes than were put there"


class ObjectReader:
    """An object that is read in parts, by pages of which several are on their way at once."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(FETCHES_AT_ONCE, "fetch")
        self._pages: dict[int, Future[bytes]] = {}

    def __del__(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, start: int, num_bytes: int) -> None:
        """Have these bytes fetched, and do not wait."""
        for number in range(start // PAGE_BYTES, -(-(start + num_bytes) // PAGE_BYTES)):
            self._fetch(number)

    def read(self, into: memoryview, start: int, afresh: bool) -> None:
        """Fill `into` from byte `start` on. OSError where the object ends before that, or the store fails. afresh: asked of the
        store once more."""
        if afresh:
            self._pages.clear()
        filled = 0
        while filled < len(into):
            number, offset = divmod(start + filled, PAGE_BYTES)
            try:
                page = self._fetch(number).result()[offset : offset + len(into) - filled]
            except OSError:
                self._pages.pop(number, None)
                raise
            if not page:
                raise OSError(errno.ESTALE, f"{self._path} ends at byte {start + filled}")
            into[filled : filled + len(page)] = page
            filled += len(page)

    def _fetch(self, number: int) -> "Future[bytes]":
        page = self._pages.pop(number, None)
        if page is None:
            first = number * PAGE_BYTES
            page = self._threads.submit(self._path.read_range, first, first + PAGE_BYTES)
        self._pages[number] = page  # the last one in the order of the dict: the others go first
        if len(self._pages) > MAX_PAGES:
            self._pages.pop(next(iter(self._pages))).cancel()
        return page
