"""The token store of one source on disk, written shard by shard and read memory-mapped.

    <root>/<source>-<settings key>-<files key>/
        00000.json                        what shard 0 holds; its presence says that the shard is complete
        00000.train.tokens                uint16 (uint32 above 65536 entries), each document closed by the end-of-sequence id
        00000.train.ends                  int64: end of each document, in tokens from the start of this file
        00000.validation.tokens  .ends    the same of the held-out documents; a split without documents has no files
        validation.counts                 int64 [vocab]: how often each id stands in the validation split
        quarantine.jsonl                  the bad records: file, row, reason
        meta.json                         the whole; its presence says that the store is complete

Every file appears under its name by an atomic rename after fsync, so a process killed at any moment leaves nothing that
could be taken for complete. No file holds a time, a host name or a worker count: equal input gives equal bytes.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash

from framework.errors import DataError

# Raise it when the meaning of a store's bytes changes: older stores are then prepared anew.
STORE_VERSION = 1

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


def choose_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` when the block ends well, and not at all otherwise.

    An OSError (full disk, quota) leaves with the path in it and takes the unfinished file away.
    """
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_json(path: Path, value: Any) -> None:
    with write_atomically(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


@dataclass(frozen=True)
class SplitReport:
    """One split of one shard, or of a store. checksum: xxh3-128 of the tokens and then of the ends."""

    num_documents: int
    num_tokens: int
    checksum: str


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be trained on. row: counted from 1 (a line of jsonl, a row of parquet, a piece of text)."""

    file: str
    row: int
    reason: str


@dataclass(frozen=True)
class ShardReport:
    """What a finished shard holds. lowest_hash, highest_hash: of its documents; None where it has none."""

    threshold: int
    splits: dict[str, SplitReport]
    num_source_bytes: int
    bad_records: tuple[BadRecord, ...]
    lowest_hash: int | None
    highest_hash: int | None

    @classmethod
    def read(cls, path: Path) -> "ShardReport | None":
        """The report of a shard, or None where the shard is not finished."""
        try:
            value = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        value["splits"] = {split: SplitReport(**report) for split, report in value["splits"].items()}
        value["bad_records"] = tuple(BadRecord(**record) for record in value["bad_records"])
        return cls(**value)

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def shard_path(folder: Path, shard: int, ending: str) -> Path:
    return folder / f"{shard:05d}.{ending}"


class SplitWriter:
    """Writes one split of one shard. The token file is open within `stack` from the first document on, and appears when
    the stack closes well; a split without documents leaves no file."""

    def __init__(self, stack: ExitStack, folder: Path, shard: int, split: Split, dtype: np.dtype) -> None:
        self._stack = stack
        self._tokens_path = shard_path(folder, shard, f"{split}.tokens")
        self._ends_path = shard_path(folder, shard, f"{split}.ends")
        self._dtype = dtype
        self._file: BinaryIO | None = None
        self._ends: list[int] = []
        self._hash = xxhash.xxh3_128()

    def add(self, ids: np.ndarray) -> None:
        """Appends one document, its end-of-sequence id included."""
        if self._file is None:
            self._file = self._stack.enter_context(write_atomically(self._tokens_path))
        data = ids.astype(self._dtype).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self._ends.append((self._ends[-1] if self._ends else 0) + len(ids))

    def finish(self) -> SplitReport | None:
        """Writes the document ends; None where the split has no documents."""
        if not self._ends:
            return None
        data = np.asarray(self._ends, dtype=np.int64).tobytes()
        self._hash.update(data)
        with write_atomically(self._ends_path) as file:
            file.write(data)
        return SplitReport(len(self._ends), self._ends[-1], self._hash.hexdigest())


class TokenStream:
    """One split of one store as a single sequence of tokens: its shards, one after another, memory-mapped."""

    def __init__(self, shards: list[tuple[np.ndarray, np.ndarray]]) -> None:
        """shards: (tokens [n] uint16 or uint32, ends [documents] int64), none of them empty."""
        self._tokens = [tokens for tokens, _ in shards]
        self._ends = [ends for _, ends in shards]
        self._starts = [0, *accumulate(len(tokens) for tokens in self._tokens)]

    @cached_property
    def num_tokens(self) -> int:
        return self._starts[-1]

    @cached_property
    def num_documents(self) -> int:
        return sum(len(ends) for ends in self._ends)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as stored (a view where they lie in one shard)."""
        parts = [self._tokens[shard][low:high] for shard, low, high in self._cut(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def ends_within(self, start: int, stop: int) -> np.ndarray:
        """The document ends e with start < e <= stop, relative to `start`: int64, ascending."""
        parts = []
        for shard, low, high in self._cut(start, stop):
            first, last = np.searchsorted(self._ends[shard], (low, high), side="right")
            parts.append(self._ends[shard][first:last] + (self._starts[shard] - start))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def count_ids(self, vocab_size: int) -> np.ndarray:
        """How often each id stands in the stream: int64 [vocab_size]."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for tokens in self._tokens:
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    def _cut(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """[start, stop), not empty, cut at the borders of the shards: (shard, start and stop within it)."""
        shard = bisect_right(self._starts, start) - 1
        while start < stop:
            origin, end = self._starts[shard : shard + 2]
            yield shard, start - origin, min(stop, end) - origin
            start, shard = end, shard + 1


@dataclass(frozen=True)
class StoreMeta:
    """meta.json: what a complete store holds, and of what it was made.

    threshold: a document is held out when the 64-bit hash of its text is below it. source: the recipe's words for it;
    files: [name, bytes, mtime in ns] of each file read; tokenizer_folder: relative to the root of the stores.
    fingerprint: of the tokens, the ends and their order, whatever folder or machine they came from.
    """

    version: int
    source: dict[str, Any]
    files: list[list[Any]]
    tokenizer_folder: str
    tokenizer_hash: str
    vocab_size: int
    eos_id: int
    dtype: str
    threshold: int
    shards: list[dict[str, SplitReport]]
    num_bad_records: int
    num_source_bytes: int
    fingerprint: str

    def count(self, split: Split) -> tuple[int, int]:
        """(documents, tokens) of a split."""
        reports = [shard[split] for shard in self.shards if split in shard]
        return sum(report.num_documents for report in reports), sum(report.num_tokens for report in reports)

    def write(self, folder: Path) -> None:
        write_json(folder / "meta.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "StoreMeta | None":
        """The meta of a complete store, or None where there is none."""
        try:
            value = json.loads((folder / "meta.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        value["shards"] = [
            {split: SplitReport(**report) for split, report in shard.items()} for shard in value["shards"]
        ]
        return cls(**value)


def fingerprint_shards(shards: list[dict[str, SplitReport]], tokenizer_hash: str) -> str:
    """Names what training sees: equal for equal source files and tokenizer, wherever and whenever they were prepared."""
    content = [[split, shard[split].checksum] for shard in shards for split in SPLITS if split in shard]
    return xxhash.xxh3_128_hexdigest(json.dumps([tokenizer_hash, content]).encode())


def open_stream(folder: Path, meta: StoreMeta, split: Split) -> TokenStream:
    """Maps a split into memory; DataError where a file is missing or of the wrong size."""
    dtype = np.dtype(meta.dtype)
    shards = []
    for number, reports in enumerate(meta.shards):
        if split in reports:
            report = reports[split]
            tokens = _map(shard_path(folder, number, f"{split}.tokens"), dtype, report.num_tokens)
            ends = _map(shard_path(folder, number, f"{split}.ends"), np.dtype(np.int64), report.num_documents)
            shards.append((tokens, ends))
    return TokenStream(shards)


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    found = path.stat().st_size if path.exists() else None
    if found != length * dtype.itemsize:
        size = "missing" if found is None else f"{found} bytes"
        raise DataError(
            f"{path}: {size}, but its store's meta.json says {length * dtype.itemsize} bytes: the store is damaged. "
            f"Delete the folder {path.parent} and run `meshwright prepare` again."
        )
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
