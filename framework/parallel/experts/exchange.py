"""Rows on their way to the experts' ranks and back: the exchange over one axis, the plan of its hops, and their sorting.

    direct          one hop over `ep`: rank (m, j) sends to every rank (n, i)
    hierarchical    two hops: within the node over `ep_inner`, (m, j) to (m, i) of all rows that are meant for a rank i of some
                    node; then over `ep_outer`, (m, i) to (n, i). Fewer and larger messages leave the node, as many rows.

Rows are sorted before every hop by the rank to which it takes them, and behind the last by expert. What lies between two sorts is
known from numbers of rows alone: they are exchanged first, in as many hops, and the host learns all of them at once.

Departure and arrival are two autograd functions, so that what stands between them is computed while rows travel, in forward and
in backward: autograd runs the nodes that were made last first, and an arrival's gradient is a departure.

    forward     depart: start sending      ... others compute ...      arrive: wait
    backward    depart: wait               ... others compute ...      arrive: start sending the gradient

    T tokens, k experts per token, P pairs that are sent, R rows received, H features. `order`: [P] int64, the pair behind each
    sorted row; pair t * k + j is token t with its j-th expert. Pairs that are not sent (padding, dropped) are in no row.
    G ranks of the first hop, N of the second (1 where there is none), e experts on a rank, E = N G e; expert (n G + i) e + x is
    number x of rank (n, i). Numbers of rows: [ranks of a hop, parts, ranks of the other hop, e], for `parts` parts of the tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from framework.comm.collectives import Pending, all_to_all, start_all_to_all
from framework.comm.communicator import Communicator
from framework.comm.transfer import AsyncHostCopy
from framework.model.matmul import RowGroups


class RowExchange:
    """One all-to-all of rows over `axis`, and its gradient's. sent, received: rows for each rank and from each rank."""

    def __init__(self, axis: Communicator, sent: Sequence[int], received: Sequence[int]):
        self.axis, self.sent, self.received = axis, sent, received
        self.pending = Pending()
        self.gradient: Tensor | None = None

    def depart(self, x: Tensor) -> Tensor:
        """Start sending x: [sum(sent), H]; what is returned, [sum(received), H], is for `arrive` alone."""
        return x if self.axis.size == 1 else _Depart.apply(x, self)

    def arrive(self, x: Tensor) -> Tensor:
        """Wait for the rows, [sum(received), H], that `depart` has started to send. x: what it returned."""
        return x if self.axis.size == 1 else _Arrive.apply(x, self)

    def back(self) -> "RowExchange":
        """The exchange of as many rows in the other direction."""
        return RowExchange(self.axis, self.received, self.sent)


class _Depart(torch.autograd.Function):
    """x: [sum(sent), H] -> memory for the rows that come, [sum(received), H], which nobody may read yet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: RowExchange) -> Tensor:
        ctx.transfer = transfer
        out = x.new_empty(sum(transfer.received), *x.shape[1:])
        splits = transfer.received, transfer.sent
        # Kept in the exchange and not in ctx: the wait belongs to `_Arrive`, another node of the graph.
        transfer.pending = start_all_to_all(out, x.contiguous(), transfer.axis, *splits, "rows of experts")
        return out

    @staticmethod
    def backward(ctx: Any, stand_in: Tensor) -> tuple[Tensor, None]:
        transfer: RowExchange = ctx.transfer
        # Autograd has run `_Arrive.backward` before: it starts the message whose end this is.
        dx, transfer.gradient = transfer.gradient, None
        assert dx is not None, "the gradient of rows that have not arrived"
        transfer.pending.wait()
        return dx, None


class _Arrive(torch.autograd.Function):
    """x: what `_Depart` returned -> the same rows, [sum(received), H], once they have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: RowExchange) -> Tensor:
        ctx.transfer = transfer
        transfer.pending.wait()
        # The same memory without being a view: models may write to it in place.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        transfer: RowExchange = ctx.transfer
        dx = dy.new_empty(sum(transfer.sent), *dy.shape[1:])
        splits = transfer.sent, transfer.received
        transfer.pending = start_all_to_all(dx, dy.contiguous(), transfer.axis, *splits, "gradient of rows of experts")
        transfer.gradient = dx
        # Stands in for the gradient of what has departed, which nobody reads: `_Depart.backward` has the real one.
        return dy, None


class _Spread(torch.autograd.Function):
    """x: [T, H] -> [P, H]."""

    # Written out because autograd's own gradient of a gather adds into zeros row by row; here it is a gather again.

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k, ctx.num_tokens = top_k, x.shape[0]
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return _unsort(dy, order, ctx.num_tokens, ctx.top_k).sum(1), None, None


class _Combine(torch.autograd.Function):
    """y: [P, H], weights: [T, k] -> [T, H]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order)
        # In fp32 or wider, and rounded once. One slot after the other: all at once would be [T, k, H], and in the wider dtype.
        wide = torch.promote_types(torch.promote_types(y.dtype, weights.dtype), torch.float32)
        slots = _slots(y, order, *weights.shape)
        total = next(slots).to(wide) * weights[:, :1]
        for slot, rows in enumerate(slots, start=1):
            total.addcmul_(rows, weights[:, slot : slot + 1])
        return total.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y, weights, order = ctx.saved_tensors
        rows = dout.index_select(0, order // weights.shape[1])
        flat = weights.flatten()
        sorted_weights = flat.index_select(0, order).unsqueeze(-1)
        wide = torch.promote_types(y.dtype, flat.dtype)
        products = []
        # In chunks of as many rows as there are tokens: all at once would be twice [P, H] in the wider dtype. `rows` become dy.
        for own, others, weight in zip(
            *(each.split(max(1, len(weights))) for each in (rows, y, sorted_weights)), strict=True
        ):
            if ctx.needs_input_grad[1]:
                products.append((own.to(wide) * others).sum(-1).to(flat.dtype))
            own.mul_(weight)
        if not ctx.needs_input_grad[1]:
            return rows, None, None
        # A pair that was not sent has no output, so its weight has no gradient.
        dweights = torch.zeros_like(flat).index_copy_(0, order, torch.cat(products))
        return rows, dweights.view_as(weights), None


class _Permute(torch.autograd.Function):
    """x: [R, H] -> [R, H]."""

    # Saves the inverse, so that the gradient is a gather, too.
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return dy.index_select(0, inverse), None, None


def _unsort(rows: Tensor, order: Tensor, num_tokens: int, top_k: int) -> Tensor:
    """[P, H] to [T, k, H], zeros for pairs that have no row."""
    pairs = rows.new_zeros(num_tokens * top_k, rows.shape[1])
    return pairs.index_copy_(0, order, rows).view(num_tokens, top_k, rows.shape[1])


def _slots(y: Tensor, order: Tensor, num_tokens: int, top_k: int) -> Iterator[Tensor]:
    """The rows of all tokens' first experts, of their second ones and so on, [T, H] each; zeros for pairs that have no row."""
    if len(order) < num_tokens * top_k:
        yield from _unsort(y, order, num_tokens, top_k).unbind(1)
        return
    for places in invert(order).view(num_tokens, top_k).unbind(1):
        yield y.index_select(0, places)


def spread(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """The token of each sorted pair.  x: [T, H] -> [P, H]."""
    return _Spread.apply(x, order, top_k)


def combine(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weighted sum of each token's experts.  y: [P, H], what the experts made of the pairs; weights: [T, k] -> [T, H]."""
    return _Combine.apply(y, weights, order)


def permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x in another order of rows, [R, H]; inverse: the permutation that undoes `order`, both [R] int64."""
    return _Permute.apply(x, order, inverse)


def invert(order: Tensor) -> Tensor:
    """The permutation that undoes `order`, [R] int64."""
    return torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))


@dataclass(frozen=True)
class Hop:
    """Rows sent over one axis, and sorted on arrival."""

    axis: Communicator
    sent: Sequence[int]
    """Rows for each rank."""
    received: Sequence[int]
    """Rows from each rank."""
    order: Tensor
    """[R] int64, from the order of arrival to that of what follows."""
    inverse: Tensor
    """[R] int64, the way back."""

    def start(self) -> RowExchange:
        """The exchange towards the experts; `RowExchange.back` is the other."""
        return RowExchange(self.axis, self.sent, self.received)


@dataclass(frozen=True)
class DispatchPlan:
    """The hops of one part of the tokens. ids: [R] int64, the number among this rank's experts that each arrived row is for;
    groups: of rows by expert."""

    hops: tuple[Hop, ...]
    ids: Tensor
    groups: RowGroups

    @property
    def num_sent(self) -> int:
        """Rows that this rank sends of its own."""
        return sum(self.hops[0].sent)


class DispatchedRows:
    """The rows of one part of the tokens on their way to the experts and back. What is called between two of its methods is
    computed while the rows travel."""

    def __init__(self, plan: DispatchPlan):
        self.plan = plan
        self._there = [hop.start() for hop in plan.hops]
        self._back = [transfer.back() for transfer in self._there]
        self._rows = torch.empty(0)

    def depart(self, rows: Tensor) -> None:
        """Start the first hop.  rows: [P, H], sorted by the rank of it."""
        self._rows = self._there[0].depart(rows)

    def arrive(self) -> Tensor:
        """The rows for this rank's experts, [R, H], in their order."""
        last = len(self._there) - 1
        for index, (hop, transfer) in enumerate(zip(self.plan.hops, self._there, strict=True)):
            self._rows = permute(transfer.arrive(self._rows), hop.order, hop.inverse)
            if index < last:
                # Not before all of this hop has come and is sorted: a rank of the next hop gets rows of all its ranks.
                self._rows = self._there[index + 1].depart(self._rows)
        return self._take()

    def depart_back(self, rows: Tensor) -> None:
        """Start the first hop back.  rows: [R, H], the experts' outputs."""
        hop = self.plan.hops[-1]
        # In its place: the experts' outputs need not live while it is sent.
        rows = permute(rows, hop.inverse, hop.order)
        self._rows = self._back[-1].depart(rows)

    def arrive_back(self) -> Tensor:
        """The experts' outputs for this rank's rows, [P, H], in the order of `depart`."""
        for index in reversed(range(len(self._back))):
            self._rows = self._back[index].arrive(self._rows)
            if index:
                hop = self.plan.hops[index - 1]
                self._rows = self._back[index - 1].depart(permute(self._rows, hop.inverse, hop.order))
        return self._take()

    def _take(self) -> Tensor:
        # Nothing may hold the rows that the caller frees: they are the largest activations of the layer.
        rows, self._rows = self._rows, torch.empty(0)
        return rows


class ExpertRoute:
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
        # Kept: they depend on the layout alone, and are asked for in every layer.
        if (keys := self._keys.get((num_experts, device))) is None:
            order = (
                torch.arange(num_experts, device=device).view(self._outer, self._inner, -1).transpose(0, 1).flatten()
            )
            keys = torch.cat([invert(order), order.new_full((1,), num_experts)])
            self._keys[num_experts, device] = keys
        return keys

    def plan(self, counts: Sequence[Tensor]) -> list[DispatchPlan]:
        """The plan of each part of the tokens, from this rank's rows for each of the layer's experts, [E] int64 each.

        Collective over the hops: an all-to-all of the numbers over each. The host has to know them before it can send rows, and
        waits for them here, once in a layer.
        """
        parts = len(counts)
        # Parts go together: as many messages of numbers as with one part.
        sent = torch.stack(list(counts)).view(parts, self._outer, self._inner, -1).permute(2, 0, 1, 3).contiguous()
        numbers: list[tuple[Tensor, Tensor]] = []
        for axis in self.hops:
            received = torch.empty_like(sent)
            all_to_all(received, sent, axis)
            numbers.append((sent, received))
            # Received rows are sorted by the rank of the next hop: their numbers are those that this hop sends.
            sent = received.transpose(0, 2).contiguous()
        # Numbers of the last hop by expert, of the others by rank: all that the host has to know, in one copy. Each copy would be
        # a wait for the device, in forward and again in each recomputation.
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
        return [self._plan_part(part, parts, numbers, by_hop, groups[part]) for part in range(parts)]

    def _plan_part(
        self,
        part: int,
        parts: int,
        numbers: Sequence[tuple[Tensor, Tensor]],
        by_hop: Sequence[tuple[list[int], list[int]]],
        groups: list[int],
    ) -> DispatchPlan:
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
            # Stable, so that an expert meets its rows in the order of ranks and tokens, whatever came first: sums are
            # reproducible.
            ids, order = arriving.sort(stable=True)
            hops.append(Hop(axis, to[part::parts], of_part, order, invert(order)))
        return DispatchPlan(tuple(hops), ids, RowGroups.of(groups, ids.device))
