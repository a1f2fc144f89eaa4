"""Token stores in an object store (`data.root=s3://bucket/tokens`): small files mirrored to each node, tokens read by blocks
through a cache on the node's disk.

    URL/STORE/                   as in a folder (store.py); store.json is put last
    TMPDIR/meshwright-USER/tokens-KEY/
        STORE/                   on each node the same folder without train.tokens, validation.tokens and which are trained
        blocks-N                 N slots of a block of those each, the bound of the disk that the cache takes
        blocks-N.index           for each slot the checksum of the block in it, and when it was last used

What a run reads next follows from its cursor, so the loader asks for exactly these blocks some seconds before it reads them. A
block is verified against its checksum wherever it comes from. `prepare` makes a store in the mirror as in any folder, puts it
file by file, and then removes the tokens here: killed at any moment, it goes on when called again on this node.

The cache is shared by the node's processes without a lock: nothing that is in it is believed. A block is asked for by its
checksum, and a reader copies a slot and hashes the copy. So bytes that another process replaces at that moment, that a kill has
left half written, or that lie under a wrong entry of the index are blocks that are not there, and are fetched again. Of the slots
to which a block may go the least recently used makes room.
"""

import fcntl
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import xxhash

from framework.data.join import hold_lock, is_tokenized
from framework.data.store import (
    BLOCK_BYTES,
    CHECKSUMS_FILE,
    COUNTS_FILE,
    LEFT_OUT,
    StoreMeta,
    damaged_size,
    describe_block,
    hash_block,
    hash_blocks,
)
from framework.data.tokenize import INFO_FILE
from framework.errors import DamagedStore, DataError, StorageError
from framework.files import name_errors, write_atomically
from framework.object_store import ObjectPath, Upload, is_url, read, retry
from framework.recipe.schema import Data

KEY = "data.root"
GIB = 1 << 30
# Files of a store that stay where they are. The document ends are 8 bytes a document.
LARGE = (".tokens", ".trained")
COPY_BYTES = 16 << 20
FETCHES_AT_ONCE = 16
# Blocks of a file that are on their way, or have come and wait to be read: 64 MiB.
MAX_PENDING = 1024
# A request that hangs longer than the library's own limits is an error.
WAIT_S = 300.0
# Slots to one of which a block may go.
WAYS = 16
ENTRY = np.dtype([("hash", np.uint64), ("used_ns", np.int64)])


@dataclass(frozen=True)
class Root:
    """`data.root` as a node sees it. A value: what rank 0 has found is opened on every node below a folder of its own."""

    text: str
    """A folder or a URL, in the words of the recipe."""
    cache_gb: float = 0.0

    @classmethod
    def of(cls, data: Data) -> "Root":
        return cls(data.root, data.cache_gb)

    @cached_property
    def url(self) -> ObjectPath | None:
        """None for a folder."""
        return ObjectPath(self.text.rstrip("/"), key=KEY) if is_url(self.text) else None

    @property
    def folder(self) -> Path:
        """The folder of the stores on this node. DataError if another user has it."""
        # Not cached: the value would take this node's folder along to others.
        if self.url is None:
            return Path(self.text.removeprefix("file://"))
        user = Path(tempfile.gettempdir(), f"meshwright-{os.getuid()}")
        folder = user / f"tokens-{xxhash.xxh3_64_hexdigest(self.url.url.encode())}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if user.is_symlink() or user.stat().st_uid != os.getuid():
            raise DataError(
                f"{user}: another user's, and what is read from {KEY}={self.text} is to be kept there. Set TMPDIR"
            )
        return folder

    def list(self, stem: str) -> list[Path]:
        """The stores of this stem that are complete, or can be completed without their files; their small files are here then."""
        names = {path.name for path in self.folder.glob(f"{stem}-*")}
        if self.url is not None:
            names |= {name for name in read(self.url.list, self.url) if name.startswith(f"{stem}-")}
        for name in names:
            self.pull(name)
        return [folder for folder in (self.folder / name for name in sorted(names)) if is_tokenized(folder)]

    def pull(self, name: str) -> None:
        """Bring the small files of a store and its tokenizer to this node, if the store is complete in the object store."""
        self._mirror(name, "store.json", _list_small)
        if self.url is not None and (meta := StoreMeta.read(self.folder / name)) is not None:
            self.pull_tokenizer(meta.tokenizer_folder)

    def pull_tokenizer(self, name: str) -> None:
        """Bring a kept tokenizer to this node, if it is there."""
        self._mirror(name, INFO_FILE, lambda folder: list(json.loads((folder / INFO_FILE).read_bytes())["files"]))

    def _mirror(self, name: str, first: str, list_others: Callable[[Path], Sequence[str]]) -> None:
        """Bring a folder to this node, if its file `first` is there, which says what else it has. A missing file is missed by who
        reads it. Processes of a node wait for one."""
        folder, made = self.folder / name, self.folder / f".{name}.pulled"
        if self.url is None or (folder / first).exists():
            return
        with hold_lock(folder):
            if (folder / first).exists():
                return
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            if _download(self.url / name / first, made / first):
                for each in list_others(made):
                    _download(self.url / name / each, made / each)
                shutil.rmtree(folder, ignore_errors=True)  # what an interrupted `prepare` of this node has left
                made.rename(folder)
            else:
                made.rmdir()

    def push(self, folder: Path) -> None:
        """Put a store that was made here into the object store, store.json last, and remove its tokens from this node. For a
        process that holds the store's lock. DataError where it cannot be put."""
        if self.url is None or not self.is_pending(folder):
            return
        meta = StoreMeta.read(folder)
        assert meta is not None, "it is whole"
        kept = sorted((self.folder / meta.tokenizer_folder).iterdir(), key=lambda path: path.name == INFO_FILE)
        made = sorted(folder.iterdir(), key=lambda path: path.name == "store.json")
        for path in (*kept, *made):
            try:
                _upload(path, self.url / path.parent.name / path.name)
            except (OSError, StorageError) as error:
                raise DataError(f"{KEY}={self.text}: tokens cannot be put there. {error}") from error
        for path in made:
            if path.suffix in LARGE:
                path.unlink()

    def is_pending(self, folder: Path) -> bool:
        """Whether a store was made on this node and has not been put yet."""
        return self.url is not None and (folder / "train.tokens").exists()

    def open(self) -> "RemoteReader | None":
        """A reader of tokens in the object store, for this node; None for a folder, where they are mapped."""
        return (
            None
            if self.url is None
            else RemoteReader(self.url.share(), NodeCache(self.folder, int(self.cache_gb * GIB)))
        )


def pull_small(store: ObjectPath, folder: Path) -> None:
    """Copy a store without its tokens to a folder."""
    if _download(store / "store.json", folder / "store.json"):
        for name in _list_small(folder):
            _download(store / name, folder / name)


def hash_object(path: ObjectPath, num_bytes: int) -> Iterator[int]:
    """The hash of each block of a store's file. DamagedStore if it has not so many bytes."""
    size = read(path.read_size, path) if read(path.exists, path) else None
    if size != num_bytes:
        raise damaged_size(path, num_bytes, size)
    for start in range(0, num_bytes, COPY_BYTES):
        data = read(partial(path.read_range, start, min(start + COPY_BYTES, num_bytes)), path)
        yield from hash_blocks(np.frombuffer(data, np.uint8))


def _list_small(folder: Path) -> list[str]:
    """The files of a store that a node keeps whole, by its store.json in `folder`."""
    meta = StoreMeta.read(folder)
    assert meta is not None, "it is there"
    files = [name for name, (_, length) in meta.list_files().items() if length and Path(name).suffix not in LARGE]
    return [*files, COUNTS_FILE, CHECKSUMS_FILE, LEFT_OUT]


def _download(path: ObjectPath, into: Path) -> bool:
    """Copy an object to a file, which appears whole. False if there is none."""
    try:
        # Asked for first: behind an object's end there is no range to ask for, and a range that is cut short is no end.
        size = read(path.read_size, path)
        with write_atomically(into) as file:
            while (start := file.tell()) < size:
                data = read(partial(path.read_range, start, min(start + COPY_BYTES, size)), path)
                if not data:
                    break  # another, shorter object by now: whoever reads the file misses its end
                file.write(data)
    except FileNotFoundError:
        return False
    return True


def _upload(path: Path, to: ObjectPath) -> None:
    """Put a file as an object, which appears whole."""

    def put() -> None:
        with open(path, "rb") as file, Upload(to, os.fstat(file.fileno()).st_size) as upload:
            while data := file.read(COPY_BYTES):
                upload.write(memoryview(data))
            upload.sync()

    retry(put, "write", to)


class RemoteReader:
    """Opens files of stores below a URL: with the threads that fetch, and the node's cache."""

    def __init__(self, url: ObjectPath, cache: "NodeCache") -> None:
        self.url, self.cache = url, cache
        self.threads = ThreadPoolExecutor(FETCHES_AT_ONCE, "fetch")
        weakref.finalize(self, self.threads.shutdown, wait=False, cancel_futures=True)

    def open(self, store: str, name: str, file: tuple[np.dtype, int], hashes: np.ndarray) -> "RemoteFile":
        return RemoteFile(self, self.url / store / name, file, hashes)


class RemoteFile:
    """A file of a store in an object store. A slice of it is a verified copy of its elements: [n] of `dtype`."""

    def __init__(self, reader: RemoteReader, path: ObjectPath, file: tuple[np.dtype, int], hashes: np.ndarray) -> None:
        """file: dtype and number of elements; hashes: of its blocks."""
        self._reader, self._path, self._hashes = reader, path, hashes
        self.dtype, self._length = file
        self._pending: dict[int, Future[bytes]] = {}  # by block, the oldest first
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(self._length)
        if start >= stop:
            return np.empty(0, self.dtype)
        blocks = self.ask(start, stop)
        data = b"".join(self._wait(block) for block in blocks)
        return np.frombuffer(data, self.dtype, stop - start, start * self.dtype.itemsize - blocks[0] * BLOCK_BYTES)

    def ask(self, start: int, stop: int) -> range:
        """Start to fetch elements [start, stop), and do not wait. Returns their blocks."""
        first, last = (place * self.dtype.itemsize // BLOCK_BYTES for place in (start, stop - 1))
        with self._lock:
            for block in range(first, last + 1):
                if block not in self._pending:
                    self._pending[block] = self._reader.threads.submit(self._load, block)
            # Blocks that were fetched and never read, because a run went back, must not stay.
            for block in list(self._pending)[: max(0, len(self._pending) - MAX_PENDING)]:
                self._pending.pop(block).cancel()
        return range(first, last + 1)

    def _wait(self, block: int) -> bytes:
        with self._lock:
            future = self._pending.pop(block, None)
        try:
            return self._load(block) if future is None else future.result(WAIT_S)
        except TimeoutError as error:
            raise StorageError(
                f"{KEY}: {self._path} has not answered for {WAIT_S:.0f} s. Look at the object store; the next start tries again"
            ) from error

    def _load(self, block: int) -> bytes:
        """A block, verified. DamagedStore if the store has other bytes, StorageError if it does not answer."""
        hash, start = int(self._hashes[block]), block * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, self._length * self.dtype.itemsize)
        if (data := self._reader.cache.get(hash, stop - start)) is not None:
            return data
        for _ in range(2):  # an answer may be cut short
            try:
                data = read(lambda: self._path.read_range(start, stop), self._path)
            except FileNotFoundError as error:
                raise damaged_size(self._path, self._length * self.dtype.itemsize, None) from error
            except StorageError as error:
                raise StorageError(f"{KEY}: {error}") from error
            if len(data) == stop - start and hash_block(np.frombuffer(data, np.uint8)) == hash:
                self._reader.cache.put(hash, data)
                return data
        raise DamagedStore(describe_block(self._path, block))


class NodeCache:
    """A cache of blocks in a folder, at most `num_bytes` of disk."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        """DataError where the disk has no room for it."""
        ways = min(WAYS, max(1, num_bytes // (BLOCK_BYTES + ENTRY.itemsize)))
        num_sets = max(1, num_bytes // (ways * (BLOCK_BYTES + ENTRY.itemsize)))
        path = folder / f"blocks-{num_sets * ways}"
        for other in set(folder.glob("blocks-*[0-9]")) - {path}:
            _remove_unused(other)
        self._file = _open_sized(path, num_sets * ways * BLOCK_BYTES)
        index_path = path.with_name(f"{path.name}.index")
        index_file = _open_sized(index_path, num_sets * ways * ENTRY.itemsize)
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


def _open_sized(path: Path, num_bytes: int) -> int:
    """Open a file of a size, which keeps what it has. Its bytes take disk once they are written."""
    with name_errors(path):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)  # as long as it is open: `_remove_unused`
        missing = num_bytes - os.fstat(file).st_blocks * 512
        if missing > (free := shutil.disk_usage(path.parent).free):
            os.close(file)
            raise DataError(
                f"data.cache_gb: a cache of {num_bytes:,} bytes at {path} may need {missing:,} more, and {free:,} are free there."
                f" Lower data.cache_gb, or set TMPDIR to a larger disk of the node"
            )
        os.ftruncate(file, num_bytes)
    return file
