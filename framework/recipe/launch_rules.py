"""Rules between the keys of `launch` that concern SLURM. They judge the recipe alone: what is installed here and which
files exist is asked by `meshwright submit`."""

import re
from collections.abc import Callable, Iterator

from framework.recipe.derive import count_nodes, count_ranks
from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe

Rule = Callable[[Recipe], Iterator[Problem]]

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# What meshwright renders itself; a second one in launch.sbatch would silently win or lose.
_OWN_OPTIONS = {
    "--job-name": "run.id", "--nodes": "launch.nodes", "--ntasks": "launch.ranks", "--time": "launch.time",
    "--ntasks-per-node": "launch.ranks_per_node", "--partition": "launch.partition", "--account": "launch.account",
    "--qos": "launch.qos", "--gres": "launch.gres", "--cpus-per-task": "launch.cpus_per_rank",
    "--mem": "launch.memory_per_rank_gb", "--signal": "launch.signal_seconds_before_end", "--output": "run.root",
}  # fmt: skip


def launch_rules() -> tuple[tuple[tuple[str, ...], Rule], ...]:
    """(keys that the rule reads, rule), for `check.py`."""
    return (
        (("launch.time", "launch.signal_seconds_before_end", "launch.kind"), _time),
        (("launch", "parallel.tp"), find_placement_problems),
        (("launch.container", "launch.kind"), _container),
        (("launch.sbatch", "launch.kind"), _options),
        (("launch.environment", "launch.kind"), _environment),
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
    for option in recipe.launch.sbatch if recipe.launch.kind == "slurm" else ():
        name = option.partition("=")[0].partition(" ")[0]
        if not name.startswith("-"):
            yield Problem(
                "launch.sbatch", option, "not an option of sbatch", "such as --exclusive or --constraint=a100"
            )
        elif name in _OWN_OPTIONS:
            yield Problem("launch.sbatch", option, "has a key of its own", f"set {_OWN_OPTIONS[name]}")


def _environment(recipe: Recipe) -> Iterator[Problem]:
    for name, value in recipe.launch.environment.items() if recipe.launch.kind == "slurm" else ():
        if not _VARIABLE.fullmatch(name):
            yield Problem(f"launch.environment.{name}", value, "not the name of a variable", "such as NCCL_DEBUG")
        elif not isinstance(value, str | int | float):
            yield Problem(f"launch.environment.{name}", value, "a variable holds text or a number", "quote it")
