"""Tars of samples, as WebDataset has them: `000.txt` is a document, and so is the field of the object in `000.json`.

A sample is made of the members, side by side, whose names are equal up to the first dot: `shard/000.json` and `shard/000.cls` are
one. Its values are the fields of its object, `text` of a `.txt`, and other members by what stands behind that dot.
"""

import json
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path, PurePath
from tarfile import InvalidHeaderError, ReadError, TruncatedHeaderError  # type: ignore[attr-defined]
from typing import Any, Self

from framework.data.kinds import open_bytes


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
