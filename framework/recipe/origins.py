"""YAML of recipes: a loader with a bound on what aliases expand to, and where each value was written.

The loader reads OmegaConf's dialect. An alias (`*name`) repeats what its anchor (`&name`) marks, so ten lines can stand for 10^9
values. The parser keeps one copy of them; code that walks the tree afterwards does not. The bound is checked on the parser's
graph, before anything walks it.

An origin is a file and line, or the command line. Hydra says which files it merged, in which order and at which place of the
tree, but not what each one set; so the files are read once more, for the positions of their keys. Later files win, as in the
merge itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader

from framework.recipe.keys import join
from framework.recipe.problem import COMMAND_LINE, DEFAULT


def trace_file(origins: dict[str, str], file: Path, package: str, label: str) -> None:
    """Enter the keys of `file`, which Hydra placed at `package` (dotted, "" for the top)."""
    root, _ = read_yaml(str(file), read_text(file))
    if not isinstance(root, yaml.MappingNode):
        set_origin(origins, package, f"{label}:1")
        return
    for path, line in _positions(root, package):
        if path != join(package, "defaults"):
            set_origin(origins, path, f"{label}:{line}")


def trace_value(origins: dict[str, str], key: str, value: Any) -> None:
    """Enter an override of the command line; the keys of a mapping are merged one by one."""
    if isinstance(value, Mapping) and value:
        for name in value:
            trace_value(origins, join(key, name), value[name])
    else:
        set_origin(origins, key, COMMAND_LINE)


def set_origin(origins: dict[str, str], path: str, label: str) -> None:
    """Enter the origin of `path`, and remove what its value has replaced above or below it."""
    remove_origin(origins, path)
    parts = path.split(".")
    for length in range(1, len(parts)):
        origins.pop(".".join(parts[:length]), None)
    origins[path] = label


def remove_origin(origins: dict[str, str], path: str) -> None:
    for old in [key for key in origins if key == path or key.startswith(path + ".")]:
        del origins[old]


def origin_of(origins: Mapping[str, str], key: str) -> str:
    """The origin of a key, of something below it, or of the nearest thing above it."""
    if key in origins:
        return origins[key]
    below = next((label for path, label in origins.items() if path.startswith(key + ".")), None)
    parts = key.split(".")
    above = (origins.get(".".join(parts[:length])) for length in range(len(parts) - 1, 0, -1))
    return below or next((label for label in above if label), DEFAULT)


def locate_named(text: str, origins: Mapping[str, str]) -> Iterator[str]:
    """Lines with the file and line of keys that a message names with their values, unless it has them already."""
    for key in dict.fromkeys(re.findall(r"\b([a-z_]+(?:\.\w+)+)(?==| is not)", text)):
        place = origins.get(key, DEFAULT)
        if ":" in place and place not in text:
            yield f"  {key} is set in {place}"


def find_file(config_path: str, folders: Sequence[Path]) -> Path | None:
    """The file of a Hydra config path such as `optim/adamw`: the first on the search path."""
    name = config_path if config_path.endswith((".yaml", ".yml")) else f"{config_path}.yaml"
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _positions(node: yaml.MappingNode, path: str) -> Iterator[tuple[str, int]]:
    for name, value in node.value:
        where = join(path, name.value)
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _positions(value, where)
        else:
            yield where, name.start_mark.line + 1


# A measured cluster file has some thousand values, the largest recipe of ours 300.
MAX_VALUES = 100_000


class YamlLoader(get_yaml_loader()):  # type: ignore[misc]
    """OmegaConf's loader. A file that expands to more than MAX_VALUES values, or is nested too deeply, is a MarkedYAMLError."""

    def get_single_node(self) -> yaml.Node | None:
        """The root of the file's graph of nodes; aliases are edges to nodes that are there already."""
        start = self.get_mark()
        try:
            node = super().get_single_node()
            expanded = 0 if node is None else _count_values(node, {})
        except RecursionError as error:
            raise yaml.MarkedYAMLError(
                problem="brackets or blocks are nested too deeply", problem_mark=start
            ) from error
        if expanded > MAX_VALUES:
            problem = f"its aliases (*name) expand to {expanded:,} values, and a recipe has at most {MAX_VALUES:,}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=start)
        return node


def read_text(file: Path) -> str:
    """The text of a file, without the mark that some editors begin UTF-8 with: Hydra would not see a package behind it."""
    return file.read_text(encoding="utf-8").removeprefix("\ufeff")


@lru_cache(maxsize=256)
def read_yaml(name: str, text: str) -> tuple[yaml.Node | None, Any]:
    """The graph of a file's nodes and its value, which nobody changes: all compositions of a process read the same few dozen
    files. name: of the file, for errors."""
    loader = YamlLoader(text)
    loader.name = name
    try:
        root = loader.get_single_node()
        return root, None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()


class RecipeSource(FileConfigSource):
    """Hydra's source of a folder of recipes, with files that YamlLoader accepts."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The file at a path such as `optim/adamw`, which Hydra has found."""
        file = Path(self.path, self._normalize_file_name(config_path))
        text = read_text(file)
        _, value = read_yaml(str(file), text)
        config = OmegaConf.create({} if value is None else value)
        return ConfigResult(self.provider, f"file://{self.path}", config, self._get_header_dict(text[:512]))


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node with its aliases written out. known: counts of the nodes seen, by id; a node within itself has none."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1  # what an alias to one of the nodes around it counts: it would not end
        children = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum([_count_values(each, known) for each in children])
    return known[id(node)]
