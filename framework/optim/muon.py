"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the momentum of each matrix, made orthogonal.

    M <- M + (1 - b) (G - M)        U = G + b (M - G)        W <- (1 - lr wd) W - lr s NS(U)

NS(U) is a polynomial of U whose singular values lie near 1, so it needs the whole matrix, of which ranks hold parts: ZeRO an
interval of its elements, tensor parallelism some of its rows or columns. Every matrix has an *owner* among those ranks.
Elementwise work stays where the parts are; U travels to the owners axis by axis and NS(U) back the way it came:

    part of U --update axis--> --shard axis--> elements of this rank of tp --tp--> whole U, NS(U) --tp--> ... --> part of NS(U)

Each hop is one all-to-all for all matrices. An axis of size 1 is a copy. Owners have about equal work (`assign_owners`). Ranks of
`tp` that hold a whole matrix alike get one rank's result, so they stay equal to the bit. Experts are matrices one by one, and so
are the matrices packed in one weight (`MatrixForm`), and its heads on request, which are whole on ranks of `tp` and stay there.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod, sqrt
from operator import itemgetter

import torch
from torch import Tensor

from framework.comm.collectives import all_to_all
from framework.comm.communicator import Communicator
from framework.optim.groups import GroupAssignment, decay_rate
from framework.optim.held_matrices import HeldWeight, OwnedValues, cut_slice, join_slices
from framework.optim.matrices import SYMMETRIC_ROWS
from framework.optim.optimizers import FlatOptimizer
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.parallel.zero.buffer_plan import BufferPlan, GroupSpan, Slot
from framework.recipe.schema import Muon, Optim

# Coefficients of the quintic iteration, those of torch.optim.Muon: the slope at zero is as large as it can be.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
# Elements of equal matrices that are iterated together: enough to fill a GPU, and 512 MiB of bf16 for each intermediate.
BATCH_NUMEL = 1 << 28


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Newton-Schulz iterations for the nearest orthogonal matrix of each of [n, a, b], in their dtype."""
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    unread = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    for _ in range(steps):
        gram = _add_gram(unread, 0.0, x, 1.0)
        x = torch.baddbmm(x, _add_gram(gram, b, gram, c), x, beta=a)
    return x.mT if is_tall else x


def _add_gram(symmetric: Tensor, beta: float, x: Tensor, alpha: float) -> Tensor:
    """beta S + alpha X X^T for S, X: [n, a, a], [n, a, b]. Of large ones the block above the diagonal is copied from below it: a
    quarter of the FLOPs less."""
    rows = x.shape[1]
    if rows < SYMMETRIC_ROWS:
        return torch.baddbmm(symmetric, x, x.mT, beta=beta, alpha=alpha)
    low, high, out = slice(0, rows // 2), slice(rows // 2, rows), torch.empty_like(symmetric)
    for i, j in ((low, low), (high, high), (high, low)):
        torch.baddbmm(symmetric[:, i, j], x[:, i], x[:, j].mT, beta=beta, alpha=alpha, out=out[:, i, j])
    out[:, low, high] = out[:, high, low].mT
    return out


def scale_of(shape: tuple[int, int], kind: str) -> float:
    """The factor s of an update for a matrix of this shape (`optim.muon.scale`)."""
    # An orthogonal matrix has elements of root mean square 1 / sqrt(longer side); AdamW's updates are about 0.2 (Liu et al. 2025,
    # arXiv 2502.16982).
    return 0.2 * sqrt(max(shape)) if kind == "adamw" else sqrt(max(1.0, shape[0] / shape[1]))


def assign_owners(
    costs: Sequence[int], loads: Sequence[int], holders: Sequence[Sequence[int]] | None = None, num_holders: int = 1
) -> list[int]:
    """An owner for each matrix, so that the owners' costs are about equal: the dearest first, each to whoever has least. loads:
    costs that each owner has already. holders: for each matrix, remainders of its owner's number by num_holders; None: any."""
    numbered = [(load, owner) for owner, load in enumerate(loads)]
    heaps = [numbered[holder::num_holders] for holder in range(num_holders)]
    for heap in heaps:
        heapq.heapify(heap)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        heap = min((heaps[holder] for holder in (holders[index] if holders else range(num_holders))), key=itemgetter(0))
        load, owner = heap[0]
        owners[index] = owner
        heapq.heapreplace(heap, (load + costs[index], owner))
    return owners


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
        x, out_splits = torch.cat([empty, *sent]), [sum(each) for each in lengths]
        out = empty.new_empty(sum(out_splits))
        all_to_all(out, x, self.axis, out_splits, in_splits)
        return [chunk.split(each) for chunk, each in zip(out.split(out_splits), lengths, strict=True)]


class MatrixGroup:
    """Matrices whose parts the same ranks hold: those of the axes of their buffers, and of `tp`.

    loads: FLOPs of all groups so far, by how far the owner's number is from this rank's. Those of another group count where it
    has all owners of this one: they all see them then, and choose alike.
    """

    def __init__(self, weights: Sequence[HeldWeight], tp: Communicator, settings: Muon, others: Mapping[int, int]):
        self.weights, self._settings = weights, settings
        self.parts = parts = [part for each in weights for part in each.parts]
        update, shard = weights[0].buffer.axes.update, weights[0].buffer.axes.shard
        self._dtype = torch.bfloat16 if settings.dtype == "bf16" else weights[0].own.momentum.dtype
        # A weight has the scale of its first matrix, to which `_orthogonalize_all` scales the others.
        shapes = [weight.form.shapes(weight.parts[0].shape)[0] for weight in weights]
        scales = [scale_of(shape, settings.scale) for shape in shapes]
        self._factors = [each.own.lr_ratio * scale for each, scale in zip(weights, scales, strict=True)]
        costs = [each.flops(settings.steps) for each in parts]
        steps = [[rank - axis.ranks[axis.rank] for rank in axis.ranks] for axis in (update, shard, tp)]
        ranks = [sum(each) for each in product(*steps)]
        loads = [others[rank] for rank in ranks] if others.keys() >= set(ranks) else [0] * len(ranks)
        # Heads stay on their ranks of tp.
        owners = assign_owners(costs, loads, [own for each in weights for own in each.holders(tp.size)], tp.size)
        for owner, cost in zip(owners, costs, strict=True):
            loads[owner] += cost
        self.loads = dict(zip(ranks, loads, strict=True))
        places = [(owner // (shard.size * tp.size), owner // tp.size % shard.size, owner % tp.size) for owner in owners]

        here = list(range(len(parts)))
        self._hops: list[OwnerHop] = []
        for number, axis in enumerate((update, shard)):
            lengths = [parts[index].lengths(axis.size, of_owners=axis is update) for index in here]
            self._hops.append(OwnerHop(axis, [places[index][number] for index in here], lengths, lengths))
            here = [here[index] for index in self._hops[-1].own]
        slices = [[parts[index].slice_of(rank) for rank in range(tp.size)] for index in here]
        back = [
            [prod(parts[index].shape) if each is None else each.numel(parts[index].shape) for each in of_ranks]
            for index, of_ranks in zip(here, slices, strict=True)
        ]
        # The owner has its own copy of a matrix that is replicated, and needs none of it from others.
        there = [
            [
                length * (each is not None or rank == places[index][2])
                for rank, (each, length) in enumerate(zip(*both, strict=True))
            ]
            for index, *both in zip(here, slices, back, strict=True)
        ]
        self._last = OwnerHop(tp, [places[index][2] for index in here], there, back)
        self.owned = [parts[here[index]] for index in self._last.own]
        self._slices = [slices[index] for index in self._last.own]

    def update(self, rate: Tensor, momentum: float, decay_rate: Tensor) -> None:
        """Update the values of all parts at a learning rate, and decay them at another one, scalars. Collective over the update
        axis, the shard axis and tp."""
        held = []
        for weight in self.weights:
            moved = weight.own.gradient.lerp(weight.own.momentum, momentum)
            held += weight.cut(moved.to(self._dtype))
        results = iter(self._orthogonalize(held))
        # Scalars of the device, one for all matrices that are updated alike.
        decays = {each: 1 - decay_rate * each for each in {weight.own.decay for weight in self.weights}}
        rates = {each: rate * each for each in set(self._factors)}
        for weight, factor in zip(self.weights, self._factors, strict=True):
            value, result = weight.own.value, weight.join([next(results) for _ in weight.parts])
            value.mul_(decays[weight.own.decay]).sub_(result.to(value.dtype).mul_(rates[factor]))

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes that this rank sends in an update, by axis."""
        return {hop.axis.name: hop.num_sent * self._dtype.itemsize for hop in (*self._hops, self._last)}

    def _orthogonalize(self, held: list[Tensor]) -> list[Tensor]:
        """This rank's part of NS(U), of what it holds of U: [n] of each part."""
        empty = held[0].new_empty(0)
        for hop in self._hops:
            held = [torch.cat(parts) for parts in hop.collect(held, empty)]
        collected = self._last.collect(held, empty)
        matrices = [
            part.weight.form.split(join_slices(part.shape, of_ranks, slices))
            for part, of_ranks, slices in zip(self.owned, collected, self._slices, strict=True)
        ]
        done = _orthogonalize_all(matrices, self._settings)
        weights = [part.weight.form.join(each) for part, each in zip(self.owned, done, strict=True)]
        cut = [
            [cut_slice(weight, each) for each in slices] for weight, slices in zip(weights, self._slices, strict=True)
        ]
        results = self._last.give_back(cut, empty)
        for hop in reversed(self._hops):
            mine = zip(results, hop.own, strict=True)
            results = hop.give_back([each.split(list(hop.from_owner[index])) for each, index in mine], empty)
        return results


def _orthogonalize_all(matrices: list[list[Tensor]], settings: Muon) -> list[list[Tensor]]:
    """NS of the matrices of each weight, equal shapes together; those of another shape than the first scaled to its scale."""
    by_shape: dict[torch.Size, list[tuple[int, int]]] = {}
    for weight, each in enumerate(matrices):
        for place, matrix in enumerate(each):
            by_shape.setdefault(matrix.shape, []).append((weight, place))
    results = [list(each) for each in matrices]
    for shape, places in by_shape.items():
        size = max(1, BATCH_NUMEL // shape.numel())
        for first in range(0, len(places), size):
            batch = places[first : first + size]
            done = orthogonalize(torch.stack([matrices[i][j] for i, j in batch]), settings.steps)
            for (i, j), each in zip(batch, done, strict=True):
                scales = [
                    scale_of((matrix.shape[0], matrix.shape[1]), settings.scale) for matrix in (each, matrices[i][0])
                ]
                results[i][j] = each if scales[0] == scales[1] else each * (scales[0] / scales[1])
    return results


class MuonOptimizer(FlatOptimizer):
    """Muon over flat shards of buffers. spans: the place of each shard in the buffer of this plan. axes: of the mesh, by name.
    Other arguments as of `FlatOptimizer`."""

    def __init__(
        self,
        optim: Optim,
        groups: Sequence[ShardGroup],
        buffers: Sequence[BufferPlan],
        spans: Mapping[FlatShard, tuple[BufferPlan, GroupSpan]],
        assignments: Sequence[GroupAssignment],
        axes: Mapping[str, Communicator],
        device: torch.device,
    ):
        super().__init__("muon", optim, groups, device)
        self._momentum = optim.momentum
        held = {(id(plan), span.group): (shard, span.start) for shard, (plan, span) in spans.items()}

        def find(plan: BufferPlan, slot: Slot, low: int, high: int) -> OwnedValues:
            shard, first = held[id(plan), slot.group]
            group, where = self._group_of[shard], slice(low - first, high - first)
            momentum = self.states.values(shard, "momentum_buffer")
            flat = shard.value[where], shard.gradient[where], momentum[where]
            return OwnedValues(*flat, group.lr_ratio, group.lr_ratio * group.weight_decay)

        self._groups = group_matrices(buffers, assignments, axes, optim.muon, device, find)

    def step(self, lr: float, divisor: Tensor, skip: Tensor, step: int) -> None:
        """`FlatOptimizer.step`. Collective over all axes that divide the matrices."""
        super().step(lr, divisor, skip, step)
        taken = 1.0 - skip.double()
        for each in self._groups:
            each.update(taken * lr, self._momentum, taken * decay_rate(self._optim, lr))


def group_matrices(
    buffers: Sequence[BufferPlan],
    assignments: Sequence[GroupAssignment],
    axes: Mapping[str, Communicator],
    settings: Muon,
    device: torch.device,
    find: Callable[[BufferPlan, Slot, int, int], OwnedValues] | None = None,
) -> list[MatrixGroup]:
    """The matrices of buffers, by the axes that divide them. find: returns elements [low, high) of a buffer, which this rank
    owns; None: without memory, for a plan."""
    forms = {each.parameter: each.matrix for each in assignments if each.optimizer == "muon"}
    # In the order of the whole model: ranks of tp with uneven slices may order the parameters of a buffer otherwise.
    order = {name: index for index, name in enumerate(forms)}
    by_axes: dict[str, list[tuple[int, HeldWeight]]] = {}
    for plan, slot in ((each, slot) for each in buffers for slot in each.slots):
        if (form := forms.get(slot.name)) is None:
            continue
        nothing = torch.zeros(0, dtype=plan.dtypes.gradient, device=device)
        count = prod(slot.layout.shape_local[:-2])  # 1, or this rank's experts
        size = (slot.stop - slot.start) // max(count, 1)
        for start in (slot.start + index * size for index in range(count)):
            low, high = max(start, plan.start), min(start + size, plan.stop)
            has_some = low < high and find is not None
            own = find(plan, slot, low, high) if has_some and find else OwnedValues(nothing, nothing, nothing, 0.0, 0.0)
            weight = HeldWeight(plan, form, start, start + size, slot.layout, own)
            by_axes.setdefault(slot.layout.shard_axis, []).append((order[slot.name], weight))
    groups: list[MatrixGroup] = []
    # Experts last: they are many, and even out what their owners have of the rest.
    for name, weights in sorted(by_axes.items(), reverse=True):
        ordered = [weight for _, weight in sorted(weights, key=itemgetter(0))]
        tp = axes["expert_tp" if name == "expert_shard" else "tp"]
        groups.append(MatrixGroup(ordered, tp, settings, groups[-1].loads if groups else {}))
    return groups
