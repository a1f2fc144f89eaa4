"""The token store of one source on disk: tokenized shard by shard, joined into one file per split, read memory-mapped.

    <root>/<source>-<settings key>-<files key>/
        train.tokens                      uint16 (uint32 above 65536 entries), each document closed by the end-of-sequence id
        train.ends                        int64: end of each document, in tokens from the start of train.tokens
        validation.tokens  .ends          the same of the held-out documents; a split without documents has no files
        validation.counts                 int64 [vocab]: how often each id stands in the validation split
        left_out.json                     files beside the source's files that were not read, with the reasons
        quarantine.jsonl                  the bad records: file, row, reason
        shards.json                       the source's files and each shard's sizes and checksums; only `prepare` reads it
        checksums                         of all these: checksums.py
        store.json                        what the store holds; its presence says that the store is complete

Until they are joined (`join.py`) there are the shards, each made by one worker at one time:

        00000.train.tokens  .ends         as above, ends from the start of this file; 00000.validation.tokens  .ends
        00000.json                        what shard 0 holds; its presence says that the shard is complete

A complete store is at most five files to open, whatever its size: a rank has a memory map of each.
All but the joined files appear under their names by an atomic rename after fsync, so a process killed at any moment leaves
nothing that could be taken for complete. No file holds a time, a host name or a worker count: equal input gives equal bytes.
"""

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash

from framework.errors import DamagedStore, DataError
from framework.files import write_atomically, write_json

# Raise it when equal text gives other tokens, splits or shards: all stores are then prepared anew, under other names.
TOKENS_VERSION = 1
# Raise it when a store's files change: `join.py` then converts what is there. 1: shards that were never joined.
STORE_VERSION = 2

# Tokens that are counted at once: numpy makes 8 bytes of each.
COUNTED_AT_ONCE = 1 << 20

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
ENDS_DTYPE = np.dtype(np.int64)


def choose_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """DamagedStore with the file's name where its content is not what was written there."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedStore(explain_damage(f"{path}: cannot be understood ({type(error).__name__}: {error})")) from error


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


def read_json(path: Path) -> dict[str, Any] | None:
    """The values of a JSON file; None where there is none. DamagedStore where it was cut or changed."""
    with name_damage(path):
        try:
            value: dict[str, Any] = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(value, dict):
            raise ValueError("no object")
        return value


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
        value = read_json(path)
        if value is None:
            return None
        with name_damage(path):
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


def verify_nothing(start: int, stop: int) -> None:
    """Verify elements of a store that has no checksums."""


class TokenStream:
    """One split of one store as a single sequence of tokens.

    tokens: [n] uint16 or uint32, a view of the file's memory map; ends: [documents] int64, ascending, the last is n.
    verify_tokens, verify_ends: raise DataError where elements [start, stop) are not what was written (checksums.py).
    """

    def __init__(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        self.tokens, self.ends = tokens, ends
        self.num_tokens = len(tokens)
        self.num_documents = len(ends)
        self.verify_tokens: Callable[[int, int], None] = verify_nothing
        self.verify_ends: Callable[[int, int], None] = verify_nothing

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as stored: a view."""
        if start < stop:
            self.verify_tokens(start, stop)
        return self.tokens[start:stop]

    def ends_within(self, start: int, stop: int) -> np.ndarray:
        """The document ends e with start < e <= stop, relative to `start`: int64, ascending."""
        first, last = (int(each) for each in np.searchsorted(self.ends, (start, stop), side="right"))
        # Their neighbours as well: then no damaged end elsewhere can have misled the search.
        low, high = max(0, first - 1), min(last + 1, self.num_documents)
        self.verify_ends(low, high)
        if not _lies_between(self.ends, first, start) or not _lies_between(self.ends, last, stop):
            self.verify_ends(0, self.num_documents)
        return self.ends[first:last] - start

    def count_ids(self, vocab_size: int) -> np.ndarray:
        """Count the occurrences of each id in the stream: int64 [vocab_size]."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, self.num_tokens, COUNTED_AT_ONCE):
            counts += np.bincount(self.read(start, min(start + COUNTED_AT_ONCE, self.num_tokens)), minlength=vocab_size)
        return counts


def _lies_between(ends: np.ndarray, index: int, value: int) -> bool:
    """Whether `index` is where `value` belongs among ascending ends: behind all that are not above it."""
    return (index == 0 or ends[index - 1] <= value) and (index == len(ends) or value < ends[index])


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
        value = read_json(folder / "store.json")
        if value is None:
            return None
        if value.get("version", STORE_VERSION) != STORE_VERSION:
            raise DataError(
                f"{folder}: a store of version {value['version']}, and this Meshwright reads version {STORE_VERSION}. Use the"
                f" one that wrote it, or set another data.root"
            )
        with name_damage(folder / "store.json"):
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
    tokens = map_file(folder / f"{split}.tokens", np.dtype(meta.dtype), size.num_tokens)
    return TokenStream(tokens, map_file(folder / f"{split}.ends", ENDS_DTYPE, size.num_documents))


def map_file(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """A file of so many elements, mapped into memory. DataError where it is missing or of another size."""
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


def damaged(path: Path, expected_bytes: int, num_bytes: int | None) -> DamagedStore:
    """The error for a file of a store that is not what the store says. num_bytes: None where it is missing."""
    found = "missing" if num_bytes is None else f"{num_bytes} bytes"
    return DamagedStore(explain_damage(f"{path}: {found}, but store.json says {expected_bytes} bytes"))


def explain_damage(found: str) -> str:
    """The message for damage in a store, and the way out."""
    return (
        f"{found}. The store is damaged, or not all nodes see the same files under data.root. `meshwright inspect` of the folder"
        " verifies all of it. To mend it, delete the folder and run `meshwright prepare` again: equal text gives equal bytes,"
        " and a run that has trained on it goes on"
    )
