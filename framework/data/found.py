"""Files found in a folder or by a glob: which of them are data, and why the others are left out.

A file that the recipe names is read or refused. A file that is merely found is judged by its name and by the notes that
`datasets` leaves beside a saved data set, and left out with a reason where it is not text to train on.
"""

import fnmatch
import glob
import json
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from framework.data.kinds import HEAD_BYTES, Kind, find_foreign, kind_of, open_bytes, state_kind, strip_compression

HELD_OUT = re.compile(
    r"(?<![a-z])(tests?|testing|val|valid|validation|dev|eval|evaluation|h[eo]ld[-_. ]?out)(set|data|split)?(?![a-z])"
)
TRAIN = re.compile(r"(?<![a-z])train(ing)?(set|data|split)?(?![a-z])")
ABOUT_THE_DATA = re.compile(r"(readme|licen[cs]e|copying|notice|citation|changelog|contributing|authors|security)\b")
# What `datasets` writes about a data set, and the caches of its `map` and `filter`.
NOTES = (
    "dataset_info.json",
    "dataset_infos.json",
    "dataset_dict.json",
    "state.json",
    "cache-*.arrow",
    "*indices.arrow",
)


def split_pattern(pattern: str) -> tuple[Path, PurePath]:
    """(the folder in front of the first wildcard, the rest) of a glob."""
    parts = Path(pattern).parts
    first = next((index for index, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return Path(*parts[:first]), PurePath(*parts[first:])


def walk(root: Path) -> Iterator[Path]:
    """Files below a folder, and hidden folders in place of their files. Enters each folder once, linked ones last: links may
    run in a circle, in which `os.walk(followlinks=True)` and `glob` go round and round. OSError where one cannot be read."""

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
    """Does a path match, where `**` stands for any number of folders and no wildcard for a dot in front?"""
    if not parts or not pattern:
        return not parts and pattern in ((), ("**",))
    if pattern[0] == "**" and _matches(parts, pattern[1:]):
        return True
    matched = fnmatch.fnmatchcase(parts[0], pattern[0]) and not parts[0].startswith(".")
    return matched and _matches(parts[1:], pattern if pattern[0] == "**" else pattern[1:])


@dataclass(frozen=True)
class Rules:
    """How found files are judged. pattern: of a glob, below `root`; its words are no accident and not held against a file.
    saved: folder -> the data files that its state.json lists; dicts: folders of a saved DatasetDict; with_train: folders in
    which a name says `train`."""

    root: Path
    pattern: PurePath
    format: str
    saved: dict[PurePath, frozenset[str]]
    dicts: frozenset[PurePath]
    with_train: frozenset[PurePath]


def judge(
    paths: Iterable[Path], root: Path, pattern: PurePath, format: str
) -> tuple[dict[PurePath, Kind], dict[PurePath, str]]:
    """(path -> kind of the data, path -> why it is left out) of found files, relative to `root`."""
    relative: list[PurePath] = [path.relative_to(root) for path in paths]
    relative.sort(key=lambda path: (len(path.parts), path.as_posix()))
    rules = _make_rules(root, pattern, format, relative)
    kinds: dict[PurePath, Kind] = {}
    left_out: dict[PurePath, str] = {}
    seen: dict[str, PurePath] = {}
    real: dict[PurePath, str] = {}
    for path in relative:
        kind = _find_kind(path, rules)
        reason = _find_fault(path, kind, rules)
        if reason is None:
            parent = real.get(path.parent) or real.setdefault(path.parent, os.path.realpath(root / path.parent))
            where = os.path.join(parent, path.name)
            where = os.path.realpath(where) if os.path.islink(where) else where
            if seen.setdefault(where, path) != path:
                reason = f"the same file as {seen[where]}"
        if reason is None and kind is not None:
            kinds[path] = kind
        else:
            left_out[path] = str(reason)
    return kinds, left_out


def _make_rules(root: Path, pattern: PurePath, format: str, paths: list[PurePath]) -> Rules:
    folders = {path.parent for path in paths if kind_of(path) == "arrow"}
    above = {parent for path in paths if kind_of(path) == "arrow" for parent in path.parents}
    saved = {folder: names for folder in folders if (names := _read_state(root / folder))}
    parts = {(PurePath(*path.parts[:depth]), part) for path in paths for depth, part in enumerate(path.parts)}
    return Rules(
        root,
        pattern,
        format,
        saved,
        frozenset(folder for folder in above if (root / folder / "dataset_dict.json").exists()),
        frozenset(folder for folder, part in parts if TRAIN.search(part.lower())),
    )


def _read_state(folder: Path) -> frozenset[str]:
    """Names of the data files of a saved data set, by its state.json; none where that does not say."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return frozenset(entry["filename"] for entry in state["_data_files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return frozenset()


def _find_kind(path: PurePath, rules: Rules) -> Kind | None:
    """The kind by the ending, or by the stated format for an ending that the recipe names or that there is not (part-00000)."""
    kind = kind_of(path)
    is_named = bool(path.suffix) and rules.pattern.name.endswith(path.suffix)
    is_bare = not strip_compression(path).suffix.rstrip("0123456789.") and path.name[0] not in "._"
    if rules.format == "auto" or (kind is not None and not is_named):
        return kind
    return state_kind(path, rules.format) if is_named or is_bare or rules.format == "text" else None


def _find_fault(path: PurePath, kind: Kind | None, rules: Rules) -> str | None:
    """Why a found file is no data; None where it is."""
    wanted = {"auto": (kind,), "jsonl": ("jsonl", "json")}.get(rules.format, (rules.format,))
    if not rules.pattern.parts and any(part.startswith(".") for part in path.parts):
        return "hidden"
    if not (rules.root / path).is_file():
        return "no regular file"
    if path.name != rules.pattern.name and any(fnmatch.fnmatchcase(path.name, note) for note in NOTES):
        return "written by `datasets` about the data"
    if path.name not in rules.saved.get(path.parent, (path.name,)) and kind == "arrow":
        return "not among the data files of state.json"
    if kind is None:
        return f"no format known for {path.suffix or 'a name without ending'}"
    if kind not in wanted:
        return f"not of format={rules.format}"
    if kind != "text" and any(part.startswith("_") for part in path.parts) and "_" not in str(rules.pattern):
        return "under a name with _ in front (no data in Spark)"
    if (
        kind == "text"
        and ABOUT_THE_DATA.match(path.name.lower())
        and not rules.pattern.name.endswith(path.suffix or "*")
    ):
        return "about the data by its name"
    if kind == "text" and kind_of(path) is None:
        with open_bytes(rules.root / path) as opened:
            return find_foreign(opened.read(HEAD_BYTES)) or _find_split(path, kind, rules)
    return _find_split(path, kind, rules)


def _find_split(path: PurePath, kind: Kind, rules: Rules) -> str | None:
    """A split that is not for training, by names; of prose and source code only where a name beside it says `train`."""
    for depth, part in enumerate(path.parts):
        folder, word = PurePath(*path.parts[:depth]), HELD_OUT.search(part.lower())
        if folder in rules.dicts and part not in ("train", *rules.pattern.parts):
            return f"not the train split of a DatasetDict but {part}"
        if not word or TRAIN.search(part.lower()) or HELD_OUT.search(str(rules.pattern).lower()):
            continue
        if kind != "text" or folder in rules.with_train:
            return f"held out by its name ({word[0]})"
    return None
