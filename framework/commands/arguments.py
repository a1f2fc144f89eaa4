"""Arguments of the command line: one parser for all commands, and help with what was mistyped.

A command is a module of this room with `add_options(parser)` and `run(arguments)`. Its top imports no torch, so that `--help`
answers at once. A command that composes a recipe has `arguments.overrides` and `arguments.recipes`, the user's own folders.
"""

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from framework.errors import MeshwrightError, RecipeError
from framework.recipe.schema import Recipe

# Beneath the options of every command that takes a recipe.
_OVERRIDES = """OVERRIDE:  experiment=quickstart  model=gpt2   choose recipes
           train.steps=500  optim.lr=3e-4      set values
--help-recipe lists them all; `meshwright check --keys WORD` explains keys."""
# (launcher, variable with its number of processes, variable with this one's number)
_LAUNCHERS = (
    ("torchrun or another launcher of ranks", "WORLD_SIZE", "RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpirun", "PMIX_SIZE", "PMIX_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
)
# Steps from this number on are SLURM's own: the shell that salloc opens on a node, the batch script.
_OWN_STEPS = 0xFFFF_0000


class Parser(argparse.ArgumentParser):
    """An argparse parser whose mistakes are RecipeErrors, explained as any other and with our exit code."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}\n{self.format_usage().strip()}")


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    """The `type` of an option that is a number of at least so much."""

    def read(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is too small: at least {least:g}")
        return value

    read.__name__ = kind.__name__  # argparse's words for text that is no number: invalid int value
    return read


def make_parser(name: str, summary: str, composes: bool) -> Parser:
    """The parser of a command, without its own options. composes: the command takes the overrides of a recipe."""
    parser = Parser(
        prog=f"meshwright {name}",
        usage=f"meshwright {name} [options] OVERRIDE ..." if composes else None,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=_OVERRIDES if composes else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if composes:
        parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=argparse.SUPPRESS)  # the epilog's
        parser.add_argument("--help-recipe", action="store_true", help="list all recipes and keys, and exit")
        parser.add_argument(
            "--recipes",
            action="append",
            default=[],
            type=Path,
            metavar="DIR",
            help="a folder of your own recipes; repeatable",
        )
        parser.add_argument(
            "--plugins",
            action="append",
            default=[],
            metavar="PLUGIN",
            help="a package, folder or file (docs/extend.md)",
        )
        parser.add_argument("--no-plugins", action="store_true", help=argparse.SUPPRESS)
    return parser


def parse(parser: Parser, words: Sequence[str], composes: bool) -> argparse.Namespace:
    """The arguments. Options may stand anywhere among overrides. RecipeError with all that is unknown."""
    arguments, unknown = parser.parse_known_intermixed_args(words)
    if composes and arguments.help_recipe:
        print(_explain_overrides(arguments.recipes))
        parser.exit()
    if composes:
        arguments.overrides += [write_override_of(plugin) for plugin in arguments.plugins]
        arguments.overrides += ["plugins=null"] * arguments.no_plugins
    if unknown and not composes:
        parser.error(f"there is no option {' '.join(unknown)}{_guess_option(unknown[0], parser.format_help())}")
    if unknown:
        raise RecipeError(_explain_flags(_join_values(words, unknown), parser.format_help(), arguments.recipes))
    return arguments


def write_override_of(plugin: str) -> str:
    """The override that adds a plugin. A path is absolute: ranks have another working folder."""
    from framework.recipe.overrides import PLUGINS, write_override
    from framework.recipe.plugins import is_path

    path = Path(plugin).expanduser()
    return write_override(PLUGINS, str(path.absolute()) if is_path(plugin) or path.exists() else plugin)


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the argument of a command on one run."""
    parser.add_argument("run", metavar="RUN", help="a run's id or folder")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a checkpoint of the run."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="with checkpoint.keep_best: the best checkpoint")
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; else the newest")


def add_multirun(parser: argparse.ArgumentParser, how: str) -> None:
    """Add `-m`. how: the way in which the combinations are run."""
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help=f"every combination of values such as optim.lr=1e-3,3e-4 batch.context=256,512, {how}",
    )


def compose_recipe(arguments: argparse.Namespace) -> Recipe:
    """The recipe of a command line, with a layout chosen where parallel.layout=auto asks for one."""
    from framework.plan.auto import require_layout
    from framework.recipe.compose import compose

    return require_layout(compose(arguments.overrides, arguments.recipes), arguments.overrides, arguments.recipes)


def locate_keys(text: str, arguments: argparse.Namespace) -> list[str]:
    """Lines on where files set the keys that an error names: the checks of a layout know values alone."""
    from framework.recipe.compose import compose
    from framework.recipe.files import locate_named

    with suppress(MeshwrightError):
        return list(locate_named(text, compose(arguments.overrides, arguments.recipes).origins))
    return []


def refuse_launcher(environment: Mapping[str, str], command: str, is_terminal: bool = False) -> None:
    """Raises RecipeError where this process is one of several that a launcher has started: each would begin a run of its own.
    is_terminal: its input is a terminal, so that in `srun --pty` it is the one that a user types to."""
    if is_terminal and "SLURM_PTY_PORT" in environment and _number(environment, "SLURM_PROCID", 0) == 0:
        return
    for launcher, size, rank in (*_LAUNCHERS, *_find_srun(environment)):
        if _number(environment, size, 1) > 1 or _number(environment, rank, 0) > 0:
            found = [name for name in (size, rank) if name in environment]
            raise RecipeError(
                f"`meshwright {command}` is one of several processes, started by {launcher}"
                f" ({', '.join(f'{name}={environment[name]}' for name in found)}), and each would do all of it by itself. Run it"
                " once: Meshwright starts the ranks, as many as launch.ranks says; on SLURM: `meshwright submit`. Where the shell"
                f" has this from elsewhere: unset {' '.join(found)}"
            )


def _find_srun(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """srun, if this is a task of a step. In salloc's shell, and in a batch script, SLURM_NTASKS is what a step would have."""
    step = _number(environment, "SLURM_STEP_ID", _number(environment, "SLURM_STEPID", _OWN_STEPS))
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment), "")
    yield "srun", size if step < _OWN_STEPS else "", "SLURM_PROCID"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default


def _explain_overrides(recipe_dirs: Sequence[Path]) -> str:
    from framework.recipe.describe import describe_group_keys, describe_groups
    from framework.recipe.files import search_path

    return f"""overrides, in Hydra's grammar:
  group=recipe      choose a recipe:  model=gpt2  optim=lion  experiment=quickstart
  key=value         set a value:      train.steps=500  model.config.num_hidden_layers=4
  +key=value        add a value;  ++key=value  set or add it;  ~key  leave it out

groups and their recipes:
{describe_groups(search_path(recipe_dirs))}

keys (`meshwright check --keys [WORD]` explains them):
{describe_group_keys()}"""


def _guess_option(word: str, help_text: str) -> str:
    from framework.recipe.keys import nearest

    near = nearest(word.partition("=")[0].lstrip("-"), re.findall(r"--([a-z-]+)", help_text))
    return f"; did you mean --{near[0]}?" if near else ""


def _explain_flags(flags: Iterable[str], help_text: str, recipe_dirs: Sequence[Path]) -> str:
    from framework.recipe.files import search_path
    from framework.recipe.overrides import explain_flag
    from framework.recipe.problem import render_problems

    guesses = {flag: _guess_option(flag, help_text) for flag in flags}
    mistyped = [f"there is no option {flag}{guess}" for flag, guess in guesses.items() if guess]
    keys = [explain_flag(flag, search_path(recipe_dirs)) for flag, guess in guesses.items() if not guess]
    return "\n".join([*mistyped, *([render_problems(keys)] if keys else [])])


def _join_values(words: Sequence[str], unknown: Collection[str]) -> list[str]:
    """The unknown flags with the values behind them: `--lr 3` as `--lr=3`; whatever else is unknown stands behind none."""
    flags = [
        f"{word}={value}" if not (value.startswith("-") or "=" in word + value or not value) else word
        for word, value in pairwise([*words, ""])
        if word in unknown and word.startswith("-")
    ]
    joined = {flag.partition("=")[2] for flag in flags}
    return [*flags, *(word for word in unknown if not word.startswith("-") and "=" not in word and word not in joined)]
