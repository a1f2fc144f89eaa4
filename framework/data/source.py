"""Where records come from: a source of the recipe as files, and its files cut into spans and shards.

| kind    | a span counts                    |
|---------|----------------------------------|
| jsonl   | bytes (the lines starting in it) |
| json    | the whole file (one array)       |
| text    | bytes (the lines starting in it) |
| parquet | row groups                       |
| arrow   | rows                             |

Compressed files are one span each. Hub datasets are loaded by `datasets`, which keeps them in its own cache ($HF_HOME);
of local files no copy is made.
"""

import difflib
import glob
import os
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar, cast

import fsspec
import pyarrow
import pyarrow.parquet
from tqdm import tqdm

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
Kind = Literal["jsonl", "json", "text", "parquet", "arrow"]
KIND_OF_SUFFIX: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
STDLIB = "python-stdlib"
WHOLE = sys.maxsize

# Most phases are over before anyone would look at a bar.
BAR_DELAY_S = 1.0


@dataclass(frozen=True)
class SourceFile:
    """A file of a source. name: relative to the source's folder."""

    name: str
    path: Path
    kind: Kind
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class Span:
    """The part [start, stop) of a file, in the unit of its kind, that is read at once; num_bytes: its share of the file."""

    file: SourceFile
    start: int
    stop: int
    num_bytes: int


def list_files(name: str, source: Source, progress: bool = False) -> tuple[SourceFile, ...]:
    """The files of a local source, sorted by name; () for a hub dataset, which has none before it is downloaded.

    Looks at names, sizes and times only. progress: a bar on stderr. DataError where there is nothing.
    """
    if source.path == STDLIB:
        return _list_standard_library(progress)
    if source.format == "hub":
        return ()
    path = Path(source.path).expanduser()
    if path.is_file():
        return (_stat(path, path.name, _kind_of(path, source.format)),)
    if path.is_dir():
        return _list_folder(name, source, path, progress)
    matches = [Path(match) for match in _show(glob.iglob(str(path), recursive=True), "list files", progress)]
    files = _sort(
        _stat(match, match.as_posix(), _kind_of(match, source.format)) for match in matches if match.is_file()
    )
    if files or (source.format == "auto" and is_hub_name(source.path)):
        return files
    raise DataError(
        f"data.sources.{name}.path={source.path}: no such file, folder or match; {_name_nearest(path)}. "
        f"Set data.sources.{name}.path to a file, a folder, a glob, a hub dataset (owner/name) or {STDLIB}"
    )


def is_hub_name(path: str) -> bool:
    """Can this be a dataset of the hub: `owner/name` or `owner/name:configuration`, without a file's ending?"""
    suffix = _suffix(Path(path))
    return (
        re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", path) is not None
        and suffix not in KIND_OF_SUFFIX
        and suffix not in (".txt", ".md", ".py")
    )


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


def _list_folder(name: str, source: Source, folder: Path, progress: bool) -> tuple[SourceFile, ...]:
    """The files below a folder, hidden ones left out: those of the recipe's format, or all if they are of one kind."""
    paths = _show(folder.rglob("*"), "list files", progress)
    names = (path.relative_to(folder) for path in paths if path.is_file())
    kinds = {name: _kind_of(name, "auto") for name in names if not any(part.startswith(".") for part in name.parts)}
    if "arrow" in kinds.values():  # written by `save_to_disk`: the json files beside the data are about it
        kinds = {name: kind for name, kind in kinds.items() if kind == "arrow"}
    elif source.format != "auto":
        wanted = ("jsonl", "json") if source.format == "jsonl" else (source.format,)
        kinds = {name: kind for name, kind in kinds.items() if kind in wanted}
    counts = Counter(kinds.values())
    if not counts:
        raise DataError(
            f"data.sources.{name}.path={source.path}: no files for data.sources.{name}.format={source.format} in the "
            f"folder. Set another path or format"
        )
    if len(counts) > 1 and source.format == "auto":
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise DataError(
            f"data.sources.{name}.path={source.path}: the folder holds files of several kinds ({found}). "
            f"Set data.sources.{name}.format, or a glob such as {folder}/**/*.jsonl"
        )
    return _sort(_stat(folder / name, name.as_posix(), kind) for name, kind in kinds.items())


def _suffix(path: Path) -> str:
    """The ending that tells the kind, a compression's ending left out: `.json` of `a.json.gz`."""
    return (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix.lower()


def _kind_of(path: Path, format: str) -> Kind:
    """The kind by the recipe's format, else by the file's ending; a file of an unknown ending is text."""
    kind = KIND_OF_SUFFIX.get(_suffix(path), "text")
    if format == "auto" or (format == "jsonl" and kind == "json"):
        return kind
    return cast(Kind, format)


def _stat(path: Path, name: str, kind: Kind) -> SourceFile:
    stat = path.stat()
    return SourceFile(name, path.absolute(), kind, stat.st_size, stat.st_mtime_ns)


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
    if file.kind == "json" or file.path.suffix in COMPRESSIONS:
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


def open_bytes(path: Path) -> BinaryIO:
    """The bytes of a file, decompressed. DataError where the library for its compression is not installed."""
    if path.suffix not in COMPRESSIONS:
        return open(path, "rb")
    try:
        return fsspec.open(str(path), "rb", compression="infer").open()
    except ValueError as error:
        raise DataError(
            f"{path}: cannot be decompressed here ({error}). Install the library or unpack the file"
        ) from error


def _is_array(file: SourceFile) -> bool:
    """Does a .json file hold one array, rather than an object on each line?"""
    with open_bytes(file.path) as opened:
        return opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _count_units(file: SourceFile) -> int:
    """Row groups of a parquet file, rows of an Arrow file. DataError where it is damaged."""
    try:
        if file.kind == "parquet":
            return pyarrow.parquet.read_metadata(file.path).num_row_groups
        import datasets

        return len(datasets.Dataset.from_file(str(file.path)))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{file.path}: not a {file.kind} file ({error}). Replace the file or take it out") from error
