"""Layouts in files: `layout=my_layout.yaml`, as `meshwright search --write` writes them, set the keys of a layout.

A fragment of a recipe, not a recipe of a group: it is named by its path, and what it sets counts more than an experiment's values
and less than those of the command line. Any keys may stand in it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from framework.recipe.keys import flatten
from framework.recipe.origins import set_origin, trace_file
from framework.recipe.problem import COMMAND_LINE, Problem, label_of, yaml_problem
from framework.recipe.saved import plain
from framework.recipe.yaml_file import YamlLoader

KEY = "layout"
HEADER = "# @package _global_\n"


def apply_layout(tree: DictConfig, file: Path, origins: dict[str, str]) -> list[Problem]:
    """Sets the file's values in the composed tree. Whether they are known keys is judged with all others."""
    values, problems = _read(file)
    if values:
        for key, value in flatten(values).items():
            OmegaConf.update(tree, key, value, merge=True, force_add=True)
            set_origin(origins, key, label_of(file))
        trace_file(origins, file, "", label_of(file))
    return problems


def write_layout(file: Path, values: Mapping[str, Any], comment: str) -> None:
    """values: by dotted key; comment: what the layout is of, a line or more."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = plain(value)
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=120)
    file.write_text(HEADER + lines + text, encoding="utf-8")


def _read(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=YamlLoader)
    except OSError as error:
        fix = "write its path as it is found from here; `meshwright search --write FILE` makes one"
        return {}, [Problem(KEY, str(file), f"cannot be read: {error.strerror}", fix, COMMAND_LINE)]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, [yaml_problem(error, label_of(file))]
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        return {}, [Problem(KEY, str(file), "no keys of a recipe stand in it", "", label_of(file))]
    return values, []
