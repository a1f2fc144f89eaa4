"""Attention as an operator of torch's: a compiler puts the call into its graph and does not look inside.

Traced, it would be compiled again for every microbatch's documents. The operator finds the module's ContextAttention by its
number, and the documents on the mask that carries them. What autograd saves are tensors of the graph, as in `attention.py`.

    B sequences, C tokens of each on this rank, H query heads, Hk key-value heads, D and Dv features of a head
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from framework.model.opaque_linear import ATTEND
from framework.model.precision import sums_dtype
from framework.parallel.attention.attention import ATTENTIONS, ContextAttention
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.visible_rows import Scores


def attend_in_graph(
    attention: ContextAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    sinks: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """`ContextAttention.__call__`, for code that is being compiled: [B, C, H, Dv]. mask: None, or one that carries Documents."""
    assert attention.number is not None, "a compiled layer whose attention was not attached"
    # Operators of their own exchange heads, so that what this one saves need not be exchanged again in backward.
    q, k, v = attention.heads.enter(q, k, v)
    own_sinks = None if sinks is None else attention.heads.select(sinks)
    # The log-sum-exp is for backward alone.
    out: Tensor = _attend(q, k, v, own_sinks, mask, attention.number, _encode(scores))[0]
    return attention.heads.leave(out)


@torch.library.custom_op(ATTEND, mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, number: Tensor, form: list[float]
) -> tuple[Tensor, Tensor]:
    keys = _order(k, v)
    out, log_sum = ATTENTIONS.find(number).attend(q, *keys, sinks, _documents_of(mask), _decode(form))
    # The strides that the compiler has been told: what follows reads tokens before heads.
    return out.contiguous(), log_sum


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    B, H, C, _ = q.shape
    return q.new_empty(B, C, H, v.shape[-1]), q.new_empty(B, H, C, dtype=sums_dtype(q.dtype))


@torch.library.custom_op(f"{ATTEND}_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, saved: Sequence[Tensor | None], number: Tensor, form: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, dsinks or nothing). saved: q, k, v, sinks, mask, out, log-sum-exp."""
    q, k, v, sinks, mask, out, log_sum = saved
    tensors: Any = q, *_order(k, v), sinks, out, log_sum
    *found, dsinks = ATTENTIONS.find(number).differentiate(tensors, gradient, _documents_of(mask), _decode(form))
    dq, dk, dv = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in found)
    # An operator returns as many tensors in every call, and none that a caller has given.
    return dq, dk, dv, gradient.new_empty(0) if dsinks is None else dsinks


@_attend_backward.register_fake
def _(gradient: Tensor, saved: Sequence[Any], *_others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in saved[:3])
    return dq, dk, dv, gradient.new_empty(0) if saved[3] is None else torch.empty_like(saved[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, number, ctx.form = inputs
    ctx.save_for_backward(*tensors, *output, number)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, number = ctx.saved_tensors
    dq, dk, dv, dsinks = _attend_backward(gradient, saved, number, ctx.form)
    return dq, dk, dv, None if saved[3] is None else dsinks, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def _encode(scores: Scores) -> list[float]:
    """Scores as numbers, constants of a graph: layers with other windows have graphs of their own."""
    return [scores.scale, float(scores.window or 0), scores.softcap or 0.0]


def _decode(form: Sequence[float]) -> Scores:
    scale, window, softcap = form
    # Neither a window nor a cap is ever 0.
    return Scores(scale, int(window) or None, softcap or None)


def _order(k: Any, v: Any) -> tuple[Tensor, Tensor]:
    """Keys and values head by head on a CPU, whose cache they are read through once for every block of queries."""
    return (k.contiguous(), v.contiguous()) if k.device.type == "cpu" else (k, v)


def _documents_of(mask: Tensor | None) -> Documents | None:
    if mask is None:
        return None
    # The very tensor that the model was given, in backward as well: autograd saves inputs of a graph as they are.
    found = Documents.of_mask(mask)
    assert found is not None, f"an attention mask of the model's own, {mask.dtype} {[*mask.shape]}"
    return found
