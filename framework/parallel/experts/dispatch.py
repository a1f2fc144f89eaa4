"""Dispatch: what a rank's experts module computes where experts are on several ranks.

    route       which (token, expert) pairs this rank sends, sorted by expert, so also by the rank that has it
    depart      the numbers of rows, then the rows, to the experts' ranks              all-to-all, uneven
    compute     rows in the order of this rank's experts, two stacked matmuls, back in the order of the senders
    return      the results to the tokens' ranks                                       all-to-all, uneven
    combine     each token's sum over its experts, weighted by the sender: weights never travel, nor do their gradients

Every rank takes part in every step however few rows it has: ranks wait for one another in forward and in backward.

The rows that a rank routes are its own tokens. Where all ranks of `tp` hold the same ones (tensor parallelism without sequence
parallelism, whole experts), each routes an equal interval of them, and the results are gathered.

    T rows of hidden states, k experts per token, E experts, e of them on this rank, H features, R rows received
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.comm import collectives, duals
from framework.comm.communicator import Communicator
from framework.comm.transfer import AsyncHostCopy
from framework.mesh.token_layout import TokenLayout
from framework.model.experts import ExpertsForm, is_padding
from framework.model.matmul import GradView, RowGroups, StackedMatmul
from framework.parallel.experts.rows import combine, invert, permute, spread
from framework.parallel.experts.transfer import Transfer


class LocalExperts:
    """The experts that this rank holds, [e, ...] of every weight, on rows in the order of the experts."""

    def __init__(self, experts: nn.Module, form: ExpertsForm):
        self.experts, self.form = experts, form
        self.first = StackedMatmul(experts, form.first, form.is_transposed)
        self.last = StackedMatmul(experts, form.last, form.is_transposed)

    @property
    def matmuls(self) -> tuple[StackedMatmul, StackedMatmul]:
        return self.first, self.last

    def compute(self, x: Tensor, ids: Tensor, groups: RowGroups) -> Tensor:
        """What each row's expert makes of it.  x: [R, H] -> [R, H]; ids: [R] int64, its number among this rank's experts."""
        y = self._add_bias(self.first(x, groups), self.form.first, ids)
        y = self._add_bias(self.last(self.form.activate(self.experts, y), groups), self.form.last, ids)
        # Muse-Spark normalises what an expert gives, before it is weighted.
        return self.experts.post_expert_norm(y) if getattr(self.experts, "has_post_expert_norm", False) else y  # type: ignore[operator]

    def _add_bias(self, y: Tensor, name: str, ids: Tensor) -> Tensor:
        # Through the module: while it is sliced over `tp`, it lends a part of its bias.
        bias = getattr(self.experts, f"{name}_bias", None)
        return y if bias is None else y + bias.index_select(0, ids)


@dataclass(frozen=True)
class Routing:
    """The pairs that a rank sends, in the order of their experts. order: [P] int64, as in `rows`; counts: [E] int64, rows for
    each expert of the layer; both on the device. P is known when the counts are on the host."""

    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, index: Tensor, num_experts: int, is_left_out: Tensor | None) -> "Routing":
        """index: [T, k], experts of each token; is_left_out: [T] bool, tokens that are not sent, None: all are."""
        ids = index.flatten()
        if is_left_out is not None:
            # Sorted behind all experts, where nobody reads them.
            ids = ids.masked_fill(is_left_out.repeat_interleave(index.shape[1]), num_experts)
        ones = torch.ones_like(ids)
        # Not bincount: on a GPU it waits for the largest id.
        counts = ids.new_zeros(num_experts + 1).scatter_add_(0, ids, ones)[:num_experts]
        return cls(ids.argsort(stable=True), counts)


class ExpertDispatch:
    """The forward of one module of stacked experts. axis: the ranks that divide the experts among them."""

    def __init__(
        self, local: LocalExperts, num_experts: int, axis: Communicator, tp: Communicator, tokens: TokenLayout
    ):
        """tp, tokens: of the rows that the module is given: ranks with the same rows, or with parts of the same sequences. Where
        experts are sliced over `tp`, whose ranks then do all alike, tp is an axis of size 1."""
        self.local, self.num_experts, self.axis, self.tp, self.tokens = local, num_experts, axis, tp, tokens

    @torch.compiler.disable
    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """[T, H] -> [T, H], as the stock module with all experts; index and weights: [T, k], of the layer's E experts. Without
        them rows are llama4's, [E * T, H]."""
        if top_k_index is None or top_k_weights is None:
            top_k_index = _find_experts_of_rows(hidden_states, self.num_experts)
            top_k_weights = hidden_states.new_ones(len(top_k_index), 1)
        if self.tp.size == 1 or self.tokens.num_parts > 1:
            return self._route(hidden_states, top_k_index, top_k_weights, self._find_padding(hidden_states))
        num_rows = hidden_states.shape[0]
        missing = -num_rows % self.tp.size
        hidden, weights = (
            duals.scatter(F.pad(x, (0, 0, 0, missing)), self.tp, 0) for x in (hidden_states, top_k_weights)
        )
        index = F.pad(top_k_index, (0, 0, 0, missing)).chunk(self.tp.size)[self.tp.rank]
        valid = num_rows - self.tp.rank * len(index)
        padding = is_padding(len(index), len(index), valid, index.device) if missing else None
        return duals.join(self._route(hidden, index, weights, padding), self.tp, 0)[:num_rows]

    def _find_padding(self, hidden: Tensor) -> Tensor | None:
        """[T] bool, the rows that fill up a sequence's last interval; None where there are none."""
        layout = self.tokens
        if layout.padding == 0:
            return None
        return is_padding(hidden.shape[0], layout.tokens_local, layout.valid_local, hidden.device)

    def _route(self, hidden: Tensor, index: Tensor, weights: Tensor, is_left_out: Tensor | None) -> Tensor:
        """is_left_out: [T] bool, rows that are sent to nobody; None: there are none."""
        if self.local.form.is_expert_major:
            is_zero = ~hidden.detach().any(-1)
            is_left_out = is_zero if is_left_out is None else is_zero | is_left_out
        routing = Routing.of(index, self.num_experts, is_left_out)
        passage = self._exchange_counts(routing)
        order = routing.order[: sum(passage.sent)]
        rows = spread(hidden, order, index.shape[1])
        return combine(self._pass(rows, passage), weights, order)

    def _pass(self, rows: Tensor, passage: "Passage") -> Tensor:
        """What the experts make of the rows, [P, H], wherever they are."""
        there = Transfer(self.axis, passage.sent, passage.received)
        back = there.back()
        arrived = there.arrive(there.depart(rows))
        x = permute(arrived, passage.order, passage.inverse)
        y = permute(self.local.compute(x, passage.ids, passage.groups), passage.inverse, passage.order)
        return back.arrive(back.depart(y))

    def _exchange_counts(self, routing: Routing) -> "Passage":
        """How many rows go where: the host has to know before it can start to send, and waits for it here, once in a layer."""
        ranks = self.axis.size
        received = torch.empty_like(routing.counts)
        collectives.all_to_all(received, routing.counts, self.axis)
        sent = routing.counts.view(ranks, -1).sum(1)
        numbers = [int(each) for each in AsyncHostCopy(torch.cat([sent, received])).values()]
        return Passage.of(numbers[:ranks], numbers[ranks:], received)


@dataclass(frozen=True)
class Passage:
    """Where the rows of one passage go on this rank. sent, received: rows for and from each rank. ids: [R] int64, each row's
    expert in this rank's numbering, in the order of experts; order, inverse: [R] int64, from the order of arrival to that of the
    experts, and back."""

    sent: Sequence[int]
    received: Sequence[int]
    ids: Tensor
    order: Tensor
    inverse: Tensor
    groups: RowGroups

    @classmethod
    def of(cls, sent: Sequence[int], counts: Sequence[int], counts_on_device: Tensor) -> "Passage":
        """sent: rows for each rank; counts: [ranks * e], rows from each rank for each of this rank's experts."""
        num_local = len(counts) // len(sent)
        device = counts_on_device.device
        local = torch.arange(num_local, device=device).repeat(len(sent))
        # The number of rows is given, or a GPU would be waited for to learn it.
        arriving = local.repeat_interleave(counts_on_device, output_size=sum(counts))
        ids, order = arriving.sort(stable=True)
        received = [sum(counts[first : first + num_local]) for first in range(0, len(counts), num_local)]
        groups = RowGroups.of([sum(counts[expert::num_local]) for expert in range(num_local)], device)
        return cls(sent, received, ids, order, invert(order), groups)


def _find_experts_of_rows(hidden: Tensor, num_experts: int) -> Tensor:
    """[E * T, 1], the expert of each of llama4's rows. It gives every expert every token, times its score: one that was not sent
    there is a row of zeros, whose result and gradient are zeros, too, so it may stay at home."""
    rows_each = hidden.shape[0] // num_experts
    return torch.arange(num_experts, device=hidden.device).repeat_interleave(rows_each).unsqueeze(1)


def write_stacked_gradients(model: nn.Module, grad_views: Mapping[str, GradView]) -> None:
    """Have the matmuls of experts that dispatch add their weights' gradients to the main gradients. grad_views: by parameter
    name, of the trained ones."""
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    for module in model.modules():
        forward: Any = module.__dict__.get("forward")
        for matmul in forward.local.matmuls if isinstance(forward, ExpertDispatch) else ():
            if id(matmul.weight) in by_parameter:
                matmul.write_gradient_to(by_parameter[id(matmul.weight)])
