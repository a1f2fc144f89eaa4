"""The schema's keys as a flat list, for help and errors; the recipe as a tree of dotted keys; and advice on wrong names and
values.

A wrong name is our own key misspelt or misplaced, or another system's name for it (`foreign.yaml`).
"""

import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import yaml

from framework.recipe.schema import Recipe

NAME = "NAME"  # stands in a path for a name that the user chooses, as in data.sources.NAME.weight

# Keys of model.config: the launcher sets those of the tokenizer.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# A search asks for defaults a thousand times.
_DEFAULTS = Recipe()


def matches(path: str, pattern: str) -> bool:
    """Whether a dotted path is that of a pattern: `*` is within a name, and at the end stands for names behind it too."""
    names, wanted = split_key(path), pattern.split(".")
    fits = len(names) == len(wanted) or (len(names) > len(wanted) and wanted[-1].endswith("*"))
    return fits and all(map(fnmatchcase, names, wanted))


@dataclass(frozen=True)
class Key:
    """One key of the recipe that holds a value (a group of keys is no key)."""

    path: str
    kind: Any
    doc: str
    default: Any  # dataclasses.MISSING: must be given
    low: float | None
    high: float | None
    registry: str = ""

    @property
    def legal(self) -> str:
        return legal_values(self.kind, self.low, self.high) + ", or a plugin's" * bool(self.registry)


def list_keys(group: type = Recipe, path: str = "") -> Iterator[Key]:
    """Every key below `group`, in the schema's order; `path` is the group's own."""
    kinds = _kinds_of(group)
    for each in fields(group):
        where = join(path, each.name)
        kind = kinds[each.name]
        if is_dataclass(kind):
            yield from list_keys(typing.cast(type, kind), where)
        elif named := named_group(kind):
            yield from list_keys(named, join(where, NAME))
        else:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            more = {name: each.metadata[name] for name in ("low", "high", "registry")}
            yield Key(where, kind, each.metadata["doc"], default, **more)


@cache
def list_paths() -> tuple[str, ...]:
    """Dotted paths of all keys."""
    return tuple(key.path for key in list_keys())


def list_groups() -> list[str]:
    """The schema's groups of keys, as the folders of their recipes are named: optim, optim/schedule."""
    groups = dict.fromkeys(path.rpartition(".")[0] for path in list_paths())
    return [group.replace(".", "/") for group in groups if group and NAME not in group]


def join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


@cache
def split_key(key: str) -> tuple[str, ...]:
    """Names of a dotted key. A name that the user has chosen may have dots itself: it ends where a key of its group follows."""
    names, rest = list[str](), key.split(".")
    kind: Any = Recipe
    while rest:
        count, element = 1, named_group(kind)
        if element is not None:
            known = _kinds_of(element)
            count = next((at for at in range(1, len(rest)) if rest[at] in known), len(rest))
            kind = element
        elif is_dataclass(kind):
            # A stage's keys are the recipe's: its `data` has those of `data`.
            own, whole = _kinds_of(typing.cast(type, kind)).get(rest[0]), _kinds_of(Recipe).get(rest[0])
            kind = whole if kind is not Recipe and typing.get_origin(own) is dict and is_dataclass(whole) else own
        names, rest = [*names, ".".join(rest[:count])], rest[count:]
    return tuple(names)


@cache
def _kinds_of(group: type) -> dict[str, Any]:
    return typing.get_type_hints(group)


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted key -> value for every leaf; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        where = join(path, name)
        leaves |= flatten(value, where) if isinstance(value, Mapping) and value else {where: value}
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted keys of the recipe; the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *groups, name = split_key(key)
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    return tree


def plain(value: Any) -> Any:
    """Tuples as lists: YAML has no tuples."""
    if isinstance(value, dict):
        return {name: plain(element) for name, element in value.items()}
    return [plain(element) for element in value] if isinstance(value, list | tuple) else value


def value_of(recipe: Recipe, key: str) -> Any:
    """The value of a dotted key."""
    return attrgetter(key)(recipe)


def default_of(key: str) -> Any:
    """The schema's default of a dotted key."""
    return value_of(_DEFAULTS, key)


def with_value(group: Any, key: str, value: Any) -> Any:
    """A recipe, or a group of it, with another value at a dotted key."""
    name, _, rest = key.partition(".")
    return replace(group, **{name: with_value(getattr(group, name), rest, value) if rest else value})


def split_optional(kind: Any) -> tuple[Any, bool]:
    """(the type without None, whether null is legal)."""
    if not is_union(kind):
        return kind, False
    inner = tuple(part for part in typing.get_args(kind) if part is not types.NoneType)
    return typing.Union[inner], len(inner) < len(typing.get_args(kind))  # noqa: UP007  (of a tuple that is not written here)


def is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def named_group(kind: Any) -> type | None:
    """The dataclass of a `dict[str, dataclass]`, whose keys the user chooses; None for any other type."""
    if typing.get_origin(kind) is dict and is_dataclass(element := typing.get_args(kind)[1]):
        return typing.cast(type, element)
    return None


def legal_values(kind: Any, low: float | None, high: float | None) -> str:
    """The legal values in words: `a whole number of at least 1, or null`."""
    inner, optional = split_optional(kind)
    words = _legal(inner, low, high)
    return f"{words}, or null" if optional else words


def _legal(kind: Any, low: float | None, high: float | None) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return "true or false"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _range(low, high)
    if kind is str:
        return "text"
    if is_union(kind):
        return " or ".join(_legal(part, low, high) for part in parts)
    if origin is Literal:
        return "one of " + ", ".join(parts) if len(parts) > 1 else parts[0]
    if origin is list:
        return f"a list, each {_legal(parts[0], low, high)}"
    if origin is tuple:
        return f"a list of {len(parts)}, each {_legal(parts[0], low, high)}"
    assert origin is dict or is_dataclass(kind), f"the schema has a type that nothing converts: {kind}"
    return "named values" if origin is dict else "a group of keys"


def _range(low: float | None, high: float | None) -> str:
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    return "" if low is None else f" of at least {low:g}"


# --- advice on wrong names and values

FEW_KEYS = 8  # of a group, which a message can name
_ALIKE = 0.72  # ratio below which a suggestion is more likely noise than help
TABLE = Path(__file__).with_name("foreign.yaml")
# Sections of the table that are of no system.
OUR_VALUES, FORMS, STAGES = "our values", "forms", "zero stages"
# The section of names that no system can be told by.
OTHERS = "others"


@dataclass(frozen=True)
class Foreign:
    """A name of another system, as `foreign.yaml` has it."""

    system: str
    # Our key; empty where nothing has its meaning.
    key: str = ""
    # Our values by theirs, in lower case, where they have other names.
    values: Mapping[str, Any] = field(default_factory=dict)
    # The form in which other values, or all, are written here.
    note: str = ""
    # A difference that remains.
    differs: str = ""

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


def nearest(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """The most similar of `names`, best first; none where nothing is similar."""
    return difflib.get_close_matches(name, list(names), n=count, cutoff=0.6)


def explain_unknown(path: str, value: Any = None) -> str:
    """Advice on the unknown key `path` (dotted), and on its value where another system's has another name here."""
    if found := explain_place(path) or explain_name(path, value):
        return found
    if "." not in path and (
        match := nearest(path, [*list_groups(), "experiment"])
    ):  # as in modle=gpt2, optim/shedule=wsd
        return f"did you mean {match[0]}?"
    return _explain_similar(path) or _explain_list(path)


def explain_place(path: str) -> str:
    """Advice on a known key in the wrong place of a file, which also explains everything below the name; else empty."""
    parts = path.split(".")
    if parts[:2] == ["train", "stages"] and ".".join(parts[3:]) in list_paths():
        return f"state {'.'.join(parts[3:])} outside of train.stages: it is the same in all stages of a run"
    if parts[0] == "experiment":
        return "an experiment's file begins with the line `# @package _global_`"
    if path in list_paths():
        return f"a file nests its keys, without dots: `{parts[0]}: {{{'.'.join(parts[1:])}: ...}}`"
    for i in range(1, len(parts)):
        without = ".".join(parts[: i - 1] + parts[i:])
        if parts[i] == parts[i - 1] and any(f"{key}.".startswith(f"{without}.") for key in list_paths()):
            return (
                f"leave out `{parts[i]}:`; a file in the folder {'/'.join(parts[:i])} is placed below that key already"
            )
    return ""


def _explain_similar(path: str) -> str:
    """A key of that name in a group within its own; a misspelt key of the group in which it was written; else the key whose whole
    path, or last part, looks most alike."""
    group, _, name = path.rpartition(".")
    if deeper := [key for key in list_paths() if key.startswith(f"{group}.") and key.endswith(f".{name}")]:
        return f"did you mean {deeper[0]}?"
    beside = [key.rpartition(".")[2] for key in _list_siblings(group)]
    if match := nearest(name, beside):
        return f"did you mean {join(group, match[0])}?"

    def likeness(key: str) -> tuple[float, float]:
        own = key.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, path, key).ratio()
        last = difflib.SequenceMatcher(None, name, own).ratio()
        contains = len(name) > 3 and name in own  # warmup, in warmup_steps
        return max(whole, 0.9 * last, 0.85 * contains), whole

    best = max(list_paths(), key=likeness)
    return f"did you mean {best}?" if likeness(best)[0] >= _ALIKE else ""


def _explain_list(path: str) -> str:
    """Where to look: the keys beside it if they are few, else the command that lists them."""
    group = path.rpartition(".")[0]
    siblings = [key.rpartition(".")[2] for key in _list_siblings(group)] if group else []
    if 0 < len(siblings) <= FEW_KEYS:
        return f"the keys of {group} are {', '.join(siblings)}"
    return (
        f"`meshwright check --keys {group}.` lists all keys of {group}"
        if siblings
        else "`meshwright check --keys` lists all keys"
    )


def _list_siblings(group: str) -> list[str]:
    """Keys of the schema's group that `group` is, as data.sources.NAME is data.sources.web."""
    pattern = [{part, NAME} for part in group.split(".")]
    return [
        key
        for key in list_paths()
        if len(places := key.split(".")[:-1]) == len(pattern) and all(map(set.__contains__, pattern, places))
    ]


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
    return [system for system in read_table() if system not in (OUR_VALUES, FORMS, STAGES)]


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
