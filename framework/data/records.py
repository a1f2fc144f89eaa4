"""The records of a span, each with its text or with the problem that it has none.

Lines and columns are read here, span by span: the loaders of `datasets` convert a file as a whole, so one bad row fails
them all without saying which it is.
"""

import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow
import pyarrow.parquet

from framework.data.source import TEXT_DOCUMENT_BYTES, SourceFile, Span, open_bytes
from framework.errors import DataError

UTF8_MARK = b"\xef\xbb\xbf"
ROWS_PER_READ = 1024

# What libraries raise for a truncated, corrupt or unreadable file.
DAMAGE = (pyarrow.ArrowInvalid, zlib.error, lzma.LZMAError, EOFError, OSError)


@dataclass(frozen=True)
class Record:
    """One record. index: from 0 within its span; text: None where there is a problem."""

    index: int
    text: str | None
    problem: str | None = None


def read_records(span: Span, field: str) -> Iterator[Record]:
    """The records of a span in the order of the file; blank lines and blank text files are no records.

    field: holds the text, except in text files. DataError, naming the file, where the file itself is damaged.
    """
    readers = {
        "text": lambda: _read_text(span),
        "jsonl": lambda: _read_jsonl(span, field),
        "json": lambda: _read_json(span, field),
        "parquet": lambda: _read_parquet(span, field),
        "arrow": lambda: _read_arrow(span, field),
    }
    try:
        yield from readers[span.file.kind]()
    except DAMAGE as error:
        raise DataError(f"{span.file.path}: cannot be read ({error}). Replace the file or take it out") from error


def count_rows_before(span: Span) -> int:
    """Rows of the file before this span. Asked for bad records only, so that good ones cost no counting."""
    if span.file.kind == "jsonl":
        return sum(1 for _ in _read_lines(Span(span.file, 0, span.start, 0)))
    if span.file.kind == "parquet":
        metadata = pyarrow.parquet.read_metadata(span.file.path)
        return sum(metadata.row_group(group).num_rows for group in range(span.start))
    return span.start // TEXT_DOCUMENT_BYTES if span.file.kind == "text" else span.start


def _read_lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that start within the span, line ends included."""
    with open_bytes(span.file.path) as opened:
        offset = span.start
        if offset:
            opened.seek(offset - 1)
            offset += len(opened.readline()) - 1
        while offset < span.stop and (line := opened.readline()):
            yield offset, line
            offset += len(line)


def _read_text(span: Span) -> Iterator[Record]:
    """The lines that start in the same TEXT_DOCUMENT_BYTES of the file are one document: mostly the whole file."""
    first = span.start // TEXT_DOCUMENT_BYTES
    for piece, lines in groupby(_read_lines(span), key=lambda line: line[0] // TEXT_DOCUMENT_BYTES):
        data = b"".join(line for _, line in lines)
        if data.strip():
            yield _decode(piece - first, data)


def _decode(index: int, data: bytes) -> Record:
    try:
        return Record(index, data.removeprefix(UTF8_MARK).decode())
    except UnicodeDecodeError as error:
        return Record(index, None, f"not UTF-8: {error.reason} at byte {error.start} of the record")


def _read_jsonl(span: Span, field: str) -> Iterator[Record]:
    for index, (_, line) in enumerate(_read_lines(span)):
        if line.strip():
            record = _decode(index, line)
            yield record if record.text is None else _parse(index, record.text, field)


def _parse(index: int, line: str, field: str) -> Record:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return Record(index, None, f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}")
    return _take_field(index, value, field)


def _read_json(span: Span, field: str) -> Iterator[Record]:
    with open_bytes(span.file.path) as opened:
        try:
            values = json.load(opened)
        except ValueError as error:  # not JSON, or not UTF-8
            raise DataError(f"{span.file.path}: not a JSON array ({error}). Replace the file or take it out") from error
    for index, value in enumerate(values):
        yield _take_field(index, value, field)


def _take_field(index: int, value: Any, field: str) -> Record:
    if not isinstance(value, dict):
        return Record(index, None, f"not an object but {type(value).__name__}")
    if field not in value:
        return Record(index, None, f"field `{field}` is missing (there is: {', '.join(value) or 'nothing'})")
    return _check_text(index, value[field], field)


def _check_text(index: int, text: Any, field: str) -> Record:
    if not isinstance(text, str):
        return Record(index, None, f"field `{field}` is not a string but {type(text).__name__}")
    if not text.strip():
        return Record(index, None, f"field `{field}` is empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Record(index, None, f"field `{field}` is not Unicode: half of a surrogate pair")
    return Record(index, text)


def _read_parquet(span: Span, field: str) -> Iterator[Record]:
    with pyarrow.parquet.ParquetFile(span.file.path) as opened:
        _require_field(span.file, opened.schema_arrow.names, field)
        groups = range(span.start, span.stop)
        batches = opened.iter_batches(batch_size=ROWS_PER_READ, row_groups=groups, columns=[field])
        yield from _read_columns((batch.column(0) for batch in batches), field)


def _read_arrow(span: Span, field: str) -> Iterator[Record]:
    import datasets  # takes a second, and only Arrow files need it

    dataset = datasets.Dataset.from_file(str(span.file.path))
    _require_field(span.file, dataset.column_names, field)
    table = dataset.with_format("arrow").select_columns(field)
    starts = range(span.start, span.stop, ROWS_PER_READ)
    tables = (table[start : min(start + ROWS_PER_READ, span.stop)] for start in starts)
    yield from _read_columns((table.column(0) for table in tables), field)


def _require_field(file: SourceFile, columns: list[str], field: str) -> None:
    if field not in columns:
        raise DataError(f"{file.path}: no field `{field}`. Set data.sources.*.field to one of: {', '.join(columns)}")


def _read_columns(columns: Iterable[Any], field: str) -> Iterator[Record]:
    """columns: consecutive Arrow arrays of one field."""
    scalars = (scalar for column in columns for scalar in column)
    for index, scalar in enumerate(scalars):
        try:
            value = scalar.as_py()
        except UnicodeDecodeError as error:
            yield Record(index, None, f"field `{field}` is not UTF-8: {error.reason} at byte {error.start}")
        else:
            yield _check_text(index, value, field)
