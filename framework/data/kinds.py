"""Files by their kind: the kind that an ending says, first bytes that contradict it, files opened through their compression, and
which of those that are found are data.

A file whose ending is in neither table is read only if the recipe states its format. First bytes never choose a kind, they only
refuse one: so a listing needs no more than names, and nothing is trained on as the wrong kind.

A tar is read by samples, as WebDataset has them: members side by side whose names are equal up to the first dot, such as
`shard/000.json` and `shard/000.cls`. The values of a sample are the fields of its object, `text` of a `.txt`, and other members
by what stands behind that dot.
"""

import bz2
import fnmatch
import gzip
import importlib
import io
import json
import lzma
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path, PurePath
from tarfile import InvalidHeaderError, ReadError, TruncatedHeaderError  # type: ignore[attr-defined]
from typing import Any, BinaryIO, Literal, Self, cast

import pyarrow

from framework.errors import DataError

Kind = Literal["jsonl", "json", "csv", "tsv", "text", "parquet", "arrow", "tar", "megatron", "datatrove", "mds", "ids"]
# Files of token ids, which are known by their ending only where the recipe states the format.
ENDINGS_OF_IDS = {
    "megatron": (".bin",),
    "datatrove": (".ds",),
    "mds": (".mds",),
    "ids": (".parquet", ".pq", ".arrow", ".feather"),
}
# Files beside such a file that say where its documents end.
BESIDE_IDS = {".bin": (".idx",), ".ds": (".ds.index", ".ds.metadata")}
KIND_OF_ENDING: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonlines": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
}
# Prose and source code. XML, YAML, notebooks and other formats with a syntax around their text are not among them.
TEXT_ENDINGS = frozenset(
    f".{name}"
    for names in (
        "txt text md markdown rst tex adoc org",
        "py pyi pyx c h cc cpp cxx hh hpp cu cuh m mm swift go rs zig",
        "java kt scala groovy cs fs vb js jsx mjs ts tsx vue dart css scss",
        "php rb pl pm lua r jl hs ml mli clj ex exs erl lisp el scm",
        "sh bash zsh fish ps1 sql f f90 pas asm s v sv vhd sol nim proto cmake lean",
    )
    for name in names.split()
)
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
COLUMNAR = ("parquet", "arrow")

HEAD_BYTES = 4096
# More control characters than this share of the first line: not text, or text in two or four bytes a character.
MOST_CONTROLS = 0.1
CONTROLS = bytes(set(range(32)) - set(b"\t\n\r\f\b\x1b"))
OTHER_ENCODING = "{0} text (`iconv -f {0} -t UTF-8` converts it)"
# Among every four bytes of ASCII and most other text: those that are control characters, and those that seldom are.
WIDE_ENCODINGS = (
    ("UTF-32LE", (2, 3), (0, 0)),
    ("UTF-32BE", (0, 1), (3, 3)),
    ("UTF-16LE", (1, 3), (0, 2)),
    ("UTF-16BE", (0, 2), (1, 3)),
)
MAGICS = (
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"\xfd7zXZ\0", "xz data"),
    (b"BZh91AY&SY", "bzip2 data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"PAR1", "parquet"),
    (b"ARROW1", "Arrow"),
    (b"\xff\xff\xff\xff", "Arrow"),
    (b"\x93NUMPY", "a numpy array"),
    (b"\x80\x04\x95", "a pickle"),
    (b"\x80\x05\x95", "a pickle"),
    (b"%PDF-", "a PDF"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"version https://git-lfs.github.com/spec/", "a Git LFS pointer in place of the file (`git lfs pull` fetches it)"),
    (b"\xff\xfe\0\0", OTHER_ENCODING.format("UTF-32")),
    (b"\0\0\xfe\xff", OTHER_ENCODING.format("UTF-32")),
    (b"\xff\xfe", OTHER_ENCODING.format("UTF-16")),
    (b"\xfe\xff", OTHER_ENCODING.format("UTF-16")),
)

# Words in names of files.
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


def strip_compression(path: PurePath) -> PurePath:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def kind_of(path: PurePath) -> Kind | None:
    """The kind of a file by its ending, without a compression's ending and a number: `.json` of `a.json.1.gz`; None if
    unknown."""
    inner = strip_compression(path)
    while inner.suffix[1:].isdigit():
        inner = inner.with_suffix("")
    kind = KIND_OF_ENDING.get(inner.suffix.lower(), "text" if inner.suffix.lower() in TEXT_ENDINGS else None)
    return None if kind in COLUMNAR and inner.suffix != path.suffix else kind


def state_kind(path: PurePath, format: str) -> Kind:
    """The kind under a format that the recipe states. A .json file of `jsonl` may hold lines or an array."""
    return "json" if format == "jsonl" and kind_of(path) == "json" else cast(Kind, format)


def find_foreign(head: bytes) -> str | None:
    """The format that the first bytes show if it is not UTF-8 text; None if nothing speaks against that."""
    if seen := next((name for magic, name in MAGICS if head.startswith(magic)), None):
        return seen
    # One line, for a line with NULs further on is a bad record, not a foreign file.
    line = next((line for line in head.split(b"\n") if line.strip(b"\0\r\t ")), b"")
    if len(line) - len(line.translate(None, CONTROLS)) <= MOST_CONTROLS * len(line):
        return None
    # UTF-16 or UTF-32 without a mark: control characters (most are NUL) fill certain bytes of every four.
    lanes = [line[lane::4] for lane in range(4)]
    shares = [1 - len(lane.translate(None, CONTROLS)) / max(1, len(lane)) for lane in lanes]
    for name, wide, narrow in WIDE_ENCODINGS:
        if min(shares[lane] for lane in wide) > max(0.2, *(2 * shares[lane] for lane in narrow)):
            return OTHER_ENCODING.format(name)
    return "binary data, or text that is not UTF-8"


def find_records(head: bytes) -> str | None:
    """The kind of JSON that first bytes are, since a text file would be trained on with all its syntax; None if they are not."""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb'\[\s*\{\s*"', head):
        return "a JSON array of objects"
    line, ended, _ = head.partition(b"\n")
    try:
        is_object = line.startswith(b'{"') and (not ended or isinstance(json.loads(line), dict))
    except (ValueError, RecursionError):
        is_object = False
    return "JSON lines" if is_object else None


def describe_head(path: Path) -> str:
    """A clause on what a file without a known ending begins with, and the format under which it could be read."""
    try:
        with open_bytes(path) as opened:
            head = opened.read(HEAD_BYTES)
    except (OSError, EOFError, lzma.LZMAError, DataError) as error:
        return f"it cannot be read ({error})"
    if seen := find_foreign(head):
        format = seen.lower() if seen in ("parquet", "Arrow") else None
    else:
        seen = find_records(head) or "text, or lines such as csv"
        format = "jsonl" if "JSON" in seen else "text, csv or tsv"
    return f"it begins like {seen}" + (f": set format={format} to read it so" if format else "")


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading its decompressed bytes, with `peek`. DataError if that takes a library that is not installed."""
    openers = {".gz": gzip.open, ".tgz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zstd}
    opened: BinaryIO = cast(Any, openers.get(path.suffix.lower(), open))(path, "rb")
    return opened


def _open_zstd(path: Path, mode: str) -> io.BufferedReader:
    """Open a zstd file by pyarrow. It refuses windows above 128 MiB (`zstd --long=28` and more), which take another library."""
    try:
        with pyarrow.CompressedInputStream(str(path), "zstd") as probed:
            probed.read(1)
        return io.BufferedReader(pyarrow.CompressedInputStream(str(path), "zstd"))
    except OSError as error:
        if "too much memory" not in str(error):
            raise
    for name in ("compression.zstd", "backports.zstd"):  # the first is Python's own from 3.14 on
        with suppress(ImportError):
            zstd = importlib.import_module(name)
            opened: io.BufferedReader = zstd.open(path, mode, options={zstd.DecompressionParameter.window_log_max: 31})
            return opened
    raise DataError(
        f"{path}: compressed with a window above 128 MiB (zstd --long). `pip install backports.zstd` or compress it without"
        f" --long"
    )


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The values of each sample of a tar, which may be compressed, in its order. A value that is no UTF-8 stays bytes."""
    with open_bytes(path) as opened, tarfile.open(fileobj=opened, mode="r|", tarinfo=_Member) as tar:
        for _, members in groupby(filter(_is_value, _list_members(tar)), lambda each: _split_name(each)[0]):
            values: dict[str, Any] = {}
            # A stream: each member is read before the next one is looked for.
            for member in members:
                file = tar.extractfile(member)
                values |= _read_value(_split_name(member)[1], b"" if file is None else file.read())
            yield values


class _Member(tarfile.TarInfo):
    """A member whose header is whole, or a ReadError: `tarfile` takes a damaged one for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(tarfile)
        except (InvalidHeaderError, TruncatedHeaderError) as error:
            raise ReadError(f"{error} at byte {tarfile.offset:,}") from error


def _list_members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        yield member
        tar.members = []  # type: ignore[attr-defined]  # else it keeps them all, millions


def _is_value(member: tarfile.TarInfo) -> bool:
    """Whether a member belongs to a sample: a file, but none that a system or WebDataset has put there."""
    name = PurePath(member.name).name
    return member.isfile() and bool(name) and not name.startswith((".", "__"))


def _split_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """(the sample's name, the value's) of a member."""
    path = PurePath(member.name)
    stem, _, ending = path.name.partition(".")
    return str(path.with_name(stem)), ending.lower()


def _read_value(ending: str, data: bytes) -> dict[str, Any]:
    value: Any = data
    with suppress(UnicodeDecodeError):
        value = data.decode("utf-8-sig")
    if ending.rpartition(".")[2] == "json":
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
            return found if isinstance(found, dict) else {ending: found}
    return {"text" if ending in ("txt", "text", "") else ending: value}


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
