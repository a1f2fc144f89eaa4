"""The file of a rank's offloaded states: `memory.offload.disk_path/RUN_ID/HOST/rank-N`.

It is scratch: checkpoints are the truth. So it is never synced, goes when the run ends, and what a killed run has left is
removed when the run starts again on that host. A lock (flock) tells dead from living: it ends with the process that holds it,
however that ends. HOST is in the path because locks of a shared file system may hold within one host only.

The whole file is allocated at once, so that a full disk is found before the first step. It is read and written past the page
cache (O_DIRECT): a file as large as the states would push everything else out of it, and a copy through it costs a core.
"""

import errno
import fcntl
import os
import re
import shutil
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from mmap import mmap
from pathlib import Path

from framework.errors import OffloadError, RunInUse, StorageError
from framework.files import try_lock

# O_DIRECT wants memory, offsets and lengths in multiples of the device's logical block: 512 or 4096 bytes.
PAGE_BYTES = 4096
KEY = "memory.offload.disk_path"
# File systems that are the host's memory.
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs", "hugetlbfs")
MOUNTS = Path("/proc/self/mounts")
# A rank of an earlier start may need so long to end.
LOCK_WAIT_S = 10.0
LOCK_POLL_S = 0.05

# Errors that another start would meet again, so that only the user can end them.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)


def print_line(line: str) -> None:
    """Write a line for the user to stderr."""
    print(line, file=sys.stderr, flush=True)


def refuse_folder(root: Path, mounts: Path = MOUNTS) -> None:
    """Raise OffloadError where no file of states can be made below `root`: it is no folder, not writable, or in memory.

    Writes nothing. Each rank calls it before it connects.
    """
    kind = file_system_of(root, mounts)
    if not root.is_dir():
        raise OffloadError(
            f"{KEY}={root}: no such folder on {socket.gethostname()}. Make it, or name one on a local disk"
        )
    if kind in MEMORY_FILE_SYSTEMS:
        raise OffloadError(
            f"{KEY}={root} is on a {kind}, which is the memory of {socket.gethostname()}: states there would save none of it, and"
            " cost copies. Set memory.offload.home to host, or name a folder on a disk"
        )
    if not os.access(root, os.W_OK | os.X_OK):
        raise OffloadError(
            f"{KEY}={root}: not writable on {socket.gethostname()}. Name a folder of yours on a local disk"
        )


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str:
    """The type of the file system of `path`, such as ext4; empty where it is not known."""
    try:
        rows = [line.split() for line in mounts.read_text().splitlines()]
    except OSError:
        return ""
    place = path.resolve()
    # The later of two mounts at one place hides the earlier.
    on_way = {Path(_unescape(row[1])): row[2] for row in rows if place.is_relative_to(_unescape(row[1]))}
    return on_way[max(on_way, key=lambda mount: len(mount.parts))] if on_way else ""


def no_room(folder: Path, num_bytes: int, free: int) -> OffloadError:
    """The error for a disk that is too small."""
    return OffloadError(
        f"{KEY}: no room in {folder} on {socket.gethostname()}: this rank's states need {num_bytes / 2**30:.3f} GiB"
        f" ({num_bytes} bytes), and {free / 2**30:.3f} GiB are free. Free space, name a larger disk, lower"
        " memory.offload.optimizer, or shard the states over more ranks (zero.stage)"
    )


class DiskFile:
    """One rank's locked file of `num_bytes`, zero at first, a multiple of PAGE_BYTES. Read and written in whole pages.

    folder: of the run; made where it is missing. name: such as `rank-3`. is_direct: it goes past the page cache; not where the
    file system refuses that, and `say` hears so. Opening it removes what dead processes of this host have left in the folder.
    Raises OffloadError for no room or no right, RunInUse where a living process holds the file, StorageError for other errors.
    """

    def __init__(self, folder: Path, name: str, num_bytes: int, say: Callable[[str], None] = print_line) -> None:
        assert num_bytes % PAGE_BYTES == 0, num_bytes
        self.path, self.num_bytes = folder / socket.gethostname() / name, num_bytes
        self.is_direct = False
        try:
            self._fd = self._open()
        except OSError as error:
            raise self._explain(error, "make") from error
        self._remove = weakref.finalize(self, _remove, self._fd, self.path, os.getpid())
        try:
            self._allocate()
            self._settle_direct(say)
            _remove_dead(self.path)
        except BaseException:
            self.close()
            raise

    def read(self, target: memoryview, offset: int) -> None:
        """Fill `target`, whole pages of aligned memory, from byte `offset` on."""
        self._move(os.preadv, target, offset, "read")

    def write(self, source: memoryview, offset: int) -> None:
        """Write `source`, whole pages of aligned memory, from byte `offset` on."""
        self._move(os.pwritev, source, offset, "write")

    def close(self) -> None:
        """Remove the file, give its lock back, and remove folders that are then empty. Nothing happens the second time; without a
        call it happens when the object goes, or the process ends in any way but a kill."""
        self._remove()

    def _move(self, call: Callable[..., int], memory: memoryview, offset: int, doing: str) -> None:
        done = 0
        while done < len(memory):
            try:
                moved = call(self._fd, [memory[done:]], offset + done)
            except OSError as error:
                raise self._explain(error, doing) from error
            if moved == 0 or (self.is_direct and moved % PAGE_BYTES):
                found = os.fstat(self._fd).st_size
                raise self.damaged(
                    f"{self.num_bytes} bytes were allocated, it has {found}, and a {doing} came out short"
                )
            done += moved

    def damaged(self, what: str) -> StorageError:
        """The error for a file that is not as it was written."""
        return StorageError(
            f"the file of offloaded states, {self.path}, was changed from outside, or its disk lost a write: {what}. It is"
            f" scratch: the checkpoints are untouched, and the next start goes on from the newest. Keep others out of {KEY}"
        )

    def _open(self) -> int:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            # A rank that ended may just remove the folder, which it left empty: it is there and not there within one mkdir.
            with suppress(FileNotFoundError, FileExistsError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # Only the user reads it: it has the weights. Not through a link, which in a shared folder may be of somebody who
                # wants another file cut.
                fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                if _is_locked_at(fd, self.path):
                    return fd
            if time.monotonic() > deadline:
                raise RunInUse(f"{self.path} is held by a living process: a rank of an earlier start has not ended")
            time.sleep(LOCK_POLL_S)

    def _allocate(self) -> None:
        try:
            os.ftruncate(self._fd, 0)
            free = shutil.disk_usage(self.path.parent).free
            if free < self.num_bytes:  # trying would take from others what is left
                raise no_room(self.path.parent, self.num_bytes, free)
            os.posix_fallocate(self._fd, 0, self.num_bytes)
        except OSError as error:
            os.ftruncate(self._fd, 0)  # or what is free would be what this file has left
            raise self._explain(error, "allocate") from error

    def _settle_direct(self, say: Callable[[str], None]) -> None:
        """Go past the page cache where the file system can: some refuse it at once, some when they are first asked to read."""
        with mmap(-1, PAGE_BYTES) as page:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_DIRECT)
                os.preadv(self._fd, [page], 0)
                self.is_direct = True
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise self._explain(error, "read") from error
                fcntl.fcntl(self._fd, fcntl.F_SETFL, 0)
                say(
                    f"{KEY}: the {file_system_of(self.path)} file system of {self.path} has no direct I/O (O_DIRECT): the states"
                    " go through the page cache, which takes memory of the host and a core's time"
                )

    def _explain(self, error: OSError, doing: str) -> OffloadError | StorageError:
        if error.errno in NO_ROOM:
            existing = next(each for each in (self.path, *self.path.parents) if each.exists())
            return no_room(self.path.parent, self.num_bytes, shutil.disk_usage(existing).free)
        text = f"{errno.errorcode.get(error.errno or 0, '')}, {error.strerror or error}"
        what = f"{KEY}: cannot {doing} {self.path} on {socket.gethostname()} ({text})"
        if error.errno in NO_ACCESS:
            return OffloadError(f"{what}. Name a folder of yours on a local disk")
        return StorageError(
            f"{what}. The file is scratch: the checkpoints are untouched, and the next start goes on from the newest. Look at the"
            " disk, or name another"
        )


def _remove(fd: int, path: Path, pid: int) -> None:
    if pid != os.getpid():
        return  # a fork's copy of the object ends
    # Removed while the lock is still held: after that a new file of this name may be another process's.
    with suppress(OSError):
        path.unlink()
    os.close(fd)
    for folder in path.parents[:2]:
        with suppress(OSError):  # other ranks' files are in it
            folder.rmdir()


def _remove_dead(own: Path) -> None:
    """Remove files beside `own` whose processes are dead: of ranks that are gone, or on other hosts now."""
    for path in own.parent.iterdir():
        with suppress(OSError):  # it may go meanwhile
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if path != own and try_lock(fd):
                    path.unlink()
            finally:
                os.close(fd)


def _is_locked_at(fd: int, path: Path) -> bool:
    """Lock the file. Returns whether it is locked and still the one at `path`, else closes it."""
    is_ours = False
    try:
        # Another rank may have removed it before it was locked.
        is_ours = try_lock(fd) and os.path.samestat(os.fstat(fd), os.stat(path))
    finally:
        if not is_ours:
            os.close(fd)
    return is_ours


def _unescape(mount: str) -> str:
    """A mount point as the kernel writes it, with blanks as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount)
