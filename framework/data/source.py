"""The files of a source: listed from a file, a folder, a glob or a hub dataset, and which of them are data.

A file that the recipe names is read or refused. A file that is merely found is judged by its name and by the notes that
`datasets` leaves beside a saved data set, and left out with a reason if it is not text to train on. Hub datasets are loaded by
`datasets`, which keeps them in its own cache ($HF_HOME); local files are not copied.
"""

import difflib
import fnmatch
import glob
import json
import os
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar

from tqdm import tqdm

from framework.data.kinds import (
    BESIDE_IDS,
    ENDINGS_OF_IDS,
    HEAD_BYTES,
    Kind,
    describe_head,
    find_foreign,
    kind_of,
    open_bytes,
    state_kind,
    strip_compression,
)
from framework.data.python_help import PYTHON_HELP, write_help
from framework.errors import DataError
from framework.recipe.schema import Source

T = TypeVar("T")
STDLIB = "python-stdlib"
FORMATS = "jsonl, csv, tsv, parquet, arrow, tar or text"
NAMES_SHOWN = 3
REASONS_SHOWN = 4
# Most phases are over before anyone would look at a bar.
BAR_DELAY_S = 1.0

HELD_OUT = re.compile(
    r"(?<![a-z])(tests?|testing|val|valid|validation|dev|eval|evaluation|h[eo]ld[-_. ]?out)(set|data|split)?(?![a-z])"
)
TRAIN = re.compile(r"(?<![a-z])train(ing)?(set|data|split)?(?![a-z])")
ABOUT_THE_DATA = re.compile(r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|authors|security)\b")
# Files that `datasets` writes about a data set, and the caches of its `map` and `filter`.
NOTES = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "cache-*.arrow",
    "*indices.arrow",
)


@dataclass(frozen=True)
class SourceFile:
    """A file of a source."""

    name: str
    """Relative to the source's folder."""
    path: Path
    kind: Kind
    num_bytes: int
    mtime_ns: int
    stated: bool = False
    """Whether the recipe states its format."""
    url: str = ""
    """Where it lies, if that is not on this machine: it is read once it was fetched."""

    @classmethod
    def of_url(cls, url: str, kind: Kind, num_bytes: int) -> "SourceFile":
        return cls(url, Path(PurePath(url).name), kind, num_bytes, 0, url=url)


class SourceMissing(DataError):
    """The error for a source with nothing at its path. A store that was made of it may still serve."""


@dataclass(frozen=True)
class Listing:
    """The files of a source, sorted by name. left_out: name -> why a file that was found there is not read."""

    files: tuple[SourceFile, ...]
    left_out: dict[str, str] = field(default_factory=dict)


def list_files(name: str, source: Source, progress: bool = False) -> Listing:
    """The files of a local source and those left out; none for a hub dataset, which has files once it is downloaded. Only names,
    sizes and times are looked at, and the first bytes of files without a telling ending.

    progress: a bar on stderr. SourceMissing if there is nothing, DataError if nothing of it can be trained on.
    """
    if source.path == STDLIB:
        return Listing(_list_standard_library(progress))
    if source.format == "hub" or source.path == PYTHON_HELP:
        return Listing(())  # files come when they are asked for: `get_files`
    path = Path(source.path).expanduser()
    if path.is_file():
        return Listing((_name_file(name, source, path),))
    is_folder = path.is_dir()
    root, pattern = (path, PurePath()) if is_folder else split_pattern(str(path))
    try:
        found = list(show_progress(walk(root) if is_folder else expand(root, pattern), "list files", progress))
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
        f"Set data.sources.{name}.path to a file, a folder, a glob, a hub dataset (owner/name), {STDLIB} or {PYTHON_HELP}"
    )


def _name_file(name: str, source: Source, path: Path) -> SourceFile:
    """The file that the recipe names. DataError if neither its ending nor the recipe says how to read it."""
    kind = kind_of(path) if source.format == "auto" else state_kind(path, source.format)
    if kind is None:
        raise DataError(
            f"data.sources.{name}.path={source.path}: the ending {''.join(path.suffixes[-2:]) or '(none)'} tells no format; "
            f"{describe_head(path)}. Set data.sources.{name}.format to {FORMATS}, or name the file by its format"
        )
    _check_field(name, source, path.name, kind)
    return _stat(path, path.name, kind, source.format)


def is_hub_name(path: str) -> bool:
    """Whether this can be a dataset of the hub: `owner/name` or `owner/name:configuration`, without a file's ending."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(:[\w.-]+)?", path) is not None and kind_of(PurePath(path)) is None


def show_progress(items: Iterable[T], phase: str, progress: bool) -> Iterable[T]:
    """`items`, counted on a bar while they are taken, if that takes long (minutes on a network file system)."""
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
        _stat(path, path.relative_to(root).as_posix(), "text") for path in show_progress(paths, "list files", progress)
    )


def _choose(name: str, source: Source, root: Path, pattern: PurePath, found: list[Path]) -> Listing:
    """The data among the files found below `root`. DataError if there are none, or some of several kinds."""
    files = FoundFiles(found, root, pattern, source.format)
    reasons = {path.as_posix(): reason for path, reason in files.left_out.items()}
    counts = Counter(files.kinds.values())
    if not counts:
        unknown = [path for path in files.left_out if kind_of(path) is None and (root / path).is_file()]
        hint = f". {unknown[0]}: {describe_head(root / unknown[0])}" if unknown else ""
        raise (DataError if found else SourceMissing)(
            f"data.sources.{name}.path={source.path}: no files for data.sources.{name}.format={source.format} there "
            f"({summarize_left_out(reasons) or 'it is empty'}). Set another path, a file or glob that names them, or "
            f"data.sources.{name}.format ({FORMATS}){hint}"
        )
    # A glob may mean files of several record formats, but not prose among them.
    if len(counts) > 1 and source.format == "auto" and ("text" in counts or not pattern.parts):
        kinds_found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        raise DataError(
            f"data.sources.{name}.path={source.path}: files of several kinds ({kinds_found}) are there. "
            f"Set data.sources.{name}.format, or a glob such as {root}/**/*.jsonl"
        )
    for path, kind in files.kinds.items():
        _check_field(name, source, path.as_posix(), kind)
    names = {path: (root / path if pattern.parts else path).as_posix() for path in files.kinds}
    return Listing(
        _sort(_stat(root / path, names[path], kind, source.format) for path, kind in files.kinds.items()), reasons
    )


def summarize_left_out(left_out: Mapping[str, str]) -> str:
    """The commonest reasons, each with the number of files and the first names."""
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
    """DataError if the recipe names a field of records and a file is plain text, which has none."""
    if kind == "text" and source.conversation is not None:
        key = "messages" if source.messages else "pairs"
        raise DataError(
            f"data.sources.{name}.{key}={source.conversation}, but {file} is plain text, which has no conversations. Set"
            f" data.sources.{name}.format to jsonl or csv to read records from it"
        )
    if kind == "text" and source.format == "auto" and source.field != Source.field:
        raise DataError(
            f"data.sources.{name}.field={source.field}, but {file} is plain text by its ending and has no fields. Set "
            f"data.sources.{name}.format to read records from it (jsonl, csv, tsv), to text to train on it as it stands, or "
            f"leave out the field"
        )


def _stat(path: Path, name: str, kind: Kind, format: str = "auto") -> SourceFile:
    # An index that was made anew tells other documents.
    endings = BESIDE_IDS.get(path.suffix, ()) if kind in ENDINGS_OF_IDS else ()
    beside = (path.with_suffix(each) for each in endings)
    stats = [path.stat(), *(each.stat() for each in beside if each.exists())]
    num_bytes, mtime_ns = sum(each.st_size for each in stats), max(each.st_mtime_ns for each in stats)
    return SourceFile(name, path.absolute(), kind, num_bytes, mtime_ns, stated=format != "auto")


def _sort(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    return tuple(sorted(files, key=lambda file: file.name))


def _name_nearest(path: Path) -> str:
    folder = path.absolute().parent
    while not folder.is_dir():
        folder = folder.parent
    wanted = path.absolute().relative_to(folder).parts[0]
    near = difflib.get_close_matches(wanted, [entry.name for entry in folder.iterdir()], n=1, cutoff=0.4)
    return f"the nearest name there is {folder / near[0]}" if near else f"nothing in {folder} has a similar name"


def get_files(name: str, source: Source, files: tuple[SourceFile, ...], folder: Path) -> tuple[SourceFile, ...]:
    """The files of a source: those that are listed, else those of a hub dataset, or `python-help` written to `folder`."""
    if files or source.path != PYTHON_HELP:
        return files or download_dataset(name, source)
    path = write_help(folder)
    return (_stat(path, path.name, "jsonl"),)


def download_dataset(name: str, source: Source) -> tuple[SourceFile, ...]:
    """The train split of a hub dataset, as Arrow files in the cache of `datasets`. DataError if it does not load."""
    import datasets  # takes a second, and only hub datasets and Arrow files need it

    with _naming_dataset(name, source) as words:
        dataset = datasets.load_dataset(*words, split="train")
    paths = (Path(entry["filename"]) for entry in dataset.cache_files)
    return tuple(_stat(path, path.name, "arrow") for path in paths)


def list_dataset(name: str, source: Source) -> tuple[SourceFile, ...]:
    """The files of the train split of a hub dataset, where they lie, at the commit that the hub has now. DataError if it has none
    of a format that is read."""
    import datasets
    import fsspec

    with _naming_dataset(name, source) as words:
        urls = (datasets.load_dataset_builder(*words).config.data_files or {}).get("train", ())
        sizes = [fsspec.core.url_to_fs(url)[0].size(url) for url in urls]
    is_open = source.format in ("auto", "hub")
    kinds = [kind_of(path) if is_open else state_kind(path, source.format) for path in map(PurePath, urls)]
    if not urls or None in kinds:
        raise DataError(
            f"data.sources.{name}.path={source.path}: its train split is not of files of {FORMATS}, so that it cannot be"
            " streamed. Set data.mode=prepared"
        )
    return tuple(SourceFile.of_url(url, kind, size) for url, kind, size in zip(urls, kinds, sizes, strict=True) if kind)


@contextmanager
def _naming_dataset(name: str, source: Source) -> Iterator[tuple[str, str | None]]:
    """A hub dataset's name and configuration, around what looks for it there: DataError if it does not load."""
    import datasets

    path, _, configuration = source.path.partition(":")
    try:
        yield path, configuration or None
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"data.sources.{name}.path={source.path}: neither a local path ({_name_nearest(Path(source.path))}) nor a hub "
            f"dataset that loads ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Set it to a local path or "
            f"to owner/name:configuration; without a network only datasets in the cache of `datasets` load"
        ) from error


def split_pattern(pattern: str) -> tuple[Path, PurePath]:
    """Split a glob into (the folder in front of the first wildcard, the rest)."""
    parts = Path(pattern).parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:first]), PurePath(*parts[first:])


def walk(root: Path) -> Iterator[Path]:
    """Files below a folder, and hidden folders in place of their files. OSError for a folder that cannot be read.

    Each folder is entered once, linked ones last: links may form a cycle, which `os.walk(followlinks=True)` and `glob` never
    leave.
    """

    def fail(error: OSError) -> None:
        raise error

    entered = set()
    pending = deque([str(root)])
    while pending:
        for folder, subfolders, names in os.walk(pending.popleft(), onerror=fail):
            if (real := os.path.realpath(folder)) in entered:
                subfolders[:] = []
                continue
            entered.add(real)
            yield from (Path(folder, name) for name in names)
            yield from (Path(folder, name) for name in subfolders if name.startswith("."))
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            paths = (os.path.join(folder, name) for name in subfolders)
            pending.extend(path for path in paths if os.path.islink(path))


def expand(root: Path, rest: PurePath) -> Iterator[Path]:
    """Paths that a glob matches, in no certain order."""
    if "**" not in rest.parts or any(part.startswith(".") for part in rest.parts):
        yield from (Path(match) for match in glob.iglob(str(root / rest), recursive=True))
        return
    first = rest.parts.index("**")
    for folder in glob.glob(str(root.joinpath(*rest.parts[:first]))) if first else [root]:
        yield from (path for path in walk(Path(folder)) if _matches(path.relative_to(folder).parts, rest.parts[first:]))


def _matches(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether a path matches. `**` stands for any number of folders, and no wildcard for a leading dot."""
    if not parts or not pattern:
        return not parts and pattern in ((), ("**",))
    if pattern[0] == "**" and _matches(parts, pattern[1:]):
        return True
    matched = fnmatch.fnmatchcase(parts[0], pattern[0]) and not parts[0].startswith(".")
    return matched and _matches(parts[1:], pattern if pattern[0] == "**" else pattern[1:])


class FoundFiles:
    """Files found below `root`, by paths relative to it, sorted into data and the rest.

    pattern: the glob below `root`. Its words are meant, so they do not count against a file. kinds: path -> kind of the data;
    left_out: path -> why it is not read.
    """

    def __init__(self, paths: Iterable[Path], root: Path, pattern: PurePath, format: str) -> None:
        self.kinds: dict[PurePath, Kind] = {}
        self.left_out: dict[PurePath, str] = {}
        self._root, self._pattern, self._format = root, pattern, format
        relative: list[PurePath] = [path.relative_to(root) for path in paths]
        relative.sort(key=lambda path: (len(path.parts), path.as_posix()))
        arrow = {path.parent for path in relative if kind_of(path) == "arrow"}
        # Folder of a saved data set -> the data files that its state.json lists.
        self._saved = {folder: names for folder in arrow if (names := _read_state(root / folder))}
        above = {parent for folder in arrow for parent in (folder, *folder.parents)}
        # Folders of a saved DatasetDict.
        self._dicts = {folder for folder in above if (root / folder / "dataset_dict.json").exists()}
        parts = {(PurePath(*path.parts[:depth]), part) for path in relative for depth, part in enumerate(path.parts)}
        # Folders in which a name says `train`.
        self._with_train = {folder for folder, part in parts if TRAIN.search(part.lower())}
        self._seen: dict[str, PurePath] = {}
        self._real: dict[PurePath, str] = {}
        for path in relative:
            kind = self._find_kind(path)
            reason = self._find_fault(path, kind) or self._find_twin(path)
            if reason is None and kind is not None:
                self.kinds[path] = kind
            else:
                self.left_out[path] = str(reason)

    def _find_kind(self, path: PurePath) -> Kind | None:
        """The kind by the ending, or the stated format for an ending that the recipe names or that is absent (part-00000)."""
        if self._format in ENDINGS_OF_IDS:
            return state_kind(path, self._format) if path.suffix in ENDINGS_OF_IDS[self._format] else None
        kind = kind_of(path)
        is_named = bool(path.suffix) and self._pattern.name.endswith(path.suffix)
        is_bare = not strip_compression(path).suffix.rstrip("0123456789.") and path.name[0] not in "._"
        if self._format == "auto" or (kind is not None and not is_named):
            return kind
        return state_kind(path, self._format) if is_named or is_bare or self._format == "text" else None

    def _find_fault(self, path: PurePath, kind: Kind | None) -> str | None:
        """The reason why a found file is not data; None if it is."""
        pattern = self._pattern
        wanted = {"auto": (kind,), "jsonl": ("jsonl", "json")}.get(self._format, (self._format,))
        if not pattern.parts and any(part.startswith(".") for part in path.parts):
            return "hidden"
        if not (self._root / path).is_file():
            return "no regular file"
        if path.name != pattern.name and any(fnmatch.fnmatchcase(path.name, note) for note in NOTES):
            return "written by `datasets` about the data"
        if path.name not in self._saved.get(path.parent, (path.name,)) and kind == "arrow":
            return "not among the data files of state.json"
        if kind is None:
            return f"no format known for {path.suffix or 'a name without ending'}"
        if kind not in wanted:
            return f"not of format={self._format}"
        if kind != "text" and any(part.startswith("_") for part in path.parts) and "_" not in str(pattern):
            return "under a name with _ in front (no data in Spark)"
        is_meant = pattern.name.endswith(path.suffix or "*")
        if kind == "text" and ABOUT_THE_DATA.match(path.name.lower()) and not is_meant:
            return "about the data by its name"
        if kind == "text" and kind_of(path) is None:
            with open_bytes(self._root / path) as opened:
                return find_foreign(opened.read(HEAD_BYTES)) or self._find_split(path, kind)
        return self._find_split(path, kind)

    def _find_split(self, path: PurePath, kind: Kind) -> str | None:
        """The reason why a file is of a split that is not for training, by names. For prose and source code names count only
        where a name beside them says `train`."""
        for depth, part in enumerate(path.parts):
            folder, word = PurePath(*path.parts[:depth]), HELD_OUT.search(part.lower())
            if folder in self._dicts and part not in ("train", *self._pattern.parts):
                return f"not the train split of a DatasetDict but {part}"
            if not word or TRAIN.search(part.lower()) or HELD_OUT.search(str(self._pattern).lower()):
                continue
            if kind != "text" or folder in self._with_train:
                return f"held out by its name ({word[0]})"
        return None

    def _find_twin(self, path: PurePath) -> str | None:
        """The reason why a file is left out that is data already under another name."""
        parent = self._real.get(path.parent) or self._real.setdefault(
            path.parent, os.path.realpath(self._root / path.parent)
        )
        where = os.path.join(parent, path.name)
        where = os.path.realpath(where) if os.path.islink(where) else where
        twin = self._seen.setdefault(where, path)
        return f"the same file as {twin}" if twin != path else None


def _read_state(folder: Path) -> frozenset[str]:
    """Names of the data files of a saved data set, by its state.json; none if that does not say."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return frozenset(entry["filename"] for entry in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()
