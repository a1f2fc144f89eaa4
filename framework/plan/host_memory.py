"""Bytes of the host's memory that offloaded states and activations, and copies of steps, take: of a rank, of a node, and whether
this node has them."""

import shutil
from dataclasses import replace
from pathlib import Path

from framework.errors import RecipeError
from framework.host import count_host_memory
from framework.optim.optimizers import state_names
from framework.plan.memory import USABLE, sum_fullest_node
from framework.plan.plan import Plan
from framework.plan.text import show_bytes
from framework.recipe.schema import Recipe

# The file system that holds copies of steps. Linux mounts it everywhere, as large as half of the memory where a site does not say
# otherwise.
MEMORY = Path("/dev/shm")


def bytes_of_fullest_node(plan: Plan) -> int:
    """The most that the ranks of one node hold together in the host's memory."""
    of_stage = [plan.memory(rank).host for rank in plan.topology.ranks("pp", 0)]
    return sum_fullest_node(of_stage, plan.derived.world, plan.derived.ranks_per_node)


def bytes_saved(plan: Plan, rank: int) -> int:
    """Bytes that the rank's device holds less than if it held all states."""
    recipe = plan.recipe
    all_there = replace(recipe, memory=replace(recipe.memory, offload=type(recipe.memory.offload)()))
    return replace(plan, recipe=all_there).memory(rank).reserved - plan.memory(rank).reserved


def bytes_checkpointed(plan: Plan, rank: int) -> int:
    """Bytes that the rank writes of a checkpoint, and has copied: master and states of the elements that it counts."""
    total = 0
    for buffer in plan.of_rank(rank).buffers:
        if plan.recipe.adapter.is_used and not buffer.is_trained:
            continue
        for each in buffer.counted.values():
            # Moments of few bits are written in full.
            averages = plan.recipe.train.ema is not None
            states = (len(state_names(plan.recipe.optim, each.group)) + averages) * buffer.is_trained
            itemsize = buffer.dtypes.master.itemsize + states * buffer.dtypes.gradient.itemsize
            total += (each.stop - each.start) * itemsize
    return total


def bytes_of_copies(plan: Plan) -> int:
    """The most that a node holds with checkpoint.neighbor_copies: what its own ranks write and what those of so many nodes before
    it do, twice: a step stays until all nodes hold the next one."""
    copies, here = plan.recipe.checkpoint.neighbor_copies, plan.derived.ranks_per_node
    if not copies:
        return 0
    # Ranks that differ in other coordinates than `pp` write as much.
    of_stage = [bytes_checkpointed(plan, rank) for rank in plan.topology.ranks("pp", 0)]
    nodes = [
        sum(of_stage[plan.topology.index("pp", rank)] for rank in range(first, min(first + here, plan.derived.world)))
        for first in range(0, plan.derived.world, here)
    ]
    kept = range(min(1 + copies, len(nodes)))
    return 2 * max(sum(nodes[node - distance] for distance in kept) for node in range(len(nodes)))


def check_copies(plan: Plan, node_bytes: int | None = None, tmpfs_bytes: int | None = None) -> None:
    """Raises RecipeError where this node cannot hold the copies beside what is offloaded. tmpfs_bytes: of the file system that
    holds them. None for this machine's."""
    copies, key = plan.recipe.checkpoint.neighbor_copies, "checkpoint.neighbor_copies"
    if not copies:
        return
    needed = bytes_of_copies(plan)
    if tmpfs_bytes is None:
        tmpfs_bytes = shutil.disk_usage(MEMORY).total if MEMORY.is_dir() else 0
    there = find_node_bytes(plan.recipe) if node_bytes is None else node_bytes
    left = int(USABLE * there) - bytes_of_fullest_node(plan)
    room, where = min(
        (tmpfs_bytes, f"{MEMORY} has {show_bytes(tmpfs_bytes)}"), (left, f"a node can spare {show_bytes(left)}")
    )
    others = min(copies, plan.derived.nodes - 1)  # a start on fewer nodes keeps fewer copies
    if needed > room:
        raise RecipeError(
            f"{key}={copies}: a node would hold {show_bytes(needed)}, two steps of its own ranks and of {others} other"
            f" node{'s' * (others != 1)}, and {where}. Use {key}=0"
            + (" or fewer copies" if copies > 1 else "")
            + f", fewer ranks per node, nodes with more memory, or have {MEMORY} made larger (mount -o remount,size=...)"
        )


def check_host_memory(plan: Plan, node_bytes: int | None = None) -> None:
    """Raises RecipeError where the ranks of a node would hold more than its memory. node_bytes: None for this machine's."""
    check_copies(plan, node_bytes)
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
    launch, here = recipe.launch, count_host_memory()
    if launch.kind == "slurm" and launch.memory_per_rank_gb is not None:
        here = min(here, int(launch.memory_per_rank_gb * 1e9) * launch.ranks_per_node)
    return here
