"""The command line's overrides in Hydra's grammar: choices of a group's recipe, values, sweeps.

Group choices go to Hydra. Values are applied here, one by one and untyped: Hydra stops at the first unknown key and advises a `+`
that does not help, while a wrong key or value belongs in the one list of problems.
"""

import itertools
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.errors import RecipeError
from framework.output import first_line
from framework.recipe.convert import CLUSTER, LAYOUT
from framework.recipe.environment import HIDDEN, is_private
from framework.recipe.files import (
    ENDINGS,
    find_file,
    list_defaults,
    list_options,
    missing_option,
    origin_of,
    remove_origin,
    trace_value,
)
from framework.recipe.keys import explain_unknown, list_paths
from framework.recipe.problem import COMMAND_LINE, Problem, render_problems, show
from framework.recipe.schema import Run

PLUGINS = "plugins"


@dataclass(frozen=True)
class CommandLine:
    """Parsed overrides."""

    # Each names a recipe that exists.
    choices: list[Override] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    # (layout or cluster, its file) of `layout=FILE` and `cluster=FILE.yaml`.
    parts: list[tuple[str, Path]] = field(default_factory=list)
    # Plugins that it adds to those of the files; None: no recipe may have any.
    plugins: list[Any] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def parse_overrides(overrides: Iterable[str], folders: Sequence[Path]) -> CommandLine:
    """Sort overrides into group choices (checked against the recipes in `folders`) and values."""
    command = CommandLine()
    for text in overrides:
        try:
            override = _parse(text)
            if not override.key_or_group:  # of `optim.lr = 3`
                raise OverrideParseException(text, "no key")
        except OverrideParseException:
            command.problems.append(_explain_grammar(text, folders))
            continue
        if part := _find_part(override, folders):
            command.parts.append(part)
        elif override.key_or_group == PLUGINS and not override.is_sweep_override() and not override.is_delete():
            value = override.value()
            command.plugins.extend(value if isinstance(value, list) else [value])
        elif problem := _explain_form(override, folders):
            command.problems.append(problem)
        elif is_choice(override, folders):
            command.choices.append(override)
        else:
            command.values.append(override)
    return command


def _find_part(override: Override, folders: Sequence[Path]) -> tuple[str, Path] | None:
    """(layout or cluster, the file that is named). Where the user has a folder of that name, other values choose from it."""
    key = override.key_or_group
    if key not in (LAYOUT, CLUSTER) or override.is_sweep_override() or override.is_delete():
        return None
    value = override.value()
    is_file = isinstance(value, str) and (value.endswith(ENDINGS) or not is_group(key, folders))
    return (key, Path(str(value)).expanduser()) if is_file else None


def is_choice(override: Override, folders: Sequence[Path]) -> bool:
    """Whether an override chooses a recipe, by Hydra's own rule: the key is a folder of recipes and the value is not a mapping
    (`optim={lr: 1}` sets values)."""
    key = override.key_or_group
    return is_group(key, folders) and not isinstance(override.value(), dict)


def is_group(key: str, folders: Sequence[Path]) -> bool:
    return "." not in key and any((folder / key).is_dir() for folder in folders)


def apply_values(tree: DictConfig, values: Iterable[Override], origins: dict[str, str]) -> list[Problem]:
    """Set, add (`+`, `++`) and remove (`~`) values in the composed tree, in the order given."""
    problems = []
    for override in values:
        try:
            problem = _apply(tree, override, origins)
        except OmegaConfBaseException as error:  # such as a malformed ${interpolation}
            problem = Problem(override.key_or_group, override.value(), first_line(error), "", COMMAND_LINE)
        if problem:
            problems.append(problem)
    return problems


def expand_sweep(overrides: Iterable[str]) -> list[list[str]]:
    """The cartesian product of a multirun's overrides, the last one varying fastest: `a=1,2 b=x,y` gives four lists.
    Choices and `range(...)` expand as in Hydra's basic sweeper."""
    choices, problems = [], []
    for text in overrides:
        try:
            override = _parse(text)
            if override.is_sweep_override() and (not override.is_discrete_sweep() or isinstance(override._value, Glob)):
                raise HydraException("only lists of values and range(...) can be swept")
            swept = override.sweep_string_iterator() if override.is_sweep_override() else None
            choices.append([text] if swept is None else [f"{override.get_key_element()}={value}" for value in swept])
        except OverrideParseException:
            problems.append(_explain_grammar(text))
        except HydraException as error:
            problems.append(Problem(text, None, str(error), "list the values: key=a,b,c", COMMAND_LINE))
    if problems:
        raise RecipeError(render_problems(problems))
    return [list(combination) for combination in itertools.product(*choices)]


def write_override(key: str, text: str) -> str:
    """`key=text` in the command line's grammar, quoted where the grammar would read the text as something else. The shell's
    quotes come around it."""
    plain = f"{key}={text}"
    with suppress(OverrideParseException):
        value = _parse(plain).value()
        if value == text and isinstance(value, str) and "${" not in text:
            return plain
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # else the recipe would resolve it
    return f"{key}={QuotedString(escaped, Quote.double).with_quotes()}"


def write_value(value: Any) -> str:
    """A value in the command line's grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{write_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(write_value, value)) + "]"
    if isinstance(value, str):
        return write_override("key", value).removeprefix("key=")
    return json.dumps(value)


def write_resume(kind: str, run: Run, *more: str) -> str:
    """The command that resumes a run, which has an id. kind: launch.kind."""
    verb = "train" if kind == "local" else "submit"
    place = [] if run.root == Run().root else [write_override("run.root", run.root)]
    return shlex.join(["meshwright", verb, write_override("run.id", str(run.id)), *place, *more])


def explain_flag(flag: str, folders: Sequence[Path] = ()) -> Problem:
    """The problem of a key, or a recipe's file, written as a flag: `--learning_rate=1e-3`, `--config=mine.yaml`."""
    name, _, value = flag.lstrip("-").partition("=")
    message = "no such option; a recipe's keys are written without dashes"
    if value.endswith(ENDINGS):
        return Problem(flag, None, message, _explain_word(value, folders), COMMAND_LINE)
    fix = f"did you mean {name}?" if name in list_paths() else explain_unknown(name)
    ours, _, whose = fix.removeprefix("did you mean ").removesuffix("?").partition(" ")
    if is_group(name, folders) and (value in list_options(name, folders) or name in (ours, "experiment")):
        fix = f"write {name}={value or '...'}"
    elif ours in list_paths():
        fix = f"write {ours}={value or '...'} {whose}".rstrip()
    return Problem(flag, None, message, fix, COMMAND_LINE)


@lru_cache(maxsize=1024)  # Hydra's parser takes milliseconds for a word; nobody changes what it gives
def _parse(text: str) -> Override:
    return OverridesParser.create().parse_overrides([text])[0]


def _explain_grammar(text: str, folders: Sequence[Path] = ()) -> Problem:
    key, equals, value = text.partition("=")
    if not equals:
        fix = _explain_word(text, folders) or explain_unknown(key)
        return Problem(text, None, "an override is a key, an equals sign and a value", fix, COMMAND_LINE)
    if not key or not value:
        message = "an override is a key, an equals sign and a value, without spaces"
        return Problem(text, None, message, "such as train.steps=500", COMMAND_LINE)
    fix = f"text with characters such as = , : [ ] {{ }} is quoted twice, for the shell and for Hydra: '{key}=\"...\"'"
    return Problem(key, value, "this is not in Hydra's grammar", fix, COMMAND_LINE)


def _explain_word(text: str, folders: Sequence[Path]) -> str:
    """Advice on a word that sets nothing: a recipe's name or file, `key:value`, or a key alone."""
    file, is_file = Path(text), text.endswith(ENDINGS)
    name = file.stem if is_file else text
    found = {file.parent.relative_to(folder).as_posix() for folder in folders for file in folder.rglob("*.yaml")}
    groups = sorted(found - {"."}, key=lambda group: (group != "experiment", group))  # which people name most
    if choices := [f"{group}={name}" for group in groups if name in list_options(group, folders)]:
        return f"write {' or '.join(choices)}"
    if is_file:
        return _explain_file(file, folders)
    key, colon, value = text.partition(":")
    if key in list_paths() or is_group(key, folders):
        return f"write {key}={value.strip() or '...'}" if colon else f"write {key}=... with a value"
    return ""


def _explain_file(file: Path, folders: Sequence[Path]) -> str:
    """Advice on a recipe's file: how it is chosen, or how the run that has saved it is resumed."""
    if file.name == "recipe.yaml":
        return f"a run's own recipe: run.id={file.parent.name} goes on with that run"
    if file.parent.name and is_group(file.parent.name, folders):
        return f"write --recipes {file.parent.parent} {file.parent.name}={file.stem}"
    name = f"write --recipes DIR experiment={file.stem}"
    return f"recipes are chosen by name: keep the file in DIR/experiment/, and {name}"


def _explain_form(override: Override, folders: Sequence[Path]) -> Problem | None:
    """The problem of an override that does parse, before anything is composed."""
    key, text = override.key_or_group, override.input_line or ""
    if override.is_sweep_override():
        plain = text.partition("=")[2]
        fix = f"a list is {key}=[{plain}]; a text with a comma is '{key}=\"{plain}\"'; a sweep: meshwright train -m"
        return Problem(key, plain, "several values", fix, COMMAND_LINE)
    if override.is_hydra_override():
        fix = "recipes of your own: --recipes DIR; folders of runs: run.root"
        return Problem(text, None, "Hydra's own settings have no effect here", fix, COMMAND_LINE)
    if is_choice(override, folders):
        return _explain_choice(override, folders)
    if override.package is not None:
        return Problem(text, None, f"{key} is not a folder of recipes", f"write {key}=...", COMMAND_LINE)
    return None


def _explain_choice(override: Override, folders: Sequence[Path]) -> Problem | None:
    group, value = override.key_or_group, override.value()
    if override.is_delete():
        return None
    shown = value if isinstance(value, list) else [value]
    if value is None:
        return Problem(group, None, "null is not a recipe", f"leave the group out: ~{group}", COMMAND_LINE)
    if override.is_force_add() or (override.is_add() and override.package is None and group in list_defaults(folders)):
        fix = f"write {group}={show(value)}"
        message = f"{group} has a place already; nothing to add"
        return Problem(override.input_line or group, None, message, fix, COMMAND_LINE)
    for option in shown:
        if not isinstance(option, str) or find_file(f"{group}/{option}", folders) is None:
            return missing_option(group, str(option), folders, COMMAND_LINE)
    return None


def _apply(tree: DictConfig, override: Override, origins: dict[str, str]) -> Problem | None:
    key, value = override.key_or_group, override.value()
    if override.is_delete():
        return _remove(tree, key, value, origins)
    adds_one = override.is_add() and not isinstance(value, dict | list)
    if adds_one and OmegaConf.select(tree, key, throw_on_missing=False) is not None:
        where = origin_of(origins, key)
        return Problem(f"+{key}", value, f"{key} is set already ({where})", f"write {key}={show(value)}", COMMAND_LINE)
    OmegaConf.update(tree, key, value, merge=True, force_add=True)
    trace_value(origins, key, value)
    return None


def _remove(tree: DictConfig, key: str, value: Any, origins: dict[str, str]) -> Problem | None:
    parent_key, _, name = key.rpartition(".")
    parent = OmegaConf.select(tree, parent_key) if parent_key else tree
    if not isinstance(parent, DictConfig) or name not in parent:
        fix = "it has its default" if key in list_paths() else explain_unknown(key)
        return Problem(f"~{key}", None, "not set by any recipe, so there is nothing to remove", fix, COMMAND_LINE)
    if value is not None and parent[name] != value:
        found = HIDDEN if is_private(key, value) else show(parent[name])
        message = f"{key} is {found}, not {show(value)}, and stays"
        return Problem(f"~{key}", value, message, f"write ~{key}", COMMAND_LINE)
    del parent[name]
    remove_origin(origins, key)
    return None
