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

    T tokens, k experts per token, H features. N ranks of the outer hop, G of the inner one, e experts on a rank, E = N G e;
    expert (n G + i) e + x is number x of rank (n, i). `ids`: experts, int64; E, or G e of a node's, where there is none.
    T' rows that have come to this rank for its node, P pairs of them with an expert, R rows received for this rank's experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from framework.comm.codec import BlockCodec
from framework.comm.collectives import all_to_all
from framework.comm.communicator import Communicator
from framework.comm.transfer import AsyncHostCopy
from framework.model.matmul import RowGroups
from framework.parallel.experts.exchange import RowExchange
from framework.parallel.experts.rows import add_up, combine, invert, permute, spread


@dataclass(frozen=True)
class Hop:
    """Rows that go over one axis: for each rank and from each rank."""

    axis: Communicator
    sent: Sequence[int]
    received: Sequence[int]


@dataclass(frozen=True)
class DispatchPlan:
    """The way of some tokens."""

    outer: Hop
    inner: Hop
    places: Tensor | None
    """[rows of the outer hop] int64, the pair t * N + n of a token with a node behind each; None: every token is on its node."""
    order: Tensor
    """[R] int64, from the order of arrival to that of the experts."""
    inverse: Tensor
    """[R] int64, the way back."""
    ids: Tensor
    """[R] int64, the number among this rank's experts that each row is for."""
    groups: RowGroups
    """Rows by expert."""
    experts_of_node: int


class DispatchedRows:
    """The rows of some tokens on their way to the experts and back. What is called between two of its methods is
    computed while the rows travel. codec: how hidden states travel to experts; None: as they are."""

    def __init__(self, plan: DispatchPlan, codec: BlockCodec | None = None):
        self.plan = plan
        outer, inner = (RowExchange(hop.axis, hop.sent, hop.received, codec) for hop in (plan.outer, plan.inner))
        self._there = outer, inner
        self._back = outer.back(), inner.back()
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
        order = ids.flatten().argsort(stable=True)[: sum(self.plan.inner.sent)]
        self._weighted = weights, order
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
        if self.plan.places is None:
            return self._combine()
        (sums,), self._columns = self._back[0].arrive(*self._columns), ()
        return add_up(sums, self.plan.places, self._num_tokens, self.plan.outer.axis.size)

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
    """The hops between the ranks of `ep`, which are equal for all layers. outer, inner: their axes, the first between nodes.
    codec: how hidden states travel to experts; None: as they are."""

    def __init__(self, outer: Communicator, inner: Communicator, codec: BlockCodec | None = None):
        self.outer, self.inner, self.codec = outer, inner, codec

    @property
    def has_two_hops(self) -> bool:
        """Whether neither hop is the identity."""
        return min(self.outer.size, self.inner.size) > 1

    def plan(self, ids: Tensor, num_experts: int) -> DispatchedRows:
        """The way of the tokens. ids: [T, k], of the layer's `num_experts`.

        Collective over the hops: an all-to-all of numbers over each. The host has to know them before it can send rows, and waits
        for them here.
        """
        nodes = self.outer.size
        places, to_nodes = self._count(ids, num_experts)
        # From each node: the number of rows, and of pairs by expert. [N, 1 + G e]
        of_nodes = torch.empty_like(to_nodes)
        all_to_all(of_nodes, to_nodes, self.outer)
        # Pairs of what comes to this rank from all nodes are those that it passes on: [G, e].
        to_ranks = of_nodes[:, 1:].sum(0).unflatten(0, (self.inner.size, -1))
        of_ranks = torch.empty_like(to_ranks)
        all_to_all(of_ranks, to_ranks, self.inner)
        # All that the host has to know, in one copy: each would be a wait for the device, in forward and in a recomputation.
        numbers = [to_nodes[:, 0], of_nodes[:, 0], to_ranks.sum(1), of_ranks.sum(1), of_ranks.sum(0)]
        known = iter(map(int, AsyncHostCopy(torch.cat(numbers)).values()))
        to_outer, of_outer, to_inner, of_inner, groups = ([*islice(known, len(each))] for each in numbers)
        labels = torch.arange(len(groups), device=ids.device).expand_as(of_ranks).flatten()
        # The number of rows is passed in: the host would have to wait for the GPU to learn it.
        arriving = labels.repeat_interleave(of_ranks.flatten(), output_size=sum(of_inner))
        # Stable, so that an expert meets its rows in the order of ranks and tokens, whatever came first: sums are reproducible.
        own, order = arriving.sort(stable=True)
        hops = Hop(self.outer, to_outer, of_outer), Hop(self.inner, to_inner, of_inner)
        sent = None if nodes == 1 else places[: sum(to_outer)]
        row_groups = RowGroups.of(groups, ids.device)
        return DispatchedRows(
            DispatchPlan(*hops, sent, order, invert(order), own, row_groups, num_experts // nodes), self.codec
        )

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
