"""Transfer: rows on their way between the ranks of an axis, there in forward, their gradient back in backward.

Departure and arrival are two autograd functions, so that what stands between them is computed while rows travel, in forward and
in backward: autograd runs the nodes that were made last first, and an arrival's gradient is a departure.

    forward     depart: start sending      ... others compute ...      arrive: wait
    backward    depart: wait               ... others compute ...      arrive: start sending the gradient
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from framework.comm.collectives import Pending, start_all_to_all
from framework.comm.communicator import Communicator


class Transfer:
    """One journey of rows over `axis`. sent, received: rows for each rank and from each rank."""

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

    def back(self) -> "Transfer":
        """The journey of as many rows in the other direction."""
        return Transfer(self.axis, self.received, self.sent)


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        out = x.new_empty(sum(transfer.received), *x.shape[1:])
        splits = transfer.received, transfer.sent
        transfer.pending = start_all_to_all(out, x.contiguous(), transfer.axis, *splits, "rows of experts")
        return out

    @staticmethod
    def backward(ctx: Any, stand_in: Tensor) -> tuple[Tensor, None]:
        transfer: Transfer = ctx.transfer
        dx, transfer.gradient = transfer.gradient, None
        assert dx is not None, "the gradient of rows that have not arrived"
        transfer.pending.wait()
        return dx, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.pending.wait()
        # The same memory without being a view: models may write to it in place.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        transfer: Transfer = ctx.transfer
        dx = dy.new_empty(sum(transfer.sent), *dy.shape[1:])
        splits = transfer.sent, transfer.received
        transfer.pending = start_all_to_all(dx, dy.contiguous(), transfer.axis, *splits, "gradient of rows of experts")
        transfer.gradient = dx
        # Stands in for the gradient of what has departed, which nobody reads: `_Depart.backward` has the real one.
        return dy, None
