"""Places of checkpoints, and how bytes get there and back: a folder, or the URL of an object store (object_store.py).

    RUN/checkpoints             a folder, or a link to one on another disk
    RUN/checkpoints.url         in its place: the URL below which an object store has the checkpoints

They differ in how a checkpoint gets its name (folder.py). Only bytes that were read can be damaged (`DamagedCheckpoint`).
"""

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path
from types import TracebackType
from typing import Self

from framework.lease import refuse_lost_link
from framework.object_store import ObjectPath, Place, open_place, read

CHECKPOINTS = "checkpoints"
POINTER = "checkpoints.url"
KEY = "checkpoint.root"

# A reader fetches an object in pages of the size of a block of data, so that a block is one request and never two.
PAGE_BYTES = 1 << 20
# Pages that a reader holds. Half of them may be on their way at once (blocks.AHEAD_BYTES); the rest are the index's, each of
# which is read again and again.
MAX_PAGES = 32
FETCHES_AT_ONCE = 8
# Memory, place and size of a direct write must be multiples of a page, which no disk's blocks exceed.
ALIGNMENT = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
# Errors of a file system that does not support the flag or a direct write, or of memory that a driver has mapped.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)


def checkpoints_of(run: Path) -> Place:
    """The place of the checkpoints of the run at `run`. Raises StorageError, also where it is a link to a disk that is not
    mounted: to nobody is that an empty folder."""
    pointer = run / POINTER
    try:
        return open_place(read(pointer.read_text, pointer).strip(), run)
    except FileNotFoundError:
        read(partial(refuse_lost_link, run / CHECKPOINTS), run / CHECKPOINTS)
        return run / CHECKPOINTS


def sizes_in(path: Place) -> Callable[[str], int]:
    """A function from the name of a file in a folder to its bytes. It raises FileNotFoundError or KeyError for a missing file."""
    if isinstance(path, ObjectPath):
        return read(path.list, path).__getitem__  # one listing: a request for each file would take long
    return lambda name: read((path / name).stat, path / name).st_size


def find_probe_error(root: ObjectPath) -> str | None:
    """The reason why no run can keep checkpoints below `root`, None if it can. Writes an object, reads it and removes it."""
    probe = root / f".try-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        probe.write_bytes(b"try")
        found = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return None if found == b"try" else f"{probe} has other bytes than were put there"


class ObjectReader:
    """A reader of ranges of an object, by pages. Several pages are fetched at once."""

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self._threads = ThreadPoolExecutor(FETCHES_AT_ONCE, "fetch")
        self._fetch = lru_cache(MAX_PAGES)(partial(_start_fetch, self._threads, path))

    def __del__(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, start: int, num_bytes: int) -> None:
        """Start to fetch these bytes, and do not wait."""
        for number in range(start // PAGE_BYTES, -(-(start + num_bytes) // PAGE_BYTES)):
            self._fetch(number)

    def read(self, into: memoryview, start: int, afresh: bool) -> None:
        """Fill `into` from byte `start` on. OSError if the object ends before that, or the store fails. afresh: fetch the pages
        again."""
        if afresh:
            self._fetch.cache_clear()
        filled = 0
        while filled < len(into):
            number, offset = divmod(start + filled, PAGE_BYTES)
            try:
                page = self._fetch(number).result()[offset : offset + len(into) - filled]
            except OSError:
                self._fetch.cache_clear()
                raise
            if not page:
                raise OSError(errno.ESTALE, f"{self._path} ends at byte {start + filled}")
            into[filled : filled + len(page)] = page
            filled += len(page)


def _start_fetch(threads: ThreadPoolExecutor, path: ObjectPath, number: int) -> "Future[bytes]":
    return threads.submit(path.read_range, number * PAGE_BYTES, (number + 1) * PAGE_BYTES)


class DirectFile:
    """A new file, written from first to last past the system's page cache, straight from the memory where its bytes are staged.

    A checkpoint is written once and read after a failure, if ever. Through the page cache the kernel would copy all of it, in
    time that training wants (0.7 s of CPU for 512 MiB on one machine, 0.02 s without), drop what the cache held, and then hold
    the writer up while it writes pages back (20 s for 0.7 s there, on a busy machine). O_DIRECT says nothing about durability:
    that is `sync`'s, as for any file.

    Writes are direct while the file system supports it and memory, place and size are multiples of ALIGNMENT, and go through the
    page cache from there on. Raises FileExistsError if the file exists.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._place = 0
        self.is_direct = False
        self._choose(is_direct=bool(O_DIRECT))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, view: memoryview) -> None:
        """Write all of the view."""
        while view:
            count = len(view)
            if self.is_direct:
                count -= count % ALIGNMENT
                if not count or self._place % ALIGNMENT or address(view) % ALIGNMENT:
                    self._choose(is_direct=False)
                    continue
            written = self._write(view[:count])
            self._place += written
            view = view[written:]

    def sync(self) -> None:
        """Make what was written durable."""
        os.fsync(self._descriptor)

    def _write(self, view: memoryview) -> int:
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            # Some file systems accept the flag and refuse the write.
            if error.errno not in REFUSALS or not self.is_direct:
                raise
            self._choose(is_direct=False)
            return 0

    def _choose(self, *, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | O_DIRECT if is_direct else flags & ~O_DIRECT)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            is_direct = False
        self.is_direct = is_direct


def address(view: memoryview) -> int:
    """The address of a contiguous view's bytes."""
    import numpy as np  # commands that only list checkpoints need not wait for it

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
