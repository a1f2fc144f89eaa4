"""Recipes on disk: the resolved recipe of a run, which every rank, requeue and resume reads."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from framework.errors import RecipeError
from framework.files import PRIVATE, write_file
from framework.recipe.convert import to_recipe
from framework.recipe.origins import trace_file
from framework.recipe.problem import Problem, label_of, render_problems, yaml_problem
from framework.recipe.schema import Recipe
from framework.recipe.yaml_file import YamlLoader


def load_recipe(path: Path) -> Recipe:
    """A saved recipe, converted strictly. Errors: RecipeError if it is not there, or with every mistake made in editing it."""
    tree, origins, problems = _read(Path(path))
    recipe, wrong = to_recipe(tree, origins)
    if problems or wrong:
        raise RecipeError(render_problems(problems or wrong))
    return recipe


def save_recipe(recipe: Recipe, path: Path) -> None:
    """Writes the recipe as YAML such that `load_recipe` gives an equal one. The file is whole or not there, and the user's own:
    whoever is to read it is let in with `chmod`."""
    write_file(Path(path), to_yaml(recipe).encode(), PRIVATE)


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, one key a line. OmegaConf's dumper quotes the texts that its loader takes for numbers (`'1e-3'`),
    which PyYAML's own does not. Letters of all scripts stay readable, unless PyYAML would not read back what it writes (as
    with U+0085); then they are escaped."""
    tree = plain(asdict(recipe))
    text = _dump(tree, readable=True)
    return text if _reads_back(text, tree) else _dump(tree, readable=False)


def read_base(path: Path) -> tuple[DictConfig, dict[str, str], list[Problem]]:
    """A saved recipe as the tree on which overrides are applied; its values are resolved, so a `${` in them is text."""
    tree, origins, problems = _read(Path(path))
    return OmegaConf.create(_escape(tree)), origins, problems


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=YamlLoader)
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}: no recipe can be read there") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, {}, [yaml_problem(error, label_of(path))]
    if not isinstance(tree, dict):
        return {}, {}, [Problem(str(path), None, "this is not a recipe: its keys are missing", "", label_of(path))]
    origins: dict[str, str] = {}
    trace_file(origins, path, "", label_of(path))
    return tree, origins, []


class _Dumper(get_omega_conf_dumper()):  # type: ignore[misc]
    """OmegaConf's, with lists of numbers on a line: a measured cluster has hundreds of them."""

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.Node:
        """As the dumper's own."""
        is_row = bool(sequence) and all(isinstance(each, int | float) for each in sequence)
        return super().represent_sequence(tag, sequence, flow_style=True if is_row else flow_style)


def _dump(tree: dict[str, Any], readable: bool) -> str:
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=readable, width=120)


def _reads_back(text: str, tree: dict[str, Any]) -> bool:
    try:
        return yaml.load(text, Loader=YamlLoader) == tree
    except yaml.YAMLError:
        return False


def plain(value: Any) -> Any:
    """Tuples as lists: YAML has no tuples."""
    if isinstance(value, dict):
        return {name: plain(element) for name, element in value.items()}
    return [plain(element) for element in value] if isinstance(value, list | tuple) else value


def _escape(value: Any) -> Any:
    """Text that OmegaConf resolves to itself: `\\${` stands for `${`, and backslashes before it are doubled."""
    if isinstance(value, dict):
        return {name: _escape(element) for name, element in value.items()}
    if isinstance(value, list):
        return [_escape(element) for element in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    return value
