"""Mistakes in a recipe: how a list of them is printed, and rules between keys that find them."""

import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from framework.output import show_controls
from framework.recipe.environment import HIDDEN, hide_override, hide_secrets, is_private
from framework.recipe.keys import default_of, plain, value_of
from framework.recipe.schema import Recipe

COMMAND_LINE = "command line"
DEFAULT = "default"
# The keys that the number of ranks is read from.
COUNTED = ("launch.kind", "launch.ranks", "launch.nodes", "launch.ranks_per_node")
DEGREES = ("parallel.dp", "parallel.tp", "parallel.pp", "parallel.cp")


@dataclass(frozen=True)
class Problem:
    """One mistake."""

    key: str
    # None: nothing to show.
    value: Any
    # Why it cannot work.
    message: str
    fix: str = ""
    # Where it was written: `recipes/optim/adamw.yaml:3`, `command line`, `default`.
    origin: str = ""
    # The key is not written anywhere.
    missing: bool = False
    # The value has no effect beside the others: the key may as well be at its default.
    is_useless: bool = False


def find_width() -> int:
    """Columns for a text: those of the terminal, within reason, and 110 where there is none."""
    return max(60, min(shutil.get_terminal_size((110, 24)).columns, 120))


def render_problems(problems: Sequence[Problem]) -> str:
    """All problems in the order of their files and lines: `key = value` and origin in two columns, below them what is wrong
    and, after an arrow, what to do."""
    width = find_width()
    ordered = sorted(map(_hide_private, problems), key=lambda problem: _place(problem.origin))
    heads = [each.key if each.value is None else f"{each.key} = {show(each.value)}" for each in ordered]
    column = min(max((len(head) for head in heads), default=0), width * 3 // 5)
    lines = [f"{len(ordered)} problem{'s' if len(ordered) != 1 else ''} in the recipe"]
    for problem, head in zip(ordered, heads, strict=True):
        lines += ["", f"  {head:{column}}   {problem.origin}".rstrip()]
        lines += _explanation(problem, width)
    return show_controls(hide_secrets("\n".join(lines)))


def shipped_recipes() -> Path:
    """The folder of the recipes that come with the package: a link to the repository's `recipes/`, in a wheel its files."""
    return (Path(__file__).parents[1] / "shipped" / "recipes").resolve()


def label_of(file: Path) -> str:
    """A recipe's file for messages: `recipes/optim/adamw.yaml` for a shipped one, wherever one stands; any other as short as
    it still opens from here."""
    file, here, shipped = file.resolve(), Path.cwd(), shipped_recipes()
    if file.is_relative_to(shipped):
        return file.relative_to(shipped.parent).as_posix()
    return file.relative_to(here).as_posix() if file.is_relative_to(here) else str(file)


def yaml_problem(error: Exception, label: str) -> Problem:
    """A file that is not YAML, or not UTF-8: the parser's reason and its line. `label` stands for a file without a name."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(label, None, f"not a text file of YAML: {error}", "", label)
    mark = error.problem_mark
    file = label if mark.name.startswith("<") else label_of(Path(mark.name))
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    looks_right = isinstance(error, yaml.constructor.ConstructorError)  # such as a key that is there twice
    fix = "" if looks_right else "check indentation (spaces, no tabs), colons and brackets at and above this line"
    return Problem(Path(file).name, None, f"not valid YAML: {reason}", fix, f"{file}:{mark.line + 1}")


def show(value: Any) -> str:
    """A value as a recipe writes it, on one line and not longer than reads well."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=10**6, allow_unicode=True).strip()
    text = hide_secrets(text.removesuffix("...").strip())
    return text if len(text) <= 60 else text[:57] + "..."


def _hide_private(problem: Problem) -> Problem:
    """The problem without its value in all texts, if no log may have it: a refused secret is still a secret."""
    key, equals, typed = problem.key.partition("=")
    value = typed if equals else problem.value
    if value is None or not is_private(key, value):
        return problem
    message, fix = problem.message, problem.fix
    for shown in {str(value), show(value)} if len(str(value)) > 3 else ():  # shorter ones would be found in other words
        message, fix = message.replace(shown, HIDDEN), fix.replace(shown, HIDDEN)
    return replace(problem, key=hide_override(problem.key), value=None, message=message, fix=fix)


def _explanation(problem: Problem, width: int) -> list[str]:
    """Message and fix on one line if that is short, else the fix on lines of its own."""
    together = f"    {problem.message} -> {problem.fix}"
    if problem.fix and len(together) <= width:
        return [together]
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    lines = wrap(problem.message, initial_indent="    ", subsequent_indent="    ")
    return lines + wrap(problem.fix, initial_indent="    -> ", subsequent_indent="       ")


def _place(origin: str) -> tuple[bool, str, int]:
    """Sort key of an origin: the command line first, then files, each by line."""
    file, _, line = origin.rpartition(":")
    return (origin != COMMAND_LINE, file, int(line)) if line.isdigit() else (origin != COMMAND_LINE, origin, 0)


# Problems, or (key, why its value cannot work, what to do).
Findings = Iterator[Problem | tuple[str, str, str]]


@dataclass(frozen=True)
class Rule:
    """A rule is silent where a key that it reads is wrong already, so that a mistake is reported once, with its own reason.

    A search asks a rule once for all layouts that agree in these keys.
    """

    # Keys, or groups of keys.
    reads: tuple[str, ...]
    find: Callable[[Recipe], Iterator[Problem]]


def rule(*reads: str) -> Callable[[Callable[[Recipe], Findings]], Rule]:
    """Make a function of a recipe a rule that reads these keys."""

    def make(body: Callable[[Recipe], Findings]) -> Rule:
        def find(recipe: Recipe) -> Iterator[Problem]:
            return (each if isinstance(each, Problem) else refuse(recipe, *each) for each in body(recipe))

        return Rule(reads, find)

    return make


def refuse(recipe: Recipe, key: str, message: str, fix: str = "") -> Problem:
    """The problem that the value of a key cannot work."""
    return Problem(key, plain(value_of(recipe, key)), message, fix)


def refuse_useless(recipe: Recipe, key: str, message: str, way: str) -> Iterator[Problem]:
    """The problem that a key has no effect, if it is not at its default. way: values with which it has one."""
    if value_of(recipe, key) != default_of(key):
        yield replace(refuse(recipe, key, message, f"leave it out (~{key}); or {way}"), is_useless=True)
