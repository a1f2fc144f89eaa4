"""Joining: the shards of a tokenized source become one file of tokens and one of document ends for each split.

    shards.json -> for each shard, in order: write it at its place -> fsync -> remove it -> verify all -> checksums -> store.json

Killed or out of disk at any moment, it continues when called again, to the same bytes. shards.json alone decides every place, so
writing a shard twice does no harm. A shard is removed only once its bytes are on the disk, so a shard that is still there is
written (again), and a missing one has been written. A lost or damaged shard shows when the joined bytes are verified against the
checksums that were taken as the shards were written. Besides the store itself joining takes disk space for BATCH_BYTES and one
shard.
"""

import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from framework.data.shard import ShardReport, SplitReport, hash_shard, shard_path
from framework.data.source import BAR_DELAY_S
from framework.data.store import (
    ENDS_DTYPE,
    SPLITS,
    TRAINED_DTYPE,
    Split,
    StoreMeta,
    TokenStream,
    complete_store,
    explain_damage,
    map_stream,
    read_json,
)
from framework.errors import DamagedStore, DataError
from framework.files import name_errors, sync, write_json

# Shards that are removed after one fsync: few syncs for many small shards, little more disk for large ones.
BATCH_BYTES = 64 << 20
COPY_BYTES = 8 << 20


@dataclass(frozen=True)
class ShardSplit:
    """One split of one shard, and where it goes in the joined files."""

    shard: int
    report: SplitReport
    start_token: int
    start_document: int
    dtype: np.dtype
    is_masked: bool

    @property
    def num_bytes(self) -> int:
        of_token = self.dtype.itemsize + self.is_masked * TRAINED_DTYPE.itemsize
        return self.report.num_tokens * of_token + self.report.num_documents * ENDS_DTYPE.itemsize


@dataclass(frozen=True)
class JoinPlan:
    """The content of shards.json: a store whose text has all been tokenized."""

    meta: StoreMeta
    """Meta of the joined store."""
    files: list[list[Any]]
    """[name, bytes, mtime in ns] of each source file."""
    shards: list[dict[str, SplitReport]]

    def write(self, folder: Path) -> None:
        write_json(folder / "shards.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "JoinPlan | None":
        """The plan of a store that is to be joined; None if not all of it is tokenized."""

        def build(value: dict[str, Any]) -> JoinPlan:
            shards = [{split: SplitReport(**each) for split, each in shard.items()} for shard in value["shards"]]
            return cls(StoreMeta.from_json(value["meta"]), value["files"], shards)

        return read_json(folder / "shards.json", build)

    def place(self, split: Split) -> Iterator[ShardSplit]:
        """The shards that have documents of a split, in order."""
        start_token = start_document = 0
        for shard, reports in enumerate(self.shards):
            if report := reports.get(split):
                dtype, is_masked = np.dtype(self.meta.dtype), self.meta.is_masked
                yield ShardSplit(shard, report, start_token, start_document, dtype, is_masked)
                start_token += report.num_tokens
                start_document += report.num_documents

    def count_missing_bytes(self, folder: Path) -> int:
        """Bytes of disk that joining may still need."""
        shards = [shard.num_bytes for split in SPLITS for shard in self.place(split)]
        paths = [folder / name for name in self.meta.list_files()]
        joined = sum(path.stat().st_size for path in paths if path.exists())
        return min(max(0, sum(shards) - joined), BATCH_BYTES + max(shards, default=0))


def is_tokenized(folder: Path) -> bool:
    """Whether a store is complete, or can be completed without its source."""
    return any((folder / name).exists() for name in ("store.json", "shards.json"))


def count_needed_bytes(folder: Path, source_bytes: int) -> int:
    """Bytes of disk that the rest of a store may take, estimated from what has been written so far."""
    if StoreMeta.read(folder):
        return 0
    if plan := JoinPlan.read(folder):
        return plan.count_missing_bytes(folder)
    reports = [ShardReport.read(path) for path in folder.glob("[0-9]*.json")]
    done_bytes = sum(report.num_source_bytes for report in reports if report)
    written_bytes = sum(path.stat().st_size for path in folder.glob("*.tokens"))
    # Before the first shard is done: 3.4 bytes of text in a token of 2 bytes.
    ratio = written_bytes / done_bytes if done_bytes else 0.6
    return int(ratio * (source_bytes - done_bytes))


def join_store(folder: Path, progress: bool = False) -> None:
    """Complete a tokenized store. DamagedStore if a shard is lost or damaged, OSError if the disk is full."""
    plan = JoinPlan.read(folder)
    assert plan is not None, f"{folder}: not tokenized"
    _sync_folder(folder)  # the plan is on the disk before the first report goes
    for shard in range(len(plan.shards)):
        shard_path(folder, shard, "json").unlink(missing_ok=True)
    total = sum(shard.num_bytes for split in SPLITS for shard in plan.place(split))
    with tqdm(total=total, desc="join", unit="B", unit_scale=True, disable=not progress, delay=BAR_DELAY_S) as bar:
        for split in SPLITS:
            if plan.meta.splits[split].num_documents:
                _join_split(folder, plan, split, bar)
    for split in SPLITS:
        stream = map_stream(folder, plan.meta, split)
        for each in plan.place(split):
            _verify(folder, split, each, stream)
    complete_store(folder, plan.meta, stream.count_ids(plan.meta.vocab_size))  # of the validation split, the last


def _join_split(folder: Path, plan: JoinPlan, split: Split, bar: Any) -> None:
    tokens_path, ends_path, trained_path = (folder / f"{split}.{kind}" for kind in ("tokens", "ends", "trained"))
    with ExitStack() as stack:
        paths = (tokens_path, ends_path, *([trained_path] if plan.meta.is_masked else []))
        files = {path: open_without_links(path) for path in paths}
        for file in files.values():
            stack.callback(os.close, file)
        _sync_folder(folder)  # their names are on the disk before the first shard goes
        written: list[ShardSplit] = []
        for each in plan.place(split):
            for path in files.keys() - {ends_path}:
                itemsize = TRAINED_DTYPE.itemsize if path == trained_path else each.dtype.itemsize
                with name_errors(path):
                    _copy(shard_path(folder, each.shard, path.name), files[path], each.start_token * itemsize)
            with name_errors(ends_path):
                _copy_ends(shard_path(folder, each.shard, ends_path.name), files[ends_path], each)
            written.append(each)
            bar.update(each.num_bytes)
            if sum(shard.num_bytes for shard in written) >= BATCH_BYTES:
                _remove_written(folder, files, written)
        _remove_written(folder, files, written)


def _copy(path: Path, into: int, offset: int) -> None:
    """Write a file of a shard at its place, from byte `offset` on, if it is still there."""
    if path.exists():
        with open(path, "rb", buffering=0) as file:
            while data := file.read(COPY_BYTES):
                offset = _write_at(into, data, offset)


def _copy_ends(path: Path, into: int, shard: ShardSplit) -> None:
    """Write the document ends of a shard, counted from the start of the joined file, if its file is still there."""
    if path.exists():
        ends = np.fromfile(path, dtype=ENDS_DTYPE) + shard.start_token
        _write_at(into, ends.tobytes(), shard.start_document * ENDS_DTYPE.itemsize)


def _write_at(file: int, data: bytes, offset: int) -> int:
    """Write all of `data`, and return the offset behind it."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
    return offset


def _remove_written(folder: Path, files: dict[Path, int], written: list[ShardSplit]) -> None:
    """Sync the joined files, and only then remove the shards that are in them."""
    for path, file in files.items():
        with name_errors(path):
            os.fsync(file)
    for shard in written:
        for path in files:
            shard_path(folder, shard.shard, path.name).unlink(missing_ok=True)
    written.clear()


def _verify(folder: Path, split: Split, shard: ShardSplit, stream: TokenStream) -> None:
    """DamagedStore unless the joined bytes of a shard are those that it was written with. stream: the whole split."""
    start, stop = shard.start_token, shard.start_token + shard.report.num_tokens
    ends = stream.ends[shard.start_document : shard.start_document + shard.report.num_documents] - start
    trained = None if stream.trained is None else stream.trained[start:stop]
    if hash_shard(stream.tokens[start:stop], ends, trained) != shard.report.checksum:
        first, last = start * shard.dtype.itemsize, stop * shard.dtype.itemsize
        raise DamagedStore(
            explain_damage(
                f"{folder / split}.tokens: bytes {first:,} to {last:,} (shard {shard.shard}), or their ends in {split}.ends, are"
                " not as they were written"
            )
        )


def _sync_folder(folder: Path) -> None:
    with name_errors(folder):
        sync(folder)


def open_without_links(path: Path) -> int:
    """Open or create a file for reading and writing, and return its descriptor; the file keeps its content. DataError for a
    symbolic link: in a shared folder anyone could have pointed this name at another user's file."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(
                f"{path}: a link, through which nothing is written. Remove it, or set another data.root"
            ) from error
        raise


@contextmanager
def hold_lock(folder: Path, is_told: bool = True) -> Iterator[None]:
    """Hold the lock under which one process of a node at a time makes a folder. The kernel releases it however the process
    ends."""
    with open(open_without_links(folder.with_name(f".{folder.name}.lock")), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if is_told:
                print(f"waiting for another process that prepares {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
