"""Sums whose terms travel coded: rounded to a narrower dtype, or in blocks of few bits. A backend would add in what travels; here
ranks exchange messages and add what arrives in the dtype of the result.

    x    [outer, inner, part]      an axis in two levels, k nodes with m ranks on each; in one level k = 1 and m = n
    1    rank (o, i) codes x and sends column i' to its neighbour (o, i'): its parts for rank i' of all nodes
    2    it adds up what has come, [k, part]: the sums of its node, side by side in the order in which they leave
    3    it codes those and sends row o' to rank (o', i), and adds up what has come, [part]

Each rank sends (n-1)/n of x, coded, and k-1 parts of it to other nodes. A number is coded once on its way over one level and
twice over two, and launches are as many for any number of ranks. An all-reduce gathers the sums, coded once more.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from framework.comm.algorithms import Pending, choose, exchange_parts, in_turn, then
from framework.comm.communicator import Communicator


class Wire(Protocol):
    """The form in which numbers travel, messages of bytes. All messages of a tensor are coded by the same few launches."""

    def message_bytes(self, numel: int) -> int:
        """Bytes of the message of so many numbers."""

    def encode(self, x: Tensor, out: Tensor) -> Tensor:
        """Write each message and return all.  x: [..., n], any strides but the last; out: [..., message_bytes(n)] uint8."""

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the numbers of messages.  message: [..., message_bytes(n)] uint8; out: [..., n]."""

    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Write the sum of messages' numbers, in out's dtype.  messages: [ranks, ..., message_bytes(n)] uint8; out: [..., n]."""


@dataclass(frozen=True)
class Rounding:
    """The wire of numbers rounded to a narrower dtype."""

    dtype: torch.dtype

    def message_bytes(self, numel: int) -> int:
        """Bytes of the message of so many numbers."""
        return numel * self.dtype.itemsize

    def encode(self, x: Tensor, out: Tensor) -> Tensor:
        """Round to the message, of the same shape as bytes."""
        out.view(self.dtype).copy_(x)
        return out

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Widen the message."""
        out.copy_(message.view(self.dtype))

    def decode_sum(self, messages: Tensor, out: Tensor) -> None:
        """Add up in the order of ranks."""
        torch.sum(messages.view(self.dtype), 0, dtype=out.dtype, out=out)


def scatter_coded(out: Tensor, x: Tensor, axis: Communicator, wire: Wire) -> Pending:
    """Reduce-scatter of what arrives of all ranks' x, added in out's dtype.  out: any shape; x: n times as large, its dtype."""
    inner, outer = axis.levels or (axis, None)
    parts = x.view(-1, inner.size, out.numel())
    first = _CodedParts(parts.transpose(0, 1), inner, wire)
    if outer is None:
        return Pending(first.works, [x], lambda: first.end(out.view(1, -1)))

    def cross() -> Pending:
        sums = torch.empty_like(parts[:, 0])
        first.end(sums)
        second = _CodedParts(sums.unsqueeze(1), outer, wire)
        return Pending(second.works, [], lambda: second.end(out.view(1, -1)))

    return in_turn(axis, Pending(first.works, [x]), cross)


def sum_coded(x: Tensor, axis: Communicator, wire: Wire) -> Pending:
    """All-reduce of what arrives of all ranks' x, in place: a `scatter_coded`, after which all gather the sums, coded too.

    x: any shape and floating dtype. What follows the first hop starts in the wait.
    """
    part = -(-x.numel() // axis.size)
    # Nobody adds the padding up, but it is sent: reused memory would send what an earlier operation has left.
    terms = F.pad(x.view(-1), (0, axis.size * part - x.numel()))
    sums = x.new_empty(part)

    def gather() -> Pending:
        messages = x.new_empty(axis.size, wire.message_bytes(part), dtype=torch.uint8)
        # Through the messages, this rank's own sum too: else it alone would keep the exact bits of its part, and replicas would
        # drift apart.
        mine = wire.encode(sums, messages[axis.rank])
        return then(choose("all_gather", messages, axis)(messages, mine, axis), lambda: take_over(messages))

    def take_over(messages: Tensor) -> None:
        wire.decode(messages, terms.view(axis.size, -1))
        x.view(-1).copy_(terms[: x.numel()])

    return then(scatter_coded(sums, terms, axis, wire), gather)


class _CodedParts:
    """Messages of every rank for every rank, on their way.  rows: this rank's numbers for each, [ranks, places, n]."""

    def __init__(self, rows: Tensor, axis: Communicator, wire: Wire):
        self._wire = wire
        sent, self._received = rows.new_empty(2, *rows.shape[:2], wire.message_bytes(rows.shape[2]), dtype=torch.uint8)
        wire.encode(rows, sent)
        self.works: list[Any]
        if rows.is_cuda:
            # One launch for all parts.
            self.works = [dist.all_to_all_single(self._received, sent, group=axis.scatter_group, async_op=True)]
        else:
            self._received[axis.rank] = sent[axis.rank]
            of_peers = [part for rank, part in enumerate(self._received) if rank != axis.rank]
            self.works = exchange_parts(of_peers, sent, axis)

    def end(self, out: Tensor) -> None:
        """Write the sum of what has come to out, [places, n]."""
        self._wire.decode_sum(self._received, out)
