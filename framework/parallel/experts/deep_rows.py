"""Rows that travel by DeepEP (parallel.expert_backend=deepep), in the place of `route`.

    dispatch    each token once to every rank that has one of its experts
    spread      a row for each of these experts, in their order; experts compute
    combine     the rank's weighted sum for the token
    combine     DeepEP's: the sum over ranks, where the token came from

One hop for this rank; what crosses between nodes and what is passed on within them is DeepEP's affair.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.comm.deep_ep import (
    MAX_ROW_BYTES,
    RANKS,
    RANKS_PER_NODE,
    ROW_BYTES,
    ROW_BYTES_BETWEEN_NODES,
    DeepBuffer,
    Way,
)
from framework.comm.duals import linear
from framework.errors import ModelError
from framework.model.matmul import RowGroups
from framework.parallel.experts.route import ExpertRoute
from framework.parallel.experts.rows import RowExchange, combine, spread
from framework.parallel.stage_plan import StagePlan


class TokenExchange(RowExchange):
    """Tokens, weights and experts to their ranks; gradients of the first two back."""

    def __init__(self, buffer: DeepBuffer, num_experts: int):
        super().__init__(buffer.axis, (), ())
        self.buffer, self.num_experts = buffer, num_experts
        self.way: Way  # once tokens have departed
        self._arriving: list[Tensor | None] = []

    def send(self, columns: Any) -> None:
        x, weights, ids = columns
        # Nothing of what arrives stays here: autograd's graph holds this until backward.
        (x, ids, weights), self.way, self.pending = self.buffer.dispatch(x, ids, weights, self.num_experts)
        self._arriving = [x, weights, ids]

    def receive(self) -> list[Any]:
        self.pending.wait()
        arrived, self._arriving = self._arriving, []
        return arrived

    def send_gradients(self, gradients: Any) -> None:
        # The weight of a slot has a gradient on the one rank that has its expert, and zeros on the others: their sum is it.
        dx, dweights, self.pending = self.buffer.combine(gradients[0], self.way, gradients[1])
        self._arriving = [dx, dweights, None]

    def receive_gradients(self) -> list[Tensor | None]:
        return self.receive()

    def stand_ins(self) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(1, 1).expand(x.shape) for x in self._arriving if x is not None)


class SumExchange(TokenExchange):
    """Sums of ranks to where their tokens came from; their gradients to the ranks."""

    def __init__(self, there: TokenExchange):
        super().__init__(there.buffer, there.num_experts)
        self.way = there.way

    def send(self, columns: Any) -> None:
        total, _, self.pending = self.buffer.combine(columns[0], self.way)
        self._arriving = [total]

    def send_gradients(self, gradients: Any) -> None:
        rows, self.pending = self.buffer.dispatch_again(gradients[0], self.way)
        self._arriving = [rows]


class ArrivedRows(NamedTuple):
    """Rows for this rank's experts, [R] each: as in `route.DispatchPlan`."""

    ids: Tensor
    groups: RowGroups


class DeepRows:
    """`route.DispatchedRows` by DeepEP. plan: known once rows have arrived."""

    plan: ArrivedRows

    def __init__(self, buffer: DeepBuffer, num_experts: int):
        self.num_experts = num_experts
        self._there = TokenExchange(buffer, num_experts)
        self._columns: tuple[Tensor, ...] = ()
        self._weighted: tuple[Tensor, ...] = ()

    def depart(self, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Start to send.  x: [T, H]; ids, weights: [T, k]; E: to nobody."""
        weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
        self._columns = self._there.depart(x, weights, ids.masked_fill(ids == self.num_experts, -1))

    def pass_on(self) -> None:
        """Nothing: DeepEP passes tokens on."""

    def arrive(self) -> Tensor:
        """The rows for this rank's experts, [R, H], in their order."""
        (x, weights, ids), self._columns = self._there.arrive(*self._columns), ()
        counts = self._there.way.counts
        # Stable, as in `route`: the pairs of an expert stay in the order in which tokens come. Pairs elsewhere are behind all.
        pairs = ids.masked_fill(ids < 0, len(counts)).flatten()
        own, order = pairs.sort(stable=True)
        own, order = own[: sum(counts)], order[: sum(counts)]
        self.plan, self._weighted = ArrivedRows(own, RowGroups.of(counts, x.device)), (weights, order)
        return spread(x, order, ids.shape[1])

    def depart_back(self, rows: Tensor) -> None:
        """Start to send the sums.  rows: [R, H], the experts' outputs."""
        # Weighted here: DeepEP adds up what it is given.
        (weights, order), self._weighted = self._weighted, ()
        self._back = SumExchange(self._there)
        self._columns = self._back.depart(combine(rows, weights, order))

    def cross_back(self) -> None:
        """Nothing: they have started."""

    def arrive_back(self) -> Tensor:
        """The tokens' weighted sums of their experts' outputs, [T, H]."""
        (out,), self._columns = self._back.arrive(*self._columns), ()
        # A recomputation ends with the last tensor that is saved, so one is saved behind the last arrival: of halves that compute
        # by turns one has departed when the other saves its last before that, and nobody would wait for it.
        return linear(out, _alias, _alias, self.plan.groups.offsets)


def _alias(x: Tensor, _: Tensor) -> Tensor:
    # Detached, and so no view, to which models could not write in place.
    return x.detach()


class DeepRoute(ExpertRoute):
    """The way to experts by DeepEP, over all of `ep` at once."""

    def __init__(self, outer: Communicator, inner: Communicator, buffer: DeepBuffer):
        super().__init__(outer, inner)
        self.buffer = buffer

    @property
    def has_two_hops(self) -> bool:
        return False

    def plan(self, ids: Tensor, num_experts: int, most: int | None = None) -> DeepRows:  # type: ignore[override]
        """The way of the tokens.  ids: [T, k]."""
        return DeepRows(self.buffer, num_experts)


def refuse_deep_ep(plan: StagePlan, width: int) -> None:
    """Raises ModelError where DeepEP's kernels cannot run the plan. width: features of hidden states."""
    ep, itemsize = plan.axes["ep"], plan.compute_dtype.itemsize
    asked, instead = "parallel.expert_backend=deepep", "or parallel.expert_backend=own"
    if plan.device.type != "cuda":
        raise ModelError(f"{asked}: its kernels are for GPUs, and launch.device is {plan.device.type}: {instead[3:]}")
    if plan.compute_dtype != torch.bfloat16:
        raise ModelError(f"{asked} sends bf16: precision.compute=bf16; {instead}")
    whole = ep.size <= RANKS_PER_NODE if ep.nodes == 1 else ep.size == ep.nodes * RANKS_PER_NODE
    if ep.size not in RANKS or not whole:
        raise ModelError(
            f"{asked} has no kernels for parallel.ep={ep.size} over {ep.nodes} nodes: 2, 4 or 8 within one, over more of them all"
            f" eight ranks of each, in all {', '.join(map(str, RANKS[3:]))}; {instead}"
        )
    unit = ROW_BYTES if ep.nodes == 1 else ROW_BYTES_BETWEEN_NODES
    if width * itemsize % unit or width * itemsize >= MAX_ROW_BYTES:
        of_nodes = "within a node" if ep.nodes == 1 else "between nodes"
        raise ModelError(
            f"{asked} sends rows of whole {unit} bytes {of_nodes}, of less than {MAX_ROW_BYTES:,}, and those of hidden size"
            f" {width} have {width * itemsize:,}: {instead[3:]}"
        )
