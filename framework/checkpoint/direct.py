"""A new file that is written past the system's page cache, straight from where its bytes are staged.

A checkpoint is written once and read after a failure, if ever. Through the page cache the kernel would copy all of it, in time
that training wants (0.7 s of CPU for 512 MiB on one machine, 0.02 s without), drop what the cache held, and then hold the
writer up while it writes pages back (20 s for 0.7 s there, on a busy machine).

O_DIRECT says nothing of durability: that is `sync`'s, as for any file.
"""

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

import numpy as np

# What memory, place and size of a direct write must be multiples of: a page, which no disk's blocks exceed.
ALIGNMENT = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
# Of the flag or of a direct write: by a file system that has none, or for memory that a driver has mapped.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)


class DirectFile:
    """A new file, written from first to last: direct while the file system takes it and memory, place and size are multiples of
    ALIGNMENT, through the page cache from there on. Raises FileExistsError where there is one."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._place = 0
        self.is_direct = False
        self._choose(is_direct=bool(O_DIRECT))

    def __enter__(self) -> "DirectFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, view: memoryview) -> None:
        """All of the view."""
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
        """Durable on return."""
        os.fsync(self._descriptor)

    def _write(self, view: memoryview) -> int:
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            # Some file systems take the flag and refuse the write.
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
    """Where the bytes of a contiguous view are in memory."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
