"""Rows of tokens for experts: linear maps of them on one rank, and their exchange over one axis.

A *pair* is a token with one of its S slots: pair t * S + s. Slots are a token's k experts, or the N nodes. `order`: [P] int64,
the pair behind each row; T S where it is padding, which holds any token's numbers and adds nothing. Pairs that are not sent are
in no row, and their slots add nothing.

    map        row r                            adjoint
    spread     x[token of pair r]               add_up
    add_up     token t: sum over its slots      spread
    combine    the same, weighted               spread, weighted
    permute    x[order[r]]                      permute by the inverse

Adjoints are written out: autograd's own gradient of a gather adds into zeros row by row, where these gather again.

An exchange sends messages of several columns, differentiable, which travel while others compute. Departure and arrival are two
autograd functions, so that what stands between them is computed while rows travel, in forward and in backward: autograd runs the
nodes that were made last first, and an arrival's gradient is a departure.

    forward     depart: start sending      ... others compute ...      arrive: wait
    backward    depart: wait               ... others compute ...      arrive: start sending the gradient

One message has all that belongs to a row side by side: its hidden states, and what else is given, such as the weights of its
experts. Gradients go back in one message in the same way, in the dtypes of what they are gradients of.

    message    [ column 0 | column 1 | ... ] of each row: bytes, every column from a multiple of 8 on; a single column as it is

Column 0 may travel as codes (`codec`): hidden states to experts, whose every row is then rounded, a rank's own too, so that no
result depends on where an expert is; and gradients of results between nodes, which one node rounds, too (`round_gradient`).
What is summed travels as it is: results, and the gradient of what was sent, which is the exact one of the rounded rows.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.codec import BlockCodec
from framework.comm.collectives import Pending, start_all_to_all
from framework.comm.communicator import Communicator
from framework.comm.duals import linear


def spread(x: Tensor, order: Tensor, slots: int) -> Tensor:
    """The token of each pair.  x: [T, H] -> [P, H]."""
    return linear(x, partial(_take_tokens, slots=slots), partial(_sum_slots, num_tokens=len(x), slots=slots), order)


def add_up(y: Tensor, order: Tensor, num_tokens: int, slots: int) -> Tensor:
    """The sum of each token's rows.  y: [P, H] -> [T, H]."""
    return linear(y, partial(_sum_slots, num_tokens=num_tokens, slots=slots), partial(_take_tokens, slots=slots), order)


def combine(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weighted sum of each token's experts.  y: [P, H], what the experts made of the pairs; weights: [T, k] -> [T, H]."""
    return _Combine.apply(y, weights, order)


def permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x in another order of rows, [R, H]; inverse: the permutation that undoes `order`, both [R] int64."""
    # The gradient is a gather, too.
    return linear(x, _reorder, lambda dy, order, inverse: _reorder(dy, inverse, order), order, inverse)


def invert(order: Tensor) -> Tensor:
    """The permutation that undoes `order`, [R] int64."""
    return torch.empty_like(order).index_copy_(0, order, _count_up(order))


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, order)
        return _sum_weighted(y, order, weights)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y, weights, order = ctx.saved_tensors
        rows = _take_tokens(dout, order, weights.shape[1])
        flat = F.pad(weights.flatten(), (0, 1))  # behind all pairs that of padding
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
        return rows, dweights[:-1].view_as(weights), None


def _take_tokens(x: Tensor, order: Tensor, slots: int) -> Tensor:
    return x.index_select(0, (order // slots).clamp(max=len(x) - 1))


def _reorder(x: Tensor, order: Tensor, _: Tensor) -> Tensor:
    return x.index_select(0, order)


def _sum_slots(rows: Tensor, order: Tensor, num_tokens: int, slots: int) -> Tensor:
    """The sum of each token's rows.  rows: [P, H] -> [T, H]."""
    return _sum_weighted(rows, order, rows.new_ones(num_tokens, slots))


def _sum_weighted(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's rows, in fp32 or wider and rounded once.  rows: [P, H]; weights: [T, S] -> [T, H]."""
    wide = torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
    places = _find_rows(order, weights.numel()).view_as(weights)
    # A pair that is in no row reads any row, with a weight of zero.
    weights, places = weights.to(wide) * (places >= 0), places.clamp(min=0)
    rows = rows if len(rows) else rows.new_zeros(1, rows.shape[1])
    # One slot after the other: all at once would be [T, S, H], and in the wider dtype.
    slots = zip(places.unbind(1), weights.split(1, dim=1), strict=True)
    place, weight = next(slots)
    total = rows.index_select(0, place).to(wide).mul_(weight)
    for place, weight in slots:
        total.addcmul_(rows.index_select(0, place), weight)
    return total.to(rows.dtype)


def _find_rows(order: Tensor, num_pairs: int) -> Tensor:
    """The row of each pair, [num_pairs] int64; -1 where it is in none."""
    # Behind all pairs is the place of padding.
    return order.new_full((num_pairs + 1,), -1).index_copy_(0, order, _count_up(order))[:-1]


def _count_up(order: Tensor) -> Tensor:
    return torch.arange(len(order), device=order.device)


# Any column of a message may be read as numbers of up to so many bytes.
ALIGNMENT = 8
# Codec of rows that travel as codes. Rounding is idempotent, so two hops round as one does: scales are powers of two, and the
# largest code of a block is at least half of the largest there is.
ROW_CODEC = BlockCodec("fp8")


def packed_bytes(columns: Sequence[int]) -> int:
    """Bytes of a row's message. columns: bytes of each."""
    return columns[0] if len(columns) == 1 else sum(map(_align, columns))


class RowExchange:
    """One all-to-all of rows over `axis`, and its gradient's. sent, received: rows for each rank and from each rank. codec,
    gradient_codec: of column 0 in forward and in backward, None: it travels as it is. Over an axis of size 1 columns stay what
    they are."""

    def __init__(
        self,
        axis: Communicator,
        sent: Sequence[int],
        received: Sequence[int],
        codec: BlockCodec | None = None,
        gradient_codec: BlockCodec | None = None,
    ):
        self.axis, self.sent, self.received = axis, sent, received
        self.codec, self.gradient_codec = codec, gradient_codec
        self.pending = Pending()
        self._message: Tensor | None = None
        # (features, dtype) of columns.
        self._forms: list[tuple[int, torch.dtype]] = []

    def depart(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Start sending the columns, [sum(sent), ...] each; what is returned is for `arrive` alone. Integers have no gradient."""
        return columns if self.axis.size == 1 else _Depart.apply(self, *columns)

    def arrive(self, *columns: Tensor) -> tuple[Tensor, ...]:
        """Wait for the rows, [sum(received), ...] of each column. columns: what `depart` returned."""
        return columns if self.axis.size == 1 else _Arrive.apply(self, *columns)

    def back(self, gradient_codec: BlockCodec | None = None) -> "RowExchange":
        """The exchange of as many rows in the other direction, of results."""
        return RowExchange(self.axis, self.received, self.sent, None, gradient_codec)

    def send(self, columns: Sequence[Tensor]) -> None:
        """Start the message of forward."""
        self._forms = _forms_of(columns)
        self._start(columns, self.codec, self.sent, self.received, "rows of experts")

    def receive(self) -> list[Tensor]:
        """Wait for it: [sum(received), ...] of each column."""
        return self._wait(self._forms, self.codec)

    def send_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Start the message of backward, [sum(received), ...] of each column; integers have no gradient, and are left out."""
        floating = [each for each, (_, dtype) in zip(gradients, self._forms, strict=True) if dtype.is_floating_point]
        self._start(floating, self.gradient_codec, self.received, self.sent, "gradient of rows of experts")

    def receive_gradients(self) -> list[Tensor | None]:
        """Wait for it: [sum(sent), ...] of each column, None of integers."""
        forms = [form for form in self._forms if form[1].is_floating_point]
        arrived = iter(self._wait(forms, self.gradient_codec))
        return [next(arrived) if dtype.is_floating_point else None for _, dtype in self._forms]

    def stand_ins(self) -> tuple[Tensor, ...]:
        """A tensor for each column, [sum(received), ...], without memory, that nobody may read."""
        assert self._message is not None, "no rows are under way"
        device, rows = self._message.device, sum(self.received)
        return tuple(
            torch.empty_strided((rows, width), (0, 0), dtype=dtype, device=device) for width, dtype in self._forms
        )

    def _start(
        self,
        columns: Sequence[Tensor],
        codec: BlockCodec | None,
        sent: Sequence[int],
        received: Sequence[int],
        label: str,
    ) -> None:
        first = columns[0] if codec is None else codec.encode(columns[0])
        message = _pack([first, *columns[1:]])
        # Kept here and not in autograd's graph: the wait belongs to another node of it.
        self._message = message.new_empty(sum(received), message.shape[1])
        self.pending = start_all_to_all(self._message, message, self.axis, received, sent, label)

    def _wait(self, forms: Sequence[tuple[int, torch.dtype]], codec: BlockCodec | None) -> list[Tensor]:
        assert self._message is not None, "rows that have not departed"
        message, self._message = self._message, None
        self.pending.wait()
        if codec is None:
            return _unpack(message, forms)
        width, dtype = forms[0]
        codes, *others = _unpack(message, [(codec.message_bytes(width), torch.uint8), *forms[1:]])
        rows = codes.new_empty(len(codes), width, dtype=dtype)
        codec.decode(codes, rows)
        return [rows, *others]


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: RowExchange, *columns: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        transfer.send(columns)
        return _mark(ctx, transfer.stand_ins())

    @staticmethod
    def backward(ctx: Any, *stand_ins: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd has run `_Arrive.backward` before: it starts the message whose end this is.
        return None, *ctx.transfer.receive_gradients()


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transfer: RowExchange, *stand_ins: Tensor) -> tuple[Tensor, ...]:
        ctx.transfer = transfer
        return _mark(ctx, tuple(transfer.receive()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.transfer.send_gradients(gradients)
        # Stand in for gradients of what has departed, which nobody reads: `_Depart.backward` has the real ones.
        return None, *gradients


def round_gradient(y: Tensor, codec: BlockCodec | None) -> Tensor:
    """y, of any shape, whose gradient is rounded as rows of codes are; None: y as it is."""
    return y if codec is None else linear(y, Tensor.detach, partial(_round, codec=codec))


def _round(x: Tensor, codec: BlockCodec) -> Tensor:
    rounded = torch.empty_like(x)
    codec.decode(codec.encode(x), rounded)
    return rounded


def _mark(ctx: Any, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    ctx.mark_non_differentiable(*(each for each in columns if not each.is_floating_point()))
    return columns


def _pack(columns: Sequence[Tensor]) -> Tensor:
    """The message of rows: [rows, packed_bytes] uint8, or the single column.  columns: [rows, ...] each."""
    if len(columns) == 1:
        return columns[0].contiguous()
    num_bytes = packed_bytes([each.shape[1] * each.itemsize for each in columns])
    message = columns[0].new_empty(len(columns[0]), num_bytes, dtype=torch.uint8)
    for view, each in zip(_unpack(message, _forms_of(columns)), columns, strict=True):
        view.copy_(each)
    return message


def _unpack(message: Tensor, forms: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
    """The columns of a message: views. forms: (features, dtype) of each."""
    if len(forms) == 1:
        return [message]
    sizes = [width * dtype.itemsize for width, dtype in forms]
    starts = accumulate(map(_align, sizes), initial=0)
    ranges = zip(starts, sizes, forms, strict=False)
    return [message[:, start : start + size].view(dtype) for start, size, (_, dtype) in ranges]


def _forms_of(columns: Sequence[Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(each.shape[1], each.dtype) for each in columns]


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
