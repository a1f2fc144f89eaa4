"""Reading a checkpoint: its elements into any layout, whatever layout and number of ranks have saved them; or all of it, to be
described and verified (`meshwright inspect PATH`).

    wanted box  x  saved box  ->  common box  ->  rows of the saved box's file, verified  ->  elements of the wanted tensor

Rank 0 reads the manifest, checks every file's size and broadcasts; each rank then reads the records, the hashes and the elements
that it needs, through one small cache.
"""

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from math import prod
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.blocks import BlockCache, BlockFile
from framework.checkpoint.commit import (
    FoundCheckpoints,
    find_newest,
    newest_checkpoint,
    open_checkpoint,
    set_aside_newer,
    step_of,
    unleased,
)
from framework.checkpoint.index import (
    MANIFEST,
    DamagedCheckpoint,
    Index,
    Manifest,
    SavedBox,
    read_manifest,
    verify_sizes,
)
from framework.checkpoint.staging import Entry, dtype_name
from framework.checkpoint.storage import checkpoints_of
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, share_errors
from framework.errors import EXIT_DONE, EXIT_USER, CheckpointError, StorageError
from framework.lease import Lease
from framework.mesh.layout import Box
from framework.object_store import Place

# Small enough that a block is still in the processor's cache when it is copied: 64 MiB cost twice the time.
BUFFER_BYTES = 8 << 20
# Boxes that are looked up before any is read, so that they are read in the files' order: some 1.5 KB each.
MAX_NEEDS = 1 << 16


class BeforeStage(CheckpointError):
    """Damage has led back behind the border of a stage, to a checkpoint that may have other entries."""


def load_checkpoint(
    path: Place,
    entries: Iterable[Entry],
    world: Communicator,
    buffer_bytes: int = BUFFER_BYTES,
    manifest: Manifest | None = None,
) -> dict[str, Any]:
    """Fill every entry's data from the checkpoint `path` and return its state. Collective over `world`.

    Layouts may differ from those that saved. Every byte that is read is verified. Raises, on every rank if on any,
    DamagedCheckpoint if the files are not what was saved (data may then be partly filled), CheckpointError if an entry is not
    in the checkpoint or has another shape or dtype there, and StorageError if the storage keeps failing. Other saved entries
    are ignored. Needs host memory for `buffer_bytes` of blocks of all files together (at least for one, 1 MiB),
    for one more, for `MAX_NEEDS`, and for the largest entry that is not in memory.
    """
    entries = list(entries)
    manifest = manifest or broadcast_object(lambda: open_checkpoint(path), world)
    reader = Reader(path, buffer_bytes, manifest)
    # Before any damage: a mistake is no reason to try an older checkpoint.
    share_errors(lambda: reader.check(entries), world)
    try:
        share_errors(lambda: reader.fill(entries), world)
    except DamagedCheckpoint as damage:
        # One node's memory or network may be at fault, and the checkpoint whole: rank 0 reads the block itself.
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
    since: int = 0,
) -> dict[str, Any] | None:
    """Load the newest checkpoint under `root` that is whole; its state, or None for a run that has never saved. Collective.

    Rank 0 looks and broadcasts: others may see an older state of the folder. If one is damaged, or values are not finite
    although the hashes fit, the next older one is tried. Once that is loaded, the damaged ones are set aside as `step-N.bad`,
    with a line on stderr. Raises what `find_newest` raises. found: what rank 0 has found and broadcast already. lease: of the
    run, None for a run without a launcher. finite: names of entries whose values must be finite. since: the first step that has
    these entries; where no whole checkpoint is as new, damaged ones are set aside, and all ranks raise BeforeStage.
    """
    entries = list(entries)
    damaged: dict[Place, DamagedCheckpoint] = {}
    while True:
        found = found or broadcast_object(partial(find_newest, root, damaged), world)
        if found.newest is None:
            return None
        if step_of(found.newest) < since:
            if world.rank == 0:
                set_aside_newer(found, lease or unleased(root))
            raise BeforeStage(f"{found.newest} is of the stage before: all newer checkpoints are damaged")
        try:
            state = load_checkpoint(found.newest, entries, world, manifest=found.manifest)
            judged = [entry for entry in entries if entry.name in finite]
            share_errors(partial(refuse_poisoned, found.newest, judged), world)
        except DamagedCheckpoint as error:
            # Only its text: the error itself keeps its stack alive, and with that the reader's cache.
            damaged |= {**found.damaged, found.newest: DamagedCheckpoint(str(error))}
            found = None
            continue
        if world.rank == 0:
            set_aside_newer(found, lease or unleased(root))
        return state


def refuse_poisoned(path: Place, entries: Iterable[Entry]) -> None:
    """DamagedCheckpoint if an entry that was loaded from `path` has values that are not finite."""
    for entry in entries:
        if not all(_is_finite(piece) for piece in entry.pieces()):
            raise DamagedCheckpoint(
                f"{path}: {entry.name} has values that are not finite, and the bytes are those that were saved"
            )


def _is_finite(values: torch.Tensor) -> bool:
    # The smallest and the largest are NaN if any value is, and need no memory.
    return not values.numel() or all(bool(each.isfinite()) for each in torch.aminmax(values.detach()))


def form_of(entry: Entry) -> tuple[tuple[int, ...], str]:
    """Global shape and dtype of an entry, as a manifest's record has them."""
    return tuple(entry.layout.shape), dtype_name(entry.data.dtype)


class Reader:
    """A checkpoint that is opened once and read in ranges, by one rank alone.

    manifest: of a checkpoint that `open_checkpoint` has seen, perhaps on another rank; None: open it now. Raises
    DamagedCheckpoint, when opened and when read, if the files are not what was saved. cache: all memory that it needs.
    """

    def __init__(self, path: Place, buffer_bytes: int = BUFFER_BYTES, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = open_checkpoint(path) if manifest is None else manifest
        self.cache = BlockCache(buffer_bytes)
        self._index = Index(path, self.manifest, self.cache)

    def confirm(self, damage: DamagedCheckpoint) -> None:
        """Raise damage that another rank has met if this rank meets it too, else StorageError."""
        if damage.block is None:
            raise damage
        path, level, index = damage.block
        next(file for file in self._index.all_files() if file.path == path).block(level, index)
        raise StorageError(
            f"{damage}, as one rank reads it; rank 0 reads what was saved. The checkpoint is whole: a node's memory, network or"
            " view of the file system is at fault. The next start tries again"
        )

    def files_of(self, entries: Sequence[Entry]) -> set[int]:
        """The ranks whose files have elements of the entries. Only the index is read. Raises as `check`."""
        self.check(entries)
        boxes = ((entry.name, box) for entry in entries for box in entry.layout.boxes())
        return {saved.file for name, box in boxes for saved in self._index.find(name, box)}

    def file(self, rank: int) -> BlockFile:
        """The file that a rank wrote."""
        return self._index.data_file(rank)

    def check(self, entries: Iterable[Entry]) -> None:
        """CheckpointError for an entry that is not in the checkpoint, or has another shape or dtype there."""
        for entry in entries:
            record = self.manifest.entries.get(entry.name)
            if record is None:
                near = difflib.get_close_matches(entry.name, self.manifest.entries, n=3)
                raise CheckpointError(f"{self.path} has no {entry.name}; nearest: {', '.join(near) or 'none'}")
            wanted = form_of(entry)
            if wanted != (record.shape, record.dtype):
                raise CheckpointError(
                    f"{entry.name} is {wanted[1]}{list(wanted[0])} here, but {record.dtype}{list(record.shape)} in"
                    f" {self.path}: the model or its precision was changed"
                )

    def fill(self, entries: Sequence[Entry]) -> None:
        """Fill every entry's data. Raises CheckpointError for an entry that cannot be filled from this checkpoint.

        Entries in memory are read together, file by file: a block that several of them share is read once. Others are read one by
        one, through memory for one.
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
                # Bounded: a layout that cuts the last dim has thousands of boxes in one entry.
                if len(needs) == MAX_NEEDS:
                    self._read(needs)
                    needs = []
        self._read(needs)

    def _find(self, entry: Entry, data: torch.Tensor) -> Iterator["_Need"]:
        """The saved boxes of the entry's elements, to be read into `data`: thousands if a layout cuts the last dim into runs."""
        first, missing = 0, data.numel()
        for box in entry.layout.boxes():
            target = data[first : first + box.numel].view(box.sizes)
            first += box.numel
            for saved in self._index.find(entry.name, box):
                common = box.intersect(saved.box)
                if common is not None:
                    yield _Need(saved, common, target[common.relative_to(box).slices()])
                    missing -= common.numel
        if missing:
            raise CheckpointError(f"{self.path} lacks {missing} of the {data.numel()} elements of {entry.name}")

    def _read(self, needs: list["_Need"]) -> None:
        needs.sort(key=lambda need: (need.saved.file, need.saved.offset))
        for number, of_file in groupby(needs, key=lambda need: need.saved.file):
            self._read_file(self._index.data_file(number), list(of_file))

    def _read_file(self, file: BlockFile, needs: list["_Need"]) -> None:
        file.expect(need.range() for need in needs)
        # In the order of the file, so that each block is read and verified once, whatever entries share it.
        for need in needs:
            start = _start_of_run(need)
            if start is not None:
                file.read_into(start, need.target.detach().view(-1).view(torch.uint8).numpy())
                continue
            for box, values in _read_box(need.saved, need.box, need.target.dtype, file):
                need.target[box.relative_to(need.box).slices()].copy_(values)


@dataclass(slots=True)
class _Need:
    """Elements to read: `box`, within `saved`, into `target` of the box's shape."""

    saved: SavedBox
    box: Box
    target: torch.Tensor

    def range(self) -> tuple[int, int]:
        """The bytes [start, stop) of the file from the first element to the last. Other elements may lie between."""
        sizes, place = self.saved.box.sizes, self.box.relative_to(self.saved.box)
        first = last = 0
        for size, offset, length in zip(sizes, place.offsets, place.sizes, strict=True):
            first, last = first * size + offset, last * size + offset + length - 1
        itemsize = self.target.dtype.itemsize
        return self.saved.offset + first * itemsize, self.saved.offset + (last + 1) * itemsize


def _start_of_run(need: _Need) -> int | None:
    """The byte at which the wanted elements begin if they are contiguous in the file and in a target on the host. Then the file
    is read into the target directly, without a copy. Else None."""
    sizes, place = need.saved.box.sizes, need.box.relative_to(need.saved.box)
    # One index of each dim before some dim, any range of that one, all of those behind it.
    dim = next((dim for dim, size in enumerate(place.sizes) if size != 1), len(sizes))
    is_contiguous = place.sizes[dim + 1 :] == sizes[dim + 1 :]
    is_in_place = is_contiguous and need.target.is_contiguous() and need.target.device.type == "cpu"
    return need.range()[0] if is_in_place else None


def _read_box(saved: SavedBox, wanted: Box, dtype: torch.dtype, file: BlockFile) -> Iterator[tuple[Box, torch.Tensor]]:
    """The elements of `wanted`, a box within the saved one, in boxes that lie in one block or are one row in two blocks.

    A row is all elements of one index of dim `dim`, the first dim for which a row fits a block. The dims before are read index by
    index.
    """
    if not wanted.sizes:
        yield wanted, _tensor(file, saved.offset, dtype.itemsize, dtype).view(())
        return
    sizes = saved.box.sizes
    row_bytes = [prod(sizes[dim + 1 :]) * dtype.itemsize for dim in range(len(sizes))]
    dim = next(dim for dim, num_bytes in enumerate(row_bytes) if num_bytes <= file.block_bytes)
    place = wanted.relative_to(saved.box)
    columns = place.slices()[dim + 1 :]
    ones = (1,) * dim
    for outer in product(*(range(each.start, each.stop) for each in place.slices()[:dim])):
        base = saved.offset + sum(index * num_bytes for index, num_bytes in zip(outer, row_bytes[:dim], strict=True))
        row, stop = place.offsets[dim], place.offsets[dim] + place.sizes[dim]
        while row < stop:
            start = base + row * row_bytes[dim]
            # Whole rows up to the end of the block; a row that crosses it is read alone, from two blocks.
            rows_in_block = (file.block_bytes - start % file.block_bytes) // row_bytes[dim]
            num_rows = max(1, min(stop - row, rows_in_block))
            rows = _tensor(file, start, num_rows * row_bytes[dim], dtype)
            offsets = [index + low for index, low in zip((*outer, row), saved.box.offsets[: dim + 1], strict=True)]
            box = Box((*offsets, *wanted.offsets[dim + 1 :]), (*ones, num_rows, *wanted.sizes[dim + 1 :]))
            yield box, rows.view(*ones, num_rows, *sizes[dim + 1 :])[(slice(None),) * (dim + 1) + columns]
            row += num_rows


def _tensor(file: BlockFile, start: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(file.read(start, start + num_bytes)).view(dtype)


# --- inspecting

# Characters shown of a value, and values shown of a group, such as the recipe's.
LONGEST = 64
MOST_SHOWN = 8


def inspect_command(path: Place) -> int:
    """Print the checkpoint at `path` and verify every byte of it; for a run directory, its newest checkpoint.

    Returns 0, or 86 if something is damaged. Raises CheckpointError if there is none.
    """
    path = find_checkpoint(path)
    manifest = read_manifest(path)
    print("\n".join(describe(path, manifest)))
    damages = verify_files(path, manifest)
    for damage in damages:
        print(f"DAMAGED       {damage}")
    if not damages:
        print("verified      every hash fits")
    return EXIT_USER if damages else EXIT_DONE


def verify_files(path: Place, manifest: Manifest) -> list[DamagedCheckpoint]:
    """Read everything and compare with the hashes: one error per file that is not as it was saved. Only the first if a file is
    missing or short, or if the index is damaged, without which nothing is known of the others."""
    damages: list[DamagedCheckpoint] = []
    try:
        verify_sizes(path, manifest)
        for file in Index(path, manifest, BlockCache(BUFFER_BYTES)).all_files():
            try:
                file.verify()
            except DamagedCheckpoint as error:
                damages.append(error)
    except DamagedCheckpoint as error:
        damages = damages or [error]
    return damages


def find_checkpoint(path: Place) -> Place:
    """`path` itself if it is a checkpoint, else the newest checkpoint of the run directory, or the folder of checkpoints,
    `path`."""
    if path.name.startswith("step-") and path.is_dir():
        return path
    for root in (*([checkpoints_of(path)] if isinstance(path, Path) else []), path):
        newest = newest_checkpoint(root)
        if newest is not None:
            return newest
    raise CheckpointError(
        f"{path} is neither a checkpoint (a folder step-N with a {MANIFEST}), nor a run with one, nor a token store"
    )


def describe(path: Place, manifest: Manifest) -> list[str]:
    """The lines of the table: state, files, and entries by kind (the first component of their names)."""
    lines = [f"path          {path}", f"step          {manifest.step:,}"]
    lines += [
        f"{name:<13} {_shorten(value)}"
        for name, value in manifest.state.items()
        if name != "step" and value is not None
    ]
    size = sum(each.num_bytes for each in manifest.entries.values())
    ranks = "rank" if manifest.world == 1 else "ranks"
    lines.append(f"files         {manifest.world}, saved by {manifest.world} {ranks}, {size:,} bytes of tensors")
    lines.append("entries       " + f"{'kind':<14} {'tensors':>8} {'elements':>16} {'bytes':>18}  dtype")
    for kind, names in _kinds(manifest).items():
        records = [manifest.entries[name] for name in names]
        numel = sum(prod(record.shape) for record in records)
        dtypes = ", ".join(Counter(record.dtype for record in records))
        num_bytes = sum(record.num_bytes for record in records)
        lines.append(f"              {kind:<14} {len(names):>8,} {numel:>16,} {num_bytes:>18,}  {dtypes}")
    return lines


def _shorten(value: Any) -> str:
    """A value of the state. A long one, such as the norms of the last steps, is given by its number of entries."""
    if len(text := str(value)) <= LONGEST:
        return text
    if isinstance(value, dict) and len(value) > MOST_SHOWN:
        return f"{len(value)} values"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shorten(each)}" for name, each in value.items())
    return f"{len(value)} entries" if isinstance(value, list) else f"{text[:LONGEST]} ..."


def _kinds(manifest: Manifest) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in manifest.entries:
        kinds.setdefault(name.partition("/")[0], []).append(name)
    return kinds
