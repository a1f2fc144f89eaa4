"""Jobs of `prepare`: the shards of a source as jobs for its processes, the description of the store that they make, and the one
job of a source whose ids are read where they lie (formats.py).

Of such ids everything is read once: to check every id, and to choose the documents that are held out, by a hash of their ids. The
store keeps where each document ends, which one it is and the hash, 24 bytes a document, and no tokens. Stopped, it begins again.
"""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import xxhash
from tqdm import tqdm

from framework.data.formats import IdFile, ImportedTokens, hash_ids, name_file, open_ids
from framework.data.order import key_of, permute
from framework.data.prepared import StorePlace
from framework.data.records import plan_shards
from framework.data.shard import (
    BadRecord,
    ShardJob,
    ShardReport,
    SplitReport,
    check_bad_records,
    fingerprint_shards,
    settle_threshold,
    shard_path,
    sum_splits,
    tokenize_shards,
)
from framework.data.source import BAR_DELAY_S, SourceFile, get_files
from framework.data.store import ENDS_DTYPE, SPLITS, STORE_VERSION, StoreMeta, TokenStream, choose_dtype, complete_store
from framework.data.tokenize import TokenizerInfo, hash_file
from framework.errors import DataError
from framework.files import write_file
from framework.recipe.schema import Recipe


def list_all(place: StorePlace) -> tuple[SourceFile, ...]:
    assert place.files is not None, "the store of a source whose files are gone is complete"
    return get_files(place.name, place.source, place.files, place.folder.parent)


def initial_threshold(recipe: Recipe) -> int:
    return int(recipe.data.validation * 2**64)


def make_jobs(
    recipe: Recipe,
    place: StorePlace,
    files: Sequence[SourceFile],
    tokenizer_folder: Path,
    tokenizer: TokenizerInfo,
    progress: bool,
) -> list[ShardJob]:
    """The shards of a store, in its order: that of the files, or of a stream one that the seed draws."""
    shards = plan_shards(files, progress)
    if recipe.data.mode == "stream":
        number = np.arange(len(shards), dtype=np.uint64)
        key = np.full_like(number, key_of(place.name, recipe.train.seed))
        shards = [shards[each] for each in permute(number, np.full_like(number, len(shards)), key).tolist()]
    return [
        ShardJob(
            shard=shard,
            spans=tuple(spans),
            source=place.name,
            source_bytes=sum(file.num_bytes for file in files),
            folder=place.folder,
            field=place.source.field,
            conversation=place.source.conversation,
            form=place.form,
            train_on=recipe.data.train_on,
            tokenizer_folder=tokenizer_folder,
            tokenizer=tokenizer,
            threshold=initial_threshold(recipe),
            validation=recipe.data.validation,
            max_bad_records=recipe.data.bad_records,
            plugins=tuple(recipe.plugins),
        )
        for shard, spans in enumerate(shards)
    ]


def run_jobs(recipe: Recipe, jobs: list[ShardJob], workers: int, progress: bool) -> None:
    """Run the jobs whose shards are not finished. DataError once a source has too many bad records."""
    pending = []
    bad_records: dict[str, list[BadRecord]] = {job.source: [] for job in jobs}
    for job in jobs:
        if found := ShardReport.read(shard_path(job.folder, job.shard, "json")):
            bad_records[job.source] += found.bad_records
            check_bad_records(job.source, bad_records[job.source], recipe.data.bad_records)
        else:
            pending.append(job)
    num_bytes = sum(job.num_bytes for job in jobs)
    done_bytes = num_bytes - sum(job.num_bytes for job in pending)
    bar = tqdm(
        total=num_bytes,
        initial=done_bytes,
        desc="tokenize",
        unit="B",
        unit_scale=True,
        disable=not progress or not pending,
    )
    with bar, closing(tokenize_shards(pending, workers)) as finished:
        for job, report in finished:
            bar.update(job.num_bytes)
            bad_records[job.source] += report.bad_records
            check_bad_records(job.source, bad_records[job.source], recipe.data.bad_records)


def read_reports(jobs: Sequence[ShardJob]) -> list[ShardReport]:
    reports = [ShardReport.read(shard_path(job.folder, job.shard, "json")) for job in jobs]
    assert all(reports), f"{jobs[0].folder}: shards without a report after all jobs were run"
    return [report for report in reports if report]


def make_meta(
    recipe: Recipe,
    place: StorePlace,
    num_files: int,
    tokenizer_folder: str,
    tokenizer: TokenizerInfo,
    splits: Sequence[dict[str, SplitReport]],
    threshold: int,
) -> StoreMeta:
    """The meta of a store without bad records. splits: of each shard."""
    source = {"path": place.source.path, "format": place.source.format, "field": place.source.field}
    if place.source.is_imported:
        source["imported"] = place.source.format
    if place.source.conversation is not None:
        source["chat_template"] = hash_file(place.folder.parent / tokenizer_folder / "chat_template.jinja")
    if place.source.messages is not None:
        source |= {"messages": place.source.messages, "train_on": recipe.data.train_on}
    if place.form is not None:
        source |= {"pairs": str(place.source.pairs), "form": place.form}
    return StoreMeta(
        version=STORE_VERSION,
        source=source,
        num_files=num_files,
        tokenizer_folder=tokenizer_folder,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=choose_dtype(tokenizer.vocab_size).name,
        threshold=threshold,
        splits=sum_splits(splits),
        num_bad_records=0,
        num_source_bytes=0,
        fingerprint=fingerprint_shards(splits, tokenizer.hash),
    )


def import_store(
    recipe: Recipe, place: StorePlace, tokenizer_folder: str, tokenizer: TokenizerInfo, progress: bool
) -> None:
    """Write the store of a source whose ids are imported. DataError for ids without tokens."""
    folder, files, field, vocab_size = place.folder, list_all(place), place.source.field, tokenizer.vocab_size
    opened = open_ids(files, field, vocab_size)
    hashes, lengths = array("Q"), array("q")
    documents = _read_documents(files, opened, field, vocab_size)
    total = sum(ids.num_documents for ids in opened)
    for ids in tqdm(documents, "read ids", total, unit=" documents", delay=BAR_DELAY_S, disable=not progress):
        hashes.append(hash_ids(ids))
        lengths.append(len(ids))
    hash_of, length_of = np.array(hashes, np.uint64), np.array(lengths, np.int64)
    full = hash_of[length_of > 0]  # empty documents are on no side
    threshold = settle_threshold(initial_threshold(recipe), [int(full.min()), int(full.max())] if len(full) else [])
    is_held_out = hash_of < np.uint64(threshold)
    splits: dict[str, SplitReport] = {}
    for split in SPLITS:
        numbers = np.flatnonzero((length_of > 0) & (is_held_out == (split == "validation"))).astype(ENDS_DTYPE)
        ends = np.cumsum(length_of[numbers], dtype=ENDS_DTYPE)
        if len(ends):
            write_file(folder / f"{split}.ends", ends.tobytes())
            write_file(folder / f"{split}.numbers", numbers.tobytes())
            write_file(folder / f"{split}.hashes", hash_of[numbers].tobytes())
            checksum = xxhash.xxh3_128_hexdigest(hash_of[numbers].tobytes() + ends.tobytes())
            splits[split] = SplitReport(len(ends), int(ends[-1]), checksum)
    held_out = ImportedTokens(opened, ends, numbers, hash_of[numbers], choose_dtype(vocab_size))  # of the last split
    meta = make_meta(recipe, place, len(files), tokenizer_folder, tokenizer, [splits], threshold)
    complete_store(folder, meta, TokenStream(held_out, ends).count_ids(vocab_size))


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
