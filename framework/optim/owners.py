"""Owners of Muon's matrices: the parts that a rank holds, who makes which matrix orthogonal, and the way there and back.

A rank holds ZeRO's interval of a weight's elements, and of those tp's rows or columns. A weight is one block, or has one for each
head (`MatrixForm`), which tp does not divide. Blocks of rows are intervals of the local elements, blocks of columns
an interval of each row. Each block has one owner. Work is even where ranks own many; where they own few, neighbours share each
block, a *team*, which has one load. Its members own different blocks, so that messages are even as well.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor, nn

from framework.comm.collectives import all_to_all
from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout
from framework.optim.matrices import MatrixForm
from framework.parallel.zero.buffer_plan import BufferPlan


@dataclass(frozen=True)
class OwnedValues:
    """The elements of a weight that this rank owns, [n] each in the master's dtype, and their rate and decay over the step's."""

    value: Tensor
    gradient: Tensor
    momentum: Tensor
    lr_ratio: float
    decay: float


@dataclass(frozen=True, eq=False)
class HeldWeight:
    """One weight [a, b], or one expert's, of a buffer.

    start, stop: its local elements in the buffer. layout: of the parameter, as this rank holds it.
    """

    buffer: BufferPlan
    form: MatrixForm
    start: int
    stop: int
    layout: Layout
    own: OwnedValues

    @cached_property
    def parts(self) -> "list[MatrixPart]":
        """Its blocks, also those on other ranks of tp, which all know them in this order."""
        held = self.blocks_of(self.layout)
        width = self.period // max(1, len(held))
        places = {block: place * width for place, block in enumerate(held)}
        return [MatrixPart(self, b, places.get(b, 0), width * (b in places)) for b in range(self.form.blocks)]

    @property
    def is_in_columns(self) -> bool:
        """Whether its blocks are columns: each row has elements of all."""
        return self.form.dim == 1 and self.form.blocks > 1

    @cached_property
    def period(self) -> int:
        """The number of local elements, or of those in a row, of which each block has an interval."""
        return max(1, self.layout.shape_local[-1] if self.is_in_columns else self.stop - self.start)

    @cached_property
    def own_interval(self) -> tuple[int, int]:
        """The elements that this rank owns, of the local ones."""
        start = max(self.start, self.buffer.start)
        return start - self.start, max(start, min(self.stop, self.buffer.stop)) - self.start

    def layout_of(self, rank: int) -> Layout:
        """The layout of what a rank of tp, or of those that slice an expert, holds."""
        # Nested shards of one axis: an inner one counts the neighbours that share an outer one's piece.
        shards = (replace(each, index=rank % each.count) if each.axis == "tp" else each for each in self.layout.shards)
        return replace(self.layout, shards=tuple(shards), interval=None)

    def blocks_of(self, layout: Layout) -> list[int]:
        """The blocks of which a layout of it has some: of several it has each whole or not at all."""
        if self.form.blocks == 1:
            return [0]
        dim = self.form.dim - 2
        size = layout.shape[dim] // self.form.blocks
        return [block for start, stop in layout.runs[dim] for block in range(start // size, stop // size)]

    def holders(self, num_ranks: int) -> list[list[int]]:
        """The ranks of tp that hold some of each block."""
        held = [self.blocks_of(self.layout_of(rank)) for rank in range(num_ranks)]
        return [[rank for rank, own in enumerate(held) if block in own] for block in range(self.form.blocks)]

    # Columns of all heads at once: a kernel for each would be thousands in a step.

    def cut(self, own: Tensor) -> list[Tensor]:
        """The elements of each part, of those that this rank owns, [n]."""
        if not self.is_in_columns:
            return list(own.split([each.own_length for each in self.parts]))
        (start, stop), width = self.own_interval, max(each.width for each in self.parts)
        rows = nn.functional.pad(own, (start % self.period, -stop % self.period)).view(-1, self.period // width, width)
        by_block = rows.transpose(0, 1).flatten(1)
        return [by_block[each.place // width].narrow(0, each.margin, each.own_length) for each in self.parts]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The elements that this rank owns, [n], of those of each part: the inverse of `cut`."""
        if not self.is_in_columns:
            return torch.cat([*parts])
        (start, stop), width = self.own_interval, max(each.width for each in self.parts)
        first, num_rows = start % self.period, -(-stop // self.period) - start // self.period
        others = parts[0].new_empty(width)
        padded = []
        for each, part in zip(self.parts, parts, strict=True):
            behind = num_rows * each.width - each.margin - each.own_length
            padded += [others[: each.margin], part, others[:behind]]
        rows = torch.cat(padded).view(self.period // width, num_rows, width).transpose(0, 1)
        return rows.flatten()[first : first + stop - start]


@dataclass(frozen=True, eq=False)
class MatrixPart:
    """A block of a weight, which has one owner: all of it, or what it has of a head.

    place, width: its interval of `HeldWeight.period` elements; none of it is here if other ranks of tp hold it.
    """

    weight: HeldWeight
    block: int
    place: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """The global shape [a, b]."""
        return self.weight.form.block(self.weight.layout.shape)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The global shapes of the matrices in it."""
        return self.weight.form.shapes(self.shape)

    def flops(self, steps: int, ranks: int = 1) -> int:
        """FLOPs of its orthogonalisation, of each of the ranks that share it."""
        return self.weight.form.flops(self.weight.layout.shape, steps, ranks)

    def lengths(self, num_ranks: int, of_owners: bool) -> list[int]:
        """Numbers of its elements on so many ranks that hold the parts of its buffer, or own those of this rank's part."""
        buffer = self.weight.buffer
        first, numel = (buffer.part_start, buffer.numel_owned) if of_owners else (0, buffer.numel_part)
        counts = [self._count(first + rank * numel) for rank in range(num_ranks + 1)]
        return [behind - before for before, behind in pairwise(counts)]

    def _count(self, stop: int) -> int:
        """Elements of it in front of an element of the buffer."""
        weight = self.weight
        periods, rest = divmod(min(max(stop, weight.start), weight.stop) - weight.start, weight.period)
        return periods * self.width + min(max(rest - self.place, 0), self.width)

    @cached_property
    def own_length(self) -> int:
        """Number of its elements that this rank owns."""
        return self._count(self.weight.buffer.stop) - self._count(self.weight.buffer.start)

    @cached_property
    def margin(self) -> int:
        """Number of its elements in front of those that this rank owns, in their first row."""
        return min(max(self.weight.own_interval[0] % self.weight.period - self.place, 0), self.width)

    def slice_of(self, rank: int) -> "Slice | None":
        """The rows or columns of it that a rank of tp holds, or of those that slice an expert; None where it holds all."""
        own = [shard for shard in self.weight.layout.shards if shard.axis == "tp"]
        if not own:
            return None
        layout, dim = self.weight.layout_of(rank), own[0].dim
        runs = layout.runs[dim]
        if self.weight.form.blocks > 1:
            if self.block in self.weight.blocks_of(layout):
                return None
            runs = [(0, 0)]
        indices = torch.cat([torch.arange(*run) for run in runs])
        return Slice(dim - len(layout.shape) + 2, indices.to(self.weight.own.value.device))


@dataclass(frozen=True)
class Slice:
    """Rows (dim 0) or columns (dim 1) of a weight, by their indices, int64 on its device."""

    dim: int
    indices: Tensor

    def numel(self, shape: tuple[int, int]) -> int:
        """Its elements of a weight of this shape."""
        return shape[1 - self.dim] * len(self.indices)


def join_slices(shape: tuple[int, int], parts: Sequence[Tensor], slices: Sequence[Slice | None]) -> Tensor:
    """The weight [a, b] of what the ranks of tp have sent."""
    whole = parts[0].new_empty(shape)
    for part, each in zip(parts, slices, strict=True):
        if each is None:
            whole = part.view(shape) if part.numel() else whole
        else:
            size = [len(each.indices) if dim == each.dim else length for dim, length in enumerate(shape)]
            whole.index_copy_(each.dim, each.indices, part.view(size))
    return whole


def cut_slice(weight: Tensor, each: Slice | None) -> Tensor:
    """The elements of a slice, [n]."""
    return (weight if each is None else weight.index_select(each.dim, each.indices)).flatten()


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
        by_peer = self._exchange(sent, *self._there, empty)
        return [list(parts) for parts in zip(*by_peer, strict=True)]

    def give_back(self, parts: Sequence[Sequence[Tensor]], empty: Tensor) -> list[Tensor]:
        """This rank's part of every matrix. parts: for each own matrix, what each rank gets."""
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
        if self.axis.size == 1:
            return [tuple(sent)]  # without the copy
        x, out_splits = torch.cat([empty, *sent]), [sum(each) for each in lengths]
        out = empty.new_empty(sum(out_splits))
        all_to_all(out, x, self.axis, out_splits, in_splits)
        return [chunk.split(each) for chunk, each in zip(out.split(out_splits), lengths, strict=True)]
