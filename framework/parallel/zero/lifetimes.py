"""ZeRO as a table of lifetimes (Rajbhandari et al. 2020): which memory of a unit lives how long, nothing else.

    stage | full parameters            | full gradients        | optimizer state and master
    0     | always                     | the whole step        | full
    1     | always                     | the whole step        | shard
    2     | always                     | one unit's backward   | shard
    3     | one unit's forward, again  | one unit's backward   | shard
          | its backward               |                       |

Stage 0 needs no algorithm of its own: it shards over one rank and has all ranks as replicas.
"""

from dataclasses import dataclass

from framework.recipe.schema import Zero


@dataclass(frozen=True)
class Lifetimes:
    """Answers of the table, with the recipe's choices.

    keeps_gradients: the full gradients of all units live for the whole step and are reduced once, in its last backward;
    else a unit's gradients are reduced into the shard after every backward of the unit.
    keeps_parameters: a unit's gathered parameters live until the optimizer's update; else until their use is over.
    resident_parameters: their memory is never given back, so an update goes into it in place.
    divides_updates: ranks that hold the same part divide its optimizer state and its update, and gather the updated part.
    prefetch_units: units gathered ahead of the one in use, in forward and in backward.
    """

    keeps_gradients: bool
    keeps_parameters: bool
    resident_parameters: bool
    divides_updates: bool
    prefetch_units: int


def lifetimes_of(zero: Zero) -> Lifetimes:
    """The row of the table for the recipe's stage."""
    return Lifetimes(
        keeps_gradients=zero.stage < 2 or zero.accumulate == "local",
        keeps_parameters=zero.stage < 3 or zero.keep_gathered,
        resident_parameters=zero.stage < 3,
        divides_updates=zero.optimizer_within == "all",
        prefetch_units=zero.prefetch_units,
    )
