"""Borders of regions as operators of torch's: a compiler puts them into a layer's graph and does not look inside.

    border in     `enter`: all tokens of x, and a slot for each column layer    backward: the sum over ranks of dX; under it dW
    border out    `map` (`model/opaque_map.py`): the sum over ranks of y        backward: all tokens of dY

No message may be on its way between two operators. So what a sum of dX covers, the weight gradients of the region's column
layers, is computed in the same operator. The dY that they need come there as the gradient of a *slot*, [..., N_r], an output of
`enter` without elements of its own, which a layer's `linear` takes in and does not read.

The slots hang on the tensor that the model is given. A layer whose input is another one (families flatten sequences) has no slot,
and computes its weight's gradient where it stands.

    B sequences, S tokens of a whole sequence, s of them on this rank where they are sharded, D hidden features; N_r features out
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from framework.model.matmul import MatmulLinear, find_matmul
from framework.model.opaque_linear import linear, write_weight_gradient
from framework.model.opaque_map import MAPS, apply_map
from framework.parallel.tensor.borders import Border


def number_border(border: Border) -> None:
    """Give it a number, as compiled layers need."""
    if border.number is None:
        border.number = MAPS.number(border)


def _find_border(number: Tensor) -> Border:
    found = MAPS.find(number)
    assert isinstance(found, Border), "the number of another map"
    return found


def enter_in_graph(border: Border, x: Tensor, columns: Sequence[MatmulLinear], regathers: bool) -> Tensor:
    """All tokens of x, differentiable, for code that is being compiled.  x: [B, s, D] or replicated -> [B, S, D].

    columns: the region's column layers; regathers: x is kept for their weight gradients and gathered again.
    """
    # Widths are read off the layers: their weights' memory may have been given back.
    widths, ticks = [each.out_features for each in columns], [each.matmul.tick for each in columns]
    found, *slots = _enter(x, border.number, ticks, widths, border.count_inside(x), regathers)
    # Dynamo lets attributes be set on what an operation of its own returns, not on one of an operator's list.
    whole: Any = found.view(found.shape)
    whole.slots = slots
    return whole


def column_in_graph(x: Tensor, layer: MatmulLinear, index: int) -> Tensor:
    """X W_r^T + b_r of a region's column layer, differentiable, for code that is being compiled.  x: [..., K] -> [..., N_r].

    index: of the layer among the region's.
    """
    slots = getattr(x, "slots", None)
    slot = None if slots is None else slots[index]
    return linear(x, layer.matmul, layer.bias, layer.out_features, layer.operation, slot)


def leave_in_graph(border: Border, y: Tensor, leading: Sequence[int] = (), operation: str = "") -> Tensor:
    """The sum over ranks of y, differentiable, for code that is being compiled.  y: [B, S, D], or rows of as many tokens ->
    [B, s, D]. leading: (B, S) where rows are to be sequences again; operation: the name in `memory.kept_operations`."""
    if y.ndim <= len(leading):
        y = y.unflatten(0, leading)
    shape = (*y.shape[:-2], border.count_outside(y), y.shape[-1])
    return apply_map(border, [y], [shape], operation)[0]


@torch.library.custom_op("meshwright::enter", mutates_args=())
def _enter(
    x: Tensor, border: Tensor, ticks: Sequence[Tensor], widths: Sequence[int], tokens: int, regathers: bool
) -> list[Tensor]:
    whole = _find_border(border).enter_apart(x)
    return [whole, *_make_slots(whole, widths)]


@_enter.register_fake
def _(x: Tensor, border: Tensor, ticks: Any, widths: Sequence[int], tokens: int, regathers: bool) -> list[Tensor]:
    whole = _like(x, tokens, x.shape[-1])
    return [whole, *_make_slots(whole, widths)]


def _make_slots(whole: Tensor, widths: Sequence[int]) -> list[Tensor]:
    return [whole.new_empty(()).expand(*whole.shape[:-1], width) for width in widths]


@torch.library.custom_op("meshwright::enter_backward", mutates_args=())
def _enter_backward(
    dwhole: Tensor | None,
    kept: Tensor,
    dys: Sequence[Tensor | None],
    border: Tensor,
    ticks: Sequence[Tensor],
    tokens: int,
    regathers: bool,
) -> tuple[Tensor, Tensor]:
    """(dX, [B, s, D], or nothing where nobody asks; the gradient of every tick: zero). kept: [B, s, D] if it regathers, else
    [B, S, D]; tokens: of dX."""
    at = _find_border(border)
    matmuls = zip(map(find_matmul, ticks), dys, strict=True)
    trained = [(matmul, dy) for matmul, dy in matmuls if dy is not None and matmul.grad_view is not None]
    gathering = at.start_gather(kept) if regathers and trained else None
    dx, summing = (kept.new_empty(0), None) if dwhole is None else at.start_enter_adjoint(dwhole)
    whole = kept
    if gathering is not None:
        gathering[1].wait()
        whole = at.join(gathering[0])
    for matmul, dy in trained:
        write_weight_gradient(matmul, whole, dy)
    if summing is not None:
        summing.wait()
    return dx, torch.zeros_like(border)


@_enter_backward.register_fake
def _(
    dwhole: Tensor | None, kept: Tensor, dys: Any, border: Tensor, ticks: Any, tokens: int, regathers: bool
) -> tuple[Tensor, Tensor]:
    dx = kept.new_empty(0) if dwhole is None else _like(dwhole, tokens, dwhole.shape[-1])
    return dx, torch.empty_like(border)


def _save_enter(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, border, ticks, _, _, ctx.regathers = inputs
    ctx.tokens = x.shape[-2]
    # A layer without a slot gives no gradient of it, and zeros would be as large as its output.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if ctx.regathers else output[0], border, *ticks)


def _differentiate_enter(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    kept, border, *ticks = ctx.saved_tensors
    dwhole, *dys = gradients
    needs_dx = ctx.needs_input_grad[0]
    dx, zero = _enter_backward(dwhole if needs_dx else None, kept, dys, border, ticks, ctx.tokens, ctx.regathers)
    is_empty = not needs_dx or dwhole is None
    # torch wants a list in the place of an empty one.
    return None if is_empty else dx, None, [zero] * len(ticks), None if ticks else [], None, None


_enter.register_autograd(_differentiate_enter, setup_context=_save_enter)


def _like(x: Tensor, tokens: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-2], tokens, width)
