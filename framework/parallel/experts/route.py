"""The way of tokens to the ranks of their experts and back, in two hops between nodes and within them.

    (m, j)  a rank's tokens, with the k experts and weights of each
      |     outer hop over `ep_outer`: a token's row goes once to each *node* that has one of its experts, to the rank (n, j) of
      |     the same place there, with the experts that it has on that node and their weights beside it
    (n, j)  for each such expert
      |     inner hop over `ep_inner`: the row goes to the expert's rank
    (n, i)  experts compute
      |     inner hop back
    (n, j)  the node's weighted sum for the token
      |     outer hop back: one row for each token and node
    (m, j)  the sum over nodes

    y_t = sum_n ( sum_{s: expert of (t, s) on node n} w_ts f_s(x_t) )        what is in brackets crosses once

Where all of `ep` is on one node the outer hop is the identity: every token is on its node, weights do not travel, and the sum
over nodes is that of one. Where a node has one rank of `ep` the inner hop is, and a token's row goes once to each rank.

Rows are sorted before every hop by the rank to which it takes them, and behind the last by expert. Numbers of rows go ahead over
both hops; the second's follow from the first's, so the host learns all of them at once and waits once in a layer.

In padded buffers (`Room`) there is room for as many rows for every rank, so the host need not know the numbers, and they stay on
the device. A row that finds no room makes the tokens' outputs NaN: a step that is not finite updates nothing.

    T tokens, k experts per token, H features. N ranks of the outer hop, G of the inner one, e experts on a rank, E = N G e;
    expert (n G + i) e + x is number x of rank (n, i). `ids`: experts, int64; E, or G e of a node's, where there is none.
    T' rows that have come to this rank for its node, P pairs of them with an expert, R rows received for this rank's experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.codec import BlockCodec
from framework.comm.collectives import all_to_all
from framework.comm.communicator import Communicator
from framework.comm.transfer import AsyncHostCopy
from framework.model.experts import Room, Router, find_room
from framework.model.matmul import RowGroups
from framework.parallel.experts.rows import RowExchange, add_up, combine, invert, permute, round_gradient, spread


@dataclass(frozen=True)
class Hop:
    """Rows that go over one axis: for each rank and from each rank. In padded buffers those are equal for all ranks, and
    `counts`, [ranks] int64 on the device, has the rows for each that there are."""

    axis: Communicator
    sent: Sequence[int]
    received: Sequence[int]
    counts: Tensor | None = None

    @classmethod
    def padded(cls, axis: Communicator, room: int, counts: Tensor) -> "Hop":
        """A hop with room for so many rows for each rank."""
        return cls(axis, [room] * axis.size, [room] * axis.size, counts)

    def pack(self, pairs: Tensor) -> Tensor:
        """The pair behind each row that is sent, [sum(sent)]; pairs: [n], those for each rank in front, in the ranks' order. n
        where a row is padding."""
        if self.counts is None:
            return pairs[: sum(self.sent)]
        place = torch.arange(self.sent[0], device=pairs.device)
        first = (self.counts.cumsum(0) - self.counts).unsqueeze(1)
        found = pairs[(first + place).clamp(max=len(pairs) - 1)]
        return found.where(place < self.counts.unsqueeze(1), len(pairs)).flatten()

    def spoil(self, x: Tensor) -> Tensor:
        """x, of any shape; NaN in its place if a row has found no room."""
        return x if self.counts is None else x.masked_fill((self.counts > self.sent[0]).any(), torch.nan)


@dataclass(frozen=True)
class DispatchPlan:
    """The way of some tokens."""

    outer: Hop
    inner: Hop
    places: Tensor | None
    """[rows of the outer hop] int64, the pair t * N + n of a token with a node behind each, T N: padding; None: every token is on
    its node."""
    order: Tensor
    """[R] int64, from the order of arrival to that of the experts."""
    inverse: Tensor
    """[R] int64, the way back."""
    ids: Tensor
    """[R] int64, the number among this rank's experts that each row is for; any where it is padding."""
    groups: RowGroups
    """Rows by expert."""
    experts_of_node: int


class DispatchedRows:
    """The rows of some tokens on their way to the experts and back. What is called between two of its methods is
    computed while the rows travel. codec: how hidden states travel to experts, and gradients of results between nodes; None: as
    they are."""

    def __init__(self, plan: DispatchPlan, codec: BlockCodec | None = None):
        self.plan = plan
        outer, inner = (RowExchange(hop.axis, hop.sent, hop.received, codec) for hop in (plan.outer, plan.inner))
        self._there = outer, inner
        # Within a node gradients are weighted, and their product with a weight would be rounded once more.
        self._back = outer.back(codec), inner.back()
        self._codec = codec
        self._num_tokens = 0
        # On their way over the outer hop: hidden states, weights, ids. Over the inner one: rows.
        self._columns: tuple[Tensor, ...] = ()
        self._rows: tuple[Tensor, ...] = ()
        # The weights of the rows for this node, and their sorted pairs.
        self._weighted: tuple[Tensor, Tensor] | None = None

    def depart(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Start the first hop.  x: [T, H]; ids, weights: [T, k]."""
        places, nodes = self.plan.places, self.plan.outer.axis.size
        self._num_tokens = len(x)
        if places is not None:
            # Behind the tokens one for rows that are padding, without an expert.
            ids = F.pad(ids, (0, 0, 0, 1), value=self.plan.experts_of_node * nodes)
            ids = self._find_own(ids.index_select(0, places // nodes), places % nodes)
            # In fp32 or wider, as they are multiplied.
            weights = spread(weights.to(torch.promote_types(weights.dtype, torch.float32)), places, nodes)
            x = spread(x, places, nodes)
        self._columns = self._there[0].depart(x, weights, ids)
        if nodes == 1:
            self.pass_on()  # there is nothing to wait for

    def pass_on(self) -> None:
        """Start the inner hop, of all rows for this node, if that has not been done."""
        if not self._columns:
            return
        (x, weights, ids), self._columns = self._there[0].arrive(*self._columns), ()
        # Stable: pairs of one expert stay in the order of ranks and tokens, in every recomputation. Pairs without an expert are
        # behind all others.
        order = self.plan.inner.pack(ids.flatten().argsort(stable=True))
        self._weighted = self.plan.inner.spoil(weights), order
        self._rows = self._there[1].depart(spread(x, order, ids.shape[1]))

    def arrive(self) -> Tensor:
        """The rows for this rank's experts, [R, H], in their order."""
        (rows,), self._rows = self._there[1].arrive(*self._rows), ()
        return permute(rows, self.plan.order, self.plan.inverse)

    def depart_back(self, rows: Tensor) -> None:
        """Start the inner hop back.  rows: [R, H], the experts' outputs."""
        # In its place: the experts' outputs need not live while it is sent.
        rows = permute(rows, self.plan.inverse, self.plan.order)
        self._rows = self._back[1].depart(rows)

    def cross_back(self) -> None:
        """Start the outer hop back, of the node's sums, if there is one to wait for."""
        if self.plan.places is not None:
            self._columns = self._back[0].depart(self._combine())

    def arrive_back(self) -> Tensor:
        """The tokens' weighted sums of their experts' outputs, [T, H]."""
        if self.plan.places is None:  # on one node, as where each crosses
            return round_gradient(self._combine(), self._codec)
        (sums,), self._columns = self._back[0].arrive(*self._columns), ()
        return self.plan.outer.spoil(add_up(sums, self.plan.places, self._num_tokens, self.plan.outer.axis.size))

    def _find_own(self, ids: Tensor, nodes: Tensor) -> Tensor:
        """Numbers of experts on the node of each row.  ids: [rows, k], of the layer's; nodes: [rows] -> [rows, k] int32."""
        count = self.plan.experts_of_node
        own = ids - nodes.unsqueeze(1) * count
        return own.masked_fill((own < 0) | (own >= count), count).to(torch.int32)

    def _combine(self) -> Tensor:
        """This node's sums, [T', H]."""
        assert self._weighted is not None, "rows that have not been passed on"
        (weights, order), self._weighted = self._weighted, None
        # Nothing may hold the rows that the caller frees: they are the largest activations of the layer.
        (rows,), self._rows = self._back[1].arrive(*self._rows), ()
        return combine(rows, weights, order)


class ExpertRoute:
    """The hops between the ranks of `ep`. outer, inner: their axes, the first between nodes. codec: as of `DispatchedRows`.
    padding: parallel.expert_padding; groups: (groups of experts, those that a token may choose from).
    """

    def __init__(
        self,
        outer: Communicator,
        inner: Communicator,
        codec: BlockCodec | None = None,
        padding: float | None = None,
        groups: tuple[int, int] = (1, 1),
    ):
        self.outer, self.inner, self.codec, self.padding, self.groups = outer, inner, codec, padding, groups
        # The factor of padded buffers that would have been enough, a scalar, 0 where all rows found room; None: there were none.
        self.needed: Tensor | None = None

    @property
    def has_two_hops(self) -> bool:
        """Whether neither hop is the identity."""
        return min(self.outer.size, self.inner.size) > 1

    def plan(self, ids: Tensor, num_experts: int, most: int | None = None) -> DispatchedRows:
        """The way of the tokens. ids: [T, k], of the layer's `num_experts`; with padding T is equal on all ranks. most: pairs of
        them that the experts of one rank take at most, by their capacity.

        Collective over the hops: an all-to-all of numbers over each. Without padding the host has to know them before it can send
        rows, and waits for them here.
        """
        nodes, router, room = self.outer.size, Router(num_experts, ids.shape[1], *self.groups), None
        # Without a backward there is no update to be skipped for rows that find no room: buffers are as long as needed.
        if torch.is_grad_enabled():
            room = find_room(len(ids), router, nodes, self.inner.size, self.padding, most)
        places, to_nodes = self._count(ids, num_experts)
        # From each node: the number of rows, and of pairs by expert. [N, 1 + G e]
        of_nodes = torch.empty_like(to_nodes)
        all_to_all(of_nodes, to_nodes, self.outer)
        # Pairs of what comes to this rank from all nodes are those that it passes on: [G, e].
        to_ranks = of_nodes[:, 1:].sum(0).unflatten(0, (self.inner.size, -1))
        of_ranks = torch.empty_like(to_ranks)
        all_to_all(of_ranks, to_ranks if room is None else _cut(to_ranks, room.inner), self.inner)
        find = self._fit if room is None else partial(self._pad, room)
        outer, inner, arriving, groups = find(to_nodes, of_nodes, to_ranks, of_ranks)
        # Stable, so that an expert meets its rows in the order of ranks and tokens, whatever came first: sums are reproducible.
        # Padding is behind all of them.
        own, order = arriving.sort(stable=True)
        own = own.clamp(max=of_ranks.shape[1] - 1)
        sent = None if nodes == 1 else outer.pack(places)
        on_node = num_experts // nodes
        return DispatchedRows(DispatchPlan(outer, inner, sent, order, invert(order), own, groups, on_node), self.codec)

    def _fit(
        self, to_nodes: Tensor, of_nodes: Tensor, to_ranks: Tensor, of_ranks: Tensor
    ) -> tuple[Hop, Hop, Tensor, RowGroups]:
        """Both hops, the expert of each row that arrives, [R], and rows by expert, in buffers that are as long as needed.
        to_nodes, of_nodes: [N, 1 + G e]; to_ranks, of_ranks: [G, e]."""
        # All that the host has to know, in one copy: each would be a wait for the device, in forward and in a recomputation.
        numbers = [to_nodes[:, 0], of_nodes[:, 0], to_ranks.sum(1), of_ranks.sum(1), of_ranks.sum(0)]
        known = iter(map(int, AsyncHostCopy(torch.cat(numbers)).values()))
        to_outer, of_outer, to_inner, of_inner, groups = ([*islice(known, len(each))] for each in numbers)
        labels = torch.arange(len(groups), device=of_ranks.device).expand_as(of_ranks).flatten()
        # The number of rows is passed in: the host would have to wait for the GPU to learn it.
        arriving = labels.repeat_interleave(of_ranks.flatten(), output_size=sum(of_inner))
        hops = Hop(self.outer, to_outer, of_outer), Hop(self.inner, to_inner, of_inner)
        return *hops, arriving, RowGroups.of(groups, of_ranks.device)

    def _pad(
        self, room: Room, to_nodes: Tensor, _: Tensor, to_ranks: Tensor, of_ranks: Tensor
    ) -> tuple[Hop, Hop, Tensor, RowGroups]:
        """`_fit` in padded buffers; the expert of padding is e."""
        counts, rooms = (to_nodes[:, 0], to_ranks.sum(1)), (room.outer, room.inner)
        needed = [to_nodes.new_zeros((), dtype=torch.float64) if self.needed is None else self.needed]
        for most, rows, even in zip((each.max() for each in counts), rooms, room.even, strict=True):
            needed.append((most.double() / even).where(most > rows, 0.0))
        self.needed = torch.stack(needed).max()
        # Rows of each rank are in the order of experts, with its padding behind them.
        place = torch.arange(room.inner, device=of_ranks.device).expand(self.inner.size, -1)
        arriving = torch.searchsorted(of_ranks.cumsum(1), place.contiguous(), right=True).flatten()
        outer, inner = map(Hop.padded, (self.outer, self.inner), rooms, counts)
        return outer, inner, arriving, RowGroups(of_ranks.sum(0).cumsum(0).to(torch.int32))

    def _count(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """(pairs t * N + n of tokens with nodes, by node; those that are sent in front; numbers of rows and of pairs by expert,
        [N, 1 + G e]).  ids: [T, k]."""
        nodes, tokens = self.outer.size, len(ids)
        # One place more than experts: for pairs that are not sent. Not bincount: on a GPU it waits for the largest id.
        flat = ids.flatten()
        pairs = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
        by_expert = pairs.view(nodes, -1)
        if nodes == 1:
            return flat, torch.cat([by_expert.new_full((1, 1), tokens), by_expert], 1)
        is_sent = ids.new_zeros(tokens, nodes + 1, dtype=torch.bool)
        is_sent = is_sent.scatter_(1, ids // (num_experts // nodes), True)[:, :nodes].t()
        # Stable: by node, and of each the tokens in order.
        order = (~is_sent).flatten().to(torch.uint8).argsort(stable=True)
        node, token = order // max(1, tokens), order % max(1, tokens)
        return token * nodes + node, torch.cat([is_sent.sum(1, keepdim=True), by_expert], 1)


def _cut(counts: Tensor, room: int) -> Tensor:
    """Counts of pairs by expert, [ranks, e], of which each rank is sent the first `room`."""
    ends = counts.cumsum(1).clamp(max=room)
    return ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))
