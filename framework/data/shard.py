"""Tokenizing: the text of a source becomes the shards of its store, on all cores.

    00000.train.tokens  .ends         tokens and document ends of shard 0 as in the store (store.py); ends count from its start;
                                      of conversations .trained, too
    00000.validation.tokens  .ends    the same of its held-out documents; a split without documents has no files
    00000.json                        the report of shard 0; its presence means that the shard is complete

A shard is a function of its job alone, so any process may write it, at any time and any number of times. Every file appears by an
atomic rename after fsync, so a process killed at any moment leaves nothing that could be taken for complete.
"""

import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np
import xxhash

from framework.data.document import (
    Document,
    Form,
    add_probes,
    beside_of,
    encode_answers,
    encode_conversation,
    encode_text,
    hash_document,
    hash_values,
    load_chat,
    load_encoder_once,
    read_answers,
    read_conversation,
)
from framework.data.records import FileSpan, Record, count_rows_before, is_array, read_records
from framework.data.store import ENDS_DTYPE, SPLITS, TRAINED_DTYPE, Split, SplitSize, choose_dtype, read_json
from framework.data.tokenize import TokenizerInfo
from framework.errors import DataError
from framework.files import unfinished_path, write_atomically, write_json
from framework.recipe.plugins import import_plugins

# Descriptors in the parent: both ends of a worker's life (`multiprocessing` keeps two pipes), and what else is open.
DESCRIPTORS_PER_WORKER = 2
DESCRIPTORS_KEPT = 64

# Share of a source's bytes that is held out of a document that would otherwise hold out most of the source.
LARGEST_SHARE = 0.1

# Endings of a shard's files.
KINDS = ("tokens", "ends", "trained")

# Characters of a bad record's reason: the reason may have names of fields in it, of any length.
REASON_CHARS = 1000

# Usual names of the field with the text, and of chats, most common first.
TEXT_FIELDS = (
    "text",
    "content",
    "contents",
    "document",
    "body",
    "article",
    "code",
    "raw_content",
    "completion",
    "story",
)
CHAT_FIELDS = ("messages", "conversations", "conversation", "prompt", "instruction", "dialog")


@dataclass(frozen=True)
class SplitReport(SplitSize):
    """One split of one shard. checksum: xxh3-128 of the tokens, then of the ends, then of which are trained."""

    checksum: str


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be trained on. row: counted from 1 (a line of jsonl, a row of parquet, a chunk of text)."""

    file: str
    row: int
    reason: str


@dataclass(frozen=True)
class ShardReport:
    """The contents of a finished shard."""

    threshold: int
    """Documents with a hash below it are held out."""
    splits: dict[str, SplitReport]
    num_source_bytes: int
    bad_records: tuple[BadRecord, ...]
    lowest_hash: int | None
    """Lowest hash of the shard's documents; None without any."""
    highest_hash: int | None

    @classmethod
    def read(cls, path: Path) -> "ShardReport | None":
        """The report of a shard, or None if the shard is not finished."""

        def build(value: dict[str, Any]) -> ShardReport:
            splits = {split: SplitReport(**report) for split, report in value["splits"].items()}
            return cls(
                **{**value, "splits": splits, "bad_records": tuple(BadRecord(**each) for each in value["bad_records"])}
            )

        return read_json(path, build)

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))


def sum_splits(shards: Sequence[Mapping[str, SplitReport]]) -> dict[str, SplitSize]:
    """The size of each split over all shards."""
    none = SplitSize(0, 0)
    return {
        split: SplitSize(
            sum(shard.get(split, none).num_documents for shard in shards),
            sum(shard.get(split, none).num_tokens for shard in shards),
        )
        for split in SPLITS
    }


def fingerprint_shards(shards: Sequence[Mapping[str, SplitReport]], tokenizer_hash: str) -> str:
    """A fingerprint of what training sees: equal for equal source files and tokenizer, wherever and whenever prepared."""
    content = [[split, shard[split].checksum] for shard in shards for split in SPLITS if split in shard]
    return xxhash.xxh3_128_hexdigest(json.dumps([tokenizer_hash, content]).encode())


def settle_threshold(threshold: int, hashes: Sequence[int]) -> int:
    """The threshold nearest to `threshold` that leaves a document on each side, where there are two different ones.

    hashes: of documents, the lowest and the highest among them. A store with a single document keeps it for training (0).
    """
    lowest, highest = min(hashes, default=0), max(hashes, default=0)
    if threshold == 0 or lowest == highest:
        return 0
    return min(max(threshold, lowest + 1), highest)


def shard_path(folder: Path, shard: int, ending: str) -> Path:
    return folder / f"{shard:05d}.{ending}"


class SplitWriter:
    """Writes one split of one shard. Its files are open within `stack` from the first document on, and appear when the stack
    closes without an error; a split without documents leaves no file."""

    def __init__(self, stack: ExitStack, folder: Path, shard: int, split: Split, dtype: np.dtype) -> None:
        self._stack = stack
        self._path_of = {kind: shard_path(folder, shard, f"{split}.{kind}") for kind in KINDS}
        self._dtype = dtype
        self._files: dict[str, BinaryIO] = {}
        self._trained: list[bytes] = []
        self._ends: list[int] = []
        self._hash = xxhash.xxh3_128()

    def add(self, ids: np.ndarray, trained: np.ndarray | None = None) -> None:
        """Append one document, its end-of-sequence id included.  ids: [n] integers; trained: [n] bool, None: all are."""
        data = ids.astype(self._dtype).tobytes()
        self._open("tokens").write(data)
        self._hash.update(data)
        if trained is not None:
            self._trained.append(trained.astype(TRAINED_DTYPE).tobytes())
            self._open("trained").write(self._trained[-1])
        self._ends.append((self._ends[-1] if self._ends else 0) + len(ids))

    def _open(self, kind: str) -> BinaryIO:
        if kind not in self._files:
            self._files[kind] = self._stack.enter_context(write_atomically(self._path_of[kind]))
        return self._files[kind]

    def finish(self) -> SplitReport | None:
        """Write the document ends; None if the split has no documents."""
        if not self._ends:
            return None
        data = np.asarray(self._ends, dtype=ENDS_DTYPE).tobytes()
        self._hash.update(data)
        self._hash.update(b"".join(self._trained))
        with write_atomically(self._path_of["ends"]) as file:
            file.write(data)
        return SplitReport(len(self._ends), self._ends[-1], self._hash.hexdigest())


@dataclass(frozen=True)
class ShardJob:
    """One shard to write."""

    source: str
    source_bytes: int
    """Size of all files of the source."""
    folder: Path
    shard: int
    spans: tuple[FileSpan, ...]
    field: str
    conversation: str | None
    """The field of conversations, or of answers to compare; None: `field` is text."""
    form: Form | None
    """The form of answers."""
    train_on: str
    tokenizer_folder: Path
    tokenizer: TokenizerInfo
    threshold: int
    """A document is held out when its hash is below it."""
    validation: float
    """data.validation."""
    max_bad_records: int
    """data.bad_records."""
    plugins: tuple[str, ...] = ()
    """Plugins of the recipe, whose formats a worker reads."""

    @property
    def num_bytes(self) -> int:
        return sum(span.num_bytes for span in self.spans)


def tokenize_shard(job: ShardJob) -> ShardReport:
    """Write a shard and its report. DataError as soon as it alone has more than `max_bad_records`."""
    import_plugins(job.plugins)
    clear_shard(job.folder, job.shard)
    dtype = choose_dtype(job.tokenizer.vocab_size)
    hashes: list[int] = []
    bad_records: list[BadRecord] = []
    with ExitStack() as stack:
        writers = {split: SplitWriter(stack, job.folder, job.shard, split, dtype) for split in SPLITS}
        documents = _read_documents(job)
        for document in add_probes(documents) if job.form == "label" else documents:
            if isinstance(document, BadRecord):
                bad_records.append(document)
                check_bad_records(job.source, bad_records, job.max_bad_records)
            else:
                hashes.append(document.hash)
                for split, ids in split_document(document, job).items():
                    writers[split].add(ids, document.trained)
        reports = {split: writer.finish() for split, writer in writers.items()}
    report = ShardReport(
        threshold=job.threshold,
        splits={split: report for split, report in reports.items() if report},
        num_source_bytes=job.num_bytes,
        bad_records=tuple(bad_records),
        lowest_hash=min(hashes, default=None),
        highest_hash=max(hashes, default=None),
    )
    report.write(shard_path(job.folder, job.shard, "json"))
    return report


def hash_shard(tokens: np.ndarray, ends: np.ndarray, trained: np.ndarray | None) -> str:
    """The checksum of one split of a shard. ends: from its start."""
    digest = xxhash.xxh3_128(tokens.data)
    digest.update(np.ascontiguousarray(ends).data)
    if trained is not None:
        digest.update(trained.data)
    return digest.hexdigest()


def clear_shard(folder: Path, shard: int) -> None:
    """Remove what an earlier or unfinished attempt left. The report goes first: it says that the rest is complete."""
    # Removed by name: listing a folder of thousands of shards for each of them takes minutes.
    for ending in ("json", *(f"{split}.{kind}" for split in SPLITS for kind in KINDS)):
        path = shard_path(folder, shard, ending)
        path.unlink(missing_ok=True)
        unfinished_path(path).unlink(missing_ok=True)


def split_document(document: Document, job: ShardJob) -> dict[Split, np.ndarray]:
    """The document's tokens by split: all in one. Of a held-out document that is more than half of its source only the beginning
    is held out, a tenth of the source or data.validation, whichever is more; the rest is trained on."""
    if document.hash >= job.threshold:
        return {"train": document.ids}
    if document.trained is not None or 2 * document.num_bytes <= job.source_bytes:
        return {"validation": document.ids}
    share = max(job.validation, LARGEST_SHARE) * job.source_bytes / document.num_bytes
    stop = max(1, int(share * document.ids.size))
    if stop >= document.ids.size:
        return {"validation": document.ids}
    return {"validation": np.append(document.ids[:stop], job.tokenizer.eos_id), "train": document.ids[stop:]}


def _read_documents(job: ShardJob) -> Iterator[Document | BadRecord]:
    tokenizer, field = job.tokenizer_folder, job.conversation
    encode: Callable[[Record], list[Document]]
    if field is None:
        encode = partial(encode_text, encode=load_encoder_once(tokenizer), tokenizer=job.tokenizer)
    elif job.form is None:
        encode = partial(encode_conversation, field=field, chat=load_chat(tokenizer, job.train_on))
    else:
        encode = partial(encode_answers, field=field, form=job.form, chat=load_chat(tokenizer, "assistant"))
    for whole in job.spans:
        rows_before: int | None = None
        with fetched(whole, job.folder) as span:
            for record in read_records(span, field or job.field, beside_of(field, job.form)):
                try:
                    documents = encode(record)
                except (DataError, RecursionError) as error:  # of tools or arguments that are nested too deeply
                    rows_before = count_rows_before(span) if rows_before is None else rows_before
                    name = span.file.url or str(span.file.path)
                    yield BadRecord(name, rows_before + record.index + 1, escape(str(error)))
                else:
                    yield from documents


@contextmanager
def fetched(span: FileSpan, folder: Path) -> Iterator[FileSpan]:
    """A span of a file of this machine. One that lies elsewhere is here meanwhile, in `folder`."""
    file = span.file
    if not file.url:
        yield span
        return
    import fsspec

    with TemporaryDirectory(dir=folder) as place:
        here = Path(place, file.path.name)
        try:
            filesystem, path = fsspec.core.url_to_fs(file.url)
            filesystem.get_file(path, str(here))
        except Exception as error:  # of any of fsspec's libraries
            raise DataError(f"{file.url} cannot be fetched ({type(error).__name__}: {error})") from error
        file = replace(file, path=here)
        yield replace(span, file=replace(file, kind="jsonl") if file.kind == "json" and not is_array(file) else file)


def read_texts(
    span: FileSpan, field: str, conversation: str | None = None, form: Form | None = None
) -> Iterator[tuple[str, int]]:
    """(text, hash of the document) of each record of a span that has text."""
    for record in read_records(span, conversation or field, beside_of(conversation, form)):
        if record.text:
            yield record.text, hash_document(record.text)
        elif (values := record.values) is not None and conversation is not None:
            with suppress(DataError, RecursionError):
                found = [each for each, _ in read_answers(values, conversation, form)] if form else []
                said = (
                    text["content"]
                    for each in found or [read_conversation(values, conversation)]
                    for text in each.messages
                )
                yield "\n".join(said), hash_values(values)


def escape(text: str) -> str:
    """Text from a record for a terminal and a file: control characters and halves of surrogate pairs escaped, the end cut off."""
    chars = (char if char.isprintable() else char.encode("unicode_escape").decode() for char in text[:REASON_CHARS])
    return "".join(chars) + "..." * (len(text) > REASON_CHARS)


def check_bad_records(source: str, bad_records: list[BadRecord], allowed: int) -> None:
    """DataError, naming the first, if a source has more bad records than data.bad_records."""
    if len(bad_records) > allowed:
        first, count = bad_records[0], len(bad_records)
        fix = _name_field(source, first) or (
            f"repair the file, or raise data.bad_records to quarantine {'them' if count > 1 else 'it'}"
        )
        raise DataError(
            f"{first.file}, row {first.row}: {first.reason}. data.sources.{source} has at least {count} bad "
            f"record{'s' if count > 1 else ''} and data.bad_records={allowed}: {fix}"
        )


def _name_field(source: str, record: BadRecord) -> str:
    """The override that names the field with the text, if a record has it under another name."""
    missing = re.search(r"is missing \(there is: (.*)\)$", record.reason)
    names = set(missing[1].split(", ")) if missing else set()
    chat = next((name for name in CHAT_FIELDS if name in names), None)
    if chat is not None:
        return f"set data.sources.{source}.messages={chat} to train on conversations"
    found = next((name for name in TEXT_FIELDS if name in names), None)
    if found is not None:
        return f"set data.sources.{source}.field={found}"
    return f"set data.sources.{source}.field to the one that has the text" if names else ""


def tokenize_shards(jobs: list[ShardJob], workers: int) -> Generator[tuple[ShardJob, ShardReport], None, None]:
    """Run the jobs in `workers` processes and yield each as it is finished, in any order.

    The processes end with this generator (close it to leave it early), and with this process even if it is killed: a pipe that
    only it holds open then closes.
    """
    workers = min(workers, len(jobs), most_workers())
    if workers <= 1:
        yield from ((job, tokenize_shard(job)) for job in jobs)
        return
    # Forking a process that has threads (tokenizers, torch) may deadlock.
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    executor = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(reader,))
    try:
        job_of = {executor.submit(tokenize_shard, job): job for job in jobs}
        for future in as_completed(job_of):
            yield job_of[future], future.result()
        executor.shutdown()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker of `meshwright prepare` was killed, perhaps for want of memory. Run it again with fewer than "
            f"{workers} workers (one takes some 9 times the bytes of its longest document); finished shards are kept"
        ) from error
    finally:
        writer.close()
        executor.shutdown(cancel_futures=True)
        reader.close()


def most_workers() -> int:
    """The number of worker processes that this process may have under its limit of open files (`ulimit -n`); at least one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(1, (limit - DESCRIPTORS_KEPT) // DESCRIPTORS_PER_WORKER)


def _start_worker(parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which closes the pipe

    def exit_with_parent() -> None:
        parent.poll(None)
        os._exit(0)

    threading.Thread(target=exit_with_parent, daemon=True).start()
