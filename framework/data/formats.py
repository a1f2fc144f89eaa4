"""Token ids that other libraries have written, read where they lie (`data.sources.NAME.format`).

| format | a file | a document |
|---|---|---|
| megatron | `X.bin` beside `X.idx` (Megatron-LM, GPT-NeoX) | as its index has them |
| datatrove | `X.ds`, beside it `X.ds.index`, `X.ds.metadata` (nanotron) | up to each end of the index; without one the file |
| mds | a shard `X.mds` of MosaicML streaming | `field` of a sample: `bytes` of int64, or an `ndarray` |
| ids | parquet, or Arrow as a stream or file | `field` of a row, a list of integers |

A reader gives documents by number: bytes of a memory map, or of parquet rows of a decoded row group, of which the last GiB is
kept, of all files together. `prepare` reads everything once, to check the ids and to choose what is held out, and keeps of each
document where it ends and its number (`ImportedTokens`): nothing is tokenized, nothing copied.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import xxhash

from framework.data.records import open_batches
from framework.data.source import SourceFile
from framework.errors import DataError

MEGATRON_MAGIC = b"MMIDIDX\0\0"
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
MEGATRON_HEADER = np.dtype([("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("documents", "<u8")])
# Codes of dtypes that an MDS array may state in front of its values.
MDS_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
# Bytes of decoded row groups that are kept, since random order asks for them again and again.
KEPT_BYTES = 1 << 30


@dataclass(frozen=True)
class IdFile:
    """The documents of a file. read: the ids of a document, [n] integers, by its number."""

    num_documents: int
    read: Callable[[int], np.ndarray]
    path: Path = Path()


def open_ids(files: Sequence[SourceFile], field: str, vocab_size: int) -> list[IdFile]:
    """Open files of ids. DataError, naming one, where it is not of its format."""
    # One cache for all files: a source may have thousands.
    read_group = _GroupCache()
    openers: dict[str, Callable[[Path], IdFile]] = {
        "megatron": _open_megatron,
        "datatrove": lambda path: _open_datatrove(path, vocab_size),
        "mds": lambda path: _open_mds(path, field),
        "ids": lambda path: _open_ids(path, field, read_group),
    }
    opened = []
    for file in files:
        with name_file(file, field):
            opened.append(replace(openers[file.kind](file.path), path=file.path))
    return opened


def hash_ids(ids: np.ndarray) -> int:
    """xxh3 of a document's ids, of whatever dtype: [n]."""
    return xxhash.xxh3_64_intdigest(ids.astype("<u4").tobytes())


@contextmanager
def name_file(file: SourceFile, field: str) -> Iterator[None]:
    """A context whose errors about the content of a file name it: DataError."""
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{file.path}: not a file of data.sources.NAME.format={file.kind} with a field `{field}` of ids"
            f" ({type(error).__name__}: {error}). Set another format or field, or take the file out"
        ) from error


def _open_megatron(path: Path) -> IdFile:
    index = np.memmap(path.with_suffix(".idx"), np.uint8, "r")
    if index[: len(MEGATRON_MAGIC)].tobytes() != MEGATRON_MAGIC:
        raise ValueError(f"{path.with_suffix('.idx')} does not begin as an index does")
    place = len(MEGATRON_MAGIC)
    (header,) = np.frombuffer(index, MEGATRON_HEADER, 1, place)
    place += MEGATRON_HEADER.itemsize
    count, dtype = int(header["sequences"]), np.dtype(MEGATRON_DTYPES[int(header["dtype"])])
    lengths = np.frombuffer(index, "<i4", count, place)
    starts = np.frombuffer(index, "<i8", count, place + 4 * count)
    borders = np.frombuffer(index, "<i8", int(header["documents"]), place + 12 * count)
    data = _map(path, np.dtype(np.uint8))

    def read(document: int) -> np.ndarray:
        # A document may be of several sequences, sentences, which need not lie side by side.
        sequences = range(int(borders[document]), int(borders[document + 1]))
        parts = [np.frombuffer(data, dtype, int(lengths[each]), int(starts[each])) for each in sequences]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])

    return IdFile(len(borders) - 1, read)


def _open_datatrove(path: Path, vocab_size: int) -> IdFile:
    metadata = path.with_name(f"{path.name}.metadata")
    size = int(metadata.read_text().partition("\n")[0].rpartition("|")[2]) if metadata.exists() else 0
    dtype = np.dtype(f"<u{size}" if size else "<u2" if vocab_size <= 1 << 16 else "<u4")
    data = _map(path, dtype)
    index = path.with_name(f"{path.name}.index")
    ends = np.fromfile(index, "<u8").astype(np.int64) if index.exists() else np.array([len(data)])
    if (ends[-1] if len(ends) else 0) != len(data):
        raise ValueError(f"{len(data)} ids of {dtype.itemsize} bytes, and the index ends elsewhere")
    return IdFile(len(ends), lambda document: data[ends[document - 1] if document else 0 : ends[document]])


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    """The ids of a file, mapped into memory; a file without a byte cannot be."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _open_mds(path: Path, field: str) -> IdFile:
    data = np.memmap(path, np.uint8, "r")
    count = int(np.frombuffer(data, "<u4", 1)[0])
    offsets = np.frombuffer(data, "<u4", count + 1, 4)
    columns = json.loads(data[4 * (count + 2) : offsets[0]].tobytes())
    number, sizes = columns["column_names"].index(field), columns["column_sizes"]
    encoding, _, words = columns["column_encodings"][number].partition(":")
    if encoding not in ("bytes", "ndarray"):
        raise ValueError(f"the encoding of {field} is {encoding}")
    dtype, _, shape = words.partition(":")

    def read(document: int) -> np.ndarray:
        place, varies = int(offsets[document]), [size is None for size in sizes]
        found = iter(np.frombuffer(data, "<u4", sum(varies), place).tolist())
        widths = [next(found) if size is None else int(size) for size in sizes]
        start = place + 4 * sum(varies) + sum(widths[:number])
        value = data[start : start + widths[number]]
        if encoding == "bytes":
            return value.view("<i8")
        kind = dtype
        if not kind:
            kind, value = MDS_DTYPES[int(value[0])], value[1:]
        if not shape:  # in front: the number of dims, and how wide their sizes are written
            value = value[1 + (int(value[0]) >> 2) * (1 << (int(value[0]) & 3)) :]
        return np.frombuffer(value.tobytes(), kind)

    return IdFile(count, read)


def _open_ids(path: Path, field: str, read_group: Callable[[Path, int, str], Any]) -> IdFile:
    if path.suffix not in (".parquet", ".pq"):
        batches = list(open_batches(path))
        return _open_columns([batch.num_rows for batch in batches], batches.__getitem__, field)
    metadata = pyarrow.parquet.read_metadata(path)
    counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return _open_columns(counts, lambda number: read_group(path, number, field), field)


class _GroupCache:
    """The row groups that were read last: at most KEPT_BYTES, or one. The loader's thread reads beside a validation."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Path, int], Any] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __call__(self, path: Path, number: int, field: str) -> Any:
        with self._lock:
            group = self._groups.pop((path, number), None)
            if group is None:
                group = _read_group(path, number, field)
                self._num_bytes += group.nbytes
                while self._groups and self._num_bytes > KEPT_BYTES:
                    self._num_bytes -= self._groups.pop(next(iter(self._groups))).nbytes
            self._groups[path, number] = group
            return group


def _read_group(path: Path, number: int, field: str) -> Any:
    return pyarrow.parquet.ParquetFile(path).read_row_group(number, [field]).combine_chunks().to_batches()[0]


def _open_columns(counts: Sequence[int], get_batch: Callable[[int], Any], field: str) -> IdFile:
    """Rows of batches, each with a column of lists. counts: rows of each batch."""
    firsts = np.concatenate([[0], np.cumsum(counts)])

    def read(document: int) -> np.ndarray:
        batch = int(np.searchsorted(firsts, document, side="right")) - 1
        values = get_batch(batch).column(field)[document - int(firsts[batch])].values
        found: np.ndarray = np.empty(0, np.int32) if values is None else values.to_numpy(zero_copy_only=True)
        return found

    if firsts[-1]:
        read(0)  # whether there is such a column
    return IdFile(int(firsts[-1]), read)


class ImportedTokens:
    """The tokens of one split of an imported source. A slice is a copy of its documents' ids: [n] of `dtype`.

    ends: [documents] int64, ascending; numbers: [documents] int64, where each lies among the documents of all files; hashes:
    [documents] uint64, of their ids, which are verified when they are first read."""

    def __init__(
        self, files: Sequence[IdFile], ends: np.ndarray, numbers: np.ndarray, hashes: np.ndarray, dtype: np.dtype
    ) -> None:
        self._files, self._ends, self._numbers, self._hashes, self._dtype = files, ends, numbers, hashes, dtype
        self._is_verified = np.zeros(len(ends), dtype=bool)
        self._firsts = np.cumsum([0, *(file.num_documents for file in files)])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        parts = [np.empty(0, self._dtype)]
        document = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            begin, end = int(self._ends[document - 1]) if document else 0, int(self._ends[document])
            file = int(np.searchsorted(self._firsts, self._numbers[document], side="right")) - 1
            number = int(self._numbers[document] - self._firsts[file])
            ids = self._files[file].read(number)
            if len(ids) != end - begin or not (self._is_verified[document] or hash_ids(ids) == self._hashes[document]):
                raise DataError(
                    f"document {number + 1:,} of {self._files[file].path} has other ids than when it was prepared. Restore the"
                    " file, or touch it and run `meshwright prepare` again"
                )
            self._is_verified[document] = True
            parts.append(ids[start - begin : min(stop, end) - begin].astype(self._dtype))
            start, document = min(stop, end), document + 1
        return np.concatenate(parts)
