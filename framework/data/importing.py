"""Importing: a store of a source whose ids are read where they lie (formats.py).

Everything is read once: to check every id, and to choose the documents that are held out, by a hash of their ids. The store keeps
where each document ends, which one it is and the hash, 24 bytes a document, and no tokens. Stopped, it begins again.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tqdm import tqdm

from framework.data.formats import IdFile, ImportedTokens, hash_ids, name_file, open_ids
from framework.data.shard import SplitReport, settle_threshold
from framework.data.source import BAR_DELAY_S, SourceFile
from framework.data.store import ENDS_DTYPE, SPLITS, StoreMeta, TokenStream, choose_dtype, complete_store
from framework.errors import DataError
from framework.files import write_atomically

# The meta of a store from what each split has and the threshold of held-out documents.
MakeMeta = Callable[[Sequence[dict[str, SplitReport]], int], StoreMeta]


def import_store(
    folder: Path,
    files: Sequence[SourceFile],
    field: str,
    vocab_size: int,
    threshold: int,
    make_meta: MakeMeta,
    progress: bool,
) -> None:
    """Write the store of imported files. threshold: below it a hash is held out. DataError for ids without tokens."""
    opened = open_ids(files, field, vocab_size)
    hashes, lengths = array("Q"), array("q")
    documents = _read_documents(files, opened, field, vocab_size)
    total = sum(ids.num_documents for ids in opened)
    for ids in tqdm(documents, "read ids", total, unit=" documents", delay=BAR_DELAY_S, disable=not progress):
        hashes.append(hash_ids(ids))
        lengths.append(len(ids))
    hash_of, length_of = np.array(hashes, np.uint64), np.array(lengths, np.int64)
    full = hash_of[length_of > 0]  # empty documents are on no side
    threshold = settle_threshold(threshold, [int(full.min()), int(full.max())] if len(full) else [])
    is_held_out = hash_of < np.uint64(threshold)
    splits: dict[str, SplitReport] = {}
    for split in SPLITS:
        numbers = np.flatnonzero((length_of > 0) & (is_held_out == (split == "validation"))).astype(ENDS_DTYPE)
        ends = np.cumsum(length_of[numbers], dtype=ENDS_DTYPE)
        if len(ends):
            _write(folder / f"{split}.ends", ends)
            _write(folder / f"{split}.numbers", numbers)
            _write(folder / f"{split}.hashes", hash_of[numbers])
            checksum = xxhash.xxh3_128_hexdigest(hash_of[numbers].tobytes() + ends.tobytes())
            splits[split] = SplitReport(len(ends), int(ends[-1]), checksum)
    held_out = ImportedTokens(opened, ends, numbers, hash_of[numbers], choose_dtype(vocab_size))  # of the last split
    complete_store(folder, make_meta([splits], threshold), TokenStream(held_out, ends).count_ids(vocab_size))


def _read_documents(
    files: Sequence[SourceFile], opened: Sequence[IdFile], field: str, vocab_size: int
) -> Iterator[np.ndarray]:
    """The ids of all documents in order, checked. DataError for an id without a token."""
    for file, ids in zip(files, opened, strict=True):
        with name_file(file, field):
            for number in range(ids.num_documents):
                found = ids.read(number)
                if found.dtype.kind not in "iu":
                    raise ValueError(f"document {number + 1} is of {found.dtype}")
                if len(found) and not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
                    raise DataError(
                        f"{file.path}, document {number + 1}: ids from {int(found.min())} to {int(found.max())}, and"
                        f" model.tokenizer has {vocab_size} entries. Set model.tokenizer to the one that made these ids"
                    )
                yield found


def _write(path: Path, values: "np.ndarray[Any, Any]") -> None:
    with write_atomically(path) as file:
        file.write(values.tobytes())
