"""Joining: the shards of a tokenized source become one file of tokens and one of document ends for each split.

    shards.json -> for each shard, in order: write it at its place -> fsync -> remove it -> checksums -> store.json

Killed or out of disk at any moment, it goes on when called again, to the same bytes: shards.json alone decides on every place,
so writing a shard twice does no harm, and a shard is removed only once its bytes are on the disk. So a shard that is there is
written (again) and one that is not there has been written. Beyond the store itself it takes the disk of BATCH_BYTES and one
shard.

Stores of version 1 ended as shards, under a meta.json. They are joined, not tokenized again, and their shards stay: runs of
older code may be reading them. Who has no such run removes them by hand. Where the disk has no room for both, meta.json may go
once shards.json is there (until then it alone knows the shards), and joining then removes each shard.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from framework.data.checksums import COUNTS_FILE, hash_blocks, write_checksums
from framework.data.source import BAR_DELAY_S
from framework.data.store import (
    ENDS_DTYPE,
    SPLITS,
    STORE_VERSION,
    Split,
    SplitReport,
    StoreMeta,
    TokenStream,
    damaged,
    explain_damage,
    name_damage,
    open_stream,
    open_without_links,
    read_json,
    shard_path,
    sum_splits,
)
from framework.errors import DamagedStore, DataError
from framework.files import name_errors, sync, write_atomically, write_json

# Shards that are removed after one fsync: few syncs for many small shards, little more disk for large ones.
BATCH_BYTES = 64 << 20
COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class JoinPlan:
    """shards.json: a store whose text has all been tokenized.

    meta: of the joined store. files: [name, bytes, mtime in ns] of each source file. shards: what each holds.
    """

    meta: StoreMeta
    files: list[list[Any]]
    shards: list[dict[str, SplitReport]]

    def write(self, folder: Path) -> None:
        write_json(folder / "shards.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "JoinPlan | None":
        """The plan of a store that is to be joined, one of version 1 included; None where not all is tokenized."""
        if (value := read_json(path := folder / "shards.json")) is not None:
            with name_damage(path):
                return cls(StoreMeta.from_json(value["meta"]), value["files"], _read_shards(value["shards"]))
        if (value := read_json(path := folder / "meta.json")) is None:
            return None
        with name_damage(path):
            files, shards = value.pop("files"), _read_shards(value.pop("shards"))
            value |= {"version": STORE_VERSION, "num_files": len(files), "splits": sum_splits(shards)}
            return cls(StoreMeta(**value), files, shards)


def is_tokenized(folder: Path) -> bool:
    """True if the store is complete, or can be completed without its source."""
    return any((folder / name).exists() for name in ("store.json", "shards.json", "meta.json"))


def join_store(folder: Path, progress: bool = False) -> None:
    """Completes a store that has been tokenized. DataError where a shard is lost or damaged, OSError where the disk is full."""
    plan = JoinPlan.read(folder)
    assert plan is not None, f"{folder}: not tokenized"
    keeps_shards = (folder / "meta.json").exists()
    if not (folder / "shards.json").exists():
        plan.write(folder)
    _sync_folder(folder)  # the plan is on the disk before the first report goes
    if not keeps_shards:
        for shard in range(len(plan.shards)):
            shard_path(folder, shard, "json").unlink(missing_ok=True)
    total = _count_bytes(plan, SPLITS)
    bar = tqdm(total=total, desc="join", unit="B", unit_scale=True, disable=not progress, delay=BAR_DELAY_S)
    with bar:
        for split in SPLITS:
            _join_split(folder, plan, split, keeps_shards, bar)
    counts = open_stream(folder, plan.meta, "validation").count_ids(plan.meta.vocab_size)
    with write_atomically(folder / COUNTS_FILE) as file:
        file.write(counts.tobytes())
    add_checksums(folder, plan.meta)
    plan.meta.write(folder)


def add_checksums(folder: Path, meta: StoreMeta) -> None:
    """Write the checksums of the blocks of a joined store, once it is verified against those of its shards. DataError where it is
    not what its shards were. Without shards.json nothing says what it was: then the checksums are of what is there."""
    plan, hashes = JoinPlan.read(folder), list[int]()
    for split in SPLITS:
        stream = open_stream(folder, meta, split)
        for part in () if plan is None else _place_parts(plan, split):
            _verify_part(folder, split, part, stream)
        hashes += [*hash_blocks(stream.tokens), *hash_blocks(stream.ends)]
    write_checksums(folder, meta, hashes)


def _verify_part(folder: Path, split: Split, part: "Part", stream: TokenStream) -> None:
    tokens = stream.tokens[part.start_token : part.start_token + part.report.num_tokens]
    ends = stream.ends[part.start_document : part.start_document + part.report.num_documents] - part.start_token
    digest = xxhash.xxh3_128(tokens.data)
    digest.update(ends.data)
    if digest.hexdigest() != part.report.checksum:
        first, stop = (index * part.dtype.itemsize for index in (part.start_token, part.start_token + len(tokens)))
        raise DamagedStore(
            explain_damage(
                f"{folder / split}.tokens: bytes {first:,} to {stop:,}, or their ends in {split}.ends, are not as they were"
                " written"
            )
        )


def count_missing_bytes(folder: Path, plan: JoinPlan) -> int:
    """Bytes of disk that joining may still need."""
    joined = sum(path.stat().st_size for split in SPLITS for path in _joined_paths(folder, split) if path.exists())
    missing = max(0, _count_bytes(plan, SPLITS) - joined)
    if (folder / "meta.json").exists():
        return missing
    parts = [part for split in SPLITS for part in _place_parts(plan, split)]
    return min(missing, BATCH_BYTES + max((part.num_bytes for part in parts), default=0))


@dataclass(frozen=True)
class Part:
    """One split of one shard. start_token, start_document: of its split, where it goes."""

    shard: int
    report: SplitReport
    start_token: int
    start_document: int
    dtype: np.dtype

    @property
    def num_bytes(self) -> int:
        return self.report.num_tokens * self.dtype.itemsize + self.report.num_documents * ENDS_DTYPE.itemsize


def _place_parts(plan: JoinPlan, split: Split) -> Iterator[Part]:
    start_token = start_document = 0
    for shard, reports in enumerate(plan.shards):
        if report := reports.get(split):
            yield Part(shard, report, start_token, start_document, np.dtype(plan.meta.dtype))
            start_token += report.num_tokens
            start_document += report.num_documents


def _batch(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The parts in order, about BATCH_BYTES at once."""
    batch: list[Part] = []
    num_bytes = 0
    for part in parts:
        batch.append(part)
        num_bytes += part.num_bytes
        if num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _join_split(folder: Path, plan: JoinPlan, split: Split, keeps_shards: bool, bar: Any) -> None:
    size = plan.meta.splits[split]
    if size.num_documents == 0:
        return
    tokens_path, ends_path = _joined_paths(folder, split)
    with _open_joined(tokens_path) as tokens, _open_joined(ends_path) as ends:
        _sync_folder(folder)  # their names are on the disk before the first shard goes
        writer = PartWriter(folder, split, tokens, ends, os.fstat(tokens).st_size, os.fstat(ends).st_size)
        for batch in _batch(_place_parts(plan, split)):
            for part in batch:
                writer.write(part)
                bar.update(part.num_bytes)
            for file, path in ((tokens, tokens_path), (ends, ends_path)):
                with name_errors(path):
                    os.fsync(file)
            if not keeps_shards:
                for part in batch:
                    for path in _shard_paths(folder, part.shard, split):
                        path.unlink(missing_ok=True)
        found = os.fstat(tokens).st_size, os.fstat(ends).st_size
    expected = size.num_tokens * np.dtype(plan.meta.dtype).itemsize, size.num_documents * ENDS_DTYPE.itemsize
    assert found == expected, f"{folder}: {split} has {found} bytes of tokens and ends where its shards have {expected}"


@dataclass(frozen=True)
class PartWriter:
    """Writes parts into the files of one split. tokens, ends: their descriptors; known_tokens_bytes, known_ends_bytes: what
    earlier attempts had written when this one began."""

    folder: Path
    split: Split
    tokens: int
    ends: int
    known_tokens_bytes: int
    known_ends_bytes: int

    def write(self, part: Part) -> None:
        """Writes a part at its place, unless an earlier attempt has and removed it. DataError where it is not what its shard's
        report says."""
        tokens_path, ends_path = _shard_paths(self.folder, part.shard, self.split)
        tokens_bytes = part.report.num_tokens * part.dtype.itemsize
        ends_bytes = part.report.num_documents * ENDS_DTYPE.itemsize
        tokens_at, ends_at = part.start_token * part.dtype.itemsize, part.start_document * ENDS_DTYPE.itemsize
        found = _size(tokens_path), _size(ends_path)
        was_written = (
            tokens_at + tokens_bytes <= self.known_tokens_bytes and ends_at + ends_bytes <= self.known_ends_bytes
        )
        if None in found and was_written:
            return
        if found != (tokens_bytes, ends_bytes):
            is_tokens = found[0] != tokens_bytes
            raise damaged(*((tokens_path, tokens_bytes, found[0]) if is_tokens else (ends_path, ends_bytes, found[1])))
        digest = xxhash.xxh3_128()
        with open(tokens_path, "rb", buffering=0) as file:
            while data := file.read(COPY_BYTES):
                digest.update(data)
                with name_errors(_joined_paths(self.folder, self.split)[0]):
                    tokens_at = _write_at(self.tokens, data, tokens_at)
        ends = np.fromfile(ends_path, dtype=ENDS_DTYPE)
        digest.update(ends.tobytes())
        with name_errors(_joined_paths(self.folder, self.split)[1]):
            _write_at(self.ends, (ends + part.start_token).tobytes(), ends_at)
        if digest.hexdigest() != part.report.checksum:
            raise DataError(
                f"{tokens_path}, {ends_path.name}: their checksum is not the one they were written with: the disk has changed "
                f"them. Delete the folder {self.folder} and run `meshwright prepare` again."
            )


def _read_shards(shards: Sequence[Mapping[str, Any]]) -> list[dict[str, SplitReport]]:
    return [{split: SplitReport(**report) for split, report in shard.items()} for shard in shards]


def _count_bytes(plan: JoinPlan, splits: Sequence[Split]) -> int:
    return sum(part.num_bytes for split in splits for part in _place_parts(plan, split))


def _joined_paths(folder: Path, split: Split) -> tuple[Path, Path]:
    return folder / f"{split}.tokens", folder / f"{split}.ends"


def _shard_paths(folder: Path, shard: int, split: Split) -> tuple[Path, Path]:
    return shard_path(folder, shard, f"{split}.tokens"), shard_path(folder, shard, f"{split}.ends")


@contextmanager
def _open_joined(path: Path) -> Iterator[int]:
    """A descriptor of a file that may be there already and keeps what it holds."""
    file = open_without_links(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _write_at(file: int, data: bytes, offset: int) -> int:
    """Writes all of `data`; the offset behind it."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
    return offset


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _sync_folder(folder: Path) -> None:
    with name_errors(folder):
        sync(folder)
