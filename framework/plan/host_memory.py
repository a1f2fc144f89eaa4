"""Bytes of the host's memory that offloaded states and activations take: of a rank, of a node, and whether this node has them."""

import os
from dataclasses import replace
from pathlib import Path

from framework.errors import RecipeError
from framework.plan.memory import show_bytes
from framework.plan.plan import Plan
from framework.recipe.schema import Recipe

# What the kernel lets a container or a job take, of a node's memory; "max" without a limit.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# The share of a node's memory that ranks have for offloaded states: Python, torch, NCCL and page tables need the rest.
USABLE = 0.9


def bytes_of_fullest_node(plan: Plan) -> int:
    """The most that the ranks of one node hold together in the host's memory."""
    here, world = plan.derived.ranks_per_node, plan.derived.world
    # Ranks that differ in other coordinates than `pp` hold as much.
    of_stage = [sum(plan.memory(rank).on_host.values()) for rank in plan.topology.ranks("pp", 0)]
    return max(
        sum(of_stage[plan.topology.index("pp", rank)] for rank in range(first, min(first + here, world)))
        for first in range(0, world, here)
    )


def bytes_saved(plan: Plan, rank: int) -> int:
    """Bytes that the rank's device holds less than if it held all states."""
    recipe = plan.recipe
    all_there = replace(recipe, memory=replace(recipe.memory, offload=type(recipe.memory.offload)()))
    return replace(plan, recipe=all_there, _ranks={}).memory(rank).total - plan.memory(rank).total


def check_host_memory(plan: Plan, node_bytes: int | None = None) -> None:
    """Raises RecipeError where the ranks of a node would hold more than its memory. node_bytes: None for this machine's."""
    offload = plan.recipe.memory.offload
    if not any((offload.optimizer, offload.parameters, offload.activations)):
        return  # no rank need be laid out to know that
    needed = bytes_of_fullest_node(plan)
    if needed == 0:
        return
    there = find_node_bytes(plan.recipe) if node_bytes is None else node_bytes
    if needed > USABLE * there:
        ranks = plan.derived.ranks_per_node
        fits = {
            f"memory.offload.{name}": f"{int(100 * fraction * USABLE * there / needed) / 100:g}"
            for name in ("optimizer", "parameters", "activations")
            if (fraction := getattr(offload, name))
        }
        key, value = next((key, getattr(offload, key.rpartition(".")[2])) for key in fits)
        raise RecipeError(
            f"{key}={value:g}: the {ranks} ranks of a node would hold {show_bytes(needed)} of offloaded states in the host's"
            f" memory, and {show_bytes(int(USABLE * there))} of a node's {show_bytes(there)} may be used for them (launch."
            "memory_per_rank_gb, or what this node has). Use "
            + " and ".join(f"{key}={fraction} or less" for key, fraction in fits.items())
            + "; or fewer ranks per node, more shards (zero.shard_within) or nodes with more memory"
        )


def find_node_bytes(recipe: Recipe) -> int:
    """Memory of this node that the run may take: of a job what it asks for, else what the kernel lets this process have."""
    launch = recipe.launch
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        limit = "max"
    if limit.isdigit():
        here = min(here, int(limit))
    if launch.kind == "slurm" and launch.memory_per_rank_gb is not None:
        here = min(here, int(launch.memory_per_rank_gb * 1e9) * launch.ranks_per_node)
    return here
