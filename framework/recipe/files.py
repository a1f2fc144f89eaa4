"""Recipe files: where they are found, Hydra's composition of them with the origin of every value, and Hydra's errors as problems.

Hydra reads and merges two dozen files anew each time, which takes nearly all of a composition's time. Sweeps, random recipes and
tests compose few selections of shipped files, so each of those is merged once, as long as no shipped file changes.

Hydra stops at the first error and seldom says where it was reading, so the place is looked up: in the file that the message
names, else in the recipes that the command line chose, else in all.
"""

import pickle
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from framework.errors import RecipeError
from framework.recipe.origins import RecipeSource, find_file, trace_file
from framework.recipe.overrides import missing_option
from framework.recipe.problem import Problem, label_of, shipped_recipes, yaml_problem
from framework.recipe.suggest import nearest

# Errors of composing that a file may cause; ValueError: not UTF-8, or not a mapping, or a wrong defaults list.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError)


def search_path(recipe_dirs: Sequence[Path] = ()) -> list[Path]:
    """Folders of recipes in the order of the search: the user's own, then the shipped ones."""
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
            texts = tuple((str(file), file.read_bytes()) for file in sorted(shipped.rglob("*.yaml")))
            tree, origins = pickle.loads(_merge_shipped(shipped, lines, texts))
        else:  # a user's folder may be a large one, which is not read through to see whether a file has changed
            tree, origins = _merge(tuple(folders), lines)
    except HYDRA_ERRORS as error:
        return OmegaConf.create(), {}, [explain_hydra(error, choices, folders)]
    return OmegaConf.create(tree), origins, []


@lru_cache(maxsize=256)
def _merge_shipped(folder: Path, lines: tuple[str, ...], texts: tuple[tuple[str, bytes], ...]) -> bytes:
    """`_merge` of shipped files, pickled so that each caller has a tree of its own. texts: all of their contents."""
    return pickle.dumps(_merge((folder,), lines))


def _merge(folders: tuple[Path, ...], lines: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree with its interpolations unresolved, as plain values, and the origin of each of its keys."""
    with initialize_config_dir(str(folders[-1]), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
        _search_first(folders[:-1], loader)
        # The steps of Hydra's `compose`, which does not tell which files it merged: to ask for them would read all again.
        overrides, repository = loader._parse_overrides_and_create_caching_repo("config", list(lines))
        merged = create_defaults_list(repository, "config", overrides, prepend_hydra=False, skip_missing=False).defaults
        tree = loader._compose_config_from_defaults_list(merged, repository)
    origins: dict[str, str] = {}
    for entry in merged:
        file = find_file(entry.config_path or "", folders)
        if file is not None:
            trace_file(origins, file, entry.package or "", label_of(file))
    return cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False)), origins


def _search_first(folders: Sequence[Path], loader: Any) -> None:
    """Make Hydra search `folders`, in this order, before the one it was initialised with, and read files as RecipeSource does.

    `hydra.searchpath` only adds folders behind that one, so a user's recipe could not stand for a shipped one of the same name.
    """
    for folder in folders:
        loader.get_search_path().prepend("recipes", f"file://{folder}", anchor="main")
    loader.repository.initialize_sources(loader.get_search_path())
    sources = loader.repository.sources
    sources[:] = [RecipeSource(each.provider, each.path) if each.scheme() == "file" else each for each in sources]


def explain_hydra(error: Exception, choices: Sequence[Override], folders: Sequence[Path]) -> Problem:
    """The problem behind an exception of HYDRA_ERRORS; `choices`: the command line's, which all exist."""
    values = [(choice.key_or_group, choice.value()) for choice in choices]
    options = [f"{group}/{each}" for group, value in values for each in (value if isinstance(value, list) else [value])]
    chosen = [file for option in options if (file := find_file(option, folders)) is not None]
    files = [*chosen, *(file for folder in folders for file in sorted(folder.rglob("*.yaml")))]
    if isinstance(error, UnicodeDecodeError):
        return yaml_problem(error, next(label_of(file) for file in files if file.read_bytes() == error.object))
    if isinstance(error, yaml.YAMLError):
        return yaml_problem(error, "recipes")
    unpackaged = next(filter(_lacks_package, chosen), None)
    if unpackaged and not isinstance(error, GrammarParseError):
        message = "Hydra takes its keys and its defaults for those of a group `experiment`"
        fix = "an experiment's file begins with the line `# @package _global_`"
        return Problem("experiment", unpackaged.stem, message, fix, f"{label_of(unpackaged)}:1")
    if isinstance(error, RecursionError):
        message = "a defaults list leads back to its own file"
        fix = "a recipe that extends another one needs a name of its own"
        lines = (_find_line(rf"^\s*(-|defaults:).*\b{re.escape(file.stem)}\b", [file]) for file in files)
        return Problem("defaults", None, message, fix, next(filter(None, lines), "recipes"))
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        origin = _find_line(rf"^\s*(-|defaults:).*\b{re.escape(option)}\b", files)
        return missing_option(group, option, folders, origin or "recipes")
    return _explain_text(error, chosen, files, folders)


def _explain_text(error: Exception, chosen: Sequence[Path], files: Sequence[Path], folders: Sequence[Path]) -> Problem:
    text = str(error)
    twice = re.match(r"Multiple values for (\S+)\. To override a value use 'override \S+: (\S+)'", text)
    if twice:
        group, option = twice.groups()
        origin = _find_line(rf"{re.escape(group)}\s*:\s*{re.escape(option)}", files) or "recipes"
        fix = f"write it as `- override /{group}: {option}`"
        return Problem(group, option, "the defaults list chooses this group a second time", fix, origin)
    message = _plain_words(text)
    if isinstance(error, GrammarParseError):
        message = f"not an interpolation such as ${{train.steps}}: {message}"
    named = re.search(r"\b[Ii]n '?([\w./-]+)'?", text)
    file = find_file(named[1], folders) if named else None
    likely = [file] if file else chosen
    quoted = re.search(r"'([^']+)'", message)
    origin = _find_line(re.escape(quoted[1]), likely or files) if quoted else ""
    word = quoted[1] if quoted else "defaults"
    guess = nearest(word, {folder.name for root in folders for folder in root.iterdir() if "/" not in word})
    fix = f"did you mean {guess[0]}?" if guess else ""
    return Problem(word, None, message, fix, origin or next(map(label_of, likely), "recipes"))


def _plain_words(text: str) -> str:
    """A message of Hydra's or OmegaConf's on one line, without its own prefixes."""
    lines = [line for line in text.splitlines() if not re.match(r"\s*(full_key|object_type|reference_type)\b", line)]
    message = " ".join(" ".join(lines).split())
    return re.sub(r"^(In '?[\w./-]+'?: )?(\w+ raised while composing config: )?", "", message)


def _lacks_package(file: Path) -> bool:
    text = file.read_text(encoding="utf-8", errors="replace").removeprefix("\ufeff")
    return file.parent.name == "experiment" and not re.search(r"^#\s*@package\s+_global_\s*$", text, re.MULTILINE)


def _find_line(pattern: str, files: Sequence[Path]) -> str:
    """File and line of the first match; "" without one."""
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if re.search(pattern, line):
                return f"{label_of(file)}:{number}"
    return ""
