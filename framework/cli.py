"""The command line: `meshwright COMMAND [options] [overrides]`.

Each command is one function that composes and checks the recipe and calls the room that does the work. Rooms are imported
inside these functions, so that `check` and `--help` answer at once, without torch.
"""

import argparse
import codecs
import locale
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, MeshwrightError, RecipeError, RunError
from framework.imports import loading_libraries
from framework.output import find_loss, keep_streams
from framework.recipe.schema import Recipe
from framework.start import guard_imports

# Commands that start ranks or write files, and of several processes each would.
RUN_ONCE = frozenset(("train", "prepare", "submit", "export", "verify"))

# Commands that do more than print: where what they print is lost, they have not failed.
WORKS = frozenset({"train", "prepare", "submit", "save", "stop", "inject", "export"})


# Words that are no commands, and who does what they ask for.
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


@dataclass(frozen=True)
class Command:
    """One command. `composes`: it takes the overrides of a recipe."""

    name: str
    summary: str
    run: Callable[[argparse.Namespace], int]
    add_options: Callable[[argparse.ArgumentParser], None]
    composes: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, of this process's arguments or of `argv`. The exit code is one of errors.py's, or 130 after Ctrl-C; a
    fault of ours keeps its traceback."""
    if argv is None:
        _speak_utf8()
        guard_imports()
        keep_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    code = _run(words)
    loss = find_loss()
    if code != EXIT_DONE or loss is None or WORKS.intersection(words[:1]):
        return code
    print(f"meshwright: stdout cannot be written ({loss.strerror}): what this command prints is lost", file=sys.stderr)
    return EXIT_FAILED


def _speak_utf8() -> None:
    """Start this process again in Python's UTF-8 mode, where the locale is of another encoding: files that libraries and other
    machines wrote are UTF-8. What a terminal cannot show is escaped."""
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


def _dispatch(argv: list[str]) -> int:
    commands = _commands()
    name = argv[0] if argv else "--help"
    if name in ("--version", "-V", "version"):
        print(_describe_version())
        return EXIT_DONE
    if name in ("-h", "--help", "help"):
        print(_overview(commands))
        return EXIT_DONE
    command = next((command for command in commands if command.name == name), None)
    if command is None:
        raise RecipeError(_explain_command(name, [command.name for command in commands]))
    arguments = _parse(command, argv[1:])
    if name in RUN_ONCE or any(getattr(arguments, option, None) is not None for option in ("try_best", "measure")):
        from framework.launch.launchers import refuse_launcher

        refuse_launcher(os.environ, name, is_terminal=sys.stdin is not None and sys.stdin.isatty())
    try:
        return command.run(arguments)
    except MeshwrightError as error:
        if command.composes:
            error.add_note("\n".join(_locate(str(error), arguments)))
        raise


def _locate(text: str, arguments: argparse.Namespace) -> list[str]:
    """Where files set the keys that an error names: what judges a layout knows values alone."""
    from framework.recipe.compose import compose
    from framework.recipe.origins import locate_named

    with suppress(MeshwrightError):
        return list(locate_named(text, compose(arguments.overrides, arguments.recipes).origins))
    return []


def _commands() -> tuple[Command, ...]:
    return (
        Command("train", "check the recipe and train it here", _train, _add_train, True),
        Command("check", "every mistake of a recipe at once, or what it says in full", _check, _add_check, True),
        Command("verify", "the recipe's layout against stock Hugging Face in one process", _verify, _add_verify, True),
        Command(
            "plan", "does it fit, how long does it take, what does it cost: without any device", _plan, _add_plan, True
        ),
        Command("search", "the fastest layouts that fit, by forecast", _search, _add_search, True),
        Command("prepare", "text to token store, resumable and on all cores", _prepare, _add_prepare, True),
        Command("submit", "queue the recipe on a SLURM cluster", _submit, _add_submit, True),
        Command(
            "status",
            "how a run stands: job, step, checkpoint, loss, the log line that matters",
            _status,
            _add_status,
            False,
        ),
        Command("diff", "two runs beside one another: recipe, code, environment, curves", _diff, _add_diff, False),
        Command("save", "have a running run save a checkpoint now and go on", _save, _add_run, False),
        Command("stop", "have a running run save and end, here or in SLURM's queue", _stop, _add_run, False),
        Command(
            "inject", "have a run suffer a fault: a death, a full disk, NaN, a flipped bit", _inject, _add_inject, False
        ),
        Command("doctor", "what is installed and within reach, and how to fix what is not", _doctor, _add_doctor, True),
        Command("generate", "let a trained model continue a text", _generate, _add_generate, False),
        Command("export", "a run's model as a folder that from_pretrained loads", _export, _add_export, False),
        Command(
            "inspect", "what a checkpoint or a token store holds, every byte verified", _inspect, _add_inspect, False
        ),
    )


# --- the commands, each with its options


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_multirun(parser, "one after another")


def _train(arguments: argparse.Namespace) -> int:
    if arguments.multirun:
        from framework.launch.sweep import train_sweep

        return train_sweep(arguments.overrides, arguments.recipes)
    recipe = _compose_run(arguments)
    from framework.launch.process import let_threads_sleep, may_use_gpus
    from framework.monitor.phases import Phase, PhaseBar

    if not may_use_gpus(recipe.launch):  # a single rank lives in this process, which is about to import torch
        let_threads_sleep()
    bar = PhaseBar((Phase.LIBRARIES,))
    bar.begin(Phase.LIBRARIES)
    with loading_libraries():
        from framework.launch.local import train
        from framework.train.program import main as run_rank

    bar.close()
    return train(recipe, arguments.overrides, arguments.recipes, run_rank)


def _add_submit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print the script that would be submitted; change nothing"
    )
    _add_multirun(parser, "as one job array of at most launch.at_once runs")


def _submit(arguments: argparse.Namespace) -> int:
    if arguments.multirun:
        from framework.launch.sweep import compose_sweep

        recipes, combinations = compose_sweep(arguments.overrides, arguments.recipes)
        with loading_libraries():
            from framework.launch.submit import submit_sweep

        return submit_sweep(recipes, combinations, dry_run=arguments.dry_run)
    recipe = _compose_run(arguments)
    with loading_libraries():
        from framework.launch.submit import submit

    return submit(recipe, arguments.overrides, arguments.recipes, dry_run=arguments.dry_run)


def _add_multirun(parser: argparse.ArgumentParser, how: str) -> None:
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help=f"every combination of values such as optim.lr=1e-3,3e-4 batch.context=256,512, {how}",
    )


def _add_status(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="a run's or a sweep's id or folder; several, or none for all: a line each",
    )


def _status(arguments: argparse.Namespace) -> int:
    from framework.launch.status import overview_command, status_command

    paths = [_find_run(name) for name in arguments.runs]
    return status_command(paths[0]) if len(paths) == 1 else overview_command(paths, Path(Recipe().run.root))


def _add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="RUN", help="a run's id or folder")
    parser.add_argument("second", metavar="RUN", help="another one's")


def _diff(arguments: argparse.Namespace) -> int:
    from framework.launch.diff import diff_command

    return diff_command(_find_run(arguments.first), _find_run(arguments.second))


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id or folder")


def _save(arguments: argparse.Namespace) -> int:
    from framework.launch.request import save_command

    return save_command(_find_run(arguments.run))


def _stop(arguments: argparse.Namespace) -> int:
    from framework.launch.request import stop_command

    return stop_command(_find_run(arguments.run))


def _add_inject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="a run's id or folder")
    parser.add_argument(
        "words", nargs="*", metavar="FAULT", help="a fault and where it acts, such as: kill rank=1 step=30"
    )
    parser.add_argument("--list", action="store_true", help="explain the faults, or list those of RUN")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)


def _inject(arguments: argparse.Namespace) -> int:
    from framework.commands.inject import inject_command, list_command

    if arguments.list or not arguments.run:
        return list_command(_find_run(arguments.run) if arguments.run else None)
    if not arguments.words:
        raise RunError(
            "inject RUN FAULT: say which fault, such as kill rank=1 step=30; `meshwright inject --list` explains them"
        )
    return inject_command(_find_run(arguments.run), words=arguments.words, here=arguments.here)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure this machine in under two minutes and write what plan and search need of it, for cluster=FILE"
        " (default: measured.yaml)",
    )
    parser.add_argument("--overwrite", action="store_true", help="with --measure: also a file of another machine")


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.measure is not None:
        return _measure(arguments)
    if arguments.overwrite:
        raise RecipeError("--overwrite is for the file of --measure FILE")
    recipe = _compose(arguments)
    with loading_libraries():
        from framework.launch.doctor import doctor_command

    return doctor_command(recipe)


def _measure(arguments: argparse.Namespace) -> int:
    typed = arguments.measure
    if "=" in typed:  # argparse takes the override behind a lone --measure for its file
        arguments.overrides, typed = [typed, *arguments.overrides], ""
    recipe = _compose(arguments)
    from framework.launch.measure import choose_file, measure_command

    return measure_command(recipe, choose_file(typed, arguments.recipes), overwrites=arguments.overwrite)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sources", action="store_true", help="say which file or override set each value")
    parser.add_argument(
        "--model", action="store_true", help="build the model and lay every rank out too, without memory: some seconds"
    )
    parser.add_argument(
        "--keys",
        nargs="?",
        const="",
        metavar="WORD",
        help="explain all keys, or those with WORD in their name or meaning; composes nothing",
    )
    parser.add_argument(
        "--from",
        dest="from_file",
        type=Path,
        metavar="FILE",
        help="print a file of torchtitan, nanotron, axolotl, LLaMA-Factory or HF TrainingArguments as an experiment, checked",
    )


def _check(arguments: argparse.Namespace) -> int:
    from framework.mesh.placement import place
    from framework.plan.auto import require_layout
    from framework.recipe.compose import compose
    from framework.recipe.derive import derive
    from framework.recipe.describe import (
        describe_blend,
        describe_compilation,
        describe_derived,
        describe_keys,
        describe_sources,
    )
    from framework.recipe.environment import hide_secrets
    from framework.recipe.saved import to_yaml

    if arguments.keys is not None:
        print(describe_keys(arguments.keys))
        return EXIT_DONE
    if arguments.from_file is not None:
        from framework.recipe.foreign_files import convert_command

        return convert_command(arguments.from_file, arguments.overrides, arguments.recipes)
    composition = compose(arguments.overrides, arguments.recipes)
    recipe = require_layout(composition, arguments.overrides, arguments.recipes)
    need = _describe_need(recipe, composition.origins) if arguments.model else ""
    text = describe_sources(recipe, composition.origins) if arguments.sources else to_yaml(recipe).rstrip()
    print(hide_secrets(text))
    print()
    print(f"{describe_derived(derive(recipe))}\ndata          {describe_blend(recipe.data)}{need}")
    if compilation := describe_compilation(recipe):
        print(compilation)
    if advice := place(derive(recipe)).advise_experts():
        print(f"experts       {advice}")
    return EXIT_DONE


def _describe_need(recipe: Recipe, origins: Mapping[str, str]) -> str:
    with loading_libraries():
        from framework.plan.check import check_layout, check_weights, describe_need

    plan = check_layout(recipe, origins)
    check_weights(plan)
    return f"\nmodel         {describe_need(plan)}"


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="a config.json instead of the recipe's model")
    parser.add_argument(
        "--dtype",
        choices=["fp64", "fp32", "bf16", "fp16", "fp8"],
        help="compare in it: to 1e-9, to 1e-5 (default), to measured bounds; --fp64 and --bf16 say the same",
    )
    parser.add_argument("--fp64", dest="dtype", action="store_const", const="fp64", help=argparse.SUPPRESS)
    parser.add_argument("--bf16", dest="dtype", action="store_const", const="bf16", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to compare (default: 3)")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks (default: few that the layout needs)")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: NCCL, or gloo on shared GPUs (default: cpu)",
    )
    parser.add_argument("--strict", action="store_true", help="the recipe in its own sizes, or a refusal")
    parser.add_argument(
        "--end-to-end", action="store_true", help="a whole run, from text to export, beside a plain loop"
    )


def _verify(arguments: argparse.Namespace) -> int:
    recipe = _compose(arguments)
    with loading_libraries():
        from framework.verify.command import verify
        from framework.verify.prepare import VerifyOptions

    names = ("model_config", "dtype", "steps", "ranks", "device", "strict")
    options = VerifyOptions(**{name: getattr(arguments, name) for name in names})
    if arguments.end_to_end:
        from framework.verify.end_to_end import verify_end_to_end

        return verify_end_to_end(recipe, options, main)
    return verify(recipe, options)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--schedule-to",
        type=Path,
        metavar="FILE",
        help="write the schedule too: .svg, .png or .pdf is its picture, .csv a table for pipeline.table",
    )
    details = {
        "--ranks": "what each rank holds and sends, and leaves to its host",
        "--layouts": "units and parameters as a rank has them",
        "--schedule": "the pipeline's stages and actions, and all schedules compared",
        "--options": "what each option that lowers memory saves and costs",
    }
    for option, words in details.items():
        parser.add_argument(option, action="store_true", help=f"and {words}")
    _add_page(parser)


def _add_page(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to look at in a browser: one file")
    parser.add_argument("--overwrite", action="store_true", help="in place of files that are not ours, too")


def _plan(arguments: argparse.Namespace) -> int:
    from framework.plan.auto import require_layout
    from framework.recipe.compose import compose_for_nodes

    composition = compose_for_nodes(arguments.overrides, arguments.recipes)
    recipe = require_layout(composition, arguments.overrides, arguments.recipes)
    with loading_libraries():
        from framework.launch.machine import check_measured
        from framework.plan.plan_command import plan_command
        from framework.plan.plan_text import Wanted

    check_measured(recipe)

    names = ("ranks", "layouts", "schedule", "options", "schedule_to", "html", "overwrite")
    return plan_command(recipe, Wanted(**{name: getattr(arguments, name) for name in names}))


def _add_search(parser: argparse.ArgumentParser) -> None:
    from framework.commands.search import add_search_options

    add_search_options(parser)


def _search(arguments: argparse.Namespace) -> int:
    from framework.commands.search import search_command

    return search_command(arguments)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")


def _prepare(arguments: argparse.Namespace) -> int:
    recipe = _compose(arguments)
    from framework.data.prepare import prepare_command

    return prepare_command(recipe, workers=arguments.workers)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id or folder, or an exported folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "--max-new-tokens", type=int, default=100, metavar="N", help="at most so many tokens (default: 100)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token (default: 0.8)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the sampling (default: 0)")


def _generate(arguments: argparse.Namespace) -> int:
    folder = _find_run(arguments.run)
    with loading_libraries():
        from framework.launch.generate import generate_command

    names = ("prompt", "max_new_tokens", "temperature", "seed")
    return generate_command(folder, **{name: getattr(arguments, name) for name in names})


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run's id or folder")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to write")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="with checkpoint.keep_best: of the lowest validation loss")
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; else the newest")


def _export(arguments: argparse.Namespace) -> int:
    run = _find_run(arguments.run)
    with loading_libraries():
        from framework.launch.export import export_command

    return export_command(run, to=arguments.to, best=arguments.best, step=arguments.step)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint's folder or URL, a run's id or folder: its newest, or a token store"
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from framework.checkpoint.inspect import inspect_command
    from framework.checkpoint.place import is_url, open_place

    return inspect_command(open_place(arguments.path) if is_url(arguments.path) else _find_run(arguments.path))


# --- recipes and runs


def _compose(arguments: argparse.Namespace) -> Recipe:
    from framework.plan.auto import require_layout
    from framework.recipe.compose import compose

    return require_layout(compose(arguments.overrides, arguments.recipes), arguments.overrides, arguments.recipes)


def _compose_run(arguments: argparse.Namespace) -> Recipe:
    from framework.launch.subject import compose_run

    return compose_run(arguments.overrides, arguments.recipes)


def _find_run(name: str) -> Path:
    from framework.launch.directory import find_run

    return find_run(name)


# --- arguments and help


# Beneath the options of every command that takes a recipe.
_OVERRIDES = """OVERRIDE:  experiment=quickstart  model=gpt2   choose recipes
           train.steps=500  optim.lr=3e-4      set values
--help-recipe lists them all; `meshwright check --keys WORD` explains keys."""


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is an error as any other: explained, with our exit code."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message}\n{self.format_usage().strip()}")


def _parse(command: Command, argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog=f"meshwright {command.name}",
        usage=f"meshwright {command.name} [options] OVERRIDE ..." if command.composes else None,
        description=command.summary[0].upper() + command.summary[1:] + ".",
        epilog=_OVERRIDES if command.composes else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if command.composes:
        parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=argparse.SUPPRESS)  # the epilog's
        parser.add_argument("--help-recipe", action="store_true", help="list all recipes and keys, and exit")
        parser.add_argument(
            "--recipes",
            action="append",
            default=[],
            type=Path,
            metavar="DIR",
            help="a folder of your own recipes, which come first; repeatable",
        )
    command.add_options(parser)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if command.composes and arguments.help_recipe:
        print(_explain_overrides(arguments.recipes))
        parser.exit()
    if unknown and not command.composes:
        parser.error(f"there is no option {' '.join(unknown)}")
    if unknown:
        raise RecipeError(_explain_flags(_join_values(argv, unknown), parser.format_help(), arguments.recipes))
    return arguments


def _overview(commands: Iterable[Command]) -> str:
    lines = [f"  {command.name:10} {command.summary}" for command in commands]
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
    """Ours with its commit, and of what it runs on; nothing of it is imported."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from framework.launch.record import describe_commit

    found = describe_commit()
    commit = f" (commit {found['commit'][:9]}{', edited' if found['edited'] else ''})" if found else ""
    try:
        own = version("meshwright")
    except PackageNotFoundError:  # run from its source
        own = "not installed"
    others = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return ", ".join([f"meshwright {own}{commit}", f"Python {platform.python_version()}", *others])


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


def _explain_flags(flags: Iterable[str], help_text: str, recipe_dirs: Sequence[Path]) -> str:
    from framework.recipe.files import search_path
    from framework.recipe.overrides import explain_flag
    from framework.recipe.problem import render_problems
    from framework.recipe.suggest import nearest

    options = re.findall(r"--([a-z-]+)", help_text)
    guesses = {flag: nearest(flag.partition("=")[0].lstrip("-"), options) for flag in flags}
    mistyped = [f"there is no option {flag}; did you mean --{guess[0]}?" for flag, guess in guesses.items() if guess]
    keys = [explain_flag(flag, search_path(recipe_dirs)) for flag, guess in guesses.items() if not guess]
    return "\n".join([*mistyped, *([render_problems(keys)] if keys else [])])


def _join_values(argv: Sequence[str], unknown: Collection[str]) -> list[str]:
    """The unknown flags with the values behind them: `--lr 3` as `--lr=3`; whatever else is unknown stands behind none."""
    flags = [
        f"{word}={value}" if not (value.startswith("-") or "=" in word + value or not value) else word
        for word, value in pairwise([*argv, ""])
        if word in unknown and word.startswith("-")
    ]
    joined = {flag.partition("=")[2] for flag in flags}
    return [*flags, *(word for word in unknown if not word.startswith("-") and "=" not in word and word not in joined)]


def _explain_command(name: str, commands: Sequence[str]) -> str:
    from framework.recipe.suggest import nearest

    if "=" in name:
        return f"the command comes first: meshwright train {name} (commands: {', '.join(commands)})"
    guess = nearest(name, commands)
    meant = f"did you mean {guess[0]}? " if guess else ""
    meant = f"{ELSEWHERE[name]} " if name in ELSEWHERE else meant
    return f"there is no command {name}; {meant}({', '.join(commands)})"


if __name__ == "__main__":
    sys.exit(main())
