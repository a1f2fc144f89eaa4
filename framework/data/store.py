"""The token store of one source: one file of tokens and one of document ends per split, memory-mapped and verified as it is read.

    <root>/<source>-<settings key>-<files key>/
        train.tokens                      uint16 (uint32 above 65536 entries), each document closed by the end-of-sequence id
        train.ends                        int64: end of each document, in tokens from the start of train.tokens
        train.numbers  .hashes            of token ids that are read where they lie (formats.py), in place of train.tokens: int64,
                                          the number of each document among those of all files; uint64: xxh3 of its ids
        train.trained                     of conversations: uint8, 1 for each token of train.tokens that is trained; of answers
                                          to compare the kind of answer (document.py)
        validation.tokens  .ends ...      the same of the held-out documents; a split without documents has no files
        validation.counts                 int64 [vocab]: occurrences of each id in the validation split
        checksums                         uint64: xxh3 of each block of train.tokens, train.ends (and train.trained), then those
                                          of validation, one file after another; then the 16-byte seal: xxh3-128 of the
                                          values of store.json, of validation.counts and of all hashes before it
        left_out.json                     files beside the source's files that were not read, with the reasons
        quarantine.jsonl                  the bad records: file, row, reason
        shards.json                       the source's files and each shard's sizes and checksums; only `prepare` reads it
        store.json                        the store's sizes and origin; its presence means that the store is complete

`shard.py` writes a store shard by shard and `join.py` joins the shards: a rank maps at most seven files, whatever the store's
size. A stream stays in shards (growing.py). Rank 0 verifies the small files when it looks for the store. Every rank verifies a
block of tokens or ends before it first reads from it, once per process. `meshwright inspect STORE` verifies every byte. No file
holds a time, a host name or a worker count: equal input gives equal bytes.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import pyarrow
import xxhash

from framework.data.formats import IdFile, ImportedTokens
from framework.errors import DamagedStore, DataError
from framework.files import write_atomically, write_json

T = TypeVar("T")
# Raise it when equal text gives other tokens, splits or shards: all stores are then prepared anew, under other names.
TOKENS_VERSION = 1
# Raise it when a store's files change.
STORE_VERSION = 2

Split = Literal["train", "validation"]
# Raises DamagedStore unless elements [start, stop) of a file are what was written.
Verify = Callable[[int, int], None]
NO_VERIFIERS: Mapping[str, Verify] = MappingProxyType({})
SPLITS: tuple[Split, ...] = ("train", "validation")
ENDS_DTYPE = np.dtype(np.int64)
TRAINED_DTYPE = np.dtype(np.uint8)
COUNTS_FILE = "validation.counts"
# Name of a file that was found beside the source's files -> why it was not read.
LEFT_OUT = "left_out.json"
CHECKSUMS_FILE = "checksums"
HASH_DTYPE = np.dtype("<u8")
SEAL_BYTES = 16
# Half of what Linux reads ahead around the page that a map touches first, so verifying reads no more of the disk.
BLOCK_BYTES = 1 << 16
# numpy makes 8 bytes of each token that it counts.
TOKENS_COUNTED_AT_ONCE = 1 << 20


def choose_dtype(vocab_size: int) -> np.dtype:
    """The smallest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


@contextmanager
def name_damage(path: Path) -> Iterator[None]:
    """Turn an error about the content of a file into a DamagedStore that names the file."""
    try:
        yield
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedStore(explain_damage(f"{path}: cannot be understood ({type(error).__name__}: {error})")) from error


def read_json(path: Path, build: Callable[[dict[str, Any]], T]) -> T | None:
    """The object in a JSON file, as `build` makes it; None if there is no file. DamagedStore if it was cut or changed."""
    with name_damage(path):
        try:
            value = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not isinstance(value, dict):
            raise ValueError("no object")
        return build(value)


def explain_damage(found: str) -> str:
    """The message for damage in a store, with the way to mend it."""
    return (
        f"{found}. The store is damaged, or not all nodes see the same files under data.root. `meshwright inspect` of the folder"
        " verifies all of it. To mend it, delete the folder and run `meshwright prepare` again: equal text gives equal bytes,"
        " and a run that has trained on it goes on"
    )


def damaged_size(path: object, expected_bytes: int, num_bytes: int | None) -> DamagedStore:
    """The error for a file whose size is not what store.json implies. num_bytes: None if the file is missing."""
    found = "missing" if num_bytes is None else f"{num_bytes} bytes"
    return DamagedStore(explain_damage(f"{path}: {found}, but store.json says {expected_bytes} bytes"))


@dataclass(frozen=True)
class SplitSize:
    """The size of one split of a store."""

    num_documents: int
    num_tokens: int


@dataclass(frozen=True)
class StoreMeta:
    """The content of store.json. About a kilobyte, whatever the store's size."""

    version: int
    source: dict[str, Any]
    """Path, format and field, as the recipe states them; of conversations also `messages` and what their tokens follow from."""
    num_files: int
    tokenizer_folder: str
    """Relative to data.root."""
    tokenizer_hash: str
    vocab_size: int
    eos_id: int
    dtype: str
    threshold: int
    """A document is held out when the 64-bit hash of its text is below it."""
    splits: dict[str, SplitSize]
    num_bad_records: int
    num_source_bytes: int
    fingerprint: str
    """Hash of the tokens, the ends and their order, whatever folder or machine they came from."""

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "StoreMeta":
        return cls(**{**value, "splits": {split: SplitSize(**size) for split, size in value["splits"].items()}})

    @classmethod
    def read(cls, folder: Path) -> "StoreMeta | None":
        """The meta of a complete store; None if the store is not complete. DataError if a later version wrote it."""
        value = read_json(folder / "store.json", dict)
        if value is not None and value.get("version", STORE_VERSION) != STORE_VERSION:
            raise DataError(
                f"{folder}: a store of version {value['version']}, and this Meshwright reads version {STORE_VERSION}. Use the"
                f" one that wrote it, or set another data.root"
            )
        return read_json(folder / "store.json", cls.from_json)

    def write(self, folder: Path) -> None:
        write_json(folder / "store.json", asdict(self))

    def list_files(self) -> dict[str, tuple[np.dtype, int]]:
        """(dtype, number of elements) of each file with block hashes, in the order of the hashes."""
        files: dict[str, tuple[np.dtype, int]] = {}
        for split in () if self.is_streamed else SPLITS:
            if self.is_imported:
                files[f"{split}.numbers"] = ENDS_DTYPE, self.splits[split].num_documents
                files[f"{split}.hashes"] = HASH_DTYPE, self.splits[split].num_documents
            else:
                files[f"{split}.tokens"] = np.dtype(self.dtype), self.splits[split].num_tokens
            files[f"{split}.ends"] = ENDS_DTYPE, self.splits[split].num_documents
            if self.is_masked:
                files[f"{split}.trained"] = TRAINED_DTYPE, self.splits[split].num_tokens
        return files

    def list_kinds(self, split: Split) -> dict[str, tuple[np.dtype, int]]:
        """The same of a split, by the files' endings."""
        files = self.list_files().items()
        return {name.partition(".")[2]: file for name, file in files if name.startswith(f"{split}.")}

    @property
    def is_imported(self) -> bool:
        """Whether the ids are in the source's own files."""
        return "imported" in self.source

    @property
    def is_streamed(self) -> bool:
        """Whether it grows shard by shard beside a run (beside.py): its splits are then those of its head."""
        return "shards" in self.source

    @property
    def is_masked(self) -> bool:
        """Whether only some tokens are trained, those of assistants in conversations."""
        return "messages" in self.source or self.is_paired

    @property
    def is_paired(self) -> bool:
        """Whether each two documents are answers to compare."""
        return "pairs" in self.source


class Elements(Protocol):
    """The elements of a file that is not mapped into memory. Slices are verified copies."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice) -> np.ndarray: ...


@runtime_checkable
class Fetched(Elements, Protocol):
    """Elements that come from elsewhere."""

    def ask(self, start: int, stop: int) -> object:
        """Start to fetch elements [start, stop), and do not wait."""


class Opener(Protocol):
    """Opens the files of stores whose folders here lack the tokens."""

    def open(self, store: str, name: str, file: tuple[np.dtype, int], hashes: np.ndarray) -> Elements:
        """The file `name` of a store. file: dtype and number of elements; hashes: of its blocks."""


class TokenStream:
    """One split of one store as a single sequence of tokens.

    tokens: [n] uint16 or uint32, a view of the file's memory map, or the elements of a file elsewhere; ends: [documents] int64,
    ascending, the last is n; trained: [n] uint8, above 0 for each token that is trained, None where all are. is_paired: each two
    documents are answers to compare. reference: [documents] fp64, their log-probabilities under a reference; None until they are
    known, or not needed. verify: by the name of each of these files, raises DamagedStore if elements [start, stop) are not what
    was written.
    """

    def __init__(
        self,
        tokens: "np.ndarray | Elements",
        ends: np.ndarray,
        trained: "np.ndarray | Elements | None" = None,
        is_paired: bool = False,
        verify: Mapping[str, Verify] = NO_VERIFIERS,
    ) -> None:
        self.tokens, self.ends, self.trained = tokens, ends, trained
        self.is_paired, self._verifiers = is_paired, verify
        self.reference: np.ndarray | None = None

    def _verify(self, kind: str, start: int, stop: int) -> None:
        if start < stop and kind in self._verifiers:
            self._verifiers[kind](start, stop)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.ends)

    @property
    def is_whole(self) -> bool:
        """Whether all of its tokens are there."""
        return True

    @property
    def is_mapped(self) -> bool:
        """Whether all of it is in memory, or comes there by itself."""
        return not isinstance(self.tokens, Fetched)

    def ask(self, start: int, stop: int) -> None:
        """Start to fetch tokens [start, stop), unless they are mapped, and do not wait."""
        for each in (self.tokens, self.trained):
            if isinstance(each, Fetched):
                each.ask(start, stop)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) as stored: a view."""
        self._verify("tokens", start, stop)
        return self.tokens[start:stop]

    def read_trained(self, start: int, stop: int) -> np.ndarray | None:
        """Whether each of tokens [start, stop) is trained: uint8, a view; None where all are."""
        if self.trained is None:
            return None
        self._verify("trained", start, stop)
        return self.trained[start:stop]

    @property
    def noun(self) -> str:
        """The word for what rows are packed of."""
        return "pairs of answers" if self.is_paired else "conversations"

    def read_ends(self) -> np.ndarray:
        """The ends of all documents, verified: int64, ascending."""
        self._verify("ends", 0, self.num_documents)
        return self.ends

    def ends_within(self, start: int, stop: int) -> np.ndarray:
        """The document ends e with start < e <= stop, relative to `start`: int64, ascending."""
        first, last = (int(each) for each in np.searchsorted(self.ends, (start, stop), side="right"))
        # Their neighbours as well: then no damaged end elsewhere can have misled the search.
        self._verify("ends", max(0, first - 1), min(last + 1, self.num_documents))
        if not _lies_between(self.ends, first, start) or not _lies_between(self.ends, last, stop):
            self._verify("ends", 0, self.num_documents)
        return self.ends[first:last] - start

    def count_ids(self, vocab_size: int) -> np.ndarray:
        """Count the occurrences of each id in the stream: int64 [vocab_size]."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start in range(0, self.num_tokens, TOKENS_COUNTED_AT_ONCE):
            tokens = self.read(start, min(start + TOKENS_COUNTED_AT_ONCE, self.num_tokens))
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts


def _lies_between(ends: np.ndarray, index: int, value: int) -> bool:
    """Whether `index` is where `value` belongs among ascending ends: behind all that are not above it."""
    return (index == 0 or ends[index - 1] <= value) and (index == len(ends) or value < ends[index])


def map_stream(folder: Path, meta: StoreMeta, split: Split) -> TokenStream:
    """Map a split into memory, unverified. DamagedStore if a file is missing or of the wrong size."""
    mapped = {kind: map_file(folder / f"{split}.{kind}", *file) for kind, file in meta.list_kinds(split).items()}
    return TokenStream(mapped["tokens"], mapped["ends"], trained=mapped.get("trained"), is_paired=meta.is_paired)


def open_stream(
    folder: Path, meta: StoreMeta, split: Split, reader: Opener | None = None, ids: Sequence[IdFile] = ()
) -> TokenStream:
    """Open a split, verified block by block as it is read: mapped into memory, or its tokens by `reader`, or those of its files
    `ids` if it is imported. DamagedStore if a file is missing or of the wrong size."""
    if not meta.splits[split].num_tokens:
        trained = np.empty(0, TRAINED_DTYPE) if meta.is_masked else None
        return TokenStream(np.empty(0, meta.dtype), np.empty(0, ENDS_DTYPE), trained=trained, is_paired=meta.is_paired)
    hashes = map_hashes(folder, meta)
    opened: dict[str, Any] = {}
    verify: dict[str, Verify] = {}
    for kind, file in meta.list_kinds(split).items():
        path = folder / f"{split}.{kind}"
        if reader is None or kind not in ("tokens", "trained"):
            opened[kind] = map_file(path, *file)
            verify[kind] = _make_verifier(path, opened[kind], hashes)
        else:
            opened[kind] = reader.open(folder.name, path.name, file, hashes[path.name])
    if meta.is_imported:
        for each in verify.values():
            each(0, len(opened["ends"]))
        words = opened["ends"], opened.pop("numbers"), opened.pop("hashes"), np.dtype(meta.dtype)
        opened["tokens"] = ImportedTokens(ids, *words)
    return TokenStream(**opened, is_paired=meta.is_paired, verify=verify)


def map_file(path: Path, dtype: np.dtype, length: int) -> np.ndarray:
    """A file of `length` elements, mapped into memory. DamagedStore if it is missing or of another size."""
    if length == 0:
        return np.empty(0, dtype)
    try:
        # Mapped by Arrow: Python keeps a file open as long as it is mapped, and a stream has thousands.
        with pyarrow.memory_map(str(path)) as file:
            num_bytes = file.size()
            if num_bytes == length * dtype.itemsize:
                return np.frombuffer(file.read_buffer(), dtype)
    except FileNotFoundError:
        num_bytes = None
    raise damaged_size(path, length * dtype.itemsize, num_bytes)


def hash_block(data: np.ndarray) -> int:
    """xxh3 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def hash_blocks(values: np.ndarray) -> Iterator[int]:
    """The hash of each block of a mapped file."""
    data = values.view(np.uint8)
    for start in range(0, len(data), BLOCK_BYTES):
        yield hash_block(data[start : start + BLOCK_BYTES])


def complete_store(folder: Path, meta: StoreMeta, counts: np.ndarray) -> None:
    """Write what a store has besides the files of `StoreMeta.list_files`, which are there. counts: of the validation split."""
    with write_atomically(folder / COUNTS_FILE) as file:
        file.write(counts.tobytes())
    mapped = (map_file(folder / name, *file) for name, file in meta.list_files().items())
    hashes = np.array([hash for values in mapped for hash in hash_blocks(values)], dtype=HASH_DTYPE).tobytes()
    with write_atomically(folder / CHECKSUMS_FILE) as file:
        file.write(hashes + _seal(meta, counts.tobytes(), hashes))
    meta.write(folder)


def _seal(meta: StoreMeta, counts: bytes, hashes: bytes) -> bytes:
    return xxhash.xxh3_128_digest(json.dumps(asdict(meta), sort_keys=True).encode() + counts + hashes)


def verify_small_files(folder: Path, meta: StoreMeta) -> None:
    """DamagedStore unless store.json, validation.counts and the checksums belong together."""
    counts = _read(folder / COUNTS_FILE, meta.vocab_size * np.dtype(np.int64).itemsize)
    num_blocks = sum(_count_blocks(*file) for file in meta.list_files().values())
    data = _read(folder / CHECKSUMS_FILE, num_blocks * HASH_DTYPE.itemsize + SEAL_BYTES)
    if _seal(meta, counts, data[:-SEAL_BYTES]) != data[-SEAL_BYTES:]:
        found = f"one of store.json, {COUNTS_FILE} and {CHECKSUMS_FILE} is not as it was written"
        raise DamagedStore(explain_damage(f"{folder}: {found}"))


def _read(path: Path, num_bytes: int) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise damaged_size(path, num_bytes, None) from error
    if len(data) != num_bytes:
        raise damaged_size(path, num_bytes, len(data))
    return data


def _count_blocks(dtype: np.dtype, length: int) -> int:
    return -(-length * dtype.itemsize // BLOCK_BYTES)


def map_hashes(folder: Path, meta: StoreMeta) -> dict[str, np.ndarray]:
    """The hashes of each file's blocks. A flipped bit in a hash shows as a block that does not match it."""
    counts = {name: _count_blocks(*file) for name, file in meta.list_files().items()}
    num_bytes = sum(counts.values()) * HASH_DTYPE.itemsize
    hashes = map_file(folder / CHECKSUMS_FILE, np.dtype(np.uint8), num_bytes + SEAL_BYTES)[:num_bytes].view(HASH_DTYPE)
    stops = np.cumsum([0, *counts.values()])
    return {name: hashes[stops[at] : stops[at + 1]] for at, name in enumerate(counts)}


def _make_verifier(path: Path, values: np.ndarray, hashes: dict[str, np.ndarray]) -> Callable[[int, int], None]:
    """A function that verifies the blocks with elements [start, stop) of a file, each once. It is called for each sample, so
    blocks already verified cost only a look at their flags."""
    expected, data = hashes[path.name], values.view(np.uint8)
    is_verified = np.zeros(len(expected), dtype=bool)
    num_elements = BLOCK_BYTES // values.itemsize

    def verify(start: int, stop: int) -> None:
        first, last = start // num_elements, (stop - 1) // num_elements
        if not is_verified[first : last + 1].all():
            for block in first + np.flatnonzero(~is_verified[first : last + 1]):
                if hash_block(data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]) != expected[block]:
                    raise DamagedStore(describe_block(path, int(block)))
                is_verified[block] = True

    return verify


def describe_block(path: object, block: int) -> str:
    first = block * BLOCK_BYTES
    return explain_damage(
        f"{path}: bytes {first:,} to {first + BLOCK_BYTES:,} (block {block:,}) are not as they were written: their checksum in"
        f" {CHECKSUMS_FILE} does not fit, so they would be other text"
    )
