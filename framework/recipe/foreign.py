"""Names and values of other systems, and ours for them: the table of `foreign.yaml`, for messages and for whole files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

TABLE = Path(__file__).with_name("foreign.yaml")
OUR_VALUES = "our values"
# The section of names that no system can be told by.
OTHERS = "others"


@dataclass(frozen=True)
class Foreign:
    """A name of another system. key: ours, empty where nothing has its meaning; values: ours by theirs, in lower case, where they
    have other names; note: the words in which other values, or all, are said here; differs: what differs all the same."""

    system: str
    key: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    differs: str = ""

    @property
    def words(self) -> str:
        """Our key, or the sentence in its place."""
        return self.key or self.note

    def settings(self, value: Any) -> dict[str, Any] | None:
        """Our key with our value for theirs; empty where there is nothing to say, None where there is no counterpart."""
        if not self.values:
            return {self.key: value} if self.key else None
        theirs = "none" if value is None else str(value).lower()
        if theirs in self.values:
            ours = self.values[theirs]
            return {self.key: ours} if self.key else ({} if ours == "" else None)
        # Numbers need no other name: of zero.shard_within only -1 does.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return {self.key: value} if self.key and is_number else None


@cache
def read_table() -> Mapping[str, Mapping[str, Any]]:
    """The sections of the table."""
    return MappingProxyType(yaml.safe_load(TABLE.read_text(encoding="utf-8")))


@cache
def names_of(system: str) -> Mapping[str, Foreign]:
    """The names of one system."""
    shown = "" if system == OTHERS else system
    return MappingProxyType({name: _read(shown, entry) for name, entry in read_table()[system].items()})


def list_systems() -> list[str]:
    """The systems, the one that explains a shared name first."""
    return [system for system in read_table() if system != OUR_VALUES]


@cache
def foreign_names() -> Mapping[str, Foreign]:
    """All names; where two systems share one the first stands for both."""
    table: dict[str, Foreign] = {}
    for system in list_systems():
        for name, entry in names_of(system).items():
            table.setdefault(name, entry)
    return MappingProxyType(table)


def normalize(path: str) -> str:
    """A name as the table has it: lower case, with underscores."""
    return path.lower().replace("-", "_").lstrip("_")


def suffixes(path: str) -> Iterator[str]:
    """A dotted name with ever more of what stands before it left out."""
    parts = normalize(path).split(".")
    return (".".join(parts[start:]) for start in range(len(parts)))


def explain_name(path: str, value: Any = None) -> str:
    """Our key or sentence for another system's name, with or without its section, and our value for theirs where it has another
    name here; empty where nobody has such a name."""
    table = foreign_names()
    name = next((name for name in suffixes(path) if name in table), None)
    if name is None:
        return ""
    found = table[name]
    if not found.key:
        is_known = value is not None and found.settings(value) == {}
        return f"leave it out: {found.note}" if is_known else found.note
    if value is None and list(found.values) == ["true"]:  # a switch, which is asked for to be on
        value = True
    settings = found.settings(value) if found.values and value is not None else None
    ours = (
        found.key
        if not settings
        else f"{found.key}={'null' if settings[found.key] is None else str(settings[found.key])}"
    )
    shown = f"{ours} ({found.system}: {name})" if found.system else ours
    note = found.differs if settings else found.note or found.differs
    return f"{shown}: {note}" if note else shown


def explain_value(key: str, value: Any) -> str:
    """Advice on another system's value of our key; empty where nobody has such a value."""
    known = read_table()[OUR_VALUES].get(key, {})
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and "number" in known:
        return f"{known['number']}={value}"
    theirs = str(value).lower()
    return f"{key}={known[theirs]}" if theirs in known else ""


def _read(system: str, entry: str | Mapping[str, Any]) -> Foreign:
    if not isinstance(entry, str):
        return Foreign(
            system, entry["key"], MappingProxyType(entry["values"]), entry.get("note", ""), entry.get("differs", "")
        )
    return Foreign(system, note=entry) if " " in entry else Foreign(system, entry)
