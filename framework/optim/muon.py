"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): the momentum of each matrix, made orthogonal.

    M <- M + (1 - b) (G - M)        U = G + b (M - G)        W <- (1 - lr wd) W - lr s NS(U)

NS(U) is a polynomial of U whose singular values lie near 1, so it needs the whole matrix, of which ranks hold parts: ZeRO an
interval of its elements, tensor parallelism some of its rows or columns. Every matrix has an *owner* among those ranks.
Elementwise work stays where the parts are; U travels to the owners axis by axis and NS(U) back the way it came:

    part of U --update axis--> --shard axis--> elements of this rank of tp --tp--> whole U, NS(U) --tp--> ... --> part of NS(U)

Each hop is one all-to-all for all matrices. Owners have about equal work (`assign_owners`); where they have few matrices,
neighbours make each together (axis `matrix`): the owner sends each a slice of its longer side, and gets the result. Ranks of
`tp` that hold a whole matrix alike get one rank's result, so they stay equal to the bit. Experts are matrices one by one, and so
are the matrices packed in one weight (`MatrixForm`), and its heads on request, which are whole on ranks of `tp` and stay there.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod, sqrt
from operator import itemgetter

import torch
from torch import Tensor, nn

from framework.comm.collectives import all_gather, all_to_all
from framework.comm.communicator import Communicator
from framework.mesh.topology import Axis
from framework.optim.groups import GroupAssignment, decay_rate
from framework.optim.matrices import SYMMETRIC_ROWS
from framework.optim.optimizers import FlatOptimizer
from framework.optim.owners import HeldWeight, OwnedValues, OwnerHop, add_loads, assign_owners, cut_slice, join_slices
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.parallel.zero.buffer_plan import BufferPlan, GroupSpan, Slot
from framework.recipe.schema import Muon, Optim

# Coefficients of the quintic iteration, those of torch.optim.Muon: the slope at zero is as large as it can be.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7
# Elements of equal matrices that are iterated together: enough to fill a GPU, and 512 MiB of bf16 for each intermediate.
BATCH_NUMEL = 1 << 28
# A team of one rank.
ALONE = Communicator(Axis("matrix", 1, 0))


def orthogonalize(x: Tensor, steps: int, team: Communicator = ALONE) -> Tensor:
    """Newton-Schulz iterations for the nearest orthogonal matrix of each of [n, a, b], a <= b, in their dtype. x: [n, a, b / k],
    this rank's columns of them, of those of a team of k ranks. Collective over the team.

    A member adds up some rows of G = X X^T = sum_i X_i X_i^T, in the order of ranks so that replicas get the same bits, and makes
    those of bG + cG^2; two all-gathers bring the others. It sends 3 (k-1)/k a^2 numbers for a matrix and iteration.
    """
    norms = _gather(torch.linalg.matrix_norm(x, keepdim=True), team)
    x = x / torch.linalg.vector_norm(norms, dim=0).clamp(min=EPS)
    (num, rows, _), (a, b, c) = x.shape, COEFFICIENTS
    unread, more = x.new_empty(num, rows, rows), -rows % team.size
    for _ in range(steps):
        gram = _add_gram(unread, 0.0, x, 1.0)
        if team.size == 1:  # a whole product is symmetric, which rows of it are not
            polynomial = _add_gram(gram, b, gram, c)
        else:
            sent = nn.functional.pad(gram, (0, 0, 0, more)).unflatten(1, (team.size, -1)).transpose(0, 1).contiguous()
            all_to_all(found := torch.empty_like(sent), sent, team)
            own = found.sum(0)
            gram = _join_rows(_gather(own, team), rows)
            polynomial = _join_rows(_gather(torch.baddbmm(own, own, gram, beta=b, alpha=c), team), rows)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _gather(x: Tensor, team: Communicator) -> Tensor:
    """x of all ranks, [k, ...]."""
    all_gather(out := x.new_empty(team.size, *x.shape), x, team)
    return out


def _join_rows(parts: Tensor, rows: int) -> Tensor:
    """[n, rows, b] of [k, n, r, b], without the rows that are padding."""
    return parts.transpose(0, 1).flatten(1, 2)[:, :rows]


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


class MatrixGroup:
    """Matrices whose parts the same ranks hold: those of the axes of their buffers, and of `tp`.

    team: the neighbours who share the owned matrices. loads: FLOPs of all groups so far, by how far the owner's number is from
    this rank's. Those of another group count where it has all owners of this one: they all see them then, and choose alike.
    """

    def __init__(
        self,
        weights: Sequence[HeldWeight],
        tp: Communicator,
        team: Communicator,
        settings: Muon,
        others: Mapping[int, int],
    ):
        self.weights, self._settings = weights, settings
        self.parts = parts = [part for each in weights for part in each.parts]
        update, shard = weights[0].buffer.axes.update, weights[0].buffer.axes.shard
        self._dtype = torch.bfloat16 if settings.dtype == "bf16" else weights[0].own.momentum.dtype
        # A weight has the scale of its first matrix, to which `_make_orthogonal` scales the others.
        scales = [scale_of(weight.parts[0].shapes[0], settings.scale) for weight in weights]
        self._factors = [each.own.lr_ratio * scale for each, scale in zip(weights, scales, strict=True)]
        costs = [each.flops(settings.steps, team.size) for each in parts]
        steps = [[rank - axis.ranks[axis.rank] for rank in axis.ranks] for axis in (update, shard, tp)]
        ranks = [sum(each) for each in product(*steps)]
        loads = [others[rank] for rank in ranks] if others.keys() >= set(ranks) else [0] * len(ranks)
        # Heads stay on their ranks of tp.
        holders = [own for each in weights for own in each.holders(tp.size)]
        owners = assign_owners(costs, loads, holders, tp.size, team.size)
        add_loads(loads, owners, costs, team.size)
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

        first = ranks.index(0) - team.rank
        of_team = [(parts[i], owners[i] - first) for i in range(len(parts)) if 0 <= owners[i] - first < team.size]
        self._shared = [shape for part, _ in of_team for shape in part.shapes]
        # Columns as `tensor_split` deals them: one more to each of the first ranks.
        lengths = [
            [min(shape) * ((max(shape) + team.size - 1 - rank) // team.size) for rank in range(team.size)]
            for shape in self._shared
        ]
        self._sharing = OwnerHop(team, [owner for part, owner in of_team for _ in part.shapes], lengths, lengths)

    def update(self, rate: Tensor, momentum: float, decay_rate: Tensor) -> None:
        """Update the values of all parts at a learning rate, and decay them at another one, scalars. Collective over the update
        axis, the shard axis, tp and the team."""
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
        team, steps = self._sharing.axis, self._settings.steps
        rows = sum(3 * steps * -(-min(shape) // team.size) * min(shape) + 1 for shape in self._shared) * (team.size - 1)
        sent = {hop.axis.name: hop.num_sent for hop in (*self._hops, self._last)}
        sent[team.name] = self._sharing.num_sent + rows
        return {name: number * self._dtype.itemsize for name, number in sent.items()}

    def _orthogonalize(self, held: list[Tensor]) -> list[Tensor]:
        """This rank's part of NS(U), of what it holds of U: [n] of each part."""
        empty = held[0].new_empty(0)
        for hop in self._hops:
            held = [torch.cat(parts) for parts in hop.collect(held, empty)]
        collected = self._last.collect(held, empty)
        weights = [
            join_slices(part.shape, of_ranks, slices)
            for part, of_ranks, slices in zip(self.owned, collected, self._slices, strict=True)
        ]
        weights = self._make_orthogonal(weights, empty)
        cut = [
            [cut_slice(weight, each) for each in slices] for weight, slices in zip(weights, self._slices, strict=True)
        ]
        results = self._last.give_back(cut, empty)
        for hop in reversed(self._hops):
            mine = zip(results, hop.own, strict=True)
            results = hop.give_back([each.split(list(hop.from_owner[index])) for each, index in mine], empty)
        return results

    def _make_orthogonal(self, weights: Sequence[Tensor], empty: Tensor) -> list[Tensor]:
        """NS of the matrices in each own weight, as the team makes it; those of another shape than the first scaled to its
        scale."""
        team = self._sharing.axis
        matrices = [each for part, x in zip(self.owned, weights, strict=True) for each in part.weight.form.split(x)]
        sent = [[each.flatten() for each in _lay_wide(x).tensor_split(team.size, 1)] for x in matrices]
        done = self._iterate(self._sharing.give_back(sent, empty))
        wide = (
            torch.cat([each.view(min(x.shape), each.numel() // min(x.shape)) for each in parts], 1)
            for x, parts in zip(matrices, self._sharing.collect(done, empty), strict=True)
        )
        results = []
        for part in self.owned:
            scales = [scale_of(shape, self._settings.scale) for shape in part.shapes]
            made = [next(wide) if shape[0] <= shape[1] else next(wide).mT for shape in part.shapes]
            scaled = [x if s == scales[0] else x * (s / scales[0]) for x, s in zip(made, scales, strict=True)]
            results.append(part.weight.form.join(scaled))
        return results

    def _iterate(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """NS of this rank's columns of all matrices of the team, [n] each, matrices of equal shapes together."""
        by_shape: dict[tuple[int, int], list[int]] = {}
        for index, shape in enumerate(self._shared):
            by_shape.setdefault((min(shape), max(shape)), []).append(index)
        results = list(parts)
        for (rows, columns), places in by_shape.items():
            size = max(1, BATCH_NUMEL // (rows * columns))
            for first in range(0, len(places), size):
                batch = places[first : first + size]
                stacked = torch.stack([parts[index].view(rows, parts[index].numel() // rows) for index in batch])
                done = orthogonalize(stacked, self._settings.steps, self._sharing.axis)
                for index, each in zip(batch, done, strict=True):
                    results[index] = each.flatten()
        return results


def _lay_wide(matrix: Tensor) -> Tensor:
    """The matrix or its transpose, whose rows are not longer than its columns are many."""
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT


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
        has_experts = name == "expert_shard"
        tp, team = (axes["expert_tp"], ALONE) if has_experts else (axes["tp"], axes["matrix"])
        groups.append(MatrixGroup(ordered, tp, team, settings, groups[-1].loads if groups else {}))
    return groups
