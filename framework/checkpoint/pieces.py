"""Where the elements of each entry lie: a table of fixed-width records that is searched, never read whole.

A layout is a *cell*, the local tensor that the shards leave, and an interval of it. So every piece is an interval of the
row-major flattened cell, and the pieces of a cell, sorted, follow one another: those that meet a box are neighbours, found by one
search.
The pieces of thousands of ranks cost a reader as many records as it needs and a few more.

    index.bin    FILE x world      the data bytes of each rank's file, and the root of its hash tree
                 PIECE x ...       by entry; within an entry by (cell, start)
                 hash tree         of blocks of INDEX_BLOCK_BYTES: blocks.py
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from framework.checkpoint.blocks import BlockCache, BlockFile
from framework.checkpoint.place import Place
from framework.mesh.box import Box
from framework.mesh.layout import Layout, Shard

INDEX = "index.bin"
# 128 records: one read mostly finds all that a rank needs of an entry.
INDEX_BLOCK_BYTES = 4 << 10

FILE = np.dtype([("num_bytes", "<u8"), ("root", "<u8")])
PIECE = np.dtype([("cell", "<u4"), ("file", "<u4"), ("start", "<u8"), ("stop", "<u8"), ("offset", "<u8")])


@dataclass(frozen=True)
class Piece:
    """A box of an entry, row-major from byte `offset` of the file of rank `file`."""

    box: Box
    file: int
    offset: int


@dataclass(frozen=True)
class EntryRecord:
    """An entry in the checkpoint: global shape, dtype (`float32`), the shards that cut it into cells (of index 0, over unnamed
    axes), and which records of the index are its pieces: `count` of them from number `first` on."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[Shard, ...] = ()
    first: int = 0
    count: int = 0

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        import torch  # numpy has no bf16; who asks which checkpoints there are, as `status` does, waits for neither

        return int(getattr(torch, self.dtype).itemsize)


@dataclass(frozen=True)
class FileRecord:
    """A file with a hash tree: bytes of data, bytes in a block, root."""

    num_bytes: int
    block_bytes: int
    root: int


def file_name(rank: int) -> str:
    """The file that a rank writes: `rank-00003.bin`."""
    return f"rank-{rank:05d}.bin"


def cell_of(layout: Layout) -> int:
    """The number of a layout's cell among those of all ranks: its shards' indices as digits."""
    number = 0
    for shard in layout.shards:
        number = number * shard.count + shard.index
    return number


def cells(record: EntryRecord) -> list[Layout]:
    """The layouts of an entry's cells, by number."""
    layouts = []
    for number in range(prod(shard.count for shard in record.shards)):
        shards = []
        for shard in reversed(record.shards):
            number, index = divmod(number, shard.count)
            shards.append(replace(shard, index=index))
        layouts.append(Layout(record.shape, tuple(reversed(shards))))
    return layouts


class Index:
    """The files and the pieces of a checkpoint, read as they are needed. world: how many ranks saved it."""

    def __init__(
        self,
        path: Place,
        entries: Mapping[str, EntryRecord],
        record: FileRecord,
        world: int,
        block_bytes: int,
        cache: BlockCache,
    ) -> None:
        self.world = world
        self._entries = entries
        self.file = BlockFile(path / INDEX, record.num_bytes, record.block_bytes, record.root, cache)
        self._path, self._block_bytes, self._cache = path, block_bytes, cache
        self._cells: dict[tuple[tuple[int, ...], tuple[Shard, ...]], list[Layout]] = {}

    def all_files(self) -> Iterator[BlockFile]:
        """`index.bin` and all ranks' files."""
        yield self.file
        yield from self.data_files()

    def data_file(self, rank: int) -> BlockFile:
        """The file of a rank."""
        [row] = self.file.read(rank * FILE.itemsize, (rank + 1) * FILE.itemsize).view(FILE)
        return self._data_file(rank, row)

    def data_files(self) -> Iterator[BlockFile]:
        """All ranks' files. For whoever checks a checkpoint: a reader asks for those that it needs."""
        for rank, row in enumerate(self.file.read(0, self.world * FILE.itemsize).copy().view(FILE)):
            yield self._data_file(rank, row)

    def pieces(self, name: str, box: Box) -> Iterator[Piece]:
        """Pieces of an entry that together hold what was saved of the box, each once; they may hold more.

        Records read: about as many as there are pieces, and where ranks' parts are very unequal log(count) more for a cell.
        """
        record = self._entries[name]
        layouts = self._cells_of(record)
        itemsize = record.itemsize
        for cell, layout in enumerate(layouts):
            span = layout.span(box)
            if span is None:
                continue
            hint = record.first + int(record.count * (cell + span[0] / layout.numel_local) / len(layouts))
            for row in self._rows_from(self._find(record, cell, span[0], hint), record):
                start, stop = max(span[0], int(row["start"])), min(span[1], int(row["stop"]))
                if row["cell"] != cell or start >= stop:
                    break
                offset = int(row["offset"]) + (start - int(row["start"])) * itemsize
                for part in layout.boxes_between(start, stop):
                    yield Piece(part, int(row["file"]), offset)
                    offset += part.numel * itemsize

    def _data_file(self, rank: int, row: np.void) -> BlockFile:
        path = self._path / file_name(rank)
        return BlockFile(path, int(row["num_bytes"]), self._block_bytes, int(row["root"]), self._cache)

    def _cells_of(self, record: EntryRecord) -> list[Layout]:
        # A model's layers have few shapes, so few lists are ever made.
        key = (record.shape, record.shards)
        if key not in self._cells:
            self._cells[key] = cells(record)
        return self._cells[key]

    def _find(self, record: EntryRecord, cell: int, start: int, hint: int) -> int:
        """The number of the first of the entry's records that ends after element `start` of the cell."""

        def ends_after(number: int) -> bool:
            row = self._rows(number, number + 1)[0]
            return (int(row["cell"]), int(row["stop"])) > (cell, start)

        low, high = narrow(record.first, record.first + record.count, hint, ends_after)
        return low + bisect_left(range(low, high), True, key=ends_after)

    def _rows_from(self, number: int, record: EntryRecord) -> Iterator[np.void]:
        """The entry's records from a number on, read as far as the block of the index goes that is read anyway."""
        stop = record.first + record.count
        while number < stop:
            place = (self.world * FILE.itemsize + number * PIECE.itemsize) % self.file.block_bytes
            rows = self._rows(number, min(stop, number + max(1, (self.file.block_bytes - place) // PIECE.itemsize)))
            yield from rows.copy()
            number += len(rows)

    def _rows(self, first: int, last: int) -> np.ndarray:
        start = self.world * FILE.itemsize
        return self.file.read(start + first * PIECE.itemsize, start + last * PIECE.itemsize).view(PIECE)


def narrow(low: int, high: int, hint: int, is_late: Callable[[int], bool]) -> tuple[int, int]:
    """Bounds of where `is_late` becomes true among low ... high, looking at numbers around the hint, each twice as far away.

    Ranks' parts are mostly equal, so that the hint is right or next to right; it costs a search of its distance if it is not.
    """
    at, step = min(max(hint, low), high - 1), 1
    while low <= at < high:
        if is_late(at):
            high, at = at, at - step
        else:
            low, at = at + 1, at + step
        step *= 2
    return low, high


def encode_index(files: Sequence[tuple[int, int]], pieces: np.ndarray) -> bytes:
    """The data of `index.bin`. files: data bytes and root of each rank's; pieces: PIECE records in their order."""
    assert pieces.dtype == PIECE, pieces.dtype
    return np.array(list(files), FILE).tobytes() + pieces.tobytes()
