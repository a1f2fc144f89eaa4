"""Recipes in files of their own: the resolved recipe of a run, and the parts that `layout=FILE` and `cluster=FILE` name.

Every rank, requeue and resume reads a run's `recipe.yaml`. A layout's file (`meshwright search --write`) sets any keys: they
count more than an experiment's values and less than those of the command line. A cluster's file (`meshwright doctor --measure`)
has the keys of the group `cluster`, and replaces the whole group.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from framework.errors import RecipeError
from framework.files import PRIVATE, write_file
from framework.recipe.convert import to_recipe
from framework.recipe.keys import flatten, nest, plain
from framework.recipe.origins import YamlLoader, remove_origin, trace_file
from framework.recipe.problem import COMMAND_LINE, Problem, label_of, render_problems, yaml_problem
from framework.recipe.schema import Recipe

LAYOUT, CLUSTER = "layout", "cluster"
ENDINGS = (".yaml", ".yml")
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
