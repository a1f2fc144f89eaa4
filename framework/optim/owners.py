"""Owners of matrices: who makes which one orthogonal, with which neighbours, and how its parts get there and back.

Work is even where ranks have many matrices each. Where they are few, neighbours share each matrix: `optim.muon.ranks_per_matrix`
ranks, a team, which has one load. Its members own different matrices, so that messages are even as well.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import torch
from torch import Tensor

from framework.comm.collectives import all_to_all
from framework.comm.communicator import Communicator


def assign_owners(
    costs: Sequence[int],
    loads: Sequence[int],
    holders: Sequence[Sequence[int]] | None = None,
    num_holders: int = 1,
    team: int = 1,
) -> list[int]:
    """An owner for each matrix, so that costs are about equal: the dearest first, each to the team with least. loads: costs that
    each owner has already. holders: for each matrix, remainders of its owner's number by num_holders; None: any. team: owners in
    a row that have each matrix of one of them as a cost; it divides num_holders, or is a multiple."""
    kinds = max(1, num_holders // team)  # of teams, by the holders in them
    numbered = [(max(loads[first : first + team]), first) for first in range(0, len(loads), team)]
    heaps = [numbered[kind::kinds] for kind in range(kinds)]
    for heap in heaps:
        heapq.heapify(heap)
    owners, owned = [0] * len(costs), [0] * len(loads)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        own = holders[index] if holders else range(num_holders)
        heap = min((heaps[kind] for kind in dict.fromkeys(each // team % kinds for each in own)), key=itemgetter(0))
        load, first = heap[0]
        heapq.heapreplace(heap, (load + costs[index], first))
        members = [each for each in range(first, first + team) if each % num_holders in own]
        owners[index] = min(members, key=owned.__getitem__)
        owned[owners[index]] += costs[index]
    return owners


def add_loads(loads: list[int], owners: Sequence[int], costs: Sequence[int], team: int = 1) -> None:
    """Add the matrices' costs to those of all members of their owners' teams."""
    for owner, cost in zip(owners, costs, strict=True):
        first = owner - owner % team
        for member in range(first, first + team):
            loads[member] += cost


def measure_balance(
    costs: Sequence[int],
    holders: Sequence[Sequence[int]] | None,
    num_owners: int,
    num_holders: int = 1,
    team: int = 1,
    experts: float = 0.0,
    ep: int = 1,
    slices: int = 1,
) -> float:
    """The busiest owner's work over the mean. experts: costs of those of one place of ep, which even out the rest among their
    holders: every ep-th in rows of so many slices."""
    loads = [0] * num_owners
    add_loads(loads, assign_owners(costs, loads, holders, num_holders, team), costs, team)
    places = [[load for rank, load in enumerate(loads) if rank // slices % ep == place] for place in range(ep)]
    held = [each for each in places if each]
    busiest = max(max(*each, (sum(each) + experts) / len(each)) for each in held)
    return busiest * len(loads) / max(1.0, sum(loads) + experts * len(held))


@dataclass(frozen=True)
class OwnerHop:
    """The way of matrices to their owners along one axis, and back.

    owners: the index of each matrix's owner along the axis. to_owner, from_owner: for each matrix, how many elements each rank of
    the axis sends to its owner, and gets back.
    """

    axis: Communicator
    owners: Sequence[int]
    to_owner: Sequence[Sequence[int]]
    from_owner: Sequence[Sequence[int]]

    @cached_property
    def own(self) -> list[int]:
        """The matrices whose owner this rank is."""
        return self._by_owner[self.axis.rank]

    @property
    def num_sent(self) -> int:
        """Elements that this rank sends, there and back."""
        return sum(sum(sizes) - sizes[self.axis.rank] for sizes, _ in (self._there, self._back))

    # Sizes never change, and a mixture has thousands of matrices: counted once, not in every step.

    @cached_property
    def _by_owner(self) -> list[list[int]]:
        """The matrices of each owner."""
        found: list[list[int]] = [[] for _ in range(self.axis.size)]
        for index, owner in enumerate(self.owners):
            found[owner].append(index)
        return found

    @cached_property
    def _there(self) -> tuple[list[int], list[list[int]]]:
        """Elements for each owner, and the lengths of what comes from each rank."""
        rank, ranks = self.axis.rank, range(self.axis.size)
        sizes = [sum(self.to_owner[index][rank] for index in of_owner) for of_owner in self._by_owner]
        return sizes, [[self.to_owner[index][peer] for index in self.own] for peer in ranks]

    @cached_property
    def _back(self) -> tuple[list[int], list[list[int]]]:
        """Elements for each rank, and the lengths of what comes from each owner."""
        rank, ranks = self.axis.rank, range(self.axis.size)
        sizes = [sum(self.from_owner[index][peer] for index in self.own) for peer in ranks]
        return sizes, [[self.from_owner[index][rank] for index in of_owner] for of_owner in self._by_owner]

    def collect(self, parts: Sequence[Tensor], empty: Tensor) -> list[list[Tensor]]:
        """The parts of all ranks, in order, of each own matrix. parts: this rank's of all matrices, [n] each; empty: [0]."""
        rank = self.axis.rank
        sent = [parts[index][: self.to_owner[index][rank]] for of_owner in self._by_owner for index in of_owner]
        if self.axis.size == 1:  # without the copy
            return [[part] for part in sent]
        by_peer = self._exchange(sent, *self._there, empty)
        return [list(parts) for parts in zip(*by_peer, strict=True)]

    def give_back(self, parts: Sequence[Sequence[Tensor]], empty: Tensor) -> list[Tensor]:
        """This rank's part of every matrix. parts: for each own matrix, what each rank gets."""
        if self.axis.size == 1:
            return [part for (part,) in parts]
        sent = [each[peer] for peer in range(self.axis.size) for each in parts]
        results = [empty] * len(self.owners)
        for of_owner, found in zip(self._by_owner, self._exchange(sent, *self._back, empty), strict=True):
            for index, part in zip(of_owner, found, strict=True):
                results[index] = part
        return results

    def _exchange(
        self, sent: Sequence[Tensor], in_splits: list[int], lengths: list[list[int]], empty: Tensor
    ) -> list[tuple[Tensor, ...]]:
        """The tensors that each rank has sent, in parts of these lengths."""
        x, out_splits = torch.cat([empty, *sent]), [sum(each) for each in lengths]
        out = empty.new_empty(sum(out_splits))
        all_to_all(out, x, self.axis, out_splits, in_splits)
        return [chunk.split(each) for chunk, each in zip(out.split(out_splits), lengths, strict=True)]
