"""Recipe files: where they are found, and Hydra's composition of them with the origin of every value.

Hydra reads and merges two dozen files anew each time, which takes nearly all of a composition's time. Whoever composes many
recipes in one process (sweeps, random recipes, tests) composes few selections of shipped files, so each of those is merged once,
for as long as no shipped file says anything else.
"""

import pickle
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from framework.errors import RecipeError
from framework.recipe.hydra_errors import HYDRA_ERRORS, explain_hydra
from framework.recipe.origins import find_file, trace_file
from framework.recipe.problem import Problem, label_of, shipped_recipes
from framework.recipe.yaml_file import RecipeSource


def search_path(recipe_dirs: Sequence[Path] = ()) -> list[Path]:
    """The folders in which recipes are found, the first one first: the user's own, then the shipped ones."""
    folders = [Path(folder).expanduser().resolve() for folder in recipe_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError(f"--recipes {folder}: there is no such folder")
    if shipped_recipes().is_dir():
        folders.append(shipped_recipes())
    if find_file("config", folders) is None:
        raise RecipeError(
            f"no recipes: {shipped_recipes()} does not exist and no --recipes folder has a config.yaml;"
            " install Meshwright anew, or give --recipes DIR"
        )
    return folders


def compose_files(
    folders: Sequence[Path], choices: Sequence[Override]
) -> tuple[DictConfig, dict[str, str], list[Problem]]:
    """`config.yaml` with the chosen recipes of each group: the untyped tree, the origin of each of its keys, and what Hydra
    could not read. With a problem the tree is empty."""
    lines = tuple(str(choice.input_line) for choice in choices)
    shipped = shipped_recipes()
    try:
        if list(folders) == [shipped]:
            tree, origins = pickle.loads(_merge_shipped(shipped, lines, _read_all(shipped)))
        else:  # a user's folder may be a large one, which is not read through to see whether a file has changed
            tree, origins = _merge(tuple(folders), lines)
    except HYDRA_ERRORS as error:
        return OmegaConf.create(), {}, [explain_hydra(error, choices, folders)]
    return OmegaConf.create(tree), origins, []


@lru_cache(maxsize=256)
def _merge_shipped(folder: Path, lines: tuple[str, ...], texts: tuple[tuple[str, bytes], ...]) -> bytes:
    """`_merge` of shipped files, pickled so that each caller has a tree of its own. texts: what all of them say."""
    return pickle.dumps(_merge((folder,), lines))


def _read_all(folder: Path) -> tuple[tuple[str, bytes], ...]:
    """(path, what it says) of every recipe in a folder."""
    return tuple((str(file), file.read_bytes()) for file in sorted(folder.rglob("*.yaml")))


def _merge(folders: tuple[Path, ...], lines: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with its interpolations unresolved, as plain values, and the origin of each of its keys."""
    with initialize_config_dir(str(folders[-1]), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        _search_first(folders[:-1], loader)
        tree = compose("config", list(lines))
        merged = loader.compute_defaults_list("config", list(lines), RunMode.RUN).defaults
    origins: dict[str, str] = {}
    for entry in merged:
        file = find_file(entry.config_path or "", folders)
        if file is not None:
            trace_file(origins, file, entry.package or "", label_of(file))
    return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False)), origins


def _search_first(folders: Sequence[Path], loader: Any) -> None:
    """Have Hydra look into `folders`, in this order, before the one it was initialised with, and read files as RecipeSource does.

    `hydra.searchpath` only adds folders behind that one, so a user's recipe could not stand for a shipped one of the same name.
    """
    for folder in folders:
        loader.get_search_path().prepend("recipes", f"file://{folder}", anchor="main")
    loader.repository.initialize_sources(loader.get_search_path())
    sources = loader.repository.sources
    sources[:] = [RecipeSource(each.provider, each.path) if each.scheme() == "file" else each for each in sources]
