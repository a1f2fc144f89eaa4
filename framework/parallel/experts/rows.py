"""Linear maps of rows on one rank: spread tokens to what they are sent for, sort, weight and add up what comes back.

A *pair* is a token with one of its S slots: pair t * S + s. Slots are a token's k experts, or the N nodes. `order`: [P] int64,
the pair behind each row. Pairs that are not sent are in no row, and their slots add nothing.

    map        row r                            adjoint
    spread     x[token of pair r]               add_up
    add_up     token t: sum over its slots      spread
    combine    the same, weighted               spread, weighted
    permute    x[order[r]]                      permute by the inverse

Adjoints are written out: autograd's own gradient of a gather adds into zeros row by row, where these gather again.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

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


def _take_tokens(x: Tensor, order: Tensor, slots: int) -> Tensor:
    return x.index_select(0, order // slots)


def _reorder(x: Tensor, order: Tensor, _: Tensor) -> Tensor:
    return x.index_select(0, order)


def _sum_slots(rows: Tensor, order: Tensor, num_tokens: int, slots: int) -> Tensor:
    """The sum of each token's rows, in fp32 or wider and rounded once.  rows: [P, H] -> [T, H]."""
    of_slots = _slots(rows, order, num_tokens, slots)
    total = next(of_slots).to(torch.promote_types(rows.dtype, torch.float32))
    for each in of_slots:
        total += each
    return total.to(rows.dtype)


def _slots(rows: Tensor, order: Tensor, num_tokens: int, slots: int) -> Iterator[Tensor]:
    """The rows of all tokens' first slots, of their second ones and so on, [T, H] each; zeros for pairs that have no row."""
    # Pairs without a row read one behind the others.
    places = order.new_full((num_tokens * slots,), len(order)).index_copy_(0, order, _count_up(order))
    if len(order) < num_tokens * slots:
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    for each in places.view(num_tokens, slots).unbind(1):
        yield rows.index_select(0, each)


def _count_up(order: Tensor) -> Tensor:
    return torch.arange(len(order), device=order.device)
