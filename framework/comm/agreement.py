"""A debug mode: before a collective starts, its ranks tell each other what they are about to start.

Ranks that start collectives in different orders hang, or worse, exchange each other's data. With `Communicator.check_s` set, each
sends the others a line of words first and waits so many seconds for theirs: another line, or none, is an error on the spot
that says who was about to do what. It costs a round of messages for each collective and hides nothing under compute.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.errors import OrderError

WORDS_BYTES = 256
# Apart from the tags of `collectives`; these messages are on the CPU, so over gloo on every device.
WORDS_TAG = 3


def check_agreement(axis: Communicator, operation: str, label: str, x: Tensor | None) -> None:
    """Return when all ranks of the axis are about to start this operation on equal tensors. Else OrderError.

    label: what it is of, such as a unit. x: None where ranks' tensors may differ.
    """
    if axis.check_s is None:
        return
    tensor = "" if x is None else f" {str(x.dtype).removeprefix('torch.')}[{x.numel()}]"
    mine = f"{operation} {label or '(unnamed)'}{tensor} on axis {axis.name}"
    others = _exchange(axis, mine)
    silent = [rank for rank, words in others.items() if words is None]
    different = {rank: words for rank, words in others.items() if words not in (mine, None)}
    if different:
        told = "; ".join(f"rank {rank} {words}" for rank, words in different.items())
        raise OrderError(
            f"ranks are about to start different collectives: rank {axis.ranks[axis.rank]} {mine}; {told}. Their code took"
            " different ways before this point, as for a model that skips a part of itself depending on the data"
        )
    if silent:
        raise OrderError(
            f"rank {axis.ranks[axis.rank]} is about to start {mine}, and for {axis.check_s:g} s rank(s) {silent} have started"
            " no collective there: they are slower than that, have ended, or wait on another axis"
        )


def _exchange(axis: Communicator, words: str) -> dict[int, str | None]:
    """The words of each other rank of the axis, by world rank; None for a rank that sent none in time."""
    mine = torch.zeros(WORDS_BYTES, dtype=torch.uint8)
    encoded = words.encode()[:WORDS_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    received = {peer: torch.zeros(WORDS_BYTES, dtype=torch.uint8) for peer in range(axis.size) if peer != axis.rank}
    arriving: dict[int, Any] = {
        peer: dist.irecv(place, group=axis.group, group_src=peer, tag=WORDS_TAG) for peer, place in received.items()
    }
    leaving: list[Any] = [dist.isend(mine, group=axis.group, group_dst=peer, tag=WORDS_TAG) for peer in received]
    found: dict[int, str | None] = {}
    for peer, work in arriving.items():
        try:
            work.wait(timedelta(seconds=axis.check_s or 0.0))
            found[axis.ranks[peer]] = bytes(received[peer].tolist()).rstrip(b"\0").decode(errors="replace")
        except RuntimeError:  # gloo's, for a timeout and for a peer that has ended
            found[axis.ranks[peer]] = None
    if None not in found.values():
        for work in leaving:
            work.wait()
    return found
