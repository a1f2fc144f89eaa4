"""Load: every box that is asked for is met with the boxes that were saved, whoever wanted which on how many ranks.

wanted box  x  saved piece  ->  common box  ->  rows of the piece's file, verified  ->  elements of the wanted tensor
"""

import difflib
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from framework.checkpoint.commit import list_checkpoints, newest_checkpoint, report, set_aside
from framework.checkpoint.index import (
    DamagedCheckpoint,
    Entry,
    EntryRecord,
    FileRecord,
    Manifest,
    Piece,
    dtype_name,
    read_manifest,
    verify_sizes,
)
from framework.comm.collectives import gather_objects
from framework.errors import CheckpointError
from framework.mesh.axis import Axis
from framework.mesh.box import Box

__all__ = ["load_checkpoint", "load_newest", "newest_checkpoint", "read_state"]

BUFFER_BYTES = 64 << 20


def load_checkpoint(
    path: Path, entries: Iterable[Entry], world: Axis, buffer_bytes: int = BUFFER_BYTES
) -> dict[str, Any]:
    """Fill every entry's data from the checkpoint `path` and return its state. Collective over `world`.

    Layouts need not be those that saved. Every byte that is read is verified. Raises, on every rank when on any,
    DamagedCheckpoint when the files are not what was saved (data may then be partly filled) and CheckpointError when an
    entry is not in the checkpoint, or has another shape or dtype there. Saved entries that nobody asks for are left.
    Needs host memory for `buffer_bytes`, or for the largest row of a tensor if that is more.
    """
    outcome: dict[str, Any] | CheckpointError
    try:
        reader = Reader(path, buffer_bytes)
        reader.fill(entries)
        outcome = reader.manifest.state
    except CheckpointError as error:
        outcome = error
    failures = [other for other in gather_objects(outcome, world) if isinstance(other, CheckpointError)]
    if failures:
        # A mistake is no reason to try an older checkpoint, so it is named before any damage.
        raise min(failures, key=lambda error: isinstance(error, DamagedCheckpoint))
    assert isinstance(outcome, dict)
    return outcome


def load_newest(root: Path, entries: Iterable[Entry], world: Axis) -> dict[str, Any] | None:
    """Load the newest checkpoint under `root` that is whole; its state, or None when there is no checkpoint at all.

    A damaged one is set aside as `step-N.bad`, with a line on stderr, and the next older one is tried. Collective.
    Raises CheckpointError when there are checkpoints and all are damaged: that is not a reason to start from scratch.
    """
    entries = list(entries)
    candidates = gather_objects(list_checkpoints(root) if world.rank == 0 else None, world)[0]
    for path in candidates:
        try:
            return load_checkpoint(path, entries, world)
        except DamagedCheckpoint as error:
            if world.rank == 0:
                report(f"damaged checkpoint set aside as {set_aside(path)}: {error}")
    if candidates:
        raise CheckpointError(
            f"all {len(candidates)} checkpoints in {root} are damaged: restore one, or start a new run"
        )
    return None


def read_state(path: Path) -> dict[str, Any]:
    """The state that was saved with the checkpoint `path`."""
    return read_manifest(path).state


def verify_files(path: Path, manifest: Manifest) -> list[DamagedCheckpoint]:
    """Read everything and compare with the hashes: one finding per file that is not as it was saved."""
    damages = []
    for name, record in manifest.files.items():
        try:
            file = VerifiedFile(path / name, record)
            for start in range(0, record.size, BUFFER_BYTES):
                file.read(start, min(start + BUFFER_BYTES, record.size))
        except DamagedCheckpoint as error:
            damages.append(error)
    return damages


class Reader:
    """A checkpoint that is opened once and read in parts, by one rank on its own.

    Raises DamagedCheckpoint, when opened and when read, if the files are not what was saved.
    """

    def __init__(self, path: Path, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        verify_sizes(path, self.manifest)
        self._files = {name: VerifiedFile(path / name, record) for name, record in self.manifest.files.items()}
        self._buffer_bytes = buffer_bytes

    def fill(self, entries: Iterable[Entry]) -> None:
        """Fill every entry's data. Raises CheckpointError for an entry that cannot be filled from this checkpoint."""
        for entry in entries:
            missing = _fill_entry(entry, self._record_of(entry), self._files, self._buffer_bytes)
            if missing:
                raise CheckpointError(
                    f"{self.path} lacks {missing} of the {entry.data.numel()} elements of {entry.name}"
                )

    def _record_of(self, entry: Entry) -> EntryRecord:
        record = self.manifest.entries.get(entry.name)
        if record is None:
            near = difflib.get_close_matches(entry.name, self.manifest.entries, n=3)
            raise CheckpointError(f"{self.path} has no {entry.name}; nearest: {', '.join(near) or 'none'}")
        wanted = (tuple(entry.layout.shape), dtype_name(entry.data.dtype))
        if wanted != (record.shape, record.dtype):
            raise CheckpointError(
                f"{entry.name} is {wanted[1]}{list(wanted[0])} here, but {record.dtype}{list(record.shape)} in"
                f" {self.path}: the model or its precision was changed"
            )
        return record


class VerifiedFile:
    """Bytes of a file, each block checked against its hash when it is read.

    Keeps the last read, so that small neighbours in one block cost one read. Opens the file for each read: thousands of
    ranks' files are more than a process may hold open.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path = path
        self._record = record
        self._start = 0
        self._bytes = np.empty(0, np.uint8)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) as uint8. Raises DamagedCheckpoint when they are not as they were saved."""
        if not self._start <= start <= stop <= self._start + len(self._bytes):
            size = self._record.block_bytes
            self._start, self._bytes = self._read_blocks(start // size, -(-stop // size))
        return self._bytes[start - self._start : stop - self._start]

    def _read_blocks(self, first: int, last: int) -> tuple[int, np.ndarray]:
        """Byte offset and bytes of blocks [first, last), verified."""
        size = self._record.block_bytes
        start = first * size
        data = np.empty(min(last * size, self._record.size) - start, np.uint8)
        try:
            with open(self._path, "rb", buffering=0) as file:
                file.seek(start)
                filled = 0
                while filled < len(data) and (count := file.readinto(data.data[filled:])):
                    filled += count
        except OSError as error:
            raise DamagedCheckpoint(f"{self._path} cannot be read: {error.strerror}") from error
        for index in range(first, last):
            block = data[(index - first) * size :][:size]
            if xxhash.xxh3_64_hexdigest(block.data) != self._record.hashes[index]:
                where = f"bytes [{index * size}, {index * size + len(block)})"
                raise DamagedCheckpoint(f"{self._path} was changed after it was saved, in {where}")
        return start, data


def _fill_entry(entry: Entry, record: EntryRecord, files: dict[str, VerifiedFile], buffer_bytes: int) -> int:
    """Fill what the pieces have of the entry; the number of elements that none has."""
    first, missing = 0, entry.data.numel()
    for box in entry.layout.boxes():
        target = entry.data[first : first + box.numel].view(box.sizes)
        first += box.numel
        for piece in record.pieces:
            common = box.intersect(piece.box)
            if common is None:
                continue
            for part, values in _read_piece(piece, common, entry.data.dtype, files[piece.file], buffer_bytes):
                target[part.relative_to(box).slices()].copy_(values)
            missing -= common.numel
    return missing


def _read_piece(
    piece: Piece, wanted: Box, dtype: torch.dtype, file: VerifiedFile, buffer_bytes: int
) -> Iterator[tuple[Box, torch.Tensor]]:
    """The elements of `wanted`, a box within the piece's, as boxes of whole rows that fit the buffer."""
    if not wanted.sizes:
        yield wanted, torch.from_numpy(file.read(piece.offset, piece.offset + dtype.itemsize)).view(dtype).view(())
        return
    row_shape = piece.box.sizes[1:]
    row_bytes = prod(row_shape) * dtype.itemsize
    rows_per_read = max(1, buffer_bytes // row_bytes)
    columns = wanted.relative_to(piece.box).slices()[1:]
    stop = wanted.offsets[0] + wanted.sizes[0]
    for row in range(wanted.offsets[0], stop, rows_per_read):
        num_rows = min(rows_per_read, stop - row)
        start = piece.offset + (row - piece.box.offsets[0]) * row_bytes
        rows = torch.from_numpy(file.read(start, start + num_rows * row_bytes)).view(dtype).view(num_rows, *row_shape)
        yield Box((row, *wanted.offsets[1:]), (num_rows, *wanted.sizes[1:])), rows[(slice(None), *columns)]
