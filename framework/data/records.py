"""A source's files cut into spans and shards, and the records of a span, each with its text or with the reason it has none.

| kind    | a span counts                    |
|---------|----------------------------------|
| jsonl   | bytes (the lines starting in it) |
| json    | the whole file (one array)       |
| csv     | the whole file (tsv, too)        |
| text    | bytes (the lines starting in it) |
| parquet | row groups                       |
| arrow   | rows                             |
| tar     | the whole file                   |

A compressed file is one span. Lines and columns are read here, span by span: the loaders of `datasets` convert a file as a
whole, so one bad row fails all rows without saying which it is.
"""

import csv
import json
import lzma
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from framework.data.kinds import HEAD_BYTES, find_foreign, find_records, open_bytes, read_samples, strip_compression
from framework.data.source import SourceFile, show_progress
from framework.errors import DataError

# A text file above this size is cut at line ends into documents of about this size, so that a single large file can be
# tokenized in parallel and split into training and validation. About 30,000 tokens.
TEXT_DOCUMENT_BYTES = 128 << 10

# Source bytes of a shard: a second's work of one worker, which is what a kill may lose. MAX_SHARDS bounds the number of
# files while a large store is made; its shards are larger. Other numbers would give equal text another fingerprint.
MIN_SHARD_BYTES = 512 << 10
MAX_SHARDS = 4096

WHOLE = sys.maxsize
UTF8_MARK = b"\xef\xbb\xbf"
ROWS_PER_READ = 1024
# A longer line is a bad record: it would have to be in memory as a whole, several times over.
LONGEST_LINE_BYTES = 256 << 20
SKIPPED_AT_ONCE = 1 << 20
JSON_BLANKS = re.compile(r"[ \t\n\r]*")
# Finds where a value ends, also one that `json` refuses for an integer of more digits than Python converts.
LENIENT_JSON = json.JSONDecoder(parse_int=float)
DIALECTS = {"csv": csv.excel, "tsv": csv.excel_tab}
# Formats that are read as a whole, those of plugins, too: of a file's path, its records as mappings, or as texts.
READERS: dict[str, Callable[[Path], Iterable[Any]]] = {"tar": read_samples}
# Errors of libraries for a truncated, corrupt or unreadable file.
DAMAGE = (pyarrow.ArrowException, zlib.error, lzma.LZMAError, tarfile.TarError, EOFError, OSError)


@dataclass(frozen=True)
class FileSpan:
    """The range [start, stop) of a file, in the unit of its kind, that is read at once. num_bytes: its share of the file."""

    file: SourceFile
    start: int
    stop: int
    num_bytes: int


def plan_shards(files: Iterable[SourceFile], progress: bool = False) -> list[list[FileSpan]]:
    """Cut a source into shards of about equal bytes: a function of its files alone, not of the number of workers.

    progress: a bar on stderr, since the heads of parquet, Arrow and json files are read.
    """
    files = tuple(files)
    shard_bytes = max(MIN_SHARD_BYTES, sum(file.num_bytes for file in files) // MAX_SHARDS)
    shards: list[list[FileSpan]] = []
    filled = shard_bytes
    for span in (
        span for file in show_progress(files, "plan shards", progress) for span in _cut_file(file, shard_bytes)
    ):
        if filled >= shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(span)
        filled += span.num_bytes
    return shards


def _cut_file(file: SourceFile, span_bytes: int) -> Iterator[FileSpan]:
    if file.url:
        yield FileSpan(file, 0, WHOLE, file.num_bytes)
        return
    if file.kind == "json" and not is_array(file):
        file = replace(file, kind="jsonl")
    if file.kind in ("json", "csv", "tsv", *READERS) or strip_compression(file.path) != file.path:
        yield FileSpan(file, 0, WHOLE, file.num_bytes)
        return
    if file.kind in ("parquet", "arrow"):
        num_units = _count_units(file)
        step = max(1, span_bytes * num_units // max(1, file.num_bytes))
    else:
        num_units = file.num_bytes
        step = -(-span_bytes // TEXT_DOCUMENT_BYTES) * TEXT_DOCUMENT_BYTES
    for start in range(0, num_units, step):
        stop = min(start + step, num_units)
        yield FileSpan(file, start, stop, file.num_bytes * (stop - start) // num_units)


def is_array(file: SourceFile) -> bool:
    """Whether a .json file holds one array, rather than an object on each line. DataError if it cannot be read."""
    try:
        with open_bytes(file.path) as opened:
            head = opened.read(HEAD_BYTES)
    except DAMAGE as error:
        raise DataError(f"{file.path}: cannot be read ({error}). Replace the file or take it out") from error
    return head.removeprefix(UTF8_MARK).lstrip()[:1] == b"["


def _count_units(file: SourceFile) -> int:
    """Row groups of a parquet file, rows of an Arrow file. DataError if it is damaged."""
    try:
        if file.kind == "parquet":
            return pyarrow.parquet.read_metadata(file.path).num_row_groups
        return sum(batch.num_rows for batch in open_batches(file.path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.path}: not a {file.kind} file ({error}). Replace the file or take it out") from error


def open_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Record batches of an Arrow IPC file, in the stream or the file format (Feather), mapped into memory."""
    with pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            with pyarrow.ipc.open_file(mapped) as reader:
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            mapped.seek(0)
            with pyarrow.ipc.open_stream(mapped) as stream:
                yield from stream


@dataclass(frozen=True)
class Record:
    """One record. index: from 0 within its span; text: None if there is a problem, or values are asked for."""

    index: int
    text: str | None
    problem: str | None = None
    values: dict[str, Any] | None = None


@dataclass(frozen=True)
class Asked:
    """The wish of who reads records: the text in `field`, or, with `beside`, the values of `field` and of those."""

    field: str
    beside: Sequence[str] | None = None

    def columns(self, names: Iterable[str]) -> list[str]:
        """The columns to read, of those that there are."""
        return [self.field, *(name for name in names if name in (self.beside or ()) and name != self.field)]

    def take(self, index: int, values: dict[str, Any]) -> Record:
        """The record of a row that has the field."""
        if self.beside is None:
            return _check_text(index, values[self.field], self.field)
        return Record(index, None, values={name: values[name] for name in self.columns(values)})


def read_records(span: FileSpan, field: str, beside: Sequence[str] | None = None) -> Iterator[Record]:
    """The records of a span in the order of the file; blank lines and blank text files are no records.

    field: holds the text, except in text files. beside: ask for values, of any kind, of this field and of these, where a record
    has them. DataError, naming the file, if the file itself is damaged.
    """
    if span.file.kind == "text" and beside is not None:
        raise DataError(f"{span.file.path}: plain text has no conversations. Set data.sources.*.format to jsonl or csv")
    asked = Asked(field, beside)
    readers = {
        "text": lambda: _read_text(span),
        "jsonl": lambda: _read_jsonl(span, asked),
        "json": lambda: _read_json(span, asked),
        "csv": lambda: _read_csv(span, asked),
        "tsv": lambda: _read_csv(span, asked),
        "parquet": lambda: _read_parquet(span, asked),
        "arrow": lambda: _read_columns(_slice_batches(span, asked), asked),
    }
    num_read = 0
    try:
        for record in readers.get(span.file.kind, lambda: _read_added(span, asked))():
            num_read = record.index + 1
            yield record
    except DAMAGE as error:
        row = num_read
        with suppress(*DAMAGE):
            row += count_rows_before(span)
        raise DataError(
            f"{span.file.path}: cannot be read behind row {row} ({error}). Replace the file or take it out"
        ) from error


def count_rows_before(span: FileSpan) -> int:
    """Rows of the file before this span. Called for bad records only, so that good ones cost no counting."""
    if span.file.kind == "jsonl":
        return sum(1 for _ in _read_lines(FileSpan(span.file, 0, span.start, 0)))
    if span.file.kind == "parquet":
        metadata = pyarrow.parquet.read_metadata(span.file.path)
        return sum(metadata.row_group(group).num_rows for group in range(span.start))
    return span.start // TEXT_DOCUMENT_BYTES if span.file.kind == "text" else span.start


def _read_lines(span: FileSpan) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that start within the span, line ends included. DataError if the file is no text.

    A line above LONGEST_LINE_BYTES is cut to one byte more than that.
    """
    with open_bytes(span.file.path) as opened:
        offset = span.start
        if offset:
            opened.seek(offset - 1)
            offset += _skip_line(opened) - 1
        else:
            _refuse_foreign(span.file, opened)
        while offset < span.stop and (line := opened.readline(LONGEST_LINE_BYTES + 1)):
            yield offset, line
            offset += len(line) + (_skip_line(opened) if len(line) > LONGEST_LINE_BYTES and line[-1:] != b"\n" else 0)


def _skip_line(opened: BinaryIO) -> int:
    """Read and drop the rest of the line, and return its number of bytes."""
    num_bytes = 0
    while part := opened.readline(SKIPPED_AT_ONCE):
        num_bytes += len(part)
        if part.endswith(b"\n"):
            break
    return num_bytes


def _refuse_foreign(file: SourceFile, opened: Any) -> None:
    """DataError if the first bytes show that a file is not of the kind it is to be read as."""
    head = opened.peek(HEAD_BYTES)[:HEAD_BYTES]
    seen = find_foreign(head)
    if seen is None and file.kind == "text" and not file.stated and (seen := find_records(head)):
        raise DataError(
            f"{file.path}: plain text by its ending, but it begins like {seen}. Set data.sources.*.format=jsonl to read its "
            f"records, or format=text to train on it as it stands"
        )
    if seen:
        raise DataError(
            f"{file.path}: to be read as {file.kind}, but it begins like {seen}. Take the file out, convert it, or name it by "
            f"what it is (data.sources.*.format, or a glob in data.sources.*.path that leaves it out)"
        )


def _read_text(span: FileSpan) -> Iterator[Record]:
    """One document for all lines that start in the same TEXT_DOCUMENT_BYTES of the file: mostly the whole file."""
    first = span.start // TEXT_DOCUMENT_BYTES
    for chunk, lines in groupby(_read_lines(span), key=lambda line: line[0] // TEXT_DOCUMENT_BYTES):
        data = b"".join(line for _, line in lines)
        if data.strip():
            yield _decode(chunk - first, data)


def _decode(index: int, data: bytes) -> Record:
    if len(data) > LONGEST_LINE_BYTES:
        return Record(index, None, f"a line of more than {LONGEST_LINE_BYTES:,} bytes")
    if b"\0" in data:
        return Record(index, None, f"not text: a NUL at byte {data.index(0)} of the record")
    try:
        return Record(index, data.removeprefix(UTF8_MARK).decode())
    except UnicodeDecodeError as error:
        why = f"not UTF-8: {error.reason} at byte {error.start} of the record"
        return Record(index, None, f"{why} (`iconv -f ENCODING -t UTF-8` converts a file)")


def _read_jsonl(span: FileSpan, asked: Asked) -> Iterator[Record]:
    for index, (_, line) in enumerate(_read_lines(span)):
        if line.strip():
            record = _decode(index, line)
            yield record if record.text is None else _parse(index, record.text, asked)


def _parse(index: int, line: str, asked: Asked) -> Record:
    field = asked.field
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Record(index, None, _explain_json(error))
    if line.count(json.dumps(field)) > 1 and isinstance(value, dict):
        names = [name for name, _ in json.loads(line, object_pairs_hook=list)]
        if names.count(field) > 1:
            return Record(index, None, f"field `{field}` stands there twice")
    return _take_field(index, value, asked)


def _explain_json(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "not JSON that can be read: nested too deeply"
    return f"not JSON that can be read: {str(error).partition(';')[0]}"


def _read_json(span: FileSpan, asked: Asked) -> Iterator[Record]:
    """The elements of an array, one by one. A broken element ends the file: its row is known, but not where the next begins."""
    with open_bytes(span.file.path) as opened:
        _refuse_foreign(span.file, opened)
        text = opened.read().decode("utf-8-sig", "surrogateescape")
    position = _skip_blanks(text, _skip_blanks(text, 0) + 1)  # behind the [
    index, is_closed = 0, text[position : position + 1] == "]"
    while not is_closed:
        try:
            _, stop = LENIENT_JSON.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise _broken_array(span.file, index, _explain_json(error)) from error
        yield _parse(index, text[position:stop], asked)
        position = _skip_blanks(text, stop)
        is_closed = text[position : position + 1] == "]"
        if not is_closed:
            if text[position : position + 1] != ",":
                raise _broken_array(span.file, index, "neither , nor ] behind it")
            index, position = index + 1, _skip_blanks(text, position + 1)
    if text[position + 1 :].strip():
        raise _broken_array(span.file, index, "text behind the ] of the array")


def _read_added(span: FileSpan, asked: Asked) -> Iterator[Record]:
    for index, value in enumerate(READERS[span.file.kind](span.file.path)):
        yield _take_field(index, {asked.field: value} if isinstance(value, str) else value, asked)


def _skip_blanks(text: str, position: int) -> int:
    blanks = JSON_BLANKS.match(text, position)
    return blanks.end() if blanks else position


def _broken_array(file: SourceFile, index: int, why: str) -> DataError:
    return DataError(
        f"{file.path}, row {index + 1}: {why}. The rest of a JSON array cannot be read without it. Replace the file or take it "
        f"out"
    )


def _read_csv(span: FileSpan, asked: Asked) -> Iterator[Record]:
    """The rows below the first, which names the fields. Cells may be quoted and have line ends inside."""
    csv.field_size_limit(LONGEST_LINE_BYTES)  # of the process; the library's own is 128 KiB
    lines = (line.decode("utf-8", "surrogateescape") for line in _read_short_lines(span.file))
    rows = csv.reader(lines, DIALECTS[span.file.kind], strict=True)
    header = next(rows, [])
    _require_field(span.file, header, asked.field)
    for index in count():
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Record(index, None, f"not {span.file.kind}: {error}")
            continue
        if row and len(row) != len(header):
            yield Record(index, None, f"{len(row)} cells in a row of {len(header)} columns")
        elif row and "\0" in row[header.index(asked.field)]:
            yield Record(index, None, f"field `{asked.field}` is not text: a NUL in it")
        elif row:
            yield asked.take(index, dict(zip(header, row, strict=True)))


def _read_short_lines(file: SourceFile) -> Iterator[bytes]:
    for offset, line in _read_lines(FileSpan(file, 0, WHOLE, file.num_bytes)):
        if len(line) > LONGEST_LINE_BYTES:
            raise DataError(
                f"{file.path}: a line of more than {LONGEST_LINE_BYTES:,} bytes at byte {offset}. Take it out"
            )
        yield line if offset else line.removeprefix(UTF8_MARK)


def _take_field(index: int, value: Any, asked: Asked) -> Record:
    if not isinstance(value, dict):
        return Record(index, None, f"not an object but {type(value).__name__}")
    if asked.field not in value:
        return Record(index, None, f"field `{asked.field}` is missing (there is: {', '.join(value) or 'nothing'})")
    return asked.take(index, value)


def _check_text(index: int, text: Any, field: str) -> Record:
    if not isinstance(text, str):
        return Record(index, None, f"field `{field}` is not a string but {type(text).__name__}")
    if not text.strip():
        return Record(index, None, f"field `{field}` is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        escaped = any("\udc80" <= char <= "\udcff" for char in text)  # bytes that are not UTF-8 were decoded to these
        what = "UTF-8" if escaped else "Unicode: half of a surrogate pair"
        return Record(index, None, f"field `{field}` is not {what}")
    return Record(index, text)


def _read_parquet(span: FileSpan, asked: Asked) -> Iterator[Record]:
    with pyarrow.parquet.ParquetFile(span.file.path) as opened:
        _require_field(span.file, names := opened.schema_arrow.names, asked.field)
        groups = range(span.start, min(span.stop, opened.num_row_groups))
        yield from _read_columns(
            opened.iter_batches(batch_size=ROWS_PER_READ, row_groups=groups, columns=asked.columns(names)), asked
        )


def _slice_batches(span: FileSpan, asked: Asked) -> Iterator[Any]:
    """The rows [start, stop) of an Arrow file, with the columns that are asked for, batch by batch."""
    row = 0
    for batch in open_batches(span.file.path):
        _require_field(span.file, batch.schema.names, asked.field)
        first, last = max(span.start - row, 0), min(span.stop - row, batch.num_rows)
        if first < last:
            yield batch.select(asked.columns(batch.schema.names)).slice(first, last - first)
        row += batch.num_rows
        if row >= span.stop:
            return


def _require_field(file: SourceFile, columns: list[str], field: str) -> None:
    if columns.count(field) != 1:
        found = "no field" if field not in columns else "more than one field"
        raise DataError(
            f"{file.path}: {found} `{field}`. Set data.sources.*.field (or .messages, .pairs) to one of: {', '.join(columns)}"
        )


def _read_columns(batches: Iterable[Any], asked: Asked) -> Iterator[Record]:
    """The records in consecutive Arrow batches."""
    rows = ((batch.schema.names, row) for batch in batches for row in zip(*map(_validate, batch.columns), strict=True))
    for index, (names, row) in enumerate(rows):
        try:
            values = [scalar.as_py() for scalar in row]
        except UnicodeDecodeError as error:
            yield Record(index, None, f"field `{asked.field}` is not UTF-8: {error.reason} at byte {error.start}")
        else:
            yield asked.take(index, dict(zip(names, values, strict=True)))


def _validate(column: Any) -> Any:
    """The array itself. ArrowInvalid if its offsets leave its data: pyarrow would follow them and crash the process."""
    raw = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}.get(column.type)
    (column.view(raw) if raw else column).validate(full=True)  # of strings without their bytes: one may be no UTF-8
    return column
