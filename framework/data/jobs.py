"""Jobs of `prepare`: the shards of a source as jobs for its processes, and what is said of a store that they make."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from tqdm import tqdm

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
    shard_path,
    sum_splits,
    tokenize_shards,
)
from framework.data.source import SourceFile, get_files
from framework.data.store import STORE_VERSION, StoreMeta, choose_dtype
from framework.data.tokenize import TokenizerInfo, hash_file
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
