"""A checkpoint's manifest and index: what it holds, where each element lies, and how it is known to be whole.

    step-00000100/
        manifest.json       what there is: state, every entry's shape and dtype. Written last, so its presence under a final name
                            means that all else is there. Its size does not depend on the number of ranks
        index.bin           where it is: fixed-width records that are searched, never read whole
            FILE x world        the data bytes of each rank's file, and the root of its hash tree
            CHUNK x ...         by entry; within an entry by (cell, start)
            hash tree           of blocks of INDEX_BLOCK_BYTES (blocks.py)
        rank-00000.bin      the elements that rank 0 wrote: entries one after another, each aligned to ALIGNMENT bytes
        rank-00001.bin      ...

An element is found by its place in the *global* tensor, never by the rank that wrote it, so any layout loads what any other has
saved. A layout is a *cell*, the local tensor that the shards leave, and an interval of it. So every chunk is an interval of the
row-major flattened cell, and the chunks of a cell, sorted, follow one another: those that meet a box are neighbours, found by one
search. Of thousands of ranks' chunks a reader reads about as many records as it needs.

The manifest has its own hash and that of the index, which has those of the files. All are trees of hashes, so a reader verifies
what it reads and reads no more (blocks.py).
"""

import errno
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import xxhash

from framework.checkpoint.blocks import BlockCache, BlockFile, DamagedCheckpoint
from framework.checkpoint.storage import sizes_in
from framework.errors import CheckpointError
from framework.mesh.layout import Box, Layout, Shard
from framework.object_store import Place, read

FORMAT = 2
MANIFEST = "manifest.json"
INDEX = "index.bin"
# Small, since a reader of some of a block reads all of it: after a change of layout a rank needs some of many ranks' files.
BLOCK_BYTES = 1 << 20
ALIGNMENT = 64
# 128 records: one read mostly finds all that a rank needs of an entry.
INDEX_BLOCK_BYTES = 4 << 10

FILE = np.dtype([("num_bytes", "<u8"), ("root", "<u8")])
CHUNK = np.dtype([("cell", "<u4"), ("file", "<u4"), ("start", "<u8"), ("stop", "<u8"), ("offset", "<u8")])


@dataclass(frozen=True)
class SavedBox:
    """A box of an entry, row-major from byte `offset` of the file of rank `file`."""

    box: Box
    file: int
    offset: int


@dataclass(frozen=True)
class EntryRecord:
    """An entry in the checkpoint."""

    shape: tuple[int, ...]
    """Global."""
    dtype: str
    """Such as `float32`."""
    shards: tuple[Shard, ...] = ()
    """The shards that cut it into cells, of index 0 and over unnamed axes."""
    first: int = 0
    """The first of its CHUNK records in the index."""
    count: int = 0
    """The number of its records."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        import torch  # numpy has no bf16. Commands that only list checkpoints, as `status` does, need not wait for torch

        return int(getattr(torch, self.dtype).itemsize)

    @property
    def num_bytes(self) -> int:
        """Bytes of all its elements."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class FileRecord:
    """A file with a hash tree: bytes of data, bytes in a block, root."""

    num_bytes: int
    block_bytes: int
    root: int


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without opening another file."""

    step: int
    world: int
    """The number of ranks that saved."""
    state: dict[str, Any]
    """The caller's."""
    entries: dict[str, EntryRecord]
    index: FileRecord
    block_bytes: int = BLOCK_BYTES
    """Block size of the ranks' files."""


def encode_manifest(manifest: Manifest) -> str:
    """The text of manifest.json, which begins with a hash of the rest: a changed manifest is noticed as surely as a changed
    file."""
    index = {"bytes": manifest.index.num_bytes, "block_bytes": manifest.index.block_bytes}
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "world": manifest.world,
        "state": manifest.state,
        "block_bytes": manifest.block_bytes,
        "index": index | {"xxh3": f"{manifest.index.root:016x}"},
        "entries": {name: _encode_entry(record) for name, record in manifest.entries.items()},
    }
    return _seal(json.dumps(body))


def replace_state(path: Place, state: dict[str, Any]) -> str:
    """The text of the manifest of the checkpoint `path` with another state. Raises as `read_manifest`."""
    return _seal(json.dumps({**_read_body(path), "state": state}))


def read_manifest(path: Place) -> Manifest:
    """The manifest of the checkpoint `path`. Raises DamagedCheckpoint if it is missing or changed, StorageError if it cannot be
    read."""
    body = _read_body(path)
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}, this version reads format {FORMAT}")
    index = FileRecord(body["index"]["bytes"], body["index"]["block_bytes"], int(body["index"]["xxh3"], 16))
    entries = {name: _decode_entry(value) for name, value in body["entries"].items()}
    return Manifest(body["step"], body["world"], body["state"], entries, index, body["block_bytes"])


def verify_sizes(path: Place, manifest: Manifest) -> None:
    """DamagedCheckpoint unless every file has its full size, StorageError if the storage does not answer. One stat per file (one
    listing of an object store), so one rank does it for all."""
    size_of = sizes_in(path)
    for file in Index(path, manifest, BlockCache(2 * INDEX_BLOCK_BYTES)).all_files():
        try:
            size = size_of(file.path.name)
        except (FileNotFoundError, KeyError) as error:
            raise DamagedCheckpoint(f"{file.path} is missing ({os.strerror(errno.ENOENT)})") from error
        if size != file.size:
            raise DamagedCheckpoint(f"{file.path} has {size} bytes, {file.size} were saved")


def _read_body(path: Place) -> dict[str, Any]:
    # Read twice before it is called damage: bytes that a page cache or a network has spoilt are whole on the disk.
    for _ in range(2):
        try:
            data = read((path / MANIFEST).read_bytes, path / MANIFEST)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path} has no readable {MANIFEST}: {error.strerror}") from error
        text = data[len(_head("")) : -1].decode(errors="replace")
        if data == _seal(text).encode():
            body: dict[str, Any] = json.loads(text)
            return body
    raise DamagedCheckpoint(f"{path / MANIFEST} was cut or changed after it was written: its hash does not fit")


def _seal(text: str) -> str:
    """The text of manifest.json around its JSON."""
    return _head(text) + text + "}"


def _head(text: str) -> str:
    return f'{{"xxh3": "{xxhash.xxh3_64_hexdigest(text.encode())}", "manifest": '


def _encode_entry(record: EntryRecord) -> dict[str, Any]:
    shards = [[shard.dim, shard.count, shard.segments, shard.pieces] for shard in record.shards]
    return {
        "shape": record.shape,
        "dtype": record.dtype,
        "shards": shards,
        "first": record.first,
        "count": record.count,
    }


def _decode_entry(value: dict[str, Any]) -> EntryRecord:
    shards = tuple(
        Shard("", dim, 0, count, tuple(segments), tuple(pieces)) for dim, count, segments, pieces in value["shards"]
    )
    return EntryRecord(tuple(value["shape"]), value["dtype"], shards, value["first"], value["count"])


def file_name(rank: int) -> str:
    """The name of the file that a rank writes, such as `rank-00003.bin`."""
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
    """The files and the chunks of a checkpoint, read as they are needed."""

    def __init__(self, path: Place, manifest: Manifest, cache: BlockCache) -> None:
        self.world = manifest.world
        record = manifest.index
        self.file = BlockFile(path / INDEX, record.num_bytes, record.block_bytes, record.root, cache)
        self._path, self._manifest, self._cache = path, manifest, cache
        self._cells: dict[tuple[tuple[int, ...], tuple[Shard, ...]], list[Layout]] = {}

    def all_files(self) -> Iterator[BlockFile]:
        """`index.bin` and all ranks' files, to check a checkpoint. A reader opens only those that it needs."""
        yield self.file
        for rank, row in enumerate(self.file.read(0, self.world * FILE.itemsize).copy().view(FILE)):
            yield self._data_file(rank, row)

    def data_file(self, rank: int) -> BlockFile:
        """The file of a rank."""
        [row] = self.file.read(rank * FILE.itemsize, (rank + 1) * FILE.itemsize).view(FILE)
        return self._data_file(rank, row)

    def find(self, name: str, box: Box) -> Iterator[SavedBox]:
        """Saved boxes of an entry that together hold all that was saved of `box`, each element once; they may hold more.

        About as many records are read as boxes are found, and log(count) more for a cell if the ranks' shares are very unequal.
        """
        record = self._manifest.entries[name]
        # A cell that the box does not meet costs no read.
        layouts = self._cells_of(record)
        itemsize = record.itemsize
        for cell, layout in enumerate(layouts):
            span = layout.span(box)
            if span is None:
                continue
            # Ranks own about equal shares, so the number of the first record is estimated from the element's place.
            hint = record.first + int(record.count * (cell + span[0] / layout.numel_local) / len(layouts))
            for row in self._rows_from(self._find(record, cell, span[0], hint), record):
                start, stop = max(span[0], int(row["start"])), min(span[1], int(row["stop"]))
                # Records are sorted, so the first one beyond the span ends the search.
                if row["cell"] != cell or start >= stop:
                    break
                offset = int(row["offset"]) + (start - int(row["start"])) * itemsize
                for each in layout.boxes_between(start, stop):
                    yield SavedBox(each, int(row["file"]), offset)
                    offset += each.numel * itemsize

    def _data_file(self, rank: int, row: np.void) -> BlockFile:
        path = self._path / file_name(rank)
        return BlockFile(path, int(row["num_bytes"]), self._manifest.block_bytes, int(row["root"]), self._cache)

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
        """The entry's records from a number on. All records of a block of the index are read at once."""
        stop = record.first + record.count
        while number < stop:
            # A block of the index is verified as a whole, so the rest of its records cost nothing more.
            place = (self.world * FILE.itemsize + number * CHUNK.itemsize) % self.file.block_bytes
            rows = self._rows(number, min(stop, number + max(1, (self.file.block_bytes - place) // CHUNK.itemsize)))
            yield from rows.copy()  # the view is of a cached block, which the next read may replace
            number += len(rows)

    def _rows(self, first: int, last: int) -> np.ndarray:
        start = self.world * FILE.itemsize
        return self.file.read(start + first * CHUNK.itemsize, start + last * CHUNK.itemsize).view(CHUNK)


def narrow(low: int, high: int, hint: int, is_late: Callable[[int], bool]) -> tuple[int, int]:
    """Bounds of the number at which `is_late` becomes true in low ... high, found by looking at numbers around the hint, each
    twice as far away.

    Ranks' shares are mostly equal, so that the hint is right or nearly; otherwise this is a binary search of its distance.
    """
    at, step = min(max(hint, low), high - 1), 1
    while low <= at < high:
        if is_late(at):
            high, at = at, at - step
        else:
            low, at = at + 1, at + step
        step *= 2
    return low, high


def encode_index(files: Sequence[FileRecord], chunks: np.ndarray) -> bytes:
    """The data of `index.bin`. files: of each rank; chunks: CHUNK records in their order."""
    assert chunks.dtype == CHUNK, chunks.dtype
    return np.array([(each.num_bytes, each.root) for each in files], FILE).tobytes() + chunks.tobytes()
