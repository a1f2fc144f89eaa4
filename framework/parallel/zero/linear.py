"""Linear layers that write their weight's gradient where it will be reduced.

    Y = X W^T + b        dX = dY W        G += dY^T X        db = sum dY

Autograd would allocate dY^T X anew in every microbatch, and someone would copy or add it into the unit's gradient buffer.
Here the layer does it, in place where the product can accumulate, as Megatron's fused gradient accumulation does. The weight
is looked up at the time of use, in forward and again in backward, so it may move in between.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from framework.model.matmul import matmul
from framework.parallel.zero.buffers import GradView


class _DirectLinear(torch.autograd.Function):
    """`tick` stands for the weight in autograd's graph: with it, backward runs where nothing else asks for a gradient."""

    @staticmethod
    def forward(ctx, x, tick, bias, place, is_transposed):
        weight = place.parameter.data
        ctx.save_for_backward(x)
        ctx.place, ctx.is_transposed = place, is_transposed
        return matmul(x, weight.t() if is_transposed else weight, bias)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        weight = ctx.place.parameter.data
        dx = matmul(dy, weight if ctx.is_transposed else weight.t()) if ctx.needs_input_grad[0] else None
        dy_rows, x_rows = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        left, right = (x_rows, dy_rows) if ctx.is_transposed else (dy_rows, x_rows)
        ctx.place.add_matmul(left.t(), right.t())
        db = dy_rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None


def find_linears(
    model: nn.Module, grad_views: Mapping[str, GradView], compiled: Collection[nn.Module]
) -> list[tuple[nn.Module, GradView]]:
    """The linear modules whose weight is trained, each with its weight's place; a tied head is among them."""
    by_parameter = {id(place.parameter): place for place in grad_views.values()}
    stock = (nn.Linear, Conv1D)
    modules = (each for each in model.modules() if _is_door(each) or (type(each) in stock and each not in compiled))
    return [(module, by_parameter[id(module.weight)]) for module in modules if id(module.weight) in by_parameter]


def write_gradients_directly(
    model: nn.Module, grad_views: Mapping[str, GradView], compiled: Collection[nn.Module] = ()
) -> None:
    """Give each Linear (and GPT-2's transposed Conv1D) of the model the forward above, and the place to layers that write
    there themselves. Results are those of autograd.

    compiled: modules within compiled layers, whose stock linears are left to autograd: the compiler cannot trace a write into
    a buffer that is not its own, and would break its graph at each of them.
    """
    for module, place in find_linears(model, grad_views, compiled):
        if _is_door(module):
            module.grad_view = place  # type: ignore[assignment]
        else:
            module.forward = _direct_forward(module, place)  # type: ignore[method-assign]


def _is_door(module: nn.Module) -> bool:
    """A linear layer of ours that asks for the place: those of `parallel/tensor`."""
    return hasattr(module, "grad_view")


def _direct_forward(module: nn.Module, place: GradView):
    is_transposed = isinstance(module, Conv1D)
    tick = torch.zeros((), device=place.parameter.device, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        return _DirectLinear.apply(x, tick, module.bias, place, is_transposed)

    return forward
