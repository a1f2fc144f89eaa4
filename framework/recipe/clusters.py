"""Machines as data: the file of `recipes/cluster/` that a recipe means where it names none, and rules of their keys."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from math import prod

import yaml

from framework.errors import RecipeError
from framework.host import count_cores, count_host_memory
from framework.recipe.convert import to_recipe
from framework.recipe.derive import count_ranks
from framework.recipe.files import YamlLoader
from framework.recipe.problem import Problem, render_problems, shipped_recipes
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
