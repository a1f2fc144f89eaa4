"""Machines of a run: the cluster that a recipe means, the deadlines of a launch, and rules of `launch` and `cluster`.

A cluster is data: a file of `recipes/cluster/`, by the GPU where the recipe names none. Rules judge the recipe alone: `meshwright
submit` asks what is installed here and which files exist.

A deadline says how long a rank may stay in one phase before the run counts as hung. One ladder, checked as a whole:

    deadline of each phase  <  time-out of collectives  <  time of a job until it is told to save

The first finds a hang and knows the rank to blame. The second is the last resort where no watch runs any more; it knows only who
waited. At the third SLURM would cut the run, and nobody would know that it hung.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from math import prod

import yaml

from framework.errors import RecipeError
from framework.host import count_cores, count_host_memory
from framework.recipe.convert import to_recipe
from framework.recipe.derive import count_ranks, node_counts
from framework.recipe.environment import is_secret, names_in, secret_in
from framework.recipe.files import YamlLoader
from framework.recipe.problem import (
    COUNTED,
    DEGREES,
    Findings,
    Problem,
    Rule,
    refuse_useless,
    render_problems,
    rule,
    shipped_recipes,
)
from framework.recipe.schema import Cluster, Launch, Recipe

# The file of a GPU by a part of its name in launch.gres, such as gpu:h100; and of GPUs that nothing names.
BY_GPU = {
    "A100": "a100_ib", "H100": "h100_ib", "H200": "h200_ib", "H800": "h800_ib", "B200": "b200_ib", "B300": "b300_ib",
    "GB200": "gb200_nvl72", "GB300": "gb300_nvl72", "MI300X": "mi300x_roce",
}  # fmt: skip
ASSUMED = "h100_ib"
OF_CPUS = "laptop"
DTYPES = ("nvfp4", "mxfp8", "fp8", "bf16", "fp16", "tf32", "fp32", "fp64")
ATTENTION = ("flash1", "flash2", "flash3", "cudnn")
HEADS = "context, features of a head, TFLOP/s in forward, TFLOP/s in backward"
MEASURE_ANEW = "measure anew: meshwright doctor --measure"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def find_cluster(recipe: Recipe) -> tuple[Cluster, bool]:
    """(the recipe's cluster, whether it is assumed): the one that it names, else that of the GPU in launch.gres, else H100 nodes,
    which is an assumption. CPU ranks have a laptop's rates, and on this machine its cores and memory."""
    if recipe.cluster.name is not None:
        return recipe.cluster, False
    if is_on_cpus(recipe.launch):
        laptop = read_shipped(OF_CPUS)
        return describe_host(laptop) if recipe.launch.kind == "local" else laptop, True
    named = name_of_gpu(recipe.launch.gres or "")
    return read_shipped(named or ASSUMED), named is None


def describe_host(alike: Cluster) -> Cluster:
    """This machine's cores and memory with the rates of another one's cores."""
    cores, num_bytes = count_cores(), count_host_memory()
    memory_gb = num_bytes / 2**30
    return replace(
        alike,
        name=f"{alike.name} of {cores} core{'s' * (cores != 1)}, {memory_gb:.0f} GiB (this machine's)",
        devices_per_node=cores,
        memory_gb=memory_gb / cores,
        host_memory_gb=memory_gb,
    )


def name_of_gpu(text: str) -> str | None:
    """The shipped file for the GPU that a text names, such as gpu:h100 or NVIDIA H100 80GB HBM3."""
    words = re.split(r"[^A-Z0-9]+", text.upper())
    return next((file for gpu, file in BY_GPU.items() if gpu in words), None)


def is_on_cpus(launch: Launch) -> bool:
    """Whether the recipe states that ranks compute on CPUs; `auto` on this machine leaves it open."""
    return launch.device == "cpu" or (launch.device == "auto" and launch.kind == "slurm" and launch.gres is None)


@cache
def read_shipped(name: str) -> Cluster:
    """The keys of a shipped file of `recipes/cluster/`."""
    text = (shipped_recipes() / "cluster" / f"{name}.yaml").read_text(encoding="utf-8")
    recipe, problems = to_recipe({"cluster": yaml.load(text, Loader=YamlLoader)}, {})
    assert not problems, render_problems(problems)
    return recipe.cluster


def count_devices_of_node(recipe: Recipe) -> int | None:
    """Devices of a node of the machine that a recipe is planned for; None where ranks compute on CPUs, which may take turns."""
    cluster, _ = find_cluster(recipe)
    if cluster.device == "cpu" or (recipe.launch.device == "auto" and recipe.cluster.name is None and is_local(recipe)):
        return None
    return cluster.devices_per_node


def is_local(recipe: Recipe) -> bool:
    """Whether all ranks are on one machine."""
    return recipe.launch.kind == "local"


def refuse_crowded_nodes(recipe: Recipe) -> None:
    """Raise RecipeError where a node has fewer devices than ranks, which no forecast covers."""
    here, launch, ranks = count_devices_of_node(recipe), recipe.launch, count_ranks(recipe)
    if here is None or ranks <= here:
        return
    name, key, value = find_cluster(recipe)[0].name, "launch.ranks_per_node", launch.ranks_per_node
    message = f"a node of {name} has {here} devices (cluster.devices_per_node)"
    fix = f"launch.ranks_per_node={here}, of which more nodes follow; or cluster=FILE of your machine"
    if is_local(recipe):
        key, value, message = "launch.ranks", ranks, f"launch.kind=local is one machine, and {message}"
        fix = (
            f"launch.kind=slurm launch.ranks_per_node={here}; or at most {here} ranks; or cluster=FILE of your machine"
        )
    if value > here:
        raise RecipeError(render_problems([Problem(key, value, message, fix)]))


def find_cluster_problems(recipe: Recipe) -> Iterator[Problem]:
    """Problems of a cluster's file: unknown dtypes and kinds of message, missing links, lists that do not fit one another."""
    cluster, default = recipe.cluster, Cluster()
    if cluster.name is None:
        for field in fields(cluster):
            if getattr(cluster, field.name) != getattr(default, field.name):
                message = "no cluster is named whose value this could change"
                yield Problem(
                    f"cluster.{field.name}", None, message, "choose one: cluster=h100_ib, say; or leave it out"
                )
        return
    yield from _find_matmul_problems(cluster)
    for kind in cluster.links.keys() - set(KINDS):
        yield Problem(f"cluster.links.{kind}", None, "no such kind of message", f"one of {', '.join(KINDS)}")
    missing = [kind for kind in KINDS if kind not in cluster.links]
    if missing:
        message = f"{', '.join(missing)} missing: how long these take is not known"
        yield Problem("cluster.links", None, message, "give gb_per_s of each kind; `doctor --measure` writes them all")
    for kind, link in cluster.links.items():
        for name in ("gb_per_s", "hop_us"):
            values = getattr(link, name)
            if len(values) != len(link.nodes):
                message = f"has {len(values)} values for the {len(link.nodes)} numbers of nodes {link.nodes}"
                yield Problem(f"cluster.links.{kind}.{name}", values, message, "one for each of nodes")
        if link.nodes[:1] != [1] or any(low >= high for low, high in pairwise(link.nodes)):
            yield Problem(
                f"cluster.links.{kind}.nodes", link.nodes, "must begin with 1 and rise", "such as [1, 2, 4, 8]"
            )
        yield from _find_table_problems(f"cluster.links.{kind}.measured", link.measured, "10^6 bytes, microseconds", 1)


def _find_matmul_problems(cluster: Cluster) -> Iterator[Problem]:
    for dtype in cluster.matmul.keys() - set(DTYPES):
        yield Problem(f"cluster.matmul.{dtype}", None, "no such dtype", f"one of {', '.join(DTYPES)}")
    if not cluster.matmul.keys() & {"bf16", "fp16", "fp32", "tf32"}:
        message = "no rate of bf16 or fp32, which models are trained in"
        yield Problem("cluster.matmul", None, message, "such as cluster.matmul.bf16.peak_tflops=989.4")
    for dtype, matmul in cluster.matmul.items():
        columns = "rows, inner, columns, TFLOP/s"
        for name in ("measured", "gradient"):
            yield from _find_table_problems(f"cluster.matmul.{dtype}.{name}", getattr(matmul, name), columns, 3)
        yield from _find_table_problems(f"cluster.matmul.{dtype}.attention", matmul.attention, HEADS, 2)
    for kernel in cluster.attention.keys() - set(ATTENTION):
        yield Problem(f"cluster.attention.{kernel}", None, "no such kernel", f"one of {', '.join(ATTENTION)}")
    for kernel, rates in cluster.attention.items():
        yield from _find_table_problems(f"cluster.attention.{kernel}", rates, HEADS, 2)
    yield from _find_table_problems("cluster.memory_measured", cluster.memory_measured, "10^6 bytes, 10^9 bytes/s", 1)


def _find_table_problems(key: str, measured: Sequence[Sequence[float]], columns: str, axes: int) -> Iterator[Problem]:
    """Entries that are not a grid of their first `axes` values, or with one axis not a rising curve. columns: their values."""
    shapes = {tuple(row[:axes]) for row in measured}
    if any(len(row) != 1 + columns.count(",") or min(row) <= 0 for row in measured):
        yield Problem(key, None, f"each entry must be [{columns}], all above 0", MEASURE_ANEW)
    elif axes == 1 and any(low[0] >= high[0] for low, high in pairwise(measured)):
        yield Problem(key, None, f"the first number of [{columns}] must rise", "sort the entries by it")
    elif axes > 1 and shapes:
        sizes = [len(set(values)) for values in zip(*shapes, strict=True)]
        if not len(shapes) == len(measured) == prod(sizes):
            message = f"{len(measured)} entries are not a grid of {' x '.join(map(str, sizes))} shapes"
            first, *others = columns.split(", ")[:axes]
            yield Problem(key, None, message, f"each {first} with each {' and '.join(others)}, once")


# --- deadlines

# Where the recipe says nothing. A phase that reads terabytes from a busy file system takes minutes.
PHASE_S = 1800.0
# The first steps compile, load kernels and connect.
FIRST_STEPS_S = 1200.0
# Shortest deadline, however short the measured steps: a machine may be busy for a minute, and a hang that is found after two
# minutes costs little.
FLOOR_S = 120.0
# Collectives wait so much longer than the longest deadline.
MARGIN = 1.25


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a phase counts as hung."""

    # The stated deadline; None: it follows the measured steps, from FLOOR_S to `most`.
    step: float | None
    # A step, until enough are measured.
    first_steps: float
    # Each phase before the first step, and the end of the run.
    start: float
    # One save.
    save: float
    # One validation.
    validate: float

    @property
    def most(self) -> float:
        """The longest that any phase gets."""
        return max(self.step or 0.0, self.first_steps, self.start, self.save, self.validate)

    @property
    def collective(self) -> float:
        """The time-out of process groups."""
        return MARGIN * self.most


def find_deadlines(recipe: Recipe) -> Deadlines:
    """The ladder of a recipe. Unstated deadlines are at most half of a job's time, so that the job can start again."""
    launch, has_s = recipe.launch, count_job_seconds(recipe)

    def choose(stated: float | None, otherwise: float) -> float:
        if stated is not None:
            return stated
        return otherwise if has_s is None else max(FLOOR_S, min(otherwise, has_s / 2))

    step = launch.step_deadline_s if isinstance(launch.step_deadline_s, float) else None
    return Deadlines(
        step=step,
        first_steps=max(step or 0.0, choose(None, FIRST_STEPS_S)),
        start=choose(launch.start_deadline_s, PHASE_S),
        save=choose(launch.save_deadline_s, PHASE_S),
        validate=choose(launch.validate_deadline_s, PHASE_S),
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


def count_job_seconds(recipe: Recipe) -> float | None:
    """Seconds of a job until it is told to save; None where it has no limit, or one that cannot be read."""
    launch = recipe.launch
    limit = seconds_of(launch.time) if launch.kind == "slurm" and isinstance(launch.time, str) else None
    return None if limit is None else float(limit - launch.signal_seconds_before_end)


# --- rules of launch

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Options that meshwright renders itself; a second one in launch.sbatch would silently win or lose.
_OWN_OPTIONS = {
    "--job-name": "run.id", "--nodes": "launch.nodes", "--ntasks": "launch.ranks", "--time": "launch.time",
    "--ntasks-per-node": "launch.ranks_per_node", "--partition": "launch.partition", "--account": "launch.account",
    "--qos": "launch.qos", "--gres": "launch.gres", "--cpus-per-task": "launch.cpus_per_rank",
    "--mem": "launch.memory_per_rank_gb", "--signal": "launch.signal_seconds_before_end", "--output": "run.root",
    "--segment": "launch.segment", "--switches": "launch.switches",
}  # fmt: skip
_SHORT_OPTIONS = {
    "-J": "--job-name", "-N": "--nodes", "-n": "--ntasks", "-t": "--time", "-p": "--partition", "-A": "--account",
    "-q": "--qos", "-c": "--cpus-per-task", "-o": "--output",
}  # fmt: skip
# Variables that the launcher sets for ranks, or that bash keeps for itself: whose it is, or which key sets it.
_OWN_VARIABLES = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "the launcher numbers the ranks"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "MESHWRIGHT_OUTCOME"), "the launcher sets it for each start"),
    **dict.fromkeys(("BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"), "bash keeps it for itself"),
    "OMP_NUM_THREADS": "set launch.threads_per_rank",
}


@rule("launch.time", "launch.signal_seconds_before_end", "launch.kind")
def time(recipe: Recipe) -> Findings:
    launch = recipe.launch
    if launch.kind == "local":
        return
    limit = seconds_of(launch.time)
    if limit is None:
        fix = 'in quotes, one of "MINUTES", "HH:MM:SS", "D-HH:MM:SS"'
        yield "launch.time", "not a time limit as sbatch reads them", fix
    elif limit <= launch.signal_seconds_before_end:
        message = f"{limit} s, but the run is told to save {launch.signal_seconds_before_end} s before the end"
        fix = f"a longer launch.time; or launch.signal_seconds_before_end={max(1, limit // 2)} and less"
        yield "launch.time", message, fix


@rule("launch.container", "launch.kind")
def container(recipe: Recipe) -> Findings:
    kind = recipe.launch.container.kind
    if recipe.launch.kind == "slurm" and kind != "none" and recipe.launch.container.image is None:
        message = f"launch.container.kind={kind} needs an image"
        yield "launch.container.image", message, "launch.container.image=/path/to/meshwright.sif"


@rule("launch.sbatch", "launch.kind")
def options(recipe: Recipe) -> Findings:
    """Each is a line of sbatch's own, with its quotes; a line that the script cannot say is refused."""
    key = "launch.sbatch"
    for option in recipe.launch.sbatch if recipe.launch.kind == "slurm" else ():
        try:
            words = shlex.split(option)
        except ValueError:
            yield Problem(key, option, "a quote is not closed", "write a quote that is meant as such as \\'")
            continue
        if not words or not words[0].startswith("-"):
            yield Problem(key, option, "not an option of sbatch", "such as --constraint=a100")
            continue
        names = [word.partition("=")[0] for word in words]
        names = [name if name.startswith("--") else _SHORT_OPTIONS.get(name[:2], name) for name in names]
        if own := next((name for name in names if name in _OWN_OPTIONS), None):
            yield Problem(key, option, "has a key of its own", f"set {_OWN_OPTIONS[own]}")
        yield from _find_secret(key, option)


@rule("launch.kind", "launch.segment", "launch.switches", "launch.spares", *COUNTED, *DEGREES)
def topology(recipe: Recipe) -> Findings:
    """SLURM refuses other numbers of nodes than whole segments, and what it cannot read as switches."""
    launch, switches = recipe.launch, str(recipe.launch.switches or 1)
    if launch.kind != "slurm":
        yield from refuse_useless(recipe, "launch.segment", "is for SLURM alone", "launch.kind=slurm")
        return
    asked = sorted({count + launch.spares for count in node_counts(recipe)})
    if launch.segment and (odd := [count for count in asked if count % launch.segment]):
        message = f"a job of {odd[0]} nodes is not whole segments of {launch.segment}"
        fits = [each for each in range(1, odd[0] + 1) if all(count % each == 0 for count in asked)]
        yield "launch.segment", message, f"launch.segment={' or '.join(map(str, fits))}; or null"
    count, at, wait = switches.partition("@")
    if not count.isdecimal() or int(count) < 1 or (at and seconds_of(wait) is None):
        message = "not a number of switches, with a time after an @"
        yield "launch.switches", message, "launch.switches=1; or launch.switches=1@60, in minutes"


@rule("launch.environment")
def environment(recipe: Recipe) -> Findings:
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
            # Hidden in messages it would still be in recipe.yaml, in run.json, in the shell's history, in SLURM.
            message = "looks like a secret, and a recipe is kept in files; its value is not shown here"
            fix = f"export {name} where you start the run, and refer to it: '{where}=${{oc.env:{name}}}'"
            yield Problem(where, None, message, fix)
        for other in names_in(value):
            if other != name and str(variables.get(other, itself := f"${{oc.env:{other}}}")) != itself:
                message = f"refers to {other}, which launch.environment sets as well: which of the two is meant?"
                yield Problem(where, value, message, f"write the value of {other} outright, or leave {other} out")


@rule("launch.set_up")
def set_up(recipe: Recipe) -> Findings:
    for line in recipe.launch.set_up:
        yield from _find_secret("launch.set_up", line)


def _find_secret(where: str, line: str) -> Findings:
    name = secret_in(line)
    if name is not None:
        message = f"{name} looks like a secret, and a recipe is kept in files; its value is not shown here"
        fix = f"export {name} where you submit; or read it from a file of yours: export {name}=$(cat ~/.{name.lower()})"
        yield Problem(where, None, message, fix)


@rule("launch.container")
def mounts(recipe: Recipe) -> Findings:
    container = recipe.launch.container
    split = {"none": "", "apptainer": ",", "pyxis": ", \t"}[container.kind]
    for mount in container.mounts:
        if found := [character for character in split if character in mount]:
            message = f"{container.kind} splits its list of mounts at {found[0]!r}"
            yield Problem("launch.container.mounts", mount, message, "a folder without it; a link to this one will do")


@rule("launch")
def deadlines(recipe: Recipe) -> Findings:
    """A stated deadline that the job's end would come before."""
    has_s = count_job_seconds(recipe)
    if has_s is None:
        return
    for name in ("step_deadline_s", "start_deadline_s", "save_deadline_s", "validate_deadline_s"):
        key, stated = f"launch.{name}", getattr(recipe.launch, name)
        if isinstance(stated, float) and MARGIN * stated >= has_s:
            message = (
                f"collectives would wait {MARGIN * stated:g} s, longer than the {has_s:g} s that a job has"
                f" (launch.time={recipe.launch.time}) until it is told to save: a hang would never be found"
            )
            largest = int((has_s - 1) / MARGIN)
            shorter = f"{key}={largest} or less; or " if largest >= 1 else ""
            yield key, message, f"{shorter}a longer launch.time"


LAUNCH_RULES = (
    time,
    container,
    options,
    topology,
    environment,
    set_up,
    mounts,
    deadlines,
    Rule(("cluster",), find_cluster_problems),
)
