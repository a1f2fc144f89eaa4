"""ZeRO as a table (Rajbhandari et al. 2020, section 5): which memory of a unit lives how long, and where; nothing else.

    stage | full parameters            | full gradients        | optimizer state and master
    0     | always                     | the whole step        | full
    1     | always                     | the whole step        | shard
    2     | always                     | one unit's backward   | shard
    3     | one unit's forward, again  | one unit's backward   | shard
          | its backward               |                       |

Stage 0 needs no algorithm of its own: it shards over one rank and has all ranks as replicas. Stage 3 is what FSDP (Zhao et al.
2023, section 3.2) calls full sharding; HSDP is any stage with fewer shards than ranks.

Where a state lives between its uses is offload: a home and not an algorithm (ZeRO-Offload, Ren et al. 2021; ZeRO-Infinity,
Rajbhandari et al. 2021). The recipe's fractions say which units of a stage have theirs on the host or on a disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import TYPE_CHECKING

from framework.mesh.topology import SHARING_AXES
from framework.recipe.schema import Offload, Zero

if TYPE_CHECKING:
    from framework.parallel.zero.plan_buffers import BufferPlan


class Home(Enum):
    """The memory in which a state lives between its uses."""

    DEVICE = "device"
    HOST = "host"  # pinned memory of the CPU
    DISK = "disk"


@dataclass(frozen=True)
class Homes:
    """The homes of a unit's states. Gradients and activations have theirs on the device."""

    parameters: Home = Home.DEVICE
    """Shards, or full parameters where these are resident; never on a disk."""
    master: Home = Home.DEVICE
    """The master, and the optimizer's moments: one update reads both, in one memory."""


@dataclass(frozen=True)
class Lifetimes:
    """One row of the table, with the recipe's choices."""

    keeps_gradients: bool
    """The full gradients of all units live for the whole step and are reduced once, in its last backward; else a unit's gradients
    are reduced into the shard after every backward of the unit."""
    keeps_parameters: bool
    """A unit's unsharded parameters live until the optimizer's update; else until their use is over."""
    resident_parameters: bool
    """Their memory is never given back, so an update goes into it in place."""
    divides_updates: bool
    """Ranks that hold the same part divide its optimizer state and its update, and all-gather the updated part."""
    homes: Homes = Homes()
    prefetch_units: int = 1
    """Units that are unsharded ahead of the one in use."""


def lifetimes_of(zero: Zero) -> Lifetimes:
    """The row of the table for the recipe's stage."""
    return Lifetimes(
        # "local": over k microbatches one reduction instead of k, for the memory of full gradients.
        keeps_gradients=zero.stage < 2 or zero.accumulate == "local",
        # Not the same as resident: kept parameters of stage 3 give their memory back before the update, others never do.
        keeps_parameters=zero.stage < 3 or zero.keep_gathered,
        resident_parameters=zero.stage < 3,
        divides_updates=zero.optimizer_within == "all",
        prefetch_units=zero.prefetch_units,
    )


def choose_homes(buffers: "Sequence[BufferPlan]", offload: Offload) -> "list[BufferPlan]":
    """The buffers of one stage with the homes of their master, moments and parameters.

    optimizer: of what is trained. parameters: of what is not resident; experts of which a rank has the only shard are.
    """
    updated = _choose_units(buffers, offload.optimizer, lambda each: _global_numel(each) * each.is_trained)
    unsharded = _choose_units(
        buffers,
        offload.parameters,
        lambda each: _global_numel(each) * each.dtypes.compute.itemsize * (not each.lifetimes.resident_parameters),
    )
    return [
        _place(
            each,
            Home(offload.home) if each.unit in updated and each.is_trained else Home.DEVICE,
            Home.HOST if each.unit in unsharded and not each.lifetimes.resident_parameters else Home.DEVICE,
        )
        for each in buffers
    ]


def _global_numel(buffer: "BufferPlan") -> int:
    """Elements of its parameters on all ranks: alike on ranks of `tp` that hold uneven slices, so that they choose alike."""
    return sum(prod(slot.layout.shape) for slot in buffer.slots)


def _choose_units(buffers: "Sequence[BufferPlan]", fraction: float, size: "Callable[[BufferPlan], int]") -> set[str]:
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


def is_shared(buffer: "BufferPlan") -> bool:
    """Whether another stage has a parameter of the buffer: a tied one."""
    return any(axis in slot.layout.replicated for slot in buffer.slots for axis in SHARING_AXES)


def _place(buffer: "BufferPlan", updated: Home, unsharded: Home) -> "BufferPlan":
    homes = replace(buffer.lifetimes.homes, master=updated, parameters=unsharded)
    return replace(buffer, lifetimes=replace(buffer.lifetimes, homes=homes))
