"""Recipe files: where they are found, and Hydra's composition of them with the origin of every value."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from framework.errors import RecipeError
from framework.recipe.origins import find_file, trace_file
from framework.recipe.overrides import missing_option
from framework.recipe.problem import Problem, label_of, yaml_problem
from framework.recipe.suggest import nearest


def search_path(recipe_dirs: Sequence[Path] = ()) -> list[Path]:
    """The folders in which recipes are found, the first one first: the user's own, then the shipped ones.

    The shipped ones are the repository's `recipes/`, beside the package. An installation without it (a wheel) works with a
    `--recipes` folder that has a config.yaml of its own.
    """
    folders = [Path(folder).expanduser().resolve() for folder in recipe_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise RecipeError(f"--recipes {folder}: there is no such folder")
    if shipped_recipes().is_dir():
        folders.append(shipped_recipes())
    if find_file("config", folders) is None:
        raise RecipeError(
            f"no recipes: {shipped_recipes()} does not exist and no --recipes folder has a config.yaml; "
            "install from a clone of the repository (pip install --editable .) or give --recipes DIR"
        )
    return folders


def shipped_recipes() -> Path:
    return Path(__file__).resolve().parents[2] / "recipes"


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
    except (
        yaml.YAMLError,
        HydraException,
        OmegaConfBaseException,
        ValueError,
    ) as error:  # ValueError: not UTF-8, or no mapping
        return OmegaConf.create(), {}, [_explain(error, _likely_files(folders, choices), folders)]
    OmegaConf.set_struct(tree, False)
    origins: dict[str, str] = {}
    for entry in merged:
        file = find_file(entry.config_path or "", folders)
        if file is not None:
            trace_file(origins, file, entry.package or "", _label(file, folders))
    return tree, origins, []


def _search_first(folders: Sequence[Path], loader: Any) -> None:
    """Lets Hydra look into `folders`, in this order, before the one it was initialised with. (`hydra.searchpath` only adds
    folders behind that one, and so could not let a user's recipe stand for a shipped one of the same name.)"""
    for folder in folders:
        loader.get_search_path().prepend("recipes", f"file://{folder}", anchor="main")
    loader.repository.initialize_sources(loader.get_search_path())


def _label(file: Path, folders: Sequence[Path]) -> str:
    """`recipes/optim/adamw.yaml` for a shipped recipe, wherever one stands; a user's own as a path that opens."""
    shipped = shipped_recipes()
    return file.relative_to(shipped.parent).as_posix() if file.is_relative_to(shipped) else label_of(file)


def _likely_files(folders: Sequence[Path], choices: Sequence[Override]) -> list[Path]:
    """All recipes, with those that the command line chose first: Hydra often does not say in which file it stumbled."""
    chosen = [f"{choice.key_or_group}/{option}" for choice in choices for option in _options(choice)]
    files = [file for option in chosen if (file := find_file(option, folders))]
    return files + [file for folder in folders for file in sorted(folder.rglob("*.yaml"))]


def _options(choice: Override) -> list[str]:
    value = choice.value()
    return [str(option) for option in value] if isinstance(value, list) else [str(value)]


def _explain(error: Exception, files: Sequence[Path], folders: Sequence[Path]) -> Problem:
    """What Hydra says of a file, with the file and line where that can be found."""
    if isinstance(error, UnicodeDecodeError):
        unread = next((_label(file, folders) for file in files if file.read_bytes() == error.object), "recipes")
        return yaml_problem(error, unread)
    if isinstance(error, yaml.YAMLError):
        return yaml_problem(error, "recipes")
    if isinstance(error, MissingConfigException):  # a defaults list; the command line's choices were checked before
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        named = re.compile(rf"^\s*(-|defaults:).*\b{re.escape(option)}\b")
        return missing_option(group, option, folders, _find_line(named, files, folders))
    text = str(error) or str(error.__cause__)
    message = re.sub(r"^In '[^']+': ", "", text.splitlines()[0])
    if isinstance(error.__cause__, GrammarParseError):
        message = f"not an interpolation such as ${{train.steps}}: {message}"
    quoted = re.search(r"'([^']+)'", message)
    if quoted is None:
        return Problem("recipes", None, message, "", "recipes")
    origin = _find_line(re.compile(re.escape(quoted[1])), files, folders)
    groups = {folder.name for root in folders for folder in root.iterdir() if folder.is_dir()}
    guess = nearest(quoted[1], groups)
    return Problem(quoted[1], None, message, f"did you mean {guess[0]}?" if guess else "", origin)


def _find_line(pattern: re.Pattern[str], files: Sequence[Path], folders: Sequence[Path]) -> str:
    """Where the first line that matches stands."""
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                return f"{_label(file, folders)}:{number}"
    return "recipes"
