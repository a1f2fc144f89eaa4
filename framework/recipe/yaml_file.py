"""YAML as recipes have it: OmegaConf's dialect, with a bound on what aliases and nesting may expand to.

An alias (`*name`) repeats what its anchor (`&name`) marks, so ten lines can stand for 10^9 values. The parser keeps one copy of
them; whatever walks the tree afterwards does not. The bound is checked on the parser's graph, before anything walks it.
"""

from pathlib import Path

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf._utils import get_yaml_loader

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


class RecipeSource(FileConfigSource):
    """Hydra's source of a folder of recipes, with files that YamlLoader accepts."""

    def load_config(self, config_path: str) -> ConfigResult:
        """The file at a path such as `optim/adamw`, as Hydra reads it."""
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file():
            with file.open(encoding="utf-8") as text:
                yaml.compose(text, Loader=YamlLoader)
        return super().load_config(config_path)


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node with its aliases written out. known: counts of the nodes seen, by id; a node within itself has none."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1  # what an alias to one of the nodes around it counts: it would not end
        children = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum([_count_values(each, known) for each in children])
    return known[id(node)]
