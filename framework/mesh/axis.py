"""Axis: one direction of the mesh as one rank sees it, and the Traffic that this rank has sent along it."""

from dataclasses import dataclass, field
from typing import Any


class Traffic:
    """What one rank has sent along one axis since the start, by operation: calls and bytes.

    `comm/` records and nobody resets: a step's traffic is a difference. Bytes are what this rank sends to the others
    by the operation's bandwidth-optimal algorithm (2 (n-1)/n of the tensor for an all-reduce of n ranks), so that
    volumes compare with theory and with a link's bandwidth.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def record(self, operation: str, num_bytes: int) -> None:
        """One more call of `operation`, which sends `num_bytes`."""
        self.calls[operation] = self.calls.get(operation, 0) + 1
        self.bytes[operation] = self.bytes.get(operation, 0) + num_bytes


@dataclass(frozen=True, eq=False)
class Axis:
    """One direction of the mesh. Size 1 is the identity: there is no group and every collective returns its input.

    `rank` is the index of this process along the axis; `ranks` are the world ranks of the axis, in order;
    `group` is a torch process group over them, None when the size is 1. `scatter_group`: another one, for reduce-scatters that
    must not queue behind gathers; None where operations do not queue. `buffers` are receive buffers that no operation
    uses just now: `comm/` takes them and gives them back. check_s: debug mode, see `comm/agreement.py`. staged: the group carries
    tensors of the CPU only, and those of a GPU go through host memory.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...] = (0,)
    group: Any = None
    scatter_group: Any = None
    traffic: Traffic = field(default_factory=Traffic)
    buffers: list[Any] = field(default_factory=list)
    check_s: float | None = None
    staged: bool = False
