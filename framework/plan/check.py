"""Checks of a recipe's layout against the model and the host's memory, before anything is written, where they cost seconds and no
GPU."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from framework.comm.deep_ep import require_deep_ep
from framework.data.loader import find_sequence_problems
from framework.errors import MeshwrightError, RecipeError
from framework.host import count_host_memory
from framework.model.adapters import is_adapter
from framework.model.hub import find_weights, read_generation
from framework.model.initial import refuse_uninitialised
from framework.model.load import load_config, refuse_unaligned_experts
from framework.model.peft import read_adapter
from framework.model.probe import refuse_mixed_dtypes, refuse_unordered_layers
from framework.model.weights import refuse_other_weights, refuse_unwritable_configs
from framework.optim.optimizers import state_names
from framework.output import show_bytes
from framework.parallel.layer_matmuls import require_torchao
from framework.plan.forecast_memory import USABLE, sum_fullest_node
from framework.plan.plan import Plan, make_plan
from framework.recipe.files import origin_of
from framework.recipe.problem import render_problems
from framework.recipe.schema import Recipe
from framework.recipe.stages import split_stages

# The groups of keys that a layout depends on.
GROUPS = ("model", "adapter", "batch", "parallel", "pipeline", "zero", "memory", "precision", "optim")


def check_layout(recipe: Recipe, origins: Mapping[str, str] | None = None) -> Plan:
    """The recipe's plan, with each rank of one pipeline laid out: ranks that differ in other coordinates are laid out alike.

    Raises what the ranks would raise: ModelError, TopologyError, RecipeError, ScheduleError. Asks the hub for a config that is
    not here yet. origins: where the recipe's keys were set, for messages.
    """
    config = load_config(recipe.model)
    problems = [
        replace(problem, origin=origin_of(origins or {}, problem.key) if origins else "")
        for problem in find_sequence_problems(recipe, config)
    ]
    try:
        plan = lay_out_ranks(recipe, config)
    except MeshwrightError as error:
        if not problems:
            raise
        raise RecipeError(f"{render_problems(problems)}\n\n{error}") from error
    if problems:
        raise RecipeError(render_problems(problems))
    refuse_unwritable_configs(plan.whole)
    return plan


def check_weights(plan: Plan) -> None:
    """Raises ModelError where the pretrained weights that a new run begins with are here and are not this model's, as ranks would
    that read them. Reads the files' headers."""
    folder = find_weights(plan.recipe.model)
    if folder is not None:
        refuse_other_weights(folder, plan.whole, [name for name in plan.whole.state_dict() if not is_adapter(name)])
        read_generation(plan.whole, folder)
    if plan.recipe.adapter.weights is not None:
        read_adapter(Path(plan.recipe.adapter.weights).expanduser(), plan.whole, plan.recipe.adapter)


def check_stages(recipe: Recipe) -> list[Plan]:
    """The plan of the recipe, and those of its stages. Raises as `check_layout`, and RecipeError for a stage of other shapes."""
    plans = [check_layout(recipe)]
    for stage in split_stages(recipe) if recipe.train.stages else ():
        try:
            plans.append(check_layout(stage.recipe))
        except RecipeError as error:
            raise RecipeError(f"stage {stage.name}: {error}") from error
        shapes, others = (
            {name: each.shape for name, each in plan.whole.named_parameters()} for plan in (plans[0], plans[-1])
        )
        if other := next((name for name in shapes | others if shapes.get(name) != others.get(name)), None):
            raise RecipeError(
                f"train.stages.{stage.key}.model.config: {other} is {list(others.get(other, ()))} there and"
                f" {list(shapes.get(other, ()))} before: a stage keeps the shapes of the run; state such keys outside of it"
            )
    return plans


def check_layouts(recipes: Sequence[Recipe]) -> Plan:
    """The plan that holds most bytes a rank. Runs of a sweep that differ in nothing that a layout depends on are planned once."""
    different = {
        repr([recipe.data.isolates, recipe.train.stages, *(getattr(recipe, name) for name in GROUPS)]): recipe
        for recipe in recipes
    }
    return max((plan for recipe in different.values() for plan in check_stages(recipe)), key=most_bytes)


def lay_out_ranks(recipe: Recipe, config: PretrainedConfig) -> Plan:
    """`check_layout` of a model's config, with what ranks find out in their first step: do kernels take the widths of experts, do
    layers run in an order in which tokens can be divided, has each parameter an initial value?"""
    plan = make_plan(recipe, config)
    is_dispatched = (
        plan.derived.ep > 1 or plan.derived.expert_tp < plan.derived.tp or recipe.model.expert_capacity is not None
    )
    for rank in plan.topology.ranks("pp", 0):
        for stage in plan.of_rank(rank).stages:
            if not is_dispatched and (plan.device.type == "cpu" or plan.compute_dtype == torch.bfloat16):
                refuse_unaligned_experts(stage.model.model, plan.compute_dtype)
    if plan.derived.tp > 1 and recipe.parallel.sequence:
        refuse_unordered_layers(config)
    if plan.device.type == "cpu":
        refuse_mixed_dtypes(plan.whole, config, plan.compute_dtype)
    if recipe.model.weights is None:
        refuse_uninitialised(config)
    return plan


def most_bytes(plan: Plan) -> int:
    """The most memory that a rank is planned to hold."""
    return max(plan.memory(rank).reserved for rank in plan.topology.ranks("pp", 0))


def describe_need(plan: Plan) -> str:
    """The model's size and the most memory that a rank is planned to hold, in a line."""
    return f"{plan.size.total:,} parameters in {plan.recipe.precision.compute}, at most {show_bytes(most_bytes(plan))} a rank"


# --- the host's memory

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


def check_machine(plan: Plan) -> None:
    """Raises what this machine lacks for its ranks: memory of the host, or a library that the recipe asks for."""
    check_host_memory(plan)
    if plan.recipe.precision.compute == "fp8":
        require_torchao()
    if plan.recipe.parallel.expert_backend == "deepep":
        require_deep_ep()


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
