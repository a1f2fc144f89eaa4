"""Out of memory: what of the plan to lower, in which order, and what is left to hold after each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from framework.errors import MeshwrightError, OutOfMemory
from framework.plan.memory import show_bytes
from framework.plan.plan import Plan, make_plan
from framework.recipe.check import check_recipe
from framework.recipe.derive import Derived
from framework.recipe.schema import Recipe

# A change that saves less than this share of a rank's memory is not worth a line.
WORTH_SAYING = 0.01
# As many changes as are said after an error and by `doctor`. `meshwright plan --options` says all.
CHEAPEST = 3

# Of the host's allocator; of CUDA outside torch's own, such as while it starts or captures; of cuBLAS' workspaces; of NCCL's
# buffers. torch.OutOfMemoryError is of its caching allocator for GPUs only.
SIGNS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)


@contextmanager
def explain_out_of_memory(plan: Plan, rank: int) -> Iterator[None]:
    """Raises OutOfMemory where the device, or the host's allocator, has no memory for what is done meanwhile."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{_find_line(error)}\n{describe_relief(plan, rank)}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the host, has no memory left: by the error's class, else by what torch and its libraries say."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(sign in str(error) for sign in SIGNS)


def _find_line(error: Exception) -> str:
    """The line that says it: NCCL's comes after others."""
    lines = str(error).splitlines() or [type(error).__name__]
    return next((line for line in lines if any(sign in line for sign in SIGNS)), lines[0])


def describe_relief(plan: Plan, rank: int) -> str:
    """What the rank is planned to hold, and the three cheapest changes of the recipe that lower it and leave the run the same,
    each with those before it."""
    memory = plan.memory(rank)
    parts = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in memory.kinds.items() if size)
    lines = [f"This rank is planned to hold {show_bytes(memory.reserved)}: {parts}."]
    rows = list(islice(find_relief(plan, rank), CHEAPEST))
    if rows:
        lines.append("What lowers that and leaves the run the same, the cheapest first, each with those before it:")
        width = max(len(change) for change, _ in rows)
        lines += [f"  {change:<{width}}  {show_bytes(size)}" for change, size in rows]
    lines.append(
        "`meshwright plan --options` has more, each by itself. Beyond that: more ranks, to shard over or for"
        " parallel.cp, parallel.tp and parallel.pp; or a shorter batch.context."
    )
    return "\n".join(lines)


def find_relief(plan: Plan, rank: int) -> Iterator[tuple[str, int]]:
    """(override, bytes that the rank holds with it and with those before), those that are worth it and fit the recipe."""
    recipe, best = plan.recipe, plan.memory(rank).reserved
    for key, value in list_changes(plan):
        changed = set_key(recipe, key, value)
        size = _planned_bytes(changed, plan, rank)
        if size is not None and size < (1 - WORTH_SAYING) * best:
            recipe, best = changed, size
            yield f"{key}={str(value).lower()}", size


def list_changes(plan: Plan) -> Iterator[tuple[str, Any]]:
    """(key, value), by what they cost a step: next to nothing, more microbatches, messages, copies to the host and back,
    computing parts of forwards twice, all of them, all of them more than twice."""
    derived, stage, microbatch = plan.derived, plan.recipe.zero.stage, plan.derived.sequences_per_microbatch
    stages = range(stage + 1, 4 if derived.dp * derived.cp > 1 else 0)
    yield from (("zero.stage", 1) for each in stages if each == 1)
    yield "memory.chunked_loss", True
    smaller = [size for size in range(microbatch // 2, 0, -1) if microbatch % size == 0]
    yield from (("batch.sequences_per_microbatch", size) for size in smaller[:1])
    yield from (("zero.stage", 2) for each in stages if each == 2)
    yield from (("batch.sequences_per_microbatch", size) for size in dict.fromkeys([*smaller[1::2], *smaller[-1:]]))
    yield from (("parallel.cp", degree) for degree in raise_cp(derived))
    yield "memory.offload.activations", 1.0  # as below
    for policy in ("selective", "full", "sqrt"):
        yield "memory.activation_checkpointing", policy
    yield from (("zero.stage", 3) for each in stages if each == 3)
    yield "memory.offload.optimizer", 1.0  # on a device that is the host it is refused, so it is not said


def raise_cp(derived: Derived) -> list[int]:
    """Twice, four times ... as many ranks for each sequence, as far as data-parallel ranks go."""
    return [derived.cp << power for power in range(1, derived.dp.bit_length()) if derived.dp % (1 << power) == 0]


def set_key(group: Any, key: str, value: Any) -> Any:
    """A recipe, or a group of it, with another value of one key."""
    name, _, rest = key.partition(".")
    return replace(group, **{name: set_key(getattr(group, name), rest, value) if rest else value})


def _planned_bytes(recipe: Recipe, plan: Plan, rank: int) -> int | None:
    """None where the recipe contradicts itself, or its layout does not fit the model."""
    try:
        return None if check_recipe(recipe, {}) else make_plan(recipe, plan.config).memory(rank).reserved
    except MeshwrightError:
        return None
