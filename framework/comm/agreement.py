"""A debug mode: before a collective starts, its ranks tell each other what they are about to start.

Ranks that start collectives in different orders hang, or worse, exchange each other's data. With `Communicator.check_s` set,
each sends the others one line that describes the operation and waits up to `check_s` seconds for theirs. Another line, or none,
is an OrderError on the spot that says who was about to do what. It costs a round of messages for each collective and hides
nothing under compute.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.errors import OrderError

# Lines have one size, so that a rank can post its receives before it knows what the others will say. A longer line is cut: the
# operation and the label come first, and these are what differs.
LINE_BYTES = 256
# Apart from the tags of `algorithms` and `objects`: a line must not be taken for a part of a collective that is under way. Lines
# are tensors of the CPU, so over gloo on every device.
LINE_TAG = 3


def check_agreement(axis: Communicator, operation: str, label: str, x: Tensor | None) -> None:
    """Return when all ranks of the axis are about to start this operation on equal tensors; at once without debug mode.

    label: what the operation is for, such as a unit's name. x: any shape and dtype, of which dtype and number of elements are
    compared, and which is not read; None where ranks' tensors may differ. Sends LINE_BYTES to each other rank. Raises
    OrderError when a rank is about to start something else, or has started nothing for `check_s` seconds.
    """
    if axis.check_s is None:
        return
    tensor = "" if x is None else f" {str(x.dtype).removeprefix('torch.')}[{x.numel()}]"
    mine = f"{operation} {label or '(unnamed)'}{tensor} on axis {axis.name}"
    others = _exchange(axis, mine)
    silent = [rank for rank, line in others.items() if line is None]
    different = {rank: line for rank, line in others.items() if line not in (mine, None)}
    # A rank that says something else is the cause, a silent one often only waits for it on another axis: so it is named first.
    if different:
        told = "; ".join(f"rank {rank} {line}" for rank, line in different.items())
        raise OrderError(
            f"ranks are about to start different collectives: rank {axis.ranks[axis.rank]} {mine}; {told}. Their code took"
            " different ways before this point, as for a model that skips a part of itself depending on the data"
        )
    if silent:
        raise OrderError(
            f"rank {axis.ranks[axis.rank]} is about to start {mine}, and for {axis.check_s:g} s rank(s) {silent} have started"
            " no collective there: they are slower than that, have ended, or wait on another axis"
        )


def _exchange(axis: Communicator, line: str) -> dict[int, str | None]:
    """The line of each other rank of the axis, by world rank; None for a rank that sent none in time."""
    mine = torch.zeros(LINE_BYTES, dtype=torch.uint8)
    encoded = line.encode()[:LINE_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    received = {peer: torch.zeros(LINE_BYTES, dtype=torch.uint8) for peer in range(axis.size) if peer != axis.rank}
    # Messages between pairs and not an all-gather: a collective would fail as a whole, and not say who is missing.
    arriving: dict[int, Any] = {
        peer: dist.irecv(place, group=axis.group, group_src=peer, tag=LINE_TAG) for peer, place in received.items()
    }
    leaving: list[Any] = [dist.isend(mine, group=axis.group, group_dst=peer, tag=LINE_TAG) for peer in received]
    found: dict[int, str | None] = {}
    for peer, work in arriving.items():
        try:
            # A deadline of its own: that of the group is half an hour.
            work.wait(timedelta(seconds=axis.check_s or 0.0))
            # The cut at LINE_BYTES may be inside a character.
            found[axis.ranks[peer]] = bytes(received[peer].tolist()).rstrip(b"\0").decode(errors="replace")
        except RuntimeError:  # gloo's, for a timeout and for a peer that has ended
            found[axis.ranks[peer]] = None
    # A send to a rank that never receives would wait for the group's timeout, in place of the error that names that rank.
    if None not in found.values():
        for work in leaving:
            work.wait()
    return found
