"""Preparing: the recipe's sources become token stores, once, before training.

    sources --list--> files --plan--> shards --tokenize, all cores--> shards on disk --join--> a store per source --> Prepared

`prepare` builds what is missing and reuses finished stores, and finished shards of an interrupted one. A process never has more
than a few files open, however many shards there are.
"""

import errno
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from framework.data.beside import list_read, make_head
from framework.data.jobs import import_store, initial_threshold, list_all, make_jobs, make_meta, read_reports, run_jobs
from framework.data.join import JoinPlan, count_needed_bytes, hold_lock, is_tokenized, join_store
from framework.data.order import Rows, count_overlong, refuse_no_rows
from framework.data.prepared import (
    DataPlaces,
    Prepared,
    PreparedSource,
    StorePlace,
    check_vocabulary,
    find_prepared,
    locate,
    open_found,
)
from framework.data.records import plan_shards
from framework.data.remote import Root
from framework.data.shard import LARGEST_SHARE, ShardReport, fetched, read_texts, settle_threshold, shard_path
from framework.data.source import BAR_DELAY_S, SourceFile, list_files, summarize_left_out
from framework.data.store import LEFT_OUT, StoreMeta, verify_small_files
from framework.data.tasks import keep_tasks, open_task, refuse_unknown_score
from framework.data.tokenize import (
    TokenizerInfo,
    cut_at_spaces,
    load_tokenizer,
    read_info,
    read_template,
    save_tokenizer,
    set_template,
    train_bpe,
)
from framework.errors import DamagedStore, DataError
from framework.files import write_atomically, write_json
from framework.host import count_cores
from framework.recipe.schema import Recipe

# A marker of a chat template, which a tokenizer that is trained for it has as an entry.
MARKER = re.compile(r"<\|\w+\|>")
# A note is printed if more than this many times more or less tokens are held out than asked for.
UNEVEN = 3.0


def prepare(recipe: Recipe, workers: int | None = None, progress: bool = True) -> Prepared:
    """Tokenize the sources of a recipe into stores under data.root, unless they are there, and open them.

    workers: processes; None: one per core this process may use. progress: bar and notes on stderr.
    Killed at any moment, it continues where it was when called again, to the same bytes; of two calls at once, the second
    waits for the first. DataError for what the user can put right, a full disk included.
    """
    places = locate(recipe, progress)
    data_root = Root.of(recipe.data)
    root = data_root.folder
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"data.root={root}: no folder can be made there ({error.strerror}). Set another one") from error
    try:
        with ExitStack() as stack:
            folders = {place.folder for place in places.stores}
            for folder in sorted(each for each in folders if not _is_whole(each) or data_root.is_pending(each)):
                stack.enter_context(hold_lock(folder, progress))
            absent = [place for place in places.stores if not _is_whole(place.folder, mends=True)]
            untokenized = [place for place in absent if not is_tokenized(place.folder)]
            if untokenized:
                _build(recipe, places, untokenized, workers or count_cores(), progress)
            for place in (each for each in absent if (each.folder / "shards.json").exists()):
                join_store(place.folder, progress)
            for folder in folders:
                data_root.push(folder)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(_explain_full_disk(error, root, places)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise DataError(
                f"data.root={root}: {error}. Set it to a folder that allows writing and file locks"
            ) from error
        raise
    prepared = open_found(find_prepared(recipe, places))
    kept = keep_tasks(recipe.eval.tasks, prepared.tokenizer, recipe.batch.context)
    refuse_unknown_score(recipe.checkpoint.keep_best, [open_task(place) for place in kept], recipe.eval.average)
    return prepared


def _is_whole(folder: Path, mends: bool = False) -> bool:
    """Whether a store is complete and its small files are whole. If one is damaged, joining again makes it anew from
    shards.json and verifies the rest. mends: remove store.json, so that it is joined. DamagedStore if shards.json is gone as
    well."""
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


def describe_rows(prepared: Prepared, recipe: Recipe, num_tokens: int = 0) -> list[str]:
    """A line per source of conversations: how full its rows are, and what is too long for one. DataError where data.overlong
    refuses that, or leaves nothing. num_tokens: as of `summarize_data`."""
    packing = recipe.data.packing
    if packing not in ("best_fit", "alone"):
        return []
    lines, context, overlong = [], recipe.batch.context, recipe.data.overlong
    for source in prepared.sources:
        stream = source.streams["train"]
        if not source.meta.is_masked:
            continue
        rows = Rows.of(stream, context, overlong, is_alone=packing == "alone")
        refuse_no_rows(source.name, stream, rows.num_rows, context)
        count = stream.num_documents // (1 + stream.is_paired)
        line = f"rows     {source.name}: {count:,} {stream.noun} in {rows.num_rows:,} rows of {context} tokens, "
        repeats = _count_passes(num_tokens, prepared, source, rows.num_rows * context)
        lines.append(f"{line}{rows.fill:.1%} filled{repeats}")
        if long := count_overlong(stream, context):
            done = "left out" if overlong == "skip" else "their ends cut off"
            lines.append(
                f"note     {source.name}: {long:,} of {count:,} {stream.noun}, longer than batch.context={context}: {done}"
                f" (data.overlong={overlong})"
            )
    held_out = [source.streams["validation"] for source in prepared.sources]
    if recipe.data.validation > 0 and not any(Rows.of(each, context, overlong).num_rows for each in held_out):
        raise DataError(
            f"all that data.validation={recipe.data.validation} holds out is longer than batch.context={context}: a validation"
            " would have no loss. Raise batch.context, or set data.validation=0 (and train.validate_every_steps=null)"
        )
    return lines


def _count_passes(num_tokens: int, prepared: Prepared, source: PreparedSource, tokens_once: int) -> str:
    """Words on how often a run of so many tokens reads a source, if that is more than once. tokens_once: those of one pass."""
    weight = sum(each.weight for each in prepared.sources)
    passes = num_tokens * source.weight / weight / max(1, tokens_once)
    return f", read {passes:,.1f} times" if passes > 1 else ""


def summarize_data(prepared: Prepared, validation: float, num_tokens: int = 0) -> str:
    """A line per source with its share of the samples and its tokens, then notes on what a user may not expect.

    validation: data.validation, the share of documents that was asked for. num_tokens: of the run; 0 where it is not known.
    """
    weight, lines = sum(source.weight for source in prepared.sources), []
    for source in prepared.sources:
        held_out, train = (source.streams[split].num_tokens for split in ("validation", "train"))
        share = held_out / (held_out + train)
        tokens = f"{train:,} tokens to train on, {held_out:,} held out ({share:.1%})"
        if (words := source.meta.source) and source.meta.is_streamed:
            tokens += f": the first {words['head']:,} of {words['shards']:,} shards, the others come beside the run"
        elif not source.meta.is_masked:  # whose rows are not full: `describe_rows`
            tokens += _count_passes(num_tokens, prepared, source, train)
        lines.append(f"tokens   {source.name}: {source.weight / weight:.0%} of the samples, {tokens}")
        if validation > 0 and (share < validation / UNEVEN or share > max(UNEVEN * validation, LARGEST_SHARE)):
            lines.append(
                f"note     {source.name}: a hash of its text decides whether a document is held out, and with few or very long"
                f" ones that is {share:.1%} of the tokens; data.validation asks for {validation:.1%}"
            )
    lines += [f"note     {line}" for line in describe_files(prepared) if "left out" in line]
    if len(prepared.sources) > 1:
        first = prepared.sources[0].name
        lines.append(f"note     sources are blended by weight: data.sources.{first}.weight=0 would leave {first} out")
    return "\n".join(lines)


def describe_files(prepared: Prepared) -> list[str]:
    """A line per source: the number of files read, and the files left out with the reasons."""
    lines = []
    for source in prepared.sources:
        path = source.folder / LEFT_OUT
        left_out = json.loads(path.read_text()) if path.exists() else {}
        more = f"; {len(left_out)} left out ({summarize_left_out(left_out)}), listed in {path}" if left_out else ""
        count = source.meta.num_files
        lines.append(f"{source.name}: read from {count:,} file{'s' * (count != 1)}{more}")
    return lines


def _explain_full_disk(error: OSError, root: Path, places: DataPlaces) -> str:
    sizes = [(place.folder, sum(file.num_bytes for file in place.files or ())) for place in places.stores]
    needed_bytes = sum(count_needed_bytes(*each) for each in sizes)
    return (
        f"{error.filename}: {error.strerror}. About {needed_bytes:,} more bytes are needed for the token stores and "
        f"{shutil.disk_usage(root).free:,} are free under data.root={root}. Make room or set another data.root, and run the "
        f"same command again: finished shards are kept"
    )


def _build(recipe: Recipe, places: DataPlaces, absent: Sequence[StorePlace], workers: int, progress: bool) -> None:
    """Tokenize the stores that are not there, up to their shards.json."""
    folder, tokenizer = _keep_tokenizer(recipe, places, progress)
    check_vocabulary(recipe, tokenizer.vocab_size)
    stores = []
    for place in absent:
        place.folder.mkdir(exist_ok=True)
        if recipe.data.mode == "stream":
            make_head(recipe, place, folder, tokenizer, workers, progress)
            continue
        if place.source.is_imported:
            import_store(recipe, place, folder.name, tokenizer, progress)
            continue
        files = list_all(place)
        jobs = make_jobs(recipe, place, files, folder, tokenizer, progress)
        stores.append((place, files, jobs))
    run_jobs(recipe, [job for _, _, jobs in stores for job in jobs], workers, progress)
    for place, files, jobs in stores:
        reports = read_reports(jobs)
        known = [hash for each in reports for hash in (each.lowest_hash, each.highest_hash) if hash is not None]
        threshold = settle_threshold(initial_threshold(recipe), known)
        moved = [job for job, report in zip(jobs, reports, strict=True) if is_moved(report, threshold)]
        for job in moved:
            shard_path(job.folder, job.shard, "json").unlink()
        run_jobs(recipe, [replace(job, threshold=threshold) for job in moved], workers, progress)
        _finish(recipe, place, files, read_reports(jobs), folder.name, tokenizer, threshold)


def is_moved(report: ShardReport, threshold: int) -> bool:
    """Whether a document of this shard may change sides under the new threshold."""
    low, high = sorted((report.threshold, threshold))
    if low == high or report.lowest_hash is None or report.highest_hash is None:
        return False
    return report.lowest_hash < high and report.highest_hash >= low


def _finish(
    recipe: Recipe,
    place: StorePlace,
    files: Sequence[SourceFile],
    reports: Sequence[ShardReport],
    tokenizer_folder: str,
    tokenizer: TokenizerInfo,
    threshold: int,
) -> None:
    """Write the files about the whole store; shards.json last, since its presence means that all is tokenized."""
    bad_records = [record for report in reports for record in report.bad_records]
    if bad_records:
        with write_atomically(place.folder / "quarantine.jsonl") as file:
            file.writelines(json.dumps(asdict(record)).encode() + b"\n" for record in bad_records)
    if left_out := list_files(place.name, place.source).left_out:
        write_json(place.folder / LEFT_OUT, left_out)
    splits = [report.splits for report in reports]
    meta = replace(
        make_meta(recipe, place, len(files), tokenizer_folder, tokenizer, splits, threshold),
        num_bad_records=len(bad_records),
        num_source_bytes=sum(report.num_source_bytes for report in reports),
    )
    JoinPlan(meta, [[file.name, file.num_bytes, file.mtime_ns] for file in files], splits).write(place.folder)


def _keep_tokenizer(recipe: Recipe, places: DataPlaces, progress: bool) -> tuple[Path, TokenizerInfo]:
    """The tokenizer's folder beside the stores, made unless it is there."""
    assert places.tokenizer is not None, "files are gone, so there is a complete store and nothing to build"
    with hold_lock(places.tokenizer, progress):
        info = read_info(places.tokenizer)
        if info is None:
            tokenizer = _load_or_train(recipe, places, progress)
            if recipe.data.has_conversations:
                set_template(tokenizer, recipe.data.chat_template)
            info = save_tokenizer(tokenizer, places.tokenizer)
    return places.tokenizer, info


def _load_or_train(recipe: Recipe, places: DataPlaces, progress: bool) -> Any:
    model = recipe.model
    if model.tokenizer is not None:
        return load_tokenizer(model.tokenizer)
    if model.weights is not None:
        return load_tokenizer(model.weights, model.revision, "model.weights")
    assert recipe.data.bpe_vocab is not None, "checked when the places were named"
    if progress:
        print(f"training a byte-level BPE of {recipe.data.bpe_vocab} entries on the sources", file=sys.stderr)
    markers = sorted(set(MARKER.findall(read_template(recipe.data.chat_template or "") or "")))
    texts = _sample_texts(recipe, places.stores, progress)
    return train_bpe(texts, recipe.data.bpe_vocab, progress, markers)


def _sample_texts(recipe: Recipe, stores: Sequence[StorePlace], progress: bool) -> Iterator[str]:
    """The texts of every n-th shard of all sources, without held-out documents."""
    shards = [(place, spans) for place in stores for spans in plan_shards(list_read(recipe, place), progress)]
    num_bytes = sum(span.num_bytes for _, spans in shards for span in spans)
    chosen = shards[:: num_bytes // recipe.data.bpe_text_bytes + 1]
    for place, spans in tqdm(chosen, desc="read text", unit=" shards", delay=BAR_DELAY_S, disable=not progress):
        what = place.source.field, place.source.conversation, place.form
        for whole in spans:
            with fetched(whole, place.folder) as span:
                texts = (text for text, hash in read_texts(span, *what) if hash >= initial_threshold(recipe))
                yield from (chunk for text in texts for chunk in cut_at_spaces(text))
