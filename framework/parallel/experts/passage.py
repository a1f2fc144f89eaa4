"""Passage: where the rows of one dispatch go, hop by hop, and how they lie between hops.

    direct          one hop over `ep`: rank (m, j) sends to every rank (n, i)
    hierarchical    two hops: within the node over `ep_inner`, (m, j) to (m, i) of all rows that are meant for a rank i of some
                    node; then over `ep_outer`, (m, i) to (n, i). Fewer and larger messages leave the node, as many rows.

Rows are sorted before every hop by the rank to which it takes them, and behind the last by expert. What lies between two sorts is
known from numbers of rows alone: they are exchanged first, in as many hops, and the host learns all of them at once.

    G ranks of the first hop, N of the second (1 where there is none), e experts on a rank, E = N G e; expert (n G + i) e + x is
    number x of rank (n, i). Numbers of rows: [ranks of a hop, parts, ranks of the other hop, e], for `parts` parts of the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.comm.collectives import all_to_all
from framework.comm.communicator import Communicator
from framework.comm.transfer import AsyncHostCopy
from framework.model.matmul import RowGroups
from framework.parallel.experts.rows import invert, permute
from framework.parallel.experts.transfer import Transfer


@dataclass(frozen=True)
class Hop:
    """Rows sent over one axis, and sorted on arrival. sent, received: for and from each rank; order, inverse: [R] int64, from the
    order of arrival to that of what follows, and back."""

    axis: Communicator
    sent: Sequence[int]
    received: Sequence[int]
    order: Tensor
    inverse: Tensor

    def start(self) -> Transfer:
        """The journey there; `Transfer.back` is the other."""
        return Transfer(self.axis, self.sent, self.received)


@dataclass(frozen=True)
class Passage:
    """The hops of one part of the tokens. ids: [R] int64, the number among this rank's experts that each arrived row is for;
    groups: of rows by expert."""

    hops: tuple[Hop, ...]
    ids: Tensor
    groups: RowGroups

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends of its own."""
        return sum(self.hops[0].sent)


class Journey:
    """The rows of one passage on their way to the experts and back. What is called between two of its methods is computed while
    the rows travel."""

    def __init__(self, passage: Passage):
        self.passage = passage
        self._there = [hop.start() for hop in passage.hops]
        self._back = [transfer.back() for transfer in self._there]
        self._rows = torch.empty(0)

    def depart(self, rows: Tensor) -> None:
        """Start the first hop.  rows: [P, H], sorted by the rank of it."""
        self._rows = self._there[0].depart(rows)

    def arrive(self) -> Tensor:
        """The rows for this rank's experts, [R, H], in their order."""
        last = len(self._there) - 1
        for index, (hop, transfer) in enumerate(zip(self.passage.hops, self._there, strict=True)):
            self._rows = permute(transfer.arrive(self._rows), hop.order, hop.inverse)
            if index < last:
                self._rows = self._there[index + 1].depart(self._rows)
        return self._take()

    def depart_back(self, rows: Tensor) -> None:
        """Start the first hop back.  rows: [R, H], what the experts made of them."""
        hop = self.passage.hops[-1]
        # In its place: what the experts made need not live while it is sent.
        rows = permute(rows, hop.inverse, hop.order)
        self._rows = self._back[-1].depart(rows)

    def arrive_back(self) -> Tensor:
        """What the experts made of this rank's rows, [P, H], in the order of `depart`."""
        for index in reversed(range(len(self._back))):
            self._rows = self._back[index].arrive(self._rows)
            if index:
                hop = self.passage.hops[index - 1]
                self._rows = self._back[index - 1].depart(permute(self._rows, hop.inverse, hop.order))
        return self._take()

    def _take(self) -> Tensor:
        rows, self._rows = self._rows, torch.empty(0)
        return rows


class Route:
    """The hops between the ranks of `ep`, which are equal for all layers. hops: the axes, one or two, the inner first."""

    def __init__(self, hops: Sequence[Communicator]):
        self.hops = tuple(hops)
        self._inner = self.hops[0].size
        self._outer = self.hops[1].size if len(self.hops) > 1 else 1
        self._keys: dict[tuple[int, torch.device], Tensor] = {}

    def sort_keys(self, num_experts: int, device: torch.device) -> Tensor | None:
        """[E + 1] int64, the place of each expert in the order of the first hop; the last is of pairs that are not sent. None:
        that is the order of the experts' numbers."""
        if self._outer == 1:
            return None
        if (keys := self._keys.get((num_experts, device))) is None:
            order = (
                torch.arange(num_experts, device=device).view(self._outer, self._inner, -1).transpose(0, 1).flatten()
            )
            keys = torch.cat([invert(order), order.new_full((1,), num_experts)])
            self._keys[num_experts, device] = keys
        return keys

    def plan(self, counts: Sequence[Tensor]) -> list[Passage]:
        """The passage of each part of the tokens, from this rank's rows for each of the layer's experts, [E] int64 each.

        Collective over the hops: an all-to-all of the numbers over each. The host has to know them before it can send rows, and
        waits for them here, once in a layer.
        """
        parts = len(counts)
        sent = torch.stack(list(counts)).view(parts, self._outer, self._inner, -1).permute(2, 0, 1, 3).contiguous()
        numbers: list[tuple[Tensor, Tensor]] = []
        for axis in self.hops:
            received = torch.empty_like(sent)
            all_to_all(received, sent, axis)
            numbers.append((sent, received))
            sent = received.transpose(0, 2).contiguous()
        # Of the last hop by expert, of the others by rank: all that the host has to know, in one copy.
        sums = [each.sum((2, 3)).flatten() for pair in numbers for each in pair]
        by_expert = numbers[-1][1].sum((0, 2)).flatten()
        known = [int(each) for each in AsyncHostCopy(torch.cat([*sums, by_expert])).values()]
        by_hop = []
        for axis in self.hops:
            size = axis.size * parts
            by_hop.append((known[:size], known[size : 2 * size]))
            known = known[2 * size :]
        num_local = len(known) // parts
        groups = [known[part * num_local : (part + 1) * num_local] for part in range(parts)]
        return [self._passage(part, parts, numbers, by_hop, groups[part]) for part in range(parts)]

    def _passage(
        self,
        part: int,
        parts: int,
        numbers: Sequence[tuple[Tensor, Tensor]],
        by_hop: Sequence[tuple[list[int], list[int]]],
        groups: list[int],
    ) -> Passage:
        """by_hop: of each hop [ranks * parts] rows sent and received; groups: [e] rows of each of this rank's experts."""
        hops, ids = [], torch.empty(0)
        for axis, (_, received), (to, of) in zip(self.hops, numbers, by_hop, strict=True):
            rows = received[:, part]
            # Behind the last hop by expert, else by the rank of the next.
            dim = 2 if axis is self.hops[-1] else 1
            labels = torch.arange(rows.shape[dim], device=rows.device).view(-1, *(1,) * (2 - dim)).expand_as(rows)
            # How many rows there are is told, or a GPU would be waited for to learn it.
            of_part = of[part::parts]
            arriving = labels.flatten().repeat_interleave(rows.flatten(), output_size=sum(of_part))
            ids, order = arriving.sort(stable=True)
            hops.append(Hop(axis, to[part::parts], of_part, order, invert(order)))
        return Passage(tuple(hops), ids, RowGroups.of(groups, ids.device))
