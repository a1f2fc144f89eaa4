"""Linear maps of rows on one rank: spread tokens to what they are sent for, sort, weight and add up what comes back.

A *pair* is a token with one of its S slots: pair t * S + s. Slots are a token's k experts, or the N nodes. `order`: [P] int64,
the pair behind each row; T S where it is padding, which holds any token's numbers and adds nothing. Pairs that are not sent are
in no row, and their slots add nothing.

    map        row r                            adjoint
    spread     x[token of pair r]               add_up
    add_up     token t: sum over its slots      spread
    combine    the same, weighted               spread, weighted
    permute    x[order[r]]                      permute by the inverse

Adjoints are written out: autograd's own gradient of a gather adds into zeros row by row, where these gather again.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
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
