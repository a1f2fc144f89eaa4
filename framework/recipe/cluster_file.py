"""Machines in files: `cluster=PATH.yaml` takes the keys of a cluster from a file, as `meshwright doctor --measure` writes them.

Such a file has the keys of the group `cluster`, like those in `recipes/cluster/`, and stands in the place of the whole group.
"""

from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from framework.files import write_file
from framework.recipe.origins import remove_origin, trace_file
from framework.recipe.problem import COMMAND_LINE, Problem, label_of, yaml_problem
from framework.recipe.yaml_file import YamlLoader

KEY = "cluster"
ENDINGS = (".yaml", ".yml")


def cluster_file(override: Override) -> Path | None:
    """The file that `cluster=PATH.yaml` names; None of any other override, such as cluster=h100_ib."""
    if override.key_or_group != KEY or override.is_delete():
        return None
    value = override.value()
    return Path(value).expanduser() if isinstance(value, str) and value.endswith(ENDINGS) else None


def apply_cluster(tree: DictConfig, file: Path, origins: dict[str, str]) -> list[Problem]:
    """Sets the group `cluster` of the composed tree to the file's keys. Whether they are known and sound is judged with all
    others."""
    values, problems = read_cluster_file(file)
    if not problems:
        tree[KEY] = values
        remove_origin(origins, KEY)
        trace_file(origins, file, KEY, label_of(file))
    return problems


def read_cluster_file(file: Path) -> tuple[dict[str, Any], list[Problem]]:
    """(the file's keys, why there are none)."""
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), Loader=YamlLoader)
    except OSError as error:
        fix = "write its path as it is found from here; `meshwright doctor --measure FILE` makes one of this machine"
        return {}, [Problem(KEY, str(file), f"cannot be read: {error.strerror}", fix, COMMAND_LINE)]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        return {}, [yaml_problem(error, label_of(file))]
    if not isinstance(values, dict) or "name" not in values:
        fix = "`meshwright doctor --measure FILE` writes such a file; recipes/cluster/ has others to copy"
        return {}, [Problem(KEY, str(file), "not a machine's file: it has no key `name`", fix, label_of(file))]
    return values, []


def write_cluster_file(file: Path, text: str) -> None:
    """Writes the file whole or not at all; its folder is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_file(file, text.encode(), 0o644)
