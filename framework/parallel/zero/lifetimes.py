"""ZeRO as a table (Rajbhandari et al. 2020, section 5): which memory of a unit lives how long, and where; nothing else.

    stage | full parameters            | full gradients        | optimizer state and master
    0     | always                     | the whole step        | full
    1     | always                     | the whole step        | shard
    2     | always                     | one unit's backward   | shard
    3     | one unit's forward, again  | one unit's backward   | shard
          | its backward               |                       |

Stage 0 needs no algorithm of its own: it shards over one rank and has all ranks as replicas. Stage 3 is what FSDP (Zhao et al.
2023, section 3.2) calls full sharding; HSDP is any stage with fewer shards than ranks.

The last column, where a state lives between its uses, is offload: a home and not an algorithm (ZeRO-Offload, Ren et al. 2021;
ZeRO-Infinity, Rajbhandari et al. 2021).
"""

from dataclasses import dataclass
from enum import Enum

from framework.recipe.schema import Zero


class Home(Enum):
    """The memory in which a state lives between its uses."""

    DEVICE = "device"
    HOST = "host"  # pinned memory of the CPU
    DISK = "disk"


@dataclass(frozen=True)
class Homes:
    """The homes of a unit's states: the table's last column. Gradients and activations have theirs on the device."""

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
