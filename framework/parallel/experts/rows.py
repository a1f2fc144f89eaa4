"""Rows: from tokens to pairs of a token and an expert, sorted by expert, and back; each with its gradient.

    T tokens, k experts per token, P pairs that are sent, H features. `order`: [P] int64, the pair behind each sorted row; pair
    t * k + j is token t with its j-th expert. Pairs that are not sent (padding, dropped) are in no row.

Written out because autograd's own gradient of a gather adds into zeros row by row; here it is a gather again.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class _Spread(torch.autograd.Function):
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
        # As many rows at a time as there are tokens: all at once would be twice [P, H] in the wider dtype. `rows` become dy.
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
