"""Where records come from: a source of the recipe as files, and its files cut into spans and shards.

| kind    | a span counts                    |
|---------|----------------------------------|
| jsonl   | bytes (the lines starting in it) |
| json    | the whole file (one array)       |
| csv     | the whole file (tsv, too)        |
| text    | bytes (the lines starting in it) |
| parquet | row groups                       |
| arrow   | rows                             |

Compressed files are one span each. Hub datasets are loaded by `datasets`, which keeps them in its own cache ($HF_HOME);
of local files no copy is made.
"""

import difflib
import lzma
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TypeVar

import pyarrow
import pyarrow.parquet
from tqdm import tqdm

from framework.data.found import expand, judge, split_pattern, walk
from framework.data.kinds import HEAD_BYTES, Kind, describe_head, kind_of, open_bytes, state_kind, strip_compression
from framework.errors import DataError
from framework.recipe.schema import Source

# A text file above this size is cut at line ends into documents of about this size, so that a single large file can be
# tokenized in parallel and split into training and validation. About 30,000 tokens.
TEXT_DOCUMENT_BYTES = 128 << 10

# Source bytes of a shard: what one worker does in a second, and what a killed run loses. MAX_SHARDS bounds the number of
# files while a large store is made, whose shards are larger. Other numbers would give equal text another fingerprint.
MIN_SHARD_BYTES = 512 << 10
MAX_SHARDS = 4096

T = TypeVar("T")
STDLIB = "python-stdlib"
WHOLE = sys.maxsize

FORMATS = "jsonl, csv, tsv, parquet, arrow or text"
NAMES_SHOWN = 3
REASONS_SHOWN = 4

# What libraries raise for a truncated, corrupt or unreadable file.
DAMAGE = (pyarrow.ArrowException, zlib.error, lzma.LZMAError, EOFError, OSError)

# Most phases are over before anyone would look at a bar.
BAR_DELAY_S = 1.0


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. name: relative to the source's folder. stated: the recipe states its format."""

    name: str
    path: Path
    kind: Kind
    num_bytes: int
    mtime_ns: int
    stated: bool = False


@dataclass(frozen=True)
class Span:
    """The part [start, stop) of a file, in the unit of its kind, that is read at once; num_bytes: its share of the file."""

    file: SourceFile
    start: int
    stop: int
    num_bytes: int


class SourceMissing(DataError):
    """Nothing is at the path of a source: a store that was made of it may still serve."""


@dataclass(frozen=True)
class Listing:
    """The files of a source, sorted by name. left_out: name -> why a file that was found there is not read."""

    files: tuple[SourceFile, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def list_files(name: str, source: Source, progress: bool = False) -> tuple[SourceFile, ...]:
    """The files of a local source, sorted by name; () for a hub dataset, which has none before it is downloaded."""
    return look_at(name, source, progress).files


def look_at(name: str, source: Source, progress: bool = False) -> Listing:
    """The files of a local source and those left out. Looks at names, sizes and times only, except where an ending tells nothing.

    progress: a bar on stderr. SourceMissing where there is nothing, DataError where nothing of it can be trained on.
    """
    if source.path == STDLIB:
        return Listing(_list_standard_library(progress))
    if source.format == "hub":
        return Listing(())
    path = Path(source.path).expanduser()
    if path.is_file():
        return Listing((_name_file(name, source, path),))
    is_folder = path.is_dir()
    root, pattern = (path, PurePath()) if is_folder else split_pattern(str(path))
    try:
        found = list(_show(walk(root) if is_folder else expand(root, pattern), "list files", progress))
        found = [path for path in found if is_folder or path.is_file()]
    except OSError as error:
        raise DataError(
            f"data.sources.{name}.path={source.path}: {error}. Allow reading it, or leave it out"
        ) from error
    if found or is_folder:
        return _choose(name, source, root, pattern, found)
    if source.format == "auto" and is_hub_name(source.path):
        return Listing(())
    raise SourceMissing(
        f"data.sources.{name}.path={source.path}: no such file, folder or match; {_name_nearest(path)}. "
        f"Set data.sources.{name}.path to a file, a folder, a glob, a hub dataset (owner/name) or {STDLIB}"
    )


def _name_file(name: str, source: Source, path: Path) -> SourceFile:
    """The file that the recipe names. DataError where neither its ending nor the recipe says how to read it."""
    kind = kind_of(path) if source.format == "auto" else state_kind(path, source.format)
    if kind is None:
        raise DataError(
            f"data.sources.{name}.path={source.path}: the ending {''.join(path.suffixes[-2:]) or '(none)'} tells no format; "
            f"{describe_head(path)}. Set data.sources.{name}.format to {FORMATS}, or name the file by its format"
        )
    _check_field(name, source, path.name, kind)
    return _stat(path, path.name, kind, source.format)


def is_hub_name(path: str) -> bool:
    """Can this be a dataset of the hub: `owner/name` or `owner/name:configuration`, without a file's ending?"""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", path) is not None and kind_of(PurePath(path)) is None


def _show(items: Iterable[T], phase: str, progress: bool) -> Iterable[T]:
    """`items`, counted on a bar while they are taken, where that takes long: on a network file system, minutes."""
    return tqdm(items, desc=phase, unit=" files", delay=BAR_DELAY_S, disable=not progress)


def _list_standard_library(progress: bool) -> tuple[SourceFile, ...]:
    """Every .py file of the running interpreter's standard library: a real corpus that every machine has.

    Without its tests: many distributions leave them out, and some are undecodable on purpose.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in left_out]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return _sort(
        _stat(path, path.relative_to(root).as_posix(), "text") for path in _show(paths, "list files", progress)
    )


def _choose(name: str, source: Source, root: Path, pattern: PurePath, found: list[Path]) -> Listing:
    """The data among files found below `root`. DataError where there are none, or of several kinds."""
    kinds, left_out = judge(found, root, pattern, source.format)
    reasons = {path.as_posix(): reason for path, reason in left_out.items()}
    counts = Counter(kinds.values())
    if not counts:
        unknown = [path for path in left_out if kind_of(path) is None and (root / path).is_file()]
        hint = f". {unknown[0]}: {describe_head(root / unknown[0])}" if unknown else ""
        raise (DataError if found else SourceMissing)(
            f"data.sources.{name}.path={source.path}: no files for data.sources.{name}.format={source.format} there "
            f"({summarize_left_out(reasons) or 'it is empty'}). Set another path, a file or glob that names them, or "
            f"data.sources.{name}.format ({FORMATS}){hint}"
        )
    # A glob may name files of several record formats; what it does not name is a file of prose among them.
    if len(counts) > 1 and source.format == "auto" and ("text" in counts or not pattern.parts):
        kinds_found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise DataError(
            f"data.sources.{name}.path={source.path}: files of several kinds ({kinds_found}) are there. "
            f"Set data.sources.{name}.format, or a glob such as {root}/**/*.jsonl"
        )
    for path, kind in kinds.items():
        _check_field(name, source, path.as_posix(), kind)
    names = {path: path.as_posix() if not pattern.parts else (root / path).as_posix() for path in kinds}
    files = _sort(_stat(root / path, names[path], kind, source.format) for path, kind in kinds.items())
    return Listing(files, reasons)


def summarize_left_out(left_out: Mapping[str, str]) -> str:
    """The commonest reasons, of each the number of files and the first names."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in left_out.items():
        by_reason.setdefault(reason, []).append(path)
    common = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    words = [
        f"{len(paths)} {reason}: {', '.join(paths[:NAMES_SHOWN])}{', ...' if len(paths) > NAMES_SHOWN else ''}"
        for reason, paths in common[:REASONS_SHOWN]
    ]
    return "; ".join(words + ["others"] * (len(common) > REASONS_SHOWN))


def _check_field(name: str, source: Source, file: str, kind: Kind) -> None:
    """DataError where the recipe names a field of records and a file has none."""
    if kind == "text" and source.format == "auto" and source.field != Source.field:
        raise DataError(
            f"data.sources.{name}.field={source.field}, but {file} is plain text by its ending and has no fields. Set "
            f"data.sources.{name}.format to read records from it (jsonl, csv, tsv), to text to train on it as it stands, or "
            f"leave out the field"
        )


def _stat(path: Path, name: str, kind: Kind, format: str = "auto") -> SourceFile:
    stat = path.stat()
    return SourceFile(name, path.absolute(), kind, stat.st_size, stat.st_mtime_ns, stated=format != "auto")


def _sort(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    return tuple(sorted(files, key=lambda file: file.name))


def _name_nearest(path: Path) -> str:
    folder = path.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    wanted = path.absolute().relative_to(folder).parts[0]
    near = difflib.get_close_matches(wanted, [entry.name for entry in folder.iterdir()], n=1, cutoff=0.4)
    return f"the nearest name there is {folder / near[0]}" if near else f"nothing in {folder} has a similar name"


def download_dataset(name: str, source: Source) -> tuple[SourceFile, ...]:
    """The train split of a hub dataset as the Arrow files of the cache of `datasets`. DataError where it does not load."""
    import datasets  # takes a second, and only hub datasets and Arrow files need it

    path, _, configuration = source.path.partition(":")
    try:
        dataset = datasets.load_dataset(path, configuration or None, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.sources.{name}.path={source.path}: neither a local path ({_name_nearest(Path(source.path))}) nor a hub "
            f"dataset that loads ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Set it to a local path or "
            f"to owner/name:configuration; without a network only datasets in the cache of `datasets` load"
        ) from error
    paths = (Path(entry["filename"]) for entry in dataset.cache_files)
    return tuple(_stat(path, path.name, "arrow") for path in paths)


def plan_shards(files: Iterable[SourceFile], progress: bool = False) -> list[list[Span]]:
    """Cuts a source into shards of about equal bytes: a function of its files alone, not of the number of workers.

    progress: a bar on stderr, for the heads of parquet, Arrow and json files are read.
    """
    files = tuple(files)
    shard_bytes = max(MIN_SHARD_BYTES, sum(file.num_bytes for file in files) // MAX_SHARDS)
    shards: list[list[Span]] = []
    filled = shard_bytes
    for span in (span for file in _show(files, "plan shards", progress) for span in _cut_file(file, shard_bytes)):
        if filled >= shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(span)
        filled += span.num_bytes
    return shards


def _cut_file(file: SourceFile, span_bytes: int) -> Iterator[Span]:
    if file.kind == "json" and not _is_array(file):
        file = replace(file, kind="jsonl")
    if file.kind in ("json", "csv", "tsv") or strip_compression(file.path) != file.path:
        yield Span(file, 0, WHOLE, file.num_bytes)
        return
    if file.kind in ("parquet", "arrow"):
        num_units = _count_units(file)
        step = max(1, span_bytes * num_units // max(1, file.num_bytes))
    else:
        num_units = file.num_bytes
        step = -(-span_bytes // TEXT_DOCUMENT_BYTES) * TEXT_DOCUMENT_BYTES
    for start in range(0, num_units, step):
        stop = min(start + step, num_units)
        yield Span(file, start, stop, file.num_bytes * (stop - start) // num_units)


def _is_array(file: SourceFile) -> bool:
    """Does a .json file hold one array, rather than an object on each line? DataError where it cannot be read."""
    try:
        with open_bytes(file.path) as opened:
            head = opened.read(HEAD_BYTES)
    except DAMAGE as error:
        raise DataError(f"{file.path}: cannot be read ({error}). Replace the file or take it out") from error
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _count_units(file: SourceFile) -> int:
    """Row groups of a parquet file, rows of an Arrow file. DataError where it is damaged."""
    try:
        if file.kind == "parquet":
            return pyarrow.parquet.read_metadata(file.path).num_row_groups
        return sum(batch.num_rows for batch in open_batches(file.path))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file.path}: not a {file.kind} file ({error}). Replace the file or take it out") from error


def open_batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Record batches of an Arrow IPC file, of the stream or of the file format (Feather), mapped into memory."""
    with pyarrow.memory_map(str(path)) as mapped:
        if mapped.read(6) == b"ARROW1":
            with pyarrow.ipc.open_file(mapped) as reader:
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            mapped.seek(0)
            with pyarrow.ipc.open_stream(mapped) as stream:
                yield from stream
