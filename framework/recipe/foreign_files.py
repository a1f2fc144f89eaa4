"""Whole files of other systems as recipes: `meshwright check --from FILE`.

The table of `foreign.yaml` translates names and values one by one, `foreign_forms.py` what follows from several values together.
Values that a file leaves to its system's defaults are written out.
"""

import json
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from framework.errors import EXIT_DONE, RecipeError
from framework.recipe.compose import compose
from framework.recipe.convert import MANDATORY
from framework.recipe.foreign import Foreign, names_of, normalize, suffixes
from framework.recipe.foreign_forms import FORMS, Form, Reading
from framework.recipe.keys import flatten
from framework.recipe.problem import Problem, render_problems, show


def convert_command(file: Path, overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> int:
    """Print the file's recipe as an experiment, checked, with what it leaves out. The exit code is that of a user's mistake where
    the recipe is one that cannot be run."""
    form, reading = read_file(file, count_ranks_asked(overrides))
    problems = check_experiment(render(file, form, reading), overrides, recipe_dirs)
    missing = [problem for problem in problems if problem.missing or problem.value == MANDATORY]
    reading.absent += [f"to be given: {problem.key}=..." for problem in missing]
    print(render(file, form, reading))
    wrong = [problem for problem in problems if problem not in missing]
    if wrong:
        raise RecipeError(f"the recipe of {file} needs changes:\n{render_problems(wrong)}")
    return EXIT_DONE


def check_experiment(text: str, overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> list[Problem]:
    """Explain what is wrong with an experiment's file, together with the overrides."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "experiment").mkdir()
        (Path(folder) / "experiment" / "converted.yaml").write_text(text, encoding="utf-8")
        return compose(["experiment=converted", *overrides], [Path(folder), *recipe_dirs]).problems


def count_ranks_asked(overrides: Sequence[str]) -> int:
    """Ranks that the command line asks for: few files of others say how many there are."""
    asked = [text.partition("=")[2] for text in overrides if text.startswith("launch.ranks=")]
    return int(asked[-1]) if asked and asked[-1].isdecimal() else 1


def read_file(file: Path, ranks: int) -> tuple[Form, Reading]:
    """The form of a file, and what it says in our keys. RecipeError for a file of no form that is known."""
    tree = _load(file)
    values = {normalize(name): value for name, value in flatten(tree).items()}
    form = find_form(file, tree)
    names = {suffix for name in values for suffix in suffixes(name)}
    absent = {name: value for name, value in form.defaults.items() if name not in names}
    reading = Reading(values | absent, ranks)
    form.settle(reading)
    for name, value in reading.values.items():
        _translate(reading, form, name, value, is_default=name in absent)
    _complete(file, reading)
    return form, reading


def _complete(file: Path, reading: Reading) -> None:
    """A name for the run, what the file says nowhere, and what two of its values are not together here."""
    settings = reading.settings
    settings.setdefault("run.name", re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("._-")[:64] or "run")
    if "model" not in reading.groups and not settings.keys() & {"model.weights", "model.family"}:
        reading.absent.append("the file names no model: model.weights=FOLDER, model=... or model.config_file=FILE")
    if "batch.context" not in settings:
        reading.absent.append("the file names no length of sequences: batch.context=...")
    if settings.get("memory.compile") == "always" and settings.get("memory.activation_checkpointing") == "selective":
        del settings["memory.compile"]
        reading.differs.append(
            "compiled layers decide themselves what is kept: left out beside selective checkpointing"
        )


def find_form(file: Path, tree: Mapping[str, Any]) -> Form:
    """The form whose marks a file has."""
    sections = {normalize(name) for name, value in tree.items() if isinstance(value, dict)}
    names = {normalize(name) for name in tree} - sections
    for form in FORMS:
        if (sections if form.has_sections else names) & set(form.marks):
            return form
    known = ", ".join(f"{form.name} ({' or '.join(form.marks[:3])})" for form in FORMS)
    raise RecipeError(f"--from {file}: no form that is known: a file has one of the names in brackets: {known}")


def render(file: Path, form: Form, reading: Reading) -> str:
    """An experiment's file, with what has no counterpart and what differs as comments."""
    lines = ["# @package _global_", f"# {form.name}'s {file.name}, as `meshwright check --from` reads it."]
    if reading.groups:
        lines += [
            "defaults:",
            *(f"  - override /{group}: {name}" for group, name in sorted(reading.groups.items())),
            "",
        ]
    tree: dict[str, Any] = {}
    for key, value in sorted(reading.settings.items()):
        *groups, name = key.split(".")
        inner = tree
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[name] = value
    lines.append(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).rstrip())
    for title, found in (("No counterpart", reading.absent), ("Other meaning", reading.differs)):
        if found:
            lines += ["", f"# {title}:", *(f"#   {' '.join(line.split())}" for line in found)]
    return "\n".join(lines)


def _load(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            tree = tomllib.loads(text)
        else:
            tree = json.loads(text) if file.suffix == ".json" else yaml.load(text, Loader=get_yaml_loader())
    except OSError as error:
        raise RecipeError(f"--from {file}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"--from {file}: cannot be read as {file.suffix or 'YAML'}: {error}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"--from {file}: no names with values in it")
    return tree


def _translate(reading: Reading, form: Form, name: str, value: Any, is_default: bool) -> None:
    """Enter one value: into the settings, or a line on why it is not there."""
    if value is None or value in ([], {}, ""):
        return
    line = f"{name}: {show(value)}"
    found = _find(form, name)
    if found is None:
        if not is_default:
            reading.absent.append(f"{line}: no key of ours has this name's meaning")
        return
    settings = found.settings(value)
    if settings is None:
        if value is not False and not is_default:  # what is off elsewhere is not missed
            reading.absent.append(f"{line}: {found.note or found.key}")
        return
    for key, ours in settings.items():
        if not key.startswith("model.config."):
            key = key.replace(".NAME.", ".files.")
        reading.settings.setdefault(key, ours)
        if found.differs:
            reading.differs.append(f"{line} is {key}={show(ours)}: {found.differs}")


def _find(form: Form, name: str) -> Foreign | None:
    for suffix in suffixes(name):
        for system in form.systems:
            if suffix in names_of(system):
                return names_of(system)[suffix]
    return None
