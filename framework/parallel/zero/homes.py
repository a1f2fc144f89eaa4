"""Homes: which units of a stage keep master, moments and parameters on the host or on a disk, as the recipe's fractions say."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from framework.mesh.topology import SHARING_AXES
from framework.parallel.zero.lifetimes import Home
from framework.parallel.zero.plan_buffers import BufferPlan
from framework.recipe.schema import Offload


def choose_homes(buffers: Sequence[BufferPlan], offload: Offload) -> list[BufferPlan]:
    """The buffers of one stage with the homes of their master, moments and parameters.

    optimizer: of what is trained. parameters: of what is not resident; experts of which a rank has the only shard are.
    """
    updated = _choose_units(buffers, offload.optimizer, lambda each: _global_numel(each) * each.is_trained)
    unsharded = _choose_units(buffers, offload.parameters, _sharded_bytes)
    return [
        _place(
            each,
            Home(offload.home) if each.unit in updated and each.is_trained else Home.DEVICE,
            Home.HOST if each.unit in unsharded and not each.lifetimes.resident_parameters else Home.DEVICE,
        )
        for each in buffers
    ]


def _global_numel(buffer: BufferPlan) -> int:
    """Elements of its parameters on all ranks: alike on ranks of `tp` that hold uneven slices, so that they choose alike."""
    return sum(prod(slot.layout.shape) for slot in buffer.slots)


def _sharded_bytes(buffer: BufferPlan) -> int:
    return 0 if buffer.lifetimes.resident_parameters else _global_numel(buffer) * buffer.dtypes.compute.itemsize


def _choose_units(buffers: Sequence[BufferPlan], fraction: float, size: Callable[[BufferPlan], int]) -> set[str]:
    """Units that have as near as may be `fraction` of the size so far, after every unit."""
    sizes: dict[str, int] = {}
    for buffer in buffers:
        sizes[buffer.unit] = sizes.get(buffer.unit, 0) + size(buffer)
    # Ranks that hold a parameter alike must update it alike, to the last bit, and a CPU rounds otherwise than a GPU: which units
    # the stage of the other rank chooses is not known here.
    stays = {buffer.unit for buffer in buffers if fraction < 1 and is_shared(buffer)}
    chosen, so_far, taken = set(), 0, 0
    for unit, num in sizes.items():
        so_far += num
        if unit not in stays and num and taken + num / 2 <= fraction * so_far:
            chosen.add(unit)
            taken += num
    return chosen


def is_shared(buffer: BufferPlan) -> bool:
    """Whether another stage has a parameter of the buffer: a tied one."""
    return any(axis in slot.layout.replicated for slot in buffer.slots for axis in SHARING_AXES)


def _place(buffer: BufferPlan, updated: Home, unsharded: Home) -> BufferPlan:
    homes = replace(buffer.lifetimes.homes, master=updated, parameters=unsharded)
    return replace(buffer, lifetimes=replace(buffer.lifetimes, homes=homes))
