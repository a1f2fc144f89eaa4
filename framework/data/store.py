"""The token store of one source on disk: tokenized shard by shard, joined into one file per split, read memory-mapped.

    <root>/<source>-<settings key>-<files key>/
        train.tokens                      uint16 (uint32 above 65536 entries), each document closed by the end-of-sequence id
        train.ends                        int64: end of each document, in tokens from the start of train.tokens
        validation.tokens  .ends          the same of the held-out documents; a split without documents has no files
        validation.counts                 int64 [vocab]: how often each id stands in the validation split
        left_out.json                     files beside the source's files that were not read, with the reasons
        quarantine.jsonl                  the bad records: file, row, reason
        shards.json                       the source's files and each shard's sizes and checksums; only `prepare` reads it
        store.json                        what the store holds; its presence says that the store is complete

Until they are joined (`join.py`) there are the shards, each made by one worker at one time:

        00000.train.tokens  .ends         as above, ends from the start of this file; 00000.validation.tokens  .ends
        00000.json                        what shard 0 holds; its presence says that the shard is complete

A complete store is at most four files to open, whatever its size: a rank has a descriptor and a memory map for each.
All but the joined files appear under their names by an atomic rename after fsync, so a process killed at any moment leaves
nothing that could be taken for complete. No file holds a time, a host name or a worker count: equal input gives equal bytes.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash

from framework.errors import DataError

# Raise it when equal text gives other tokens, splits or shards: all stores are then prepared anew, under other names.
TOKENS_VERSION = 1
# Raise it when a store's files change: `join.py` then converts what is there. 1: shards that were never joined.
STORE_VERSION = 2

# Tokens that are counted at once: numpy makes 8 bytes of each.
COUNTED_AT_ONCE = 1 << 20

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


def choose_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@contextmanager
def name_errors(path: Path) -> Iterator[None]:
    """Has an OSError of writing or syncing, which knows descriptors only, say the file's name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def unfinished_path(path: Path) -> Path:
    """The name under which a file is written before it appears under `path`."""
    return path.with_name(path.name + ".unfinished")


def open_without_links(path: Path, flags: int) -> int:
    """A descriptor of a file that is made where it is not there, and never cut: whoever may write in a shared folder could
    have put a link to another's file under this name. DataError where there is one."""
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(
                f"{path}: a link, through which nothing is written. Remove it, or set another data.root"
            ) from error
        raise


@contextmanager
def write_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` when the block ends well, and not at all otherwise.

    An OSError (full disk, quota) leaves with the path in it and takes the unfinished file away.
    """
    unfinished = unfinished_path(path)
    try:
        with name_errors(path):
            with suppress(FileNotFoundError):
                unfinished.unlink()
            with open(open_without_links(unfinished, os.O_WRONLY | os.O_EXCL), "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise


def write_json(path: Path, value: Any) -> None:
    with write_atomically(path) as file:
        file.write(json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


@dataclass(frozen=True)
class SplitReport:
    """One split of one shard. checksum: xxh3-128 of the tokens and then of the ends."""

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
    """The contents of a finished shard. lowest_hash, highest_hash: of its documents; None where it has none."""

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
    """One split of one store as a single sequence of tokens.

    tokens: [n] uint16 or uint32, a view of the file's memory map; ends: [documents] int64, ascending, the last is n.
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        self._tokens = tokens
        self._ends = ends
        self.num_tokens = len(tokens)
        self.num_documents = len(ends)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as stored: a view."""
        return self._tokens[start:stop]

    def ends_within(self, start: int, stop: int) -> np.ndarray:
        """The document ends e with start < e <= stop, relative to `start`: int64, ascending."""
        first, last = np.searchsorted(self._ends, (start, stop), side="right")
        return self._ends[first:last] - start

    def count_ids(self, vocab_size: int) -> np.ndarray:
        """Count the occurrences of each id in the stream: int64 [vocab_size]."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, self.num_tokens, COUNTED_AT_ONCE):
            counts += np.bincount(self._tokens[start : start + COUNTED_AT_ONCE], minlength=vocab_size)
        return counts


@dataclass(frozen=True)
class SplitSize:
    """The size of one split of a store."""

    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class StoreMeta:
    """store.json: what a complete store holds, and of what it was made. A kilobyte, whatever the store's size.

    source: the recipe's words for it. threshold: a document is held out when the 64-bit hash of its text is below it.
    tokenizer_folder: relative to the root of the stores. fingerprint: of the tokens, the ends and their order, whatever
    folder or machine they came from.
    """

    version: int
    source: dict[str, Any]
    num_files: int
    tokenizer_folder: str
    tokenizer_hash: str
    vocab_size: int
    eos_id: int
    dtype: str
    threshold: int
    splits: dict[str, SplitSize]
    num_bad_records: int
    num_source_bytes: int
    fingerprint: str

    def write(self, folder: Path) -> None:
        write_json(folder / "store.json", asdict(self))

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "StoreMeta":
        return cls(**{**value, "splits": {split: SplitSize(**size) for split, size in value["splits"].items()}})

    @classmethod
    def read(cls, folder: Path) -> "StoreMeta | None":
        """The meta of a complete store, or None where there is none. DataError where a later version wrote it."""
        try:
            value = json.loads((folder / "store.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if value["version"] != STORE_VERSION:
            raise DataError(
                f"{folder}: a store of version {value['version']}, and this Meshwright reads version {STORE_VERSION}. Use the"
                f" one that wrote it, or set another data.root"
            )
        return cls.from_json(value)


def sum_splits(shards: Sequence[Mapping[str, SplitReport]]) -> dict[str, SplitSize]:
    """The size of each split over all shards."""
    reports = {split: [shard[split] for shard in shards if split in shard] for split in SPLITS}
    return {
        split: SplitSize(sum(each.num_documents for each in of_split), sum(each.num_tokens for each in of_split))
        for split, of_split in reports.items()
    }


def fingerprint_shards(shards: Sequence[Mapping[str, SplitReport]], tokenizer_hash: str) -> str:
    """Names what training sees: equal for equal source files and tokenizer, wherever and whenever they were prepared."""
    content = [[split, shard[split].checksum] for shard in shards for split in SPLITS if split in shard]
    return xxhash.xxh3_128_hexdigest(json.dumps([tokenizer_hash, content]).encode())


def open_stream(folder: Path, meta: StoreMeta, split: Split) -> TokenStream:
    """Maps a split into memory: two files. DataError where one is missing or of the wrong size."""
    size = meta.splits[split]
    tokens = _map(folder / f"{split}.tokens", np.dtype(meta.dtype), size.num_tokens)
    return TokenStream(tokens, _map(folder / f"{split}.ends", np.dtype(np.int64), size.num_documents))


def _map(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    if length == 0:
        return np.empty(0, dtype)
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes == length * dtype.itemsize:
                return np.memmap(file, dtype=dtype, mode="r").view(np.ndarray)
    except FileNotFoundError:
        num_bytes = None
    raise damaged(path, length * dtype.itemsize, num_bytes)


def damaged(path: Path, expected_bytes: int, num_bytes: int | None) -> DataError:
    """The error for a file of a store that is not what the store says. num_bytes: None where it is missing."""
    found = "missing" if num_bytes is None else f"{num_bytes} bytes"
    return DataError(
        f"{path}: {found}, but its store says {expected_bytes} bytes: the store is damaged, or not all nodes see the same "
        f"files under data.root. If it is damaged, delete the folder {path.parent} and run `meshwright prepare` again."
    )
