"""Rules between the keys of `launch` that concern SLURM. They judge the recipe alone: what is installed here and which
files exist is asked by `meshwright submit`."""

import re
import shlex
from collections.abc import Callable, Iterator

from framework.recipe.derive import count_nodes, count_ranks
from framework.recipe.environment import is_secret, names_in, secret_in
from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe

Rule = Callable[[Recipe], Iterator[Problem]]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")  # what ends a line somewhere, or cannot be in an argument
# What meshwright renders itself; a second one in launch.sbatch would silently win or lose.
_OWN_OPTIONS = {
    "--job-name": "run.id", "--nodes": "launch.nodes", "--ntasks": "launch.ranks", "--time": "launch.time",
    "--ntasks-per-node": "launch.ranks_per_node", "--partition": "launch.partition", "--account": "launch.account",
    "--qos": "launch.qos", "--gres": "launch.gres", "--cpus-per-task": "launch.cpus_per_rank",
    "--mem": "launch.memory_per_rank_gb", "--signal": "launch.signal_seconds_before_end", "--output": "run.root",
}  # fmt: skip
_SHORT_OPTIONS = {
    "-J": "--job-name", "-N": "--nodes", "-n": "--ntasks", "-t": "--time", "-p": "--partition", "-A": "--account",
    "-q": "--qos", "-c": "--cpus-per-task", "-o": "--output",
}  # fmt: skip
# What ranks are told by their launcher, or bash keeps for itself: whose it is, or which key sets it.
_OWN_VARIABLES = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "the launcher numbers the ranks"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "MESHWRIGHT_OUTCOME"), "the launcher sets it for each start"),
    **dict.fromkeys(("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"), "bash keeps it for itself"),
    "OMP_NUM_THREADS": "set launch.threads_per_rank",
}


def launch_rules() -> tuple[tuple[tuple[str, ...], Rule], ...]:
    """(keys that the rule reads, rule), for `check.py`."""
    return (
        (("launch.time", "launch.signal_seconds_before_end", "launch.kind"), _time),
        (("launch", *(f"parallel.{name}" for name in ("dp", "tp", "pp", "cp"))), find_placement_problems),
        (("launch.container", "launch.kind"), _container),
        (("launch.sbatch", "launch.kind"), _options),
        (("launch.environment",), _environment),
        (("launch.set_up",), _set_up),
        (("launch",), _lines),
    )


def seconds_of(time: str) -> int | None:
    """A time limit in sbatch's notation as seconds; None if it is not one."""
    days, dash, clock = time.rpartition("-")
    parts = clock.split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in (*parts, *([days] if dash else []))):
        return None
    numbers = [int(part) for part in parts]
    if dash:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = (0, *numbers, 0) if len(numbers) == 1 else (0, 0, *numbers)[-3:]  # M, M:S, H:M:S
    return (hours * 60 + minutes) * 60 + seconds


def _time(recipe: Recipe) -> Iterator[Problem]:
    launch = recipe.launch
    if launch.kind == "local":
        return
    limit = seconds_of(launch.time)
    if limit is None:
        fix = 'in quotes, one of "MINUTES", "HH:MM:SS", "D-HH:MM:SS"'
        yield Problem("launch.time", launch.time, "not a time limit as sbatch reads them", fix)
    elif limit <= launch.signal_seconds_before_end:
        message = f"{limit} s, but the run is told to save {launch.signal_seconds_before_end} s before the end"
        fix = f"a longer launch.time; or launch.signal_seconds_before_end={max(1, limit // 2)} and less"
        yield Problem("launch.time", launch.time, message, fix)


def find_placement_problems(recipe: Recipe) -> Iterator[Problem]:
    """A tensor-parallel group talks in every layer: it stays within a node, unless it is asked not to."""
    tp, nodes = recipe.parallel.tp, count_nodes(recipe)
    here = count_ranks(recipe) // nodes
    if nodes > 1 and here % tp and not recipe.launch.tp_across_nodes:
        message = f"a tensor-parallel group of {tp} would lie on two nodes, which have {here} ranks each"
        legal = " or ".join(str(degree) for degree in range(1, here + 1) if here % degree == 0)
        yield Problem("parallel.tp", tp, message, f"parallel.tp={legal}; or launch.tp_across_nodes=true")


def _container(recipe: Recipe) -> Iterator[Problem]:
    launch, container = recipe.launch, recipe.launch.container
    if launch.kind == "slurm" and container.kind != "none" and container.image is None:
        message = f"launch.container.kind={container.kind} needs an image"
        yield Problem("launch.container.image", None, message, "launch.container.image=/path/to/meshwright.sif")


def _options(recipe: Recipe) -> Iterator[Problem]:
    """Each is a line of sbatch's own, with its quotes; what a line of the script cannot say is refused."""
    for option in recipe.launch.sbatch if recipe.launch.kind == "slurm" else ():
        words = _split(option)
        if words is None:
            yield Problem(
                "launch.sbatch", option, "a quote is not closed", "write a quote that is meant as such as \\'"
            )
        elif not words or not words[0].startswith("-"):
            yield Problem(
                "launch.sbatch", option, "not an option of sbatch", "such as --exclusive or --constraint=a100"
            )
        else:
            yield from _find_own_option(option, words)
            yield from _find_secret("launch.sbatch", option)


def _find_own_option(option: str, words: list[str]) -> Iterator[Problem]:
    for word in words:
        name = word.partition("=")[0]
        name = name if name.startswith("--") else _SHORT_OPTIONS.get(name[:2], name)
        if name in _OWN_OPTIONS:
            yield Problem("launch.sbatch", option, "has a key of its own", f"set {_OWN_OPTIONS[name]}")
            return


def _environment(recipe: Recipe) -> Iterator[Problem]:
    variables = recipe.launch.environment
    for name, value in variables.items():
        where = f"launch.environment.{name}"
        if not _VARIABLE.fullmatch(name):
            yield Problem(where, value, "not the name of a variable", "such as NCCL_DEBUG")
        elif isinstance(value, bool) or not isinstance(value, str | int | float):
            yield Problem(where, value, "a variable holds text or a number", "quote it")
        elif name in _OWN_VARIABLES:
            yield Problem(where, value, f"not for a recipe: {_OWN_VARIABLES[name]}", f"leave it out (~{where})")
        elif "\0" in str(value):
            yield Problem(where, value, "a variable cannot hold the character NUL")
        elif is_secret(name, value):
            yield _refuse_secret(where, name)
        for other in names_in(value):
            if other != name and str(variables.get(other, itself := f"${{oc.env:{other}}}")) != itself:
                message = f"refers to {other}, which launch.environment sets as well: which of the two is meant?"
                yield Problem(where, value, message, f"write the value of {other} outright, or leave {other} out")


def _refuse_secret(where: str, name: str) -> Problem:
    """A secret that is only kept from view would still be in recipe.yaml, in run.json, in the shell's history, in SLURM."""
    message = "looks like a secret, and a recipe is kept in files; its value is not shown here"
    fix = f"export {name} where you start the run, and refer to it: '{where}=${{oc.env:{name}}}'"
    return Problem(where, None, message, fix)


def _set_up(recipe: Recipe) -> Iterator[Problem]:
    for line in recipe.launch.set_up:
        if _CONTROL.search(re.sub(r"[\n\t]", "", line)):
            yield Problem("launch.set_up", line, "has a control character, on which bash stumbles", "remove it")
        yield from _find_secret("launch.set_up", line)


def _find_secret(where: str, line: str) -> Iterator[Problem]:
    name = secret_in(line)
    if name is not None:
        message = f"{name} looks like a secret, and a recipe is kept in files; its value is not shown here"
        fix = f"export {name} where you submit; or read it from a file of yours: export {name}=$(cat ~/.{name.lower()})"
        yield Problem(where, None, message, fix)


def _lines(recipe: Recipe) -> Iterator[Problem]:
    """Texts that become part of one line of the script, or one argument."""
    launch, container = recipe.launch, recipe.launch.container
    texts = {name: getattr(launch, name) for name in ("partition", "account", "qos", "gres", "python")}
    texts = {f"launch.{name}": [value] for name, value in texts.items()} | {"launch.sbatch": launch.sbatch}
    texts |= {"launch.container.image": [container.image], "launch.container.mounts": container.mounts}
    for where, values in texts.items():
        for value in values:
            if value is not None and _CONTROL.search(value):
                yield Problem(where, value, "has a line break or another control character", "remove it")
    split = {"none": "", "apptainer": ",", "pyxis": ", \t"}[container.kind]
    for mount in container.mounts:
        if found := [character for character in split if character in mount]:
            message = f"{container.kind} splits its list of mounts at {found[0]!r}"
            yield Problem("launch.container.mounts", mount, message, "a folder without it; a link to this one will do")


def _split(option: str) -> list[str] | None:
    """The words of a line of sbatch's options; None where a quote is not closed."""
    try:
        return shlex.split(option)
    except ValueError:
        return None
