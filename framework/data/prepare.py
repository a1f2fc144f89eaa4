"""From the recipe's sources to token stores, once, before and outside of training.

    sources --list--> files --plan--> shards --tokenize, all cores--> shards on disk --join--> a store per source --> Prepared

`prepare` builds what is missing and reuses what is there: a finished store at once, a finished shard of an interrupted one. At
no time does a process have more than a few files open, however many shards there are.
"""

import errno
import fcntl
import json
import os
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from framework.data.checksums import has_checksums, verify_small_files
from framework.data.join import JoinPlan, add_checksums, count_missing_bytes, is_tokenized, join_store
from framework.data.prepared import Place, Places, Prepared, check_vocabulary, find_prepared, locate, open_found
from framework.data.records import read_records
from framework.data.shard import LARGEST_SHARE, ShardJob, check_bad_records, hash_document, tokenize_shards
from framework.data.source import (
    BAR_DELAY_S,
    SourceFile,
    Span,
    download_dataset,
    look_at,
    plan_shards,
    summarize_left_out,
)
from framework.data.store import (
    STORE_VERSION,
    BadRecord,
    ShardReport,
    StoreMeta,
    choose_dtype,
    fingerprint_shards,
    open_without_links,
    shard_path,
    sum_splits,
)
from framework.data.tokenize import TokenizerInfo, cut_at_spaces, load_tokenizer, read_info, save_tokenizer, train_bpe
from framework.errors import EXIT_DONE, DamagedStore, DataError
from framework.files import write_atomically, write_json
from framework.host import count_cores
from framework.recipe.schema import Recipe

# So many times more or less than asked for are said to be held out.
UNEVEN = 3.0
# In a store: name of a file that was found beside the source's files -> why it was not read.
LEFT_OUT = "left_out.json"


def prepare(recipe: Recipe, workers: int | None = None, progress: bool = True) -> Prepared:
    """Tokenizes the sources of a recipe into stores under data.root, as far as they are not there, and opens them.

    workers: processes; None: one per core this process may use. progress: bar and notes on stderr.
    Killed at any moment, it goes on where it was when called again, to the same bytes; called twice at once, the second
    waits for the first. DataError for what the user can put right, a full disk included.
    """
    places = locate(recipe, progress)
    root = Path(recipe.data.root)
    _make_root(root)
    try:
        with ExitStack() as stack:
            for folder in sorted(place.folder for place in places.stores if not _is_whole(place.folder)):
                stack.enter_context(_lock(folder, progress))
            absent = [place for place in places.stores if not _is_whole(place.folder, mends=True)]
            untokenized = [place for place in absent if not is_tokenized(place.folder)]
            if untokenized:
                _build(recipe, places, untokenized, workers or count_cores(), progress)
            for place in absent:
                join_store(place.folder, progress)
                if progress:
                    _note_older_shards(place.folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(_explain_full_disk(error, root, places)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise DataError(
                f"data.root={root}: {error}. Set it to a folder that allows writing and file locks"
            ) from error
        raise
    return open_found(find_prepared(recipe, places))


def _is_whole(folder: Path, mends: bool = False) -> bool:
    """Whether a store is complete, by its small files. One of which such a file is damaged is joined again, which makes it anew
    from shards.json and verifies the rest. mends: take what is damaged out of the way. DamagedStore where there is no
    shards.json."""
    try:
        meta = StoreMeta.read(folder)
        if meta is not None:
            verify_small_files(folder, meta)
        return meta is not None
    except DamagedStore as damage:
        if JoinPlan.read(folder) is None:
            raise
        if mends:
            print(f"made again from shards.json, as it was damaged: {damage}", file=sys.stderr)
            (folder / "store.json").unlink(missing_ok=True)
        return False


def _add_checksums(prepared: Prepared) -> None:
    """For the stores that an earlier Meshwright has made."""
    for source in prepared.sources:
        if not has_checksums(source.folder):
            add_checksums(source.folder, source.meta)
            print(f"{source.folder}: verified, and given checksums", file=sys.stderr)


def prepare_command(recipe: Recipe, *, workers: int | None = None) -> int:
    """`meshwright prepare`: prepares, prints what there is, returns the exit code."""
    start_s, start_cpu_s = time.perf_counter(), _count_cpu_s()
    prepared = prepare(recipe, workers)
    _add_checksums(prepared)
    wall_s, cpu_s = time.perf_counter() - start_s, _count_cpu_s() - start_cpu_s
    print(describe(prepared))
    print(f"{wall_s:.1f} s, {cpu_s:.1f} s of CPU: {cpu_s / wall_s:.1f} of {count_cores()} cores")
    return EXIT_DONE


def describe(prepared: Prepared) -> str:
    """A few lines for people: what each source holds, the tokenizer, the unigram entropy."""
    rows = [f"{'source':16} {'weight':>7} {'split':10} {'documents':>12} {'tokens':>15} {'bad':>6}  store"]
    for source in prepared.sources:
        for split, stream in source.streams.items():
            rows.append(
                f"{source.name:16} {source.weight:7g} {split:10} {stream.num_documents:12,} {stream.num_tokens:15,} "
                f"{source.meta.num_bad_records:6}  {source.folder}"
            )
    rows += _describe_files(prepared)
    rows.append(f"tokenizer: {prepared.vocab_size} entries, end of sequence {prepared.eos_id}, {prepared.tokenizer}")
    if prepared.unigram_entropy is not None:
        rows.append(f"unigram entropy of the validation split: {prepared.unigram_entropy:.4f} nats per token")
    rows.append(f"fingerprint: {prepared.fingerprint}")
    return "\n".join(rows)


def summarize_data(prepared: Prepared, validation: float) -> str:
    """A line per source: its share of the samples and its tokens; then what a user may not expect of them.

    validation: data.validation, the share of documents that was asked for.
    """
    weight, lines = sum(source.weight for source in prepared.sources), []
    for source in prepared.sources:
        held_out, train = (source.streams[split].num_tokens for split in ("validation", "train"))
        share = held_out / (held_out + train)
        tokens = f"{train:,} tokens to train on, {held_out:,} held out ({share:.1%})"
        lines.append(f"tokens   {source.name}: {source.weight / weight:.0%} of the samples, {tokens}")
        if not has_checksums(source.folder):
            lines.append(
                f"note     {source.name}: its store has no checksums, so bits that rot on the disk are not noticed; `meshwright"
                " prepare` with the same recipe adds them"
            )
        if validation > 0 and (share < validation / UNEVEN or share > max(UNEVEN * validation, LARGEST_SHARE)):
            lines.append(
                f"note     {source.name}: a hash of its text decides whether a document is held out, and with few or very long"
                f" ones that is {share:.1%} of the tokens; data.validation asks for {validation:.1%}"
            )
    lines += [f"note     {line}" for line in _describe_files(prepared) if "left out" in line]
    if len(prepared.sources) > 1:
        first = prepared.sources[0].name
        lines.append(f"note     sources are blended by weight: data.sources.{first}.weight=0 would leave {first} out")
    return "\n".join(lines)


def _describe_files(prepared: Prepared) -> list[str]:
    """A line per source: the files that it was made of, and those left out with the reasons."""
    lines = []
    for source in prepared.sources:
        path = source.folder / LEFT_OUT
        left_out = json.loads(path.read_text()) if path.exists() else {}
        more = f"; {len(left_out)} left out ({summarize_left_out(left_out)}), listed in {path}" if left_out else ""
        count = source.meta.num_files
        lines.append(f"{source.name}: read from {count:,} file{'s' * (count != 1)}{more}")
    return lines


def _count_cpu_s() -> float:
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _make_root(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"data.root={root}: no folder can be made there ({error.strerror}). Set another one") from error


@contextmanager
def _lock(folder: Path, progress: bool) -> Iterator[None]:
    """Hold the lock under which one process at a time builds a store. The kernel releases it however its holder ends."""
    with open(open_without_links(folder.with_name(f".{folder.name}.lock"), os.O_RDWR), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print(f"waiting for another process that prepares {folder}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _explain_full_disk(error: OSError, root: Path, places: Places) -> str:
    needed_bytes = sum(_count_needed_bytes(place) for place in places.stores)
    folders = [place.folder for place in places.stores if StoreMeta.read(place.folder) is None]
    # Without shards.json meta.json alone knows the shards: with it would go the store of a source that is gone.
    older = [each for each in folders if (each / "meta.json").exists() and (each / "shards.json").exists()]
    return (
        f"{error.filename}: {error.strerror}. About {needed_bytes:,} more bytes are needed for the token stores and "
        f"{shutil.disk_usage(root).free:,} are free under data.root={root}. Make room or set another data.root, and run the "
        f"same command again: finished shards are kept"
        + "".join(
            f". {folder} is of an older version, whose shards are kept beside the new files: if no run of older code reads them,"
            f" remove {folder / 'meta.json'} and joining takes no room"
            for folder in older
        )
    )


def _count_needed_bytes(place: Place) -> int:
    """Bytes of disk that the rest of a store may take, by what has been written so far."""
    if StoreMeta.read(place.folder):
        return 0
    if plan := JoinPlan.read(place.folder):
        return count_missing_bytes(place.folder, plan)
    source_bytes = sum(file.num_bytes for file in place.files or ())
    reports = [ShardReport.read(path) for path in place.folder.glob("[0-9]*.json")]
    done_bytes = sum(report.num_source_bytes for report in reports if report)
    written_bytes = sum(path.stat().st_size for path in place.folder.glob("*.tokens"))
    # Before the first shard is done: 3.4 bytes of text in a token of 2 bytes.
    ratio = written_bytes / done_bytes if done_bytes else 0.6
    return int(ratio * (source_bytes - done_bytes))


def _note_older_shards(folder: Path) -> None:
    """Says what may go of a store that was joined from one of version 1."""
    if (folder / "meta.json").exists():
        num_bytes = sum(path.stat().st_size for path in folder.glob("[0-9]*.*"))
        print(
            f"{folder}: joined. Only runs of older code still read its {num_bytes:,} bytes of shards; without such runs: "
            f"rm {shlex.quote(str(folder))}/meta.json {shlex.quote(str(folder))}/[0-9]*",
            file=sys.stderr,
        )


@dataclass(frozen=True)
class Construction:
    """A store to build: its place, its files (of a hub dataset those in the cache), and its planned shards."""

    place: Place
    files: tuple[SourceFile, ...]
    shards: list[list[Span]]


def _build(recipe: Recipe, places: Places, absent: Sequence[Place], workers: int, progress: bool) -> None:
    tokenizer_folder, tokenizer = _keep_tokenizer(recipe, places, progress)
    check_vocabulary(recipe, tokenizer.vocab_size)
    threshold = _initial_threshold(recipe)
    constructions = [Construction(place, files := _get_files(place), plan_shards(files, progress)) for place in absent]
    jobs = []
    for construction in constructions:
        construction.place.folder.mkdir(exist_ok=True)
        for shard in range(len(construction.shards)):
            jobs.append(_make_job(recipe, construction, shard, tokenizer_folder, tokenizer, threshold))
    _run(recipe, jobs, workers, progress)
    for construction in constructions:
        reports = _read_reports(construction)
        settled = settle_threshold(threshold, reports)
        moved = [shard for shard, report in enumerate(reports) if is_moved(report, settled)]
        again = [_make_job(recipe, construction, shard, tokenizer_folder, tokenizer, settled) for shard in moved]
        for job in again:
            shard_path(job.folder, job.shard, "json").unlink()
        _run(recipe, again, workers, progress)
        _finish(recipe, construction, tokenizer_folder, tokenizer, settled)


def _get_files(place: Place) -> tuple[SourceFile, ...]:
    assert place.files is not None, "the store of a source whose files are gone is complete"
    return place.files or download_dataset(place.name, place.source)


def _initial_threshold(recipe: Recipe) -> int:
    return int(recipe.data.validation * 2**64)


def settle_threshold(threshold: int, reports: Sequence[ShardReport]) -> int:
    """The threshold nearest to `threshold` that leaves a document on each side, where there are two different ones.

    A store with a single document keeps it for training (threshold 0).
    """
    lowest = min((report.lowest_hash for report in reports if report.lowest_hash is not None), default=0)
    highest = max((report.highest_hash for report in reports if report.highest_hash is not None), default=0)
    if threshold == 0 or lowest == highest:
        return 0
    return min(max(threshold, lowest + 1), highest)


def is_moved(report: ShardReport, threshold: int) -> bool:
    """May a document of this shard change sides under the new threshold?"""
    if report.lowest_hash is None or report.highest_hash is None:
        return False
    low, high = sorted((report.threshold, threshold))
    return report.lowest_hash < high and report.highest_hash >= low and low != high


def _make_job(
    recipe: Recipe, construction: Construction, shard: int, folder: Path, tokenizer: TokenizerInfo, threshold: int
) -> ShardJob:
    return ShardJob(
        source=construction.place.name,
        source_bytes=sum(file.num_bytes for file in construction.files),
        folder=construction.place.folder,
        shard=shard,
        spans=tuple(construction.shards[shard]),
        field=construction.place.source.field,
        tokenizer_folder=folder,
        tokenizer=tokenizer,
        threshold=threshold,
        validation=recipe.data.validation,
        max_bad_records=recipe.data.bad_records,
    )


def _run(recipe: Recipe, jobs: list[ShardJob], workers: int, progress: bool) -> None:
    """Runs the jobs whose shards are not finished; DataError once a source has too many bad records."""
    pending = [job for job in jobs if not shard_path(job.folder, job.shard, "json").exists()]
    bad_records: dict[str, list[BadRecord]] = {job.source: [] for job in jobs}
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


def _read_reports(construction: Construction) -> list[ShardReport]:
    folder = construction.place.folder
    reports = [ShardReport.read(shard_path(folder, shard, "json")) for shard in range(len(construction.shards))]
    assert all(reports), f"{folder}: shards without a report after all jobs were run"
    return [report for report in reports if report]


def _finish(
    recipe: Recipe, construction: Construction, tokenizer_folder: Path, tokenizer: TokenizerInfo, threshold: int
) -> None:
    """Writes what concerns the whole store; shards.json last, for it says that there is nothing left to tokenize."""
    place = construction.place
    reports = _read_reports(construction)
    bad_records = [record for report in reports for record in report.bad_records]
    check_bad_records(place.name, bad_records, recipe.data.bad_records)
    if bad_records:
        with write_atomically(place.folder / "quarantine.jsonl") as file:
            file.writelines(json.dumps(asdict(record)).encode() + b"\n" for record in bad_records)
    if left_out := look_at(place.name, place.source).left_out:
        write_json(place.folder / LEFT_OUT, left_out)
    splits = [report.splits for report in reports]
    meta = StoreMeta(
        version=STORE_VERSION,
        source={"path": place.source.path, "format": place.source.format, "field": place.source.field},
        num_files=len(construction.files),
        tokenizer_folder=tokenizer_folder.name,
        tokenizer_hash=tokenizer.hash,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype=choose_dtype(tokenizer.vocab_size).name,
        threshold=threshold,
        splits=sum_splits(splits),
        num_bad_records=len(bad_records),
        num_source_bytes=sum(report.num_source_bytes for report in reports),
        fingerprint=fingerprint_shards(splits, tokenizer.hash),
    )
    files = [[file.name, file.num_bytes, file.mtime_ns] for file in construction.files]
    JoinPlan(meta, files, splits).write(place.folder)


def _keep_tokenizer(recipe: Recipe, places: Places, progress: bool) -> tuple[Path, TokenizerInfo]:
    """The tokenizer's folder beside the stores, made if it is not there."""
    assert places.tokenizer is not None, "files are gone, so there is a complete store and nothing to build"
    with _lock(places.tokenizer, progress):
        info = read_info(places.tokenizer)
        if info is None:
            info = save_tokenizer(_make_tokenizer(recipe, places, progress), places.tokenizer)
    return places.tokenizer, info


def _make_tokenizer(recipe: Recipe, places: Places, progress: bool) -> object:
    model = recipe.model
    if model.tokenizer is not None:
        return load_tokenizer(model.tokenizer)
    if model.weights is not None:
        return load_tokenizer(model.weights, model.revision, "model.weights")
    return _train_tokenizer(recipe, places, progress)


def _train_tokenizer(recipe: Recipe, places: Places, progress: bool) -> object:
    assert recipe.data.bpe_vocab is not None, "checked when the places were named"
    if progress:
        print(f"training a byte-level BPE of {recipe.data.bpe_vocab} entries on the sources", file=sys.stderr)
    return train_bpe(_sample_texts(recipe, places.stores, progress), recipe.data.bpe_vocab, progress)


def _sample_texts(recipe: Recipe, stores: Sequence[Place], progress: bool) -> Iterator[str]:
    """The text of every n-th shard of all sources, held-out documents left out."""
    shards = [(place, spans) for place in stores for spans in plan_shards(_get_files(place), progress)]
    num_bytes = sum(span.num_bytes for _, spans in shards for span in spans)
    chosen = shards[:: num_bytes // recipe.data.bpe_text_bytes + 1]
    for place, spans in tqdm(chosen, desc="read text", unit=" shards", delay=BAR_DELAY_S, disable=not progress):
        texts = (record.text for span in spans for record in read_records(span, place.source.field))
        trained = (text for text in texts if text and hash_document(text) >= _initial_threshold(recipe))
        yield from (part for text in trained for part in cut_at_spaces(text))
