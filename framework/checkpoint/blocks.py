"""Files that are verified block by block: a tree of hashes follows the data, and its root verifies all of it.

    level 0     the data, in blocks of `block_bytes`; the last may be shorter
    level 1     the xxh3 of each block of level 0, 8 bytes little-endian each
    level 2     the xxh3 of each block of level 1, and so on, until a level is one block
    root        the xxh3 of that block; kept elsewhere

A reader of a range reads its blocks and the blocks of hashes above them, and nothing else. With blocks of 1 MiB one block of
hashes is enough for 128 GB; with blocks of 4 KiB each level is 1/512 of the one below.
"""

import errno
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from weakref import finalize

import numpy as np
import xxhash

from framework.checkpoint.storage import ObjectReader
from framework.errors import CheckpointError
from framework.object_store import ObjectPath, Place, read

HASH = np.dtype("<u8")

# Path, level and number of a block.
Key = tuple[Place, int, int]

GONE_HERE = "the rank that opened the checkpoint has seen the file whole"

# Bytes that the disk is asked for ahead of the reader, in calls that the kernel handles as one request each. A reader of single
# blocks waits for a round trip to the disk for each.
AHEAD_BYTES = 16 << 20
ADVISED_BYTES = 1 << 20

# Files open at once: the index and the files that are read with it.
MAX_DESCRIPTORS = 4


class DamagedCheckpoint(CheckpointError):
    """The files are not those that were saved: missing, cut or changed. An older checkpoint may still be whole.

    block: the block whose hash is wrong, by which another reader can confirm the damage.
    """

    block: Key | None = None


def level_sizes(num_bytes: int, block_bytes: int) -> list[int]:
    """Bytes of each level of a file with `num_bytes` of data; their sum is the file's size."""
    assert block_bytes >= 2 * HASH.itemsize and block_bytes % HASH.itemsize == 0, block_bytes  # noqa: PT018
    sizes = [num_bytes]
    while sizes[-1] > block_bytes:
        sizes.append(_num_blocks(sizes[-1], block_bytes) * HASH.itemsize)
    return sizes


class BlockHashes:
    """The hash tree of a stream of bytes."""

    def __init__(self, block_bytes: int) -> None:
        self.size = 0
        self._block_bytes = block_bytes
        self._done: list[int] = []
        self._block = xxhash.xxh3_64()

    def add(self, view: memoryview) -> None:
        """Append these bytes to the stream."""
        while view:
            chunk = view[: self._block_bytes - self.size % self._block_bytes]
            self._block.update(chunk)
            self.size += len(chunk)
            if self.size % self._block_bytes == 0:
                self._cut()
            view = view[len(chunk) :]

    def finish(self) -> tuple[bytes, int]:
        """End the stream. Returns the tree of hashes, which follows the stream in its file, and the root."""
        if self.size % self._block_bytes or self.size == 0:
            self._cut()
        if len(self._done) == 1:
            return b"", self._done[0]
        level = np.array(self._done, HASH).tobytes()
        above = BlockHashes(self._block_bytes)
        above.add(memoryview(level))
        levels, root = above.finish()
        return level + levels, root

    def _cut(self) -> None:
        self._done.append(self._block.intdigest())
        self._block.reset()


class BlockCache:
    """A cache of the blocks that a reader has read last, of all its files: at most `max_bytes`, or one block if that is more.

    num_bytes: held now; most_bytes: ever held.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = self.most_bytes = 0
        self.files = OpenFiles()
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[Key, np.ndarray] = OrderedDict()

    def find(self, key: Key) -> np.ndarray | None:
        """The block of a key, if it is still held."""
        if key in self._blocks:
            self._blocks.move_to_end(key)
        return self._blocks.get(key)

    def hold(self, key: Key, num_bytes: int, fill: Callable[[np.ndarray], None]) -> np.ndarray:
        """Hold a new block, uint8 [num_bytes], once `fill` has filled it."""
        spare = None
        while self._blocks and self.num_bytes + num_bytes > self._max_bytes:
            spare = self._blocks.popitem(last=False)[1]
            self.num_bytes -= spare.nbytes
        # A dropped block is reused: new memory would cost a page fault every 4 KiB.
        block = spare if spare is not None and spare.nbytes == num_bytes else np.empty(num_bytes, np.uint8)
        fill(block)
        self._blocks[key] = block
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        return block


class OpenFiles:
    """The few files that were read last, kept open: opening a file is what costs a file server most."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[Place, _Descriptor | ObjectReader] = OrderedDict()
        self._expected: dict[Place, deque[tuple[int, int]]] = {}

    def expect(self, path: Place, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce that bytes [start, stop) of a file will be read soon, in this order: the disk is asked for them ahead."""
        self._expected[path] = deque(ranges)

    def read(self, path: Place, into: np.ndarray, start: int, *, afresh: bool = False) -> None:
        """Fill `into` from byte `start` of a file on. afresh: not from the system's page cache.

        Raises StorageError if the storage keeps failing.
        """
        read(partial(self._read, path, into, start, afresh), path)

    def _read(self, path: Place, into: np.ndarray, start: int, afresh: bool) -> None:
        try:
            descriptor = self._open(path)
            self._ask_ahead(path, descriptor, start)
            descriptor.read(into.data, start, afresh)
        except OSError as error:
            # A stale handle stays stale: the next attempt opens the file again.
            self._descriptors.pop(path, None)
            if isinstance(error, FileNotFoundError):
                raise OSError(errno.ESTALE, GONE_HERE) from error
            raise

    def _ask_ahead(self, path: Place, descriptor: "_Descriptor | ObjectReader", start: int) -> None:
        expected = self._expected.get(path)
        # A block of hashes lies behind all data: reading one says nothing about how far the reader has come.
        if not expected or start > expected[0][0]:
            return
        while expected and expected[0][0] < start + AHEAD_BYTES:
            low, high = expected.popleft()
            if high - low > ADVISED_BYTES:
                expected.appendleft((low + ADVISED_BYTES, high))
            descriptor.ask(low, min(high - low, ADVISED_BYTES))

    def _open(self, path: Place) -> "_Descriptor | ObjectReader":
        if path not in self._descriptors:
            self._descriptors[path] = ObjectReader(path) if isinstance(path, ObjectPath) else _Descriptor(path)
            if len(self._descriptors) > MAX_DESCRIPTORS:
                self._descriptors.popitem(last=False)
        self._descriptors.move_to_end(path)
        return self._descriptors[path]


class BlockFile:
    """The data of a file with a hash tree, each block verified when it is read.

    root: of the tree. Raises DamagedCheckpoint for bytes that are not those that were saved. Presence and size were checked when
    the checkpoint was opened (`verify_sizes`): a file that is gone or short *here* is an error of the file system, because
    another node has just seen it whole.
    """

    def __init__(self, path: Place, num_bytes: int, block_bytes: int, root: int, cache: BlockCache) -> None:
        self.path, self.num_bytes, self.block_bytes = path, num_bytes, block_bytes
        self._root, self._cache = root, cache
        self._sizes = level_sizes(num_bytes, block_bytes)

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return sum(self._sizes)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the data as uint8: a view of a cached block, valid until the next read; a copy if they lie in
        several blocks."""
        first, last = start // self.block_bytes, _num_blocks(stop, self.block_bytes) - 1
        if first >= last:
            return self.block(0, first)[start - first * self.block_bytes : stop - first * self.block_bytes]
        data = np.empty(stop - start, np.uint8)
        for low, high in blocks_between(start, stop, self.block_bytes):
            data[low - start : high - start] = self.read(low, high)
        return data

    def read_into(self, start: int, into: np.ndarray) -> None:
        """Fill `into`, uint8 [n] and contiguous, from byte `start` of the data on. Whole blocks are read into it and verified
        there, others are copied from the cache. After an error, some of `into` is filled."""
        for low, high in blocks_between(start, start + len(into), self.block_bytes):
            index, target = low // self.block_bytes, into[low - start : high - start]
            key = (self.path, 0, index)
            if len(target) == self._block_size(0, index) and self._cache.find(key) is None:
                self._fill(key, low, self._expected(0, index), target)
            else:
                target[:] = self.read(low, high)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce that bytes [start, stop) of the data will be read soon, in this order."""
        self._cache.files.expect(self.path, ranges)

    def verify(self) -> None:
        """Read and verify all data."""
        self.expect([(0, self.num_bytes)])
        for index in range(_num_blocks(self.num_bytes, self.block_bytes)):
            self.block(0, index)

    def block(self, level: int, index: int) -> np.ndarray:
        """A verified block of a level of the tree."""
        key = (self.path, level, index)
        block = self._cache.find(key)
        if block is not None:
            return block
        expected = self._expected(level, index)
        place = sum(self._sizes[:level]) + index * self.block_bytes
        return self._cache.hold(key, self._block_size(level, index), partial(self._fill, key, place, expected))

    def _block_size(self, level: int, index: int) -> int:
        return min(self.block_bytes, self._sizes[level] - index * self.block_bytes)

    def _fill(self, key: Key, place: int, expected: int, block: np.ndarray) -> None:
        # Read twice before it is called damage: bytes that a page cache or a network has spoilt are whole on the disk.
        for afresh in (False, True):
            self._cache.files.read(self.path, block, place, afresh=afresh)
            if xxhash.xxh3_64_intdigest(block.data) == expected:
                return
        where = f"bytes [{place}, {place + len(block)})"
        damage = DamagedCheckpoint(f"{self.path} was changed after it was saved, in {where}")
        damage.block = key
        raise damage

    def _expected(self, level: int, index: int) -> int:
        if level == len(self._sizes) - 1:
            return self._root
        above, place = divmod(index * HASH.itemsize, self.block_bytes)
        return int(self.block(level + 1, above)[place : place + HASH.itemsize].view(HASH)[0])


def blocks_between(start: int, stop: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) at the ends of blocks."""
    while start < stop:
        end = min(stop, (start // block_bytes + 1) * block_bytes)
        yield start, end
        start = end


def _num_blocks(num_bytes: int, block_bytes: int) -> int:
    return -(-num_bytes // block_bytes)


class _Descriptor:
    """A file, open for reading while this object lives."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        finalize(self, os.close, self._number)

    def ask(self, start: int, num_bytes: int) -> None:
        """Ask the system to read these bytes into its cache, and do not wait. Errors do no harm."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._number, start, num_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, into: memoryview, start: int, afresh: bool) -> None:
        """Fill `into` from byte `start` on. OSError if the file ends before that. afresh: not from the page cache."""
        if afresh and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._number, start, len(into), os.POSIX_FADV_DONTNEED)
        filled = 0
        while filled < len(into):
            count = os.preadv(self._number, [into[filled:]], start + filled)
            if count == 0:
                raise OSError(errno.ESTALE, f"the file ends at byte {start + filled} here, and {GONE_HERE}")
            filled += count
