"""Conversion of a plain tree (dicts, lists, scalars) to the recipe's dataclasses: strict, and with every mistake at once.

Hydra composes untyped, so this is the one place where a key's name, type and range are judged, alike for YAML files, the
command line and a saved recipe.
"""

import math
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, cast

from framework.recipe.keys import is_union, join, legal_values, named_group, split_optional
from framework.recipe.origins import origin_of
from framework.recipe.plugins import added_names, are_imported
from framework.recipe.problem import Problem, show
from framework.recipe.schema import Recipe
from framework.recipe.suggest import explain_place, explain_unknown, explain_value, nearest

MANDATORY = "???"  # how OmegaConf and Hydra write "must be given"
Limits = tuple[float | None, float | None]  # the closed range of a number, or of the numbers in a list


def to_recipe(tree: Mapping[str, Any], origins: Mapping[str, str]) -> tuple[Recipe, list[Problem]]:
    """Convert a tree to a recipe, and list all its problems. Where a value cannot be read the recipe keeps the schema's
    default, so that the other keys can still be checked; with problems it is a draft and must not be run."""
    plugins = tree.get("plugins")
    is_open = isinstance(plugins, list) and not are_imported([each for each in plugins if isinstance(each, str)])
    conversion = _Conversion(origins, is_open)
    recipe = conversion.group(tree, Recipe, "")
    return cast(Recipe, recipe), conversion.problems


class _Mistake(Exception):
    """A value that does not fit its key: why, and how to write it if that is clear."""

    def __init__(self, message: str, fix: str = ""):
        super().__init__(message)
        self.message = message
        self.fix = fix


@dataclass
class _Conversion:
    origins: Mapping[str, str]
    # Whether there are plugins which are not imported here: their names were checked by the launcher.
    is_open: bool
    problems: list[Problem] = field(default_factory=list)

    def group(self, tree: Any, kind: type, path: str) -> Any:
        """A dataclass from a mapping; None where a key without a default is missing."""
        if not isinstance(tree, Mapping):
            names = ", ".join(f.name for f in fields(kind))
            self._report(path, tree, "this is a group of keys, not a value", f"set the keys below it: {names}")
            tree = {}
        kinds = typing.get_type_hints(kind)
        values: dict[str, Any] = {}
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        for f in fields(kind):
            where = join(path, f.name)
            if f.name in tree:
                self._field(values, f, tree[f.name], kinds[f.name], where)
            elif f.name in required:
                origin, message = origin_of(self.origins, path), f"must be given: {f.metadata['doc']}"
                self.problems.append(Problem(where, None, message, f"{where}=...", origin, missing=True))
        for name in tree:
            if name not in kinds:
                self._unknown(join(path, name), tree[name])
        return kind(**values) if required <= values.keys() else None

    def _field(self, values: dict[str, Any], f: Any, value: Any, kind: Any, where: str) -> None:
        if is_dataclass(kind):
            values[f.name] = self.group(value, cast(type, kind), where)
        elif (named := named_group(kind)) and isinstance(value, Mapping):
            elements = {str(name): self.group(value[name], named, join(where, name)) for name in value}
            values[f.name] = {name: element for name, element in elements.items() if element is not None}
        else:
            try:
                registry = f.metadata["registry"]
                is_added = isinstance(value, str) and (value in added_names(registry) or (self.is_open and registry))
                limits = f.metadata["low"], f.metadata["high"]
                values[f.name] = value if is_added else _convert(value, kind, limits, added_names(registry))
            except _Mistake as mistake:
                fix = explain_value(where, value) or mistake.fix or f"{where}=..." * (value == MANDATORY)
                self._report(where, value, mistake.message, fix)

    def _unknown(self, path: str, value: Any) -> None:
        """Report the leaves of an unknown group: a foreign section has one translation per key."""
        if isinstance(value, Mapping) and value and not explain_place(path):
            for name in value:
                self._unknown(join(path, name), value[name])
        else:
            shown = None if isinstance(value, Mapping) else value
            self._report(path, shown, "unknown key", explain_unknown(path, value))

    def _report(self, key: str, value: Any, message: str, fix: str) -> None:
        self.problems.append(Problem(key, value, message, fix, origin_of(self.origins, key)))


def _convert(value: Any, kind: Any, limits: Limits, added: tuple[str, ...] = ()) -> Any:
    """The value as its type has it. added: names of plugins beside the words of a Literal."""
    inner, optional = split_optional(kind)
    if value is None and optional:
        return None
    legal = legal_values(kind, *limits)
    if value is None or value == MANDATORY:
        raise _Mistake(f"must be given: {legal}")
    if is_union(inner):
        inner = _choose_part(value, typing.get_args(inner))
    origin, parts = typing.get_origin(inner), typing.get_args(inner)
    if origin is Literal:
        if value in parts:
            return value
        guess = nearest(str(value), (*parts, *added))
        others = ", or of a plugin: " + ", ".join(added) if added else ""
        raise _Mistake(f"must be {legal}{others}", f"did you mean {guess[0]}?" if guess else "")
    if origin in (list, tuple):
        return _convert_sequence(value, origin, parts, limits, legal)
    if origin is dict:
        return _convert_mapping(value)
    return _convert_scalar(value, inner, limits, legal)


def _choose_part(value: Any, parts: tuple[Any, ...]) -> Any:
    """The part of a union of words, text, lists and numbers that fits the kind of this value; else the first not of words."""
    if isinstance(value, str) and str in parts:
        return str
    kinds = (Literal,) if isinstance(value, str) else (list, tuple) if isinstance(value, list | tuple) else (None,)
    others = [part for part in parts if typing.get_origin(part) is not Literal]
    return next((part for part in parts if typing.get_origin(part) in kinds), others[0])


def _convert_scalar(value: Any, kind: Any, limits: Limits, legal: str) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        raise _Mistake(f"must be {legal}", _rewrite(value, kind))
    if kind is float and not math.isfinite(value):
        raise _Mistake(f"must be {legal}, and finite")
    low, high = (None, None) if kind is str else limits
    if (low is not None and value < low) or (high is not None and value > high):
        raise _Mistake(f"must be {legal}")
    return value


def _rewrite(value: Any, kind: type) -> str:
    """Advice on how to write the value, where it is certain which one was meant."""
    if kind is int and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind is str and isinstance(value, bool | int | float):
        return f"it was read as {show(value)}; quotes keep it text, within the shell's own on the command line: '...=\"...\"'"
    if kind in (int, float) and isinstance(value, str):
        with suppress(ValueError):
            return f"write {kind(value.replace(',', ''))}, without quotes"
    return ""


def _convert_sequence(value: Any, kind: type, parts: tuple[Any, ...], limits: Limits, legal: str) -> Any:
    if not isinstance(value, list | tuple):
        raise _Mistake(f"must be {legal}", f"write it as a list: [{', '.join([show(value)] * len(parts))}]")
    if kind is list:
        parts = parts * len(value)
    elif len(value) != len(parts):
        raise _Mistake(f"must be {legal}; this one has {len(value)}")
    converted = []
    for element, part in zip(value, parts, strict=True):
        try:
            converted.append(_convert(element, part, limits))
        except _Mistake as mistake:
            raise _Mistake(f"{show(element)} in it {mistake.message}", mistake.fix) from None
    return kind(converted)


def _convert_mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _Mistake("must be named values", "write name: value lines below it")
    wrong = [name for name in value if not isinstance(name, str)]
    if wrong:
        raise _Mistake(f"its names must be text; {show(wrong[0])} is not", "quote the name")
    return dict(value)
