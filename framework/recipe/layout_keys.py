"""The keys of a recipe that make its layout: what `meshwright search` chooses, and what has to follow from that choice.

A layout never changes what a run learns (docs/architecture.md), so these keys may be chosen by predicted time.
`parallel.layout=auto` leaves them open until the run begins; rules that read one of them are asked of the chosen recipe.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from framework.recipe.derive import count_virtual_stages
from framework.recipe.keys import value_of, with_value
from framework.recipe.schema import Memory, Offload, Parallel, Pipeline, Recipe, Zero

# Each by the name under which `--free` and `--keep` and the table of a search know it.
LAYOUT_KEYS = (
    *(f"parallel.{name}" for name in ("dp", "tp", "sequence", "pp", "cp", "context", "ep", "expert_tp")),
    *("pipeline.schedule", "pipeline.virtual_stages"),
    *("zero.stage", "zero.shard_within"),
    *("memory.activation_checkpointing", "memory.offload.activations"),
    *("memory.offload.optimizer", "memory.offload.parameters"),
    "batch.sequences_per_microbatch",
)
# What is legal with some layouts only: kept where it is, else as the schema has it.
FOLLOWING_KEYS = (
    *("parallel.overlap", "parallel.expert_overlap", "parallel.expert_hierarchical"),
    *("pipeline.layers", "pipeline.table", "pipeline.fill_bubbles"),
    *("zero.accumulate", "zero.keep_gathered", "zero.optimizer_within"),
    *("memory.kept_operations", "memory.budget_gb", "memory.gathered_inputs"),
    *("memory.offload.home", "memory.offload.disk_path"),
)


# A search makes thousands of recipes, of which most follow already.
DEFAULTS: Mapping[str, Any] = MappingProxyType({key: value_of(Recipe(), key) for key in FOLLOWING_KEYS})


def reads_layout(reads: Iterable[str]) -> bool:
    """Whether a rule that reads these keys or groups reads the layout."""
    return any(key == read or key.startswith(f"{read}.") for read in reads for key in LAYOUT_KEYS)


def let_rest_follow(recipe: Recipe, pinned: frozenset[str]) -> Recipe:
    """The recipe of a chosen layout, where values that it has no use for are the schema's; what is pinned stays, for the rules
    to refuse. Of a searched recipe nothing is left to `auto`."""
    if recipe.parallel.layout != "stated":
        recipe = with_value(recipe, "parallel.layout", "stated")
    for key in _useless(recipe):
        default = DEFAULTS[key]
        if key not in pinned and value_of(recipe, key) != default:
            recipe = with_value(recipe, key, default)
    return recipe


def with_layout_of(recipe: Recipe, other: Recipe) -> Recipe:
    """`recipe` with the other's layout."""
    for key in ("parallel.layout", *LAYOUT_KEYS, *FOLLOWING_KEYS):
        recipe = with_value(recipe, key, value_of(other, key))
    return recipe


def _useless(recipe: Recipe) -> Iterator[str]:
    """The keys that the layout has no use for."""
    yield from _useless_of_pipeline(recipe.parallel, recipe.pipeline)
    yield from _useless_of_zero(recipe)
    yield from _useless_of_memory(recipe.memory)
    parallel = recipe.parallel
    if not parallel.sequence:
        yield from ("parallel.overlap", "memory.gathered_inputs")
    if parallel.ep == 1:
        yield "parallel.expert_overlap"
    inner = parallel.expert_hierarchical
    if inner is not None and (parallel.ep == 1 or (isinstance(inner, int) and parallel.ep % inner)):
        yield "parallel.expert_hierarchical"


def _useless_of_pipeline(parallel: Parallel, pipeline: Pipeline) -> Iterator[str]:
    yield "pipeline.table"  # a schedule beside the one that is chosen
    if pipeline.layers is not None and len(pipeline.layers) != parallel.pp * count_virtual_stages(pipeline):
        yield "pipeline.layers"
    if parallel.pp == 1:
        yield "pipeline.fill_bubbles"


def _useless_of_zero(recipe: Recipe) -> Iterator[str]:
    zero: Zero = recipe.zero
    if zero.stage < 2:
        yield "zero.accumulate"
    if zero.stage < 3:
        yield "zero.keep_gathered"
    if zero.stage == 0 or zero.shard_within is None:
        yield "zero.optimizer_within"


def _useless_of_memory(memory: Memory) -> Iterator[str]:
    if memory.activation_checkpointing != "auto":
        yield "memory.budget_gb"
    if memory.activation_checkpointing not in ("selective", "auto"):
        yield "memory.kept_operations"
    offload: Offload = memory.offload
    if not offload.optimizer:
        yield from ("memory.offload.home", "memory.offload.disk_path")


def is_world_stated(recipe: Recipe) -> bool:
    """Whether the number of ranks follows without the degrees."""
    launch = recipe.launch
    return launch.ranks is not None or (launch.kind == "slurm" and launch.nodes is not None)
