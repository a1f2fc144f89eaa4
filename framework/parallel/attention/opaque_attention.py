"""Attention as an operator of torch's: a compiler puts the call into its graph and does not look inside.

Traced, it would be compiled again for every microbatch's documents. The operator finds the module's ContextAttention by its
number, and the documents on the mask that carries them. What autograd saves are tensors of the graph, as in `attention.py`.

    B sequences, C tokens of each on this rank, H query heads, Hk key-value heads, D and Dv features of a head
"""

from typing import Any

import torch
from torch import Tensor

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
    """`ContextAttention.__call__` where heads are not exchanged, for code that is being compiled: [B, C, H, Dv]. mask: None, or
    one that carries Documents."""
    form = scores.scale, scores.window, scores.softcap
    out: Tensor = _attend(q, k, v, sinks, mask, attention.number, *form)[0]
    return out


@torch.library.custom_op("meshwright::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    number: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    out, log_sum = ATTENTIONS.find(number).attend(
        q, *_order(k, v), sinks, _documents_of(mask), Scores(scale, window, softcap)
    )
    return out.contiguous(), log_sum


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    B, H, C, _ = q.shape
    return q.new_empty(B, C, H, v.shape[-1]), q.new_empty(B, H, C, dtype=sums_dtype(q.dtype))


@torch.library.custom_op("meshwright::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor | None,
    out: Tensor,
    log_sum: Tensor,
    number: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    saved = q, *_order(k, v), sinks, out, log_sum
    scores = Scores(scale, window, softcap)
    *found, dsinks = ATTENTIONS.find(number).differentiate(saved, gradient, _documents_of(mask), scores)
    dq, dk, dv = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in found)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@_attend_backward.register_fake
def _(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, number, ctx.scale, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(*tensors, *output, number)
    ctx.mark_non_differentiable(output[1])
    ctx.has_sinks = tensors[3] is not None


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    form = ctx.scale, ctx.window, ctx.softcap
    dq, dk, dv, dsinks = _attend_backward(gradient, *ctx.saved_tensors, *form)
    return dq, dk, dv, dsinks if ctx.has_sinks else None, *(None,) * 5


_attend.register_autograd(_differentiate, setup_context=_save)


def _order(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values head by head on a CPU, whose cache they are read through once for every block of queries."""
    return (k.contiguous(), v.contiguous()) if k.device.type == "cpu" else (k, v)


def _documents_of(mask: Tensor | None) -> Documents | None:
    if mask is None:
        return None
    found = Documents.of_mask(mask)
    assert found is not None, f"an attention mask of the model's own, {mask.dtype} {[*mask.shape]}"
    return found
