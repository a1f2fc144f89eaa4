"""Recipe files: where they are found, and Hydra's composition of them with the origin of every value."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from framework.errors import RecipeError
from framework.recipe.hydra_errors import HYDRA_ERRORS, explain_hydra
from framework.recipe.origins import find_file, trace_file
from framework.recipe.problem import Problem, label_of, shipped_recipes


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
    lines = [str(choice.input_line) for choice in choices]
    try:
        with initialize_config_dir(str(folders[-1]), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            _search_first(folders[:-1], loader)
            tree = compose("config", lines)
            merged = loader.compute_defaults_list("config", lines, RunMode.RUN).defaults
    except HYDRA_ERRORS as error:
        return OmegaConf.create(), {}, [explain_hydra(error, choices, folders)]
    OmegaConf.set_struct(tree, False)
    origins: dict[str, str] = {}
    for entry in merged:
        file = find_file(entry.config_path or "", folders)
        if file is not None:
            trace_file(origins, file, entry.package or "", label_of(file))
    return tree, origins, []


def _search_first(folders: Sequence[Path], loader: Any) -> None:
    """Lets Hydra look into `folders`, in this order, before the one it was initialised with. (`hydra.searchpath` only adds
    folders behind that one, and so could not let a user's recipe stand for a shipped one of the same name.)"""
    for folder in folders:
        loader.get_search_path().prepend("recipes", f"file://{folder}", anchor="main")
    loader.repository.initialize_sources(loader.get_search_path())
