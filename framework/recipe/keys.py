"""The schema's keys as a flat list, for help, suggestions and errors; and the recipe as a tree of dotted keys."""

import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from operator import attrgetter
from typing import Any, Literal

from framework.recipe.schema import Recipe

NAME = "NAME"  # stands in a path for a name that the user chooses, as in data.sources.NAME.weight

# Keys of model.config: the launcher sets those of the tokenizer.
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")

# A search asks for defaults a thousand times.
_DEFAULTS = Recipe()


def matches(path: str, pattern: str) -> bool:
    """Whether a dotted path is that of a pattern: `*` is within a name, and at the end stands for names behind it too."""
    names, wanted = path.split("."), pattern.split(".")
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
    kinds = typing.get_type_hints(group)
    for field in fields(group):
        where = join(path, field.name)
        kind = kinds[field.name]
        if is_dataclass(kind):
            yield from list_keys(typing.cast(type, kind), where)
        elif named := named_group(kind):
            yield from list_keys(named, join(where, NAME))
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
            more = {name: field.metadata[name] for name in ("low", "high", "registry")}
            yield Key(where, kind, field.metadata["doc"], default, **more)


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


def flatten(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted key -> value for every leaf; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        where = join(path, name)
        leaves |= flatten(value, where) if isinstance(value, Mapping) and value else {where: value}
    return leaves


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of dotted keys."""
    tree: dict[str, Any] = {}
    for key, value in leaves.items():
        *groups, name = key.split(".")
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
