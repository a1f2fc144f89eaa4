"""Recipe files: a loader of YAML, where each value was written, and Hydra's composition of files with its errors as problems.

The loader reads OmegaConf's dialect. An alias (`*name`) repeats what its anchor (`&name`) marks, so ten lines can stand for 10^9
values. The parser keeps one copy of them; code that walks the tree afterwards does not. The bound is checked on the parser's
graph, before anything walks it.

An origin is a file and line, or the command line. Hydra says which files it merged, in which order and at which place of the
tree, but not what each one set; so the files are read once more, for the positions of their keys. Later files win, as in the
merge itself.

Hydra reads and merges two dozen files anew each time, which takes nearly all of a composition's time. Sweeps, random recipes and
tests compose few selections of shipped files, so each of those is merged once, as long as no shipped file changes.

Hydra stops at the first error and seldom says where it was reading, so the place is looked up: in the file that the message
names, else in the recipes that the command line chose, else in all.
"""

import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.defaults_list import create_defaults_list
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from framework.errors import RecipeError
from framework.recipe.keys import join, list_groups, nearest
from framework.recipe.problem import COMMAND_LINE, DEFAULT, Problem, label_of, shipped_recipes, yaml_problem

ENDINGS = (".yaml", ".yml")
# A measured cluster file has some thousand values, the largest recipe of ours 300.
MAX_VALUES = 100_000
# Errors of composing that a file may cause; ValueError: not UTF-8, or not a mapping, or a wrong defaults list.
HYDRA_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, RecursionError)


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


def _count_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Values below a node with its aliases written out. known: counts of the nodes seen, by id; a node within itself has none."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1  # what an alias to one of the nodes around it counts: it would not end
        children = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum([_count_values(each, known) for each in children])
    return known[id(node)]


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


# --- places and origins


def find_file(config_path: str, folders: Sequence[Path]) -> Path | None:
    """The file of a Hydra config path such as `optim/adamw`: the first on the search path."""
    name = config_path if config_path.endswith((".yaml", ".yml")) else f"{config_path}.yaml"
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def list_defaults(folders: Sequence[Path]) -> dict[str, Any]:
    """The recipe of each group that config.yaml chooses; none where it cannot be read, as composing will say."""
    file = find_file("config", folders)
    try:
        config = yaml.load(file.read_text(encoding="utf-8"), Loader=YamlLoader) if file else None
    except (yaml.YAMLError, UnicodeDecodeError):
        return {}
    defaults = config.get("defaults") if isinstance(config, dict) else None
    return {group: option for entry in defaults or () if isinstance(entry, dict) for group, option in entry.items()}


def list_options(group: str, folders: Sequence[Path]) -> list[str]:
    """Names of a group's recipes, without those of a group inside it (optim/schedule)."""
    inner = set(list_groups()) - {group}
    options = set()
    for folder in folders:
        for file in (folder / group).rglob("*.yaml"):
            if file.parent.relative_to(folder).as_posix() not in inner:
                options.add(file.relative_to(folder / group).with_suffix("").as_posix())
    return sorted(options)


def missing_option(group: str, option: str, folders: Sequence[Path], origin: str) -> Problem:
    """The problem that `group` has no recipe `option`."""
    options = list_options(group, folders)
    short = Path(option).stem if option.endswith(ENDINGS) else option
    meant = short.lower().removeprefix(group)
    guess = [each for each in options if meant and each.endswith(meant)] or nearest(short, options)
    fix = (f"did you mean {group}={guess[0]}? " if guess else "") + f"there are: {', '.join(options) or 'none'}"
    return Problem(group, option, f"no recipe {short}.yaml in the folder {group}/", fix, origin)


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


def _positions(node: yaml.MappingNode, path: str) -> Iterator[tuple[str, int]]:
    for name, value in node.value:
        where = join(path, name.value)
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _positions(value, where)
        else:
            yield where, name.start_mark.line + 1


# --- Hydra's composition


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
