"""A bounded cache of blocks on a node's disk, shared by its processes without a lock: nothing that is in it is believed.

    blocks-N          N slots of a block each, the bound of the disk it takes
    blocks-N.index    for each slot the checksum of the block in it, and when it was last used

A block is asked for by its checksum, which the token store knows (store.py). A reader copies a slot and hashes the copy. So bytes
that another process replaces at that moment, that a kill has left half written, or that lie under a wrong entry of the index are
blocks that are not there, and are fetched again. A block may go to one of WAYS slots, chosen by its checksum: of these the least
recently used makes room.
"""

import fcntl
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from framework.data.store import BLOCK_BYTES, hash_block
from framework.errors import DataError
from framework.files import name_errors

WAYS = 16
ENTRY = np.dtype([("hash", np.uint64), ("used_ns", np.int64)])
KEY = "data.cache_gb"


class NodeCache:
    """The cache in a folder, at most `num_bytes` of disk."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """DataError where the disk has no room for it."""
        ways = min(WAYS, max(1, num_bytes // (BLOCK_BYTES + ENTRY.itemsize)))
        num_sets = max(1, num_bytes // (ways * (BLOCK_BYTES + ENTRY.itemsize)))
        path = folder / f"blocks-{num_sets * ways}"
        for other in set(folder.glob("blocks-*[0-9]")) - {path}:
            _remove_unused(other)
        self._file = _make(path, num_sets * ways * BLOCK_BYTES)
        index_path = path.with_name(f"{path.name}.index")
        index_file = _make(index_path, num_sets * ways * ENTRY.itemsize)
        with name_errors(index_path):
            # A page of a map for which the disk has no room would end the process.
            os.posix_fallocate(index_file, 0, num_sets * ways * ENTRY.itemsize)
        os.close(index_file)
        self._index = np.memmap(index_path, ENTRY, "r+", shape=(num_sets, ways))
        self._path, self._is_writable = path, True

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def get(self, hash: int, num_bytes: int) -> bytes | None:
        """The block with this checksum, None where it is not there."""
        number, entries = self._entries(hash)
        for way in np.flatnonzero(entries["hash"] == hash):
            data = os.pread(self._file, num_bytes, (number * len(entries) + int(way)) * BLOCK_BYTES)
            if len(data) == num_bytes and hash_block(np.frombuffer(data, np.uint8)) == hash:
                entries["used_ns"][way] = time.time_ns()
                return data
        return None

    def put(self, hash: int, data: bytes) -> None:
        """Keep a block in place of the least recently used one of its slots. A disk that fails costs the cache, not the run."""
        if not self._is_writable:
            return
        number, entries = self._entries(hash)
        known = np.flatnonzero(entries["hash"] == hash)
        way = int(known[0]) if len(known) else int(np.argmin(entries["used_ns"]))
        try:
            os.pwrite(self._file, data, (number * len(entries) + way) * BLOCK_BYTES)
        except OSError as error:
            self._is_writable = False
            print(
                f"caution  {self._path}: {error.strerror}. Blocks are no longer kept there", file=sys.stderr, flush=True
            )
        entries[way] = (hash, time.time_ns())

    def _entries(self, hash: int) -> tuple[int, np.ndarray]:
        """The number of a block's set of slots, and their part of the index: a view of [ways]."""
        number = hash % len(self._index)
        return number, self._index[number]


def _remove_unused(path: Path) -> None:
    """Remove a cache of another size, which would come on top of this one's, unless a process still uses it."""
    with suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.index").unlink(missing_ok=True)


def _make(path: Path, num_bytes: int) -> int:
    """Open a file of a size, which keeps what it has. Its bytes take disk once they are written."""
    with name_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)  # as long as it is open: `_remove_unused`
        missing = num_bytes - os.fstat(file).st_blocks * 512
        if missing > (free := shutil.disk_usage(path.parent).free):
            os.close(file)
            raise DataError(
                f"{KEY}: a cache of {num_bytes:,} bytes at {path} may need {missing:,} more, and {free:,} are free there. Lower"
                f" {KEY}, or set TMPDIR to a larger disk of the node"
            )
        os.ftruncate(file, num_bytes)
    return file
