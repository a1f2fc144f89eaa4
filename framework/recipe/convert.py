"""Conversion of a plain tree (dicts, lists, scalars) to the recipe's dataclasses, and the files that hold such trees.

Hydra composes untyped, so this is the one place where a key's name, type and range are judged, strictly and with every mistake
at once, alike for YAML files, the command line and a saved recipe.

Every rank, requeue and resume reads a run's `recipe.yaml`. A layout's file (`meshwright search --write`, `layout=FILE`) sets any
keys: they count more than an experiment's values and less than those of the command line. A cluster's file (`meshwright doctor
--measure`, `cluster=FILE`) has the keys of the group `cluster`, and replaces the whole group.
"""

import math
import re
import typing
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from framework.errors import RecipeError
from framework.files import PRIVATE, write_file
from framework.recipe.files import YamlLoader, origin_of, remove_origin, trace_file
from framework.recipe.keys import (
    explain_place,
    explain_unknown,
    explain_value,
    flatten,
    is_union,
    join,
    legal_values,
    named_group,
    nearest,
    nest,
    plain,
    split_optional,
)
from framework.recipe.plugins import added_names, are_imported
from framework.recipe.problem import COMMAND_LINE, Problem, label_of, render_problems, show, yaml_problem
from framework.recipe.schema import Recipe

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


# --- files

LAYOUT, CLUSTER = "layout", "cluster"
# The command that makes each kind of file.
MAKERS = {
    LAYOUT: "meshwright search --write FILE",
    CLUSTER: "meshwright doctor --measure FILE",
}


def load_recipe(path: Path) -> Recipe:
    """A saved recipe, converted strictly. Errors: RecipeError if it is not there, or with every mistake made in editing it."""
    tree, origins, problems = _read(Path(path))
    recipe, wrong = to_recipe(tree, origins)
    if problems or wrong:
        raise RecipeError(render_problems(problems or wrong))
    return recipe


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Write the recipe as YAML such that `load_recipe` gives an equal one. The file is whole or not there, and the user's own:
    others read it after a `chmod`."""
    write_file(Path(path), to_yaml(recipe).encode(), PRIVATE)


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, one key a line. OmegaConf's dumper quotes the texts that its loader takes for numbers (`'1e-3'`),
    which PyYAML's own does not. Letters of all scripts stay readable, unless PyYAML would not read back what it writes (as
    with U+0085); then they are escaped."""
    tree = plain(asdict(recipe))
    text = _dump(tree, readable=True)
    if text.isascii():
        return text
    try:
        reads_back = yaml.load(text, Loader=YamlLoader) == tree
    except yaml.YAMLError:
        reads_back = False
    return text if reads_back else _dump(tree, readable=False)


class _Dumper(get_omega_conf_dumper()):  # type: ignore[misc]
    """OmegaConf's, with lists of numbers on a line: a measured cluster has hundreds of them."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.Node:
        """A sequence node; the dumper's own but for numbers."""
        is_row = bool(sequence) and all(isinstance(each, int | float) for each in sequence)
        return super().represent_sequence(tag, sequence, flow_style=True if is_row else flow_style)


def _dump(tree: dict[str, Any], readable: bool) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=readable, width=120)


def read_base(path: Path) -> tuple[DictConfig, dict[str, str], list[Problem]]:
    """A saved recipe as the tree on which overrides are applied; its values are resolved, so a `${` in them is text."""
    tree, origins, problems = _read(Path(path))
    return OmegaConf.create(_escape(tree)), origins, problems


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    origins: dict[str, str] = {}
    try:
        tree, problems = _load(path, str(path), None)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}: no recipe can be read there") from error
    if not problems:
        trace_file(origins, path, "", label_of(path))
    return tree, origins, problems


def _load(file: Path, key: str, value: str | None) -> tuple[dict[str, Any], list[Problem]]:
    """(keys of a file, why there are none, said of `key`). Raises OSError."""
    label = label_of(file)
    try:
        tree = yaml.load(file.read_text(encoding="utf-8"), Loader=YamlLoader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, [yaml_problem(error, label)]
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        return {}, [Problem(key, value, "no keys of a recipe stand in it", "", label)]
    return tree, []


def _escape(value: Any) -> Any:
    """Text that OmegaConf resolves to itself: `\\${` stands for `${`, and backslashes before it are doubled."""
    if isinstance(value, dict):
        return {name: _escape(element) for name, element in value.items()}
    if isinstance(value, list):
        return [_escape(element) for element in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value


def read_part(part: str, file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """(keys of a layout's or a cluster's file, why there are none)."""
    try:
        values, problems = _load(file, part, str(file))
    except OSError as error:
        fix = f"write its path as it is found from here; `{MAKERS[part]}` makes one"
        return {}, [Problem(part, str(file), f"cannot be read: {error.strerror}", fix, COMMAND_LINE)]
    if part == CLUSTER and not problems and "name" not in values:
        fix = f"`{MAKERS[part]}` writes such a file; recipes/cluster/ has others to copy"
        return {}, [Problem(part, str(file), "not a machine's file: it has no key `name`", fix, label_of(file))]
    return values, problems


def apply_part(tree: DictConfig, part: str, file: Path, origins: dict[str, str]) -> list[Problem]:
    """Set a file's keys in the composed tree: those of a layout one by one, of a cluster the whole group. Unknown keys are found
    later, with all others."""
    values, problems = read_part(part, file)
    if problems:
        return problems
    if part == CLUSTER:
        tree[CLUSTER] = values
        remove_origin(origins, CLUSTER)
    else:
        for key, value in flatten(values).items():
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
    trace_file(origins, file, CLUSTER if part == CLUSTER else "", label_of(file))
    return []


def write_layout(file: Path, values: Mapping[str, Any], comment: str) -> None:
    """Write values, by dotted key, as a layout's file. comment: a line or more at its top."""
    lines = "".join(f"# {line}\n" for line in ("@package _global_", *comment.splitlines()))
    text = yaml.safe_dump(plain(nest(values)), sort_keys=False, default_flow_style=None, width=120)
    file.write_text(lines + text, encoding="utf-8")


def write_cluster_file(file: Path, text: str) -> None:
    """Write the file whole or not at all; makes its folder where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, text.encode(), 0o644)
