"""Load: every box that is asked for is met with the pieces that were saved, whoever wanted which on how many ranks.

wanted box  x  saved piece  ->  common box  ->  rows of the piece's file, verified  ->  elements of the wanted tensor

Rank 0 reads the manifest, looks at every file's size and tells; each rank then reads the records, the hashes and the elements
that it needs, through one small cache.
"""

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from math import prod
from typing import Any

import torch

from framework.checkpoint.blocks import BlockCache, BlockFile
from framework.checkpoint.commit import (
    FoundCheckpoints,
    find_newest,
    newest_checkpoint,
    open_checkpoint,
    set_aside_newer,
    unleased,
)
from framework.checkpoint.entry import Entry, dtype_name
from framework.checkpoint.index import DamagedCheckpoint, Manifest, open_index, read_manifest, verify_sizes
from framework.checkpoint.pieces import Piece
from framework.checkpoint.place import Place
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, share_errors
from framework.errors import CheckpointError, StorageError
from framework.lease import Lease
from framework.mesh.box import Box

__all__ = ["load_checkpoint", "load_newest", "newest_checkpoint", "read_state"]

# Blocks that no other is read between are still in the processor's cache when they are copied: 64 MiB cost twice the time.
BUFFER_BYTES = 8 << 20
# What is looked up before anything is read, to be read in the files' order: some 1.5 KB each.
MAX_NEEDS = 1 << 16


def load_checkpoint(
    path: Place,
    entries: Iterable[Entry],
    world: Communicator,
    buffer_bytes: int = BUFFER_BYTES,
    manifest: Manifest | None = None,
) -> dict[str, Any]:
    """Fill every entry's data from the checkpoint `path` and return its state. Collective over `world`.

    Layouts need not be those that saved. Every byte that is read is verified. Raises, on every rank when on any,
    DamagedCheckpoint when the files are not what was saved (data may then be partly filled), CheckpointError when an entry is not
    in the checkpoint or has another shape or dtype there, and StorageError when the file system goes on failing. Saved entries
    that nobody asks for are left. Needs host memory for `buffer_bytes` of blocks of all files together (at least for one, 1 MiB),
    for one more, for `MAX_NEEDS`, and for the largest entry that is not in memory.
    """
    entries = list(entries)
    manifest = manifest or broadcast_object(lambda: open_checkpoint(path), world)
    reader = Reader(path, buffer_bytes, manifest)
    # A mistake is no reason to try an older checkpoint, so it is named before any damage.
    share_errors(lambda: reader.check(entries), world)
    try:
        share_errors(lambda: reader.fill(entries), world)
    except DamagedCheckpoint as damage:
        # One node's memory or network may be at fault, and then the checkpoint is whole: rank 0 looks for itself.
        broadcast_object(partial(reader.confirm, damage), world)
        raise
    return manifest.state


def load_newest(
    root: Place,
    entries: Iterable[Entry],
    world: Communicator,
    found: FoundCheckpoints | None = None,
    lease: Lease | None = None,
    finite: Collection[str] = (),
) -> dict[str, Any] | None:
    """Load the newest checkpoint under `root` that is whole; its state, or None for a run that has never saved. Collective.

    Rank 0 looks and tells: others may see an older state of the folder. When one is damaged, or has other than finite values
    whatever its hashes say, the next older one is tried, and only once that is loaded are the damaged set aside as `step-N.bad`,
    with a line on stderr. Raises what `find_newest` raises. found: what rank 0 has found and told already. lease: of the run,
    None for a folder that nobody launches. finite: names of entries whose values are.
    """
    entries = list(entries)
    damaged: dict[Place, DamagedCheckpoint] = {}
    while True:
        found = found or broadcast_object(partial(find_newest, root, damaged), world)
        if found.newest is None:
            return None
        try:
            state = load_checkpoint(found.newest, entries, world, manifest=found.manifest)
            judged = [entry for entry in entries if entry.name in finite]
            share_errors(partial(refuse_poisoned, found.newest, judged), world)
        except DamagedCheckpoint as error:
            # In words alone: the error itself keeps the stack it came from, and with that the reader's cache.
            damaged |= {**found.damaged, found.newest: DamagedCheckpoint(str(error))}
            found = None
            continue
        if world.rank == 0:
            set_aside_newer(found, lease or unleased(root))
        return state


def refuse_poisoned(path: Place, entries: Iterable[Entry]) -> None:
    """Raises DamagedCheckpoint where an entry that was loaded from `path` has values that are not finite."""
    for entry in entries:
        if not all(_is_finite(piece) for piece in entry.pieces()):
            raise DamagedCheckpoint(
                f"{path}: {entry.name} has values that are not finite, and the bytes are those that were saved"
            )


def _is_finite(values: torch.Tensor) -> bool:
    # Smallest and largest are NaN where any value is, and need no memory.
    return not values.numel() or all(bool(each.isfinite()) for each in torch.aminmax(values.detach()))


def read_state(path: Place) -> dict[str, Any]:
    """The state that was saved with the checkpoint `path`."""
    return read_manifest(path).state


def verify_files(path: Place, manifest: Manifest) -> list[DamagedCheckpoint]:
    """Read everything and compare with the hashes: one finding per file that is not as it was saved; only the first where a file
    is missing or short, or the index is damaged, without which the others cannot be told apart."""
    damages: list[DamagedCheckpoint] = []
    try:
        verify_sizes(path, manifest)
        for file in open_index(path, manifest, BlockCache(BUFFER_BYTES)).all_files():
            try:
                file.verify()
            except DamagedCheckpoint as error:
                damages.append(error)
    except DamagedCheckpoint as error:
        damages = damages or [error]
    return damages


class Reader:
    """A checkpoint that is opened once and read in parts, by one rank on its own.

    manifest: of a checkpoint that `open_checkpoint` has looked at, perhaps on another rank; None: look now. Raises
    DamagedCheckpoint, when opened and when read, if the files are not what was saved. cache: all memory that it needs.
    """

    def __init__(self, path: Place, buffer_bytes: int = BUFFER_BYTES, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = open_checkpoint(path) if manifest is None else manifest
        self.cache = BlockCache(buffer_bytes)
        self._index = open_index(path, self.manifest, self.cache)

    def confirm(self, damage: DamagedCheckpoint) -> None:
        """Raise the damage that another rank has met if this one meets it too; StorageError if it reads what was saved."""
        if damage.block is None:
            raise damage
        path, level, index = damage.block
        next(file for file in self._index.all_files() if file.path == path).block(level, index)
        raise StorageError(
            f"{damage}, as one rank reads it; rank 0 reads what was saved. The checkpoint is whole: a node's memory, network or"
            " view of the file system is at fault. The next start tries again"
        )

    def files(self) -> Iterator[BlockFile]:
        """The files of all ranks that saved."""
        return self._index.data_files()

    def files_of(self, entries: Iterable[Entry]) -> set[int]:
        """The ranks whose files have elements of the entries. Reads the index alone."""
        boxes = ((entry.name, box) for entry in entries for box in entry.layout.boxes())
        return {piece.file for name, box in boxes for piece in self._index.pieces(name, box)}

    def file(self, rank: int) -> BlockFile:
        """The file that a rank wrote."""
        return self._index.data_file(rank)

    def check(self, entries: Iterable[Entry]) -> None:
        """Raises CheckpointError for an entry that is not in the checkpoint, or has another shape or dtype there."""
        for entry in entries:
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

    def fill(self, entries: Sequence[Entry]) -> None:
        """Fill every entry's data. Raises CheckpointError for an entry that cannot be filled from this checkpoint.

        Many entries at once are read file by file: a block that has some of each of them is read once. Entries that are not in
        memory are read one by one, through memory for one.
        """
        self.check(entries)
        self._fill((entry, entry.data) for entry in entries if isinstance(entry.data, torch.Tensor))
        for entry in entries:
            if not isinstance(entry.data, torch.Tensor):
                values = torch.empty(entry.data.shape, dtype=entry.data.dtype)
                self._fill([(entry, values)])
                entry.data.write(values)

    def _fill(self, targets: Iterable[tuple[Entry, torch.Tensor]]) -> None:
        needs: list[_Need] = []
        for entry, data in targets:
            for need in self._find(entry, data):
                needs.append(need)
                if len(needs) == MAX_NEEDS:
                    self._read(needs)
                    needs = []
        self._read(needs)

    def _find(self, entry: Entry, data: torch.Tensor) -> Iterator["_Need"]:
        """The places of all of the entry's elements, to be read into `data`: thousands where a layout cuts the last dim into
        runs."""
        first, missing = 0, data.numel()
        for box in entry.layout.boxes():
            target = data[first : first + box.numel].view(box.sizes)
            first += box.numel
            for piece in self._index.pieces(entry.name, box):
                common = box.intersect(piece.box)
                if common is not None:
                    yield _Need(piece, common, target[common.relative_to(box).slices()])
                    missing -= common.numel
        if missing:
            raise CheckpointError(f"{self.path} lacks {missing} of the {data.numel()} elements of {entry.name}")

    def _read(self, needs: list["_Need"]) -> None:
        needs.sort(key=lambda need: (need.piece.file, need.piece.offset))
        for number, of_file in groupby(needs, key=lambda need: need.piece.file):
            self._read_file(self._index.data_file(number), list(of_file))

    def _read_file(self, file: BlockFile, needs: list["_Need"]) -> None:
        file.expect(need.range() for need in needs)
        for need in needs:
            start = _start_of_run(need)
            if start is not None:
                file.read_into(start, need.target.detach().view(-1).view(torch.uint8).numpy())
                continue
            for part, values in _read_piece(need.piece, need.box, need.target.dtype, file):
                need.target[part.relative_to(need.box).slices()].copy_(values)


@dataclass(slots=True)
class _Need:
    """Elements to read: `box`, of those in `piece`, into `target` of the box's shape."""

    piece: Piece
    box: Box
    target: torch.Tensor

    def range(self) -> tuple[int, int]:
        """The bytes [start, stop) of the file from the first element to the last; others may lie between."""
        sizes, place = self.piece.box.sizes, self.box.relative_to(self.piece.box)
        first = last = 0
        for size, offset, length in zip(sizes, place.offsets, place.sizes, strict=True):
            first, last = first * size + offset, last * size + offset + length - 1
        itemsize = self.target.dtype.itemsize
        return self.piece.offset + first * itemsize, self.piece.offset + (last + 1) * itemsize


def _start_of_run(need: _Need) -> int | None:
    """The byte at which the wanted elements begin where they follow one another in the file and in the target, and the file can
    be read straight into it: nothing is copied, and no other memory touched. Else None."""
    sizes, place = need.piece.box.sizes, need.box.relative_to(need.piece.box)
    # One index of each dim before some dim, any of that one, all of those behind it.
    dim = next((dim for dim, size in enumerate(place.sizes) if size != 1), len(sizes))
    follow_one_another = place.sizes[dim + 1 :] == sizes[dim + 1 :]
    is_in_place = follow_one_another and need.target.is_contiguous() and need.target.device.type == "cpu"
    return need.range()[0] if is_in_place else None


def _read_piece(piece: Piece, wanted: Box, dtype: torch.dtype, file: BlockFile) -> Iterator[tuple[Box, torch.Tensor]]:
    """The elements of `wanted`, a box within the piece's, in boxes that lie in one block or are one row in two.

    A row is what lies behind one index of dim `dim`, the first for which it fits a block; the dims before go index by index.
    """
    if not wanted.sizes:
        yield wanted, _tensor(file, piece.offset, dtype.itemsize, dtype).view(())
        return
    sizes = piece.box.sizes
    row_bytes = [prod(sizes[dim + 1 :]) * dtype.itemsize for dim in range(len(sizes))]
    dim = next(dim for dim, num_bytes in enumerate(row_bytes) if num_bytes <= file.block_bytes)
    place = wanted.relative_to(piece.box)
    columns = place.slices()[dim + 1 :]
    ones = (1,) * dim
    for outer in product(*(range(each.start, each.stop) for each in place.slices()[:dim])):
        base = piece.offset + sum(index * num_bytes for index, num_bytes in zip(outer, row_bytes[:dim], strict=True))
        row, stop = place.offsets[dim], place.offsets[dim] + place.sizes[dim]
        while row < stop:
            start = base + row * row_bytes[dim]
            rows_in_block = (file.block_bytes - start % file.block_bytes) // row_bytes[dim]
            num_rows = max(1, min(stop - row, rows_in_block))
            rows = _tensor(file, start, num_rows * row_bytes[dim], dtype)
            offsets = [index + low for index, low in zip((*outer, row), piece.box.offsets[: dim + 1], strict=True)]
            box = Box((*offsets, *wanted.offsets[dim + 1 :]), (*ones, num_rows, *wanted.sizes[dim + 1 :]))
            yield box, rows.view(*ones, num_rows, *sizes[dim + 1 :])[(slice(None),) * (dim + 1) + columns]
            row += num_rows


def _tensor(file: BlockFile, start: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(file.read(start, start + num_bytes)).view(dtype)
