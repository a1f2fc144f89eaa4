"""Axis: one direction of the mesh as one rank sees it. Integers only; what carries messages along it is a `comm` Communicator."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """The ranks that differ in one coordinate only. Size 1 is the identity: nobody to talk to.

    `rank` is the index of this process along the axis; `ranks` are the world ranks of the axis, in order. Planning may leave
    `ranks` out where nobody asks for them.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...] = (0,)
