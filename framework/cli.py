"""The command line: `meshwright COMMAND [options] [overrides]`. Each command is a file of commands/."""

import argparse
import codecs
import gc
import locale
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from framework.commands.arguments import locate_keys, make_parser, parse, refuse_launcher
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, MeshwrightError, RecipeError
from framework.output import find_loss, keep_streams
from framework.start import guard_imports


@dataclass(frozen=True)
class Command:
    """A row of the table of commands."""

    name: str
    summary: str
    composes: bool = False  # takes the overrides of a recipe
    works: bool = False  # does more than print: where its output is lost, it has not failed
    runs_once: bool = False  # starts ranks or writes files: several processes of a launcher would do it each
    file: str = ""  # the file of commands/, if it has another name

    @property
    def module(self) -> Any:
        """The command's module: `add_options(parser)` and `run(arguments)`."""
        return import_module(f"framework.commands.{self.file or self.name}")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's own options."""
        self.module.add_options(parser)


COMMANDS = (
    Command("train", "check a recipe and train it on this machine", composes=True, works=True, runs_once=True),
    Command("check", "print a recipe in full, or all of its mistakes at once", composes=True),
    Command(
        "verify", "compare the recipe's layout with stock Hugging Face in one process", composes=True, runs_once=True
    ),
    Command("plan", "forecast memory, step time and cost, without any device", composes=True),
    Command("search", "find the fastest layouts that fit, by forecast", composes=True),
    Command(
        "prepare", "turn text into a token store, resumable and on all cores", composes=True, works=True, runs_once=True
    ),
    Command("submit", "queue a recipe on a SLURM cluster", composes=True, works=True, runs_once=True),
    Command("status", "show the state of a run: job, step, checkpoint, loss, telling line of the log"),
    Command("diff", "compare two runs: recipe, code, environment, curves"),
    Command("save", "make a running run save a checkpoint now and go on", works=True, file="stop"),
    Command("stop", "make a running run save and end, here or in SLURM's queue", works=True),
    Command("inject", "inject a fault into a run: a death, a full disk, NaN, a flipped bit", works=True),
    Command("doctor", "check software, devices, disks and SLURM, and say how to fix what is missing", composes=True),
    Command("generate", "continue a text with a trained model"),
    Command("evaluate", "score a run or an exported folder on tasks, in any layout", works=True, runs_once=True),
    Command("export", "write a run's model as a folder that from_pretrained loads", works=True, runs_once=True),
    Command("prune", "remove old checkpoints of runs that do not run", works=True),
    Command("inspect", "list the content of a checkpoint or a token store, every byte verified"),
)

# Words that are no commands, and the command that does it.
ELSEWHERE = MappingProxyType(
    {
        "goodput": "`meshwright status RUN` prints it, RUN/goodput.png draws it.",
        "report": "`meshwright status RUN` says how a run stands; RUN/report.txt is its report.",
        "resume": "`meshwright train run.id=RUN` goes on with a run.",
        "sweep": "`meshwright train -m` and `meshwright submit -m` train every combination of values.",
        "list": "`meshwright status` lists the runs, `meshwright check --help-recipe` the recipes.",
        "measure": "`meshwright doctor --measure` measures this machine.",
        "cancel": "`meshwright stop RUN` has a run save and end.",
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, of this process's arguments or of `argv`. The exit code is one of errors.py's, or 130 after Ctrl-C; a
    fault of ours keeps its traceback."""
    if argv is None:
        _speak_utf8()
        gc.set_threshold(100_000)  # imports make objects that stay: to look through them 60 times is a tenth of `check`
        guard_imports()
        keep_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    code = _run(words)
    if argv is None:
        gc.freeze()  # else Python, as it ends, looks through all that the process holds: a sixth of a short command
    loss = find_loss()
    if code != EXIT_DONE or loss is None or any(command.works for command in COMMANDS if [command.name] == words[:1]):
        return code
    print(f"meshwright: stdout cannot be written ({loss.strerror}): what this command prints is lost", file=sys.stderr)
    return EXIT_FAILED


def _speak_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, where the locale is of another encoding: files that libraries and other
    machines wrote are UTF-8. Characters that a terminal cannot show are escaped."""
    if sys.flags.utf8_mode or codecs.lookup(locale.getpreferredencoding(False)).name == "utf-8":
        return
    os.environ["PYTHONUTF8"] = "1"
    if sys.stdout is not None:
        os.environ.setdefault("PYTHONIOENCODING", sys.stdout.encoding)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _run(words: list[str]) -> int:
    os.environ.setdefault("PYTHON_COLORS", "0")  # of tracebacks: control characters are shown, whoever wrote them
    try:
        return _dispatch(words)
    except SystemExit as end:  # argparse's, after --help
        return int(end.code or EXIT_DONE)
    except MeshwrightError as error:
        print("\n".join([f"meshwright: {error}", *filter(None, getattr(error, "__notes__", []))]), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("meshwright: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("--version", "-V", "version"):
        print(_describe_version())
        return EXIT_DONE
    if name in ("-h", "--help", "help"):
        print(_overview())
        return EXIT_DONE
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None:
        raise RecipeError(_explain_command(name))
    parser = make_parser(name, command.summary, command.composes)
    command.add_options(parser)
    arguments = parse(parser, words[1:], command.composes)
    # The name tells commands of one file apart; `verify --end-to-end` types commands itself.
    arguments.command, arguments.main = name, main
    if command.runs_once or any(getattr(arguments, option, None) is not None for option in ("try_best", "measure")):
        refuse_launcher(os.environ, name, is_terminal=sys.stdin is not None and sys.stdin.isatty())
    try:
        return int(command.module.run(arguments))
    except MeshwrightError as error:
        if command.composes:
            error.add_note("\n".join(locate_keys(str(error), arguments)))
        raise


def _overview() -> str:
    lines = [f"  {command.name:10} {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            "usage: meshwright COMMAND [options] [overrides]",
            "",
            *lines,
            "",
            "`meshwright COMMAND --help` explains a command, `meshwright train --help-recipe` lists recipes and keys.",
            "The first run:  meshwright train experiment=quickstart",
        ]
    )


def _describe_version() -> str:
    """Our version with its commit, and those of Python and the libraries; none of them is imported."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from framework.host import describe_commit

    found = describe_commit()
    commit = f" (commit {found['commit'][:9]}{', edited' if found['edited'] else ''})" if found else ""
    try:
        own = version("meshwright")
    except PackageNotFoundError:  # run from its source
        own = "not installed"
    others = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return ", ".join([f"meshwright {own}{commit}", f"Python {platform.python_version()}", *others])


def _explain_command(name: str) -> str:
    from framework.recipe.keys import nearest

    names = [command.name for command in COMMANDS]
    if "=" in name:
        return f"the command comes first: meshwright train {name} (commands: {', '.join(names)})"
    guess = nearest(name, names)
    meant = f"did you mean {guess[0]}? " if guess else ""
    return f"there is no command {name}; {f'{ELSEWHERE[name]} ' if name in ELSEWHERE else meant}({', '.join(names)})"


if __name__ == "__main__":
    sys.exit(main())
