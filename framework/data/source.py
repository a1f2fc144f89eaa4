"""The files of a source: listed from a file, a folder, a glob or a hub dataset, or those that every machine has.

A file that the recipe names is read or refused. A file that is merely found is judged by its name and by the notes that
`datasets` leaves beside a saved data set, and left out with a reason if it is not text to train on (`kinds.FoundFiles`). Hub
datasets are loaded by `datasets`, which keeps them in its own cache ($HF_HOME); local files are not copied.
"""

import builtins
import difflib
import fnmatch
import glob
import inspect
import json
import os
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any, TypeVar

from tqdm import tqdm

from framework.data.kinds import BESIDE_IDS, ENDINGS_OF_IDS, FoundFiles, Kind, describe_head, kind_of, state_kind
from framework.errors import DataError
from framework.files import write_atomically
from framework.recipe.schema import Source

T = TypeVar("T")
STDLIB = "python-stdlib"
PYTHON_HELP = "python-help"
HELP_TYPES = (str, list, dict, set, int, float, bytes)
HELP_QUESTIONS = ("What does {} do?", "Tell me about {}.", "How do I use {}?")
LONGEST_HELP = 120
FORMATS = "jsonl, csv, tsv, parquet, arrow, tar or text"
NAMES_SHOWN = 3
REASONS_SHOWN = 4
# Most phases are over before anyone would look at a bar.
BAR_DELAY_S = 1.0


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
    near = difflib.get_close_matches(wanted, [entry.name for entry in folder.iterdir()], n=1)
    return f"the nearest name there is {folder / near[0]}" if near else f"nothing in {folder} has a similar name"


def get_files(name: str, source: Source, files: tuple[SourceFile, ...], folder: Path) -> tuple[SourceFile, ...]:
    """The files of a source: those that are listed, else those of a hub dataset, or `python-help` written to `folder`."""
    if files or source.path != PYTHON_HELP:
        return files or download_dataset(name, source)
    path = write_help(folder)
    return (_stat(path, path.name, "jsonl"),)


def write_help(folder: Path) -> Path:
    """Write conversations that every machine has to a file in `folder`, one on each line: questions about Python's builtins,
    answered by their own docstrings. They are equal for one version of Python."""
    path = folder / f"{PYTHON_HELP}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    facts, conversations = list(_list_facts()), list[list[dict[str, str]]]()
    for question in HELP_QUESTIONS:  # each answer by itself, and behind that to the question before
        conversations += [_ask(question, *fact) for fact in facts]
        conversations += [_ask(question, *first) + _ask("And {}?", *second) for first, second in pairwise(facts)]
    with write_atomically(path) as file:
        file.writelines(json.dumps({"messages": each}).encode() + b"\n" for each in conversations)
    return path


def _ask(question: str, name: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.format(name)}, {"role": "assistant", "content": answer}]


def _list_facts() -> Iterator[tuple[str, str]]:
    """(name, first sentence of its docstring) of functions and of methods, in the order of their names."""
    named: list[tuple[str, Any]] = [(name, getattr(builtins, name)) for name in sorted(vars(builtins))]
    named = [(name, each) for name, each in named if inspect.isbuiltin(each)]
    named += [(f"{kind.__name__}.{name}", getattr(kind, name)) for kind in HELP_TYPES for name in sorted(vars(kind))]
    for name, each in named:
        sentence = (inspect.getdoc(each) or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
        if "_" not in name and callable(each) and 0 < len(sentence) <= LONGEST_HELP and "->" not in sentence:
            yield name, sentence.removesuffix(".") + "."


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
