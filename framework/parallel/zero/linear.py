"""Linear layers that write their weight's gradient where it will be reduced.

    Y = X W^T + b        G += dY^T X

Autograd would allocate dY^T X anew in every microbatch, and someone would copy or add it into the unit's gradient buffer.
Here the layer's `Matmul` adds it to the main gradient, in place where the kernel can accumulate, as Megatron's fused gradient
accumulation does.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from framework.model.matmul import Matmul, MatmulLinear
from framework.parallel.zero.buffers import GradView


class _DirectLinear(torch.autograd.Function):
    """x: [..., K] -> [..., N]. `tick` stands for the weight in autograd's graph (`Matmul.graph_input`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tick: Tensor, bias: Tensor | None, matmul: Matmul) -> Tensor:
        ctx.matmul = matmul
        matmul.save(ctx, x)
        return matmul.compute(matmul.forward, x, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,), matmul, needs = ctx.saved_tensors, ctx.matmul, ctx.needs_input_grad
        dx = matmul.input_gradient(dy) if needs[0] else None
        matmul.weight_gradient(x, dy)
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if needs[2] else None
        return dx, None, db, None


def find_linears(
    model: nn.Module, grad_views: Mapping[str, GradView], compiled: Collection[nn.Module]
) -> list[tuple[nn.Module, GradView]]:
    """The linear modules whose weight is trained, each with its weight's main gradient; a tied head is among them."""
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    # Exactly torch's and transformers' own: a subclass may compute something else with its weight.
    stock = (nn.Linear, Conv1D)
    modules = (
        each
        for each in model.modules()
        if isinstance(each, MatmulLinear) or (type(each) in stock and each not in compiled)
    )
    return [(module, by_parameter[id(module.weight)]) for module in modules if id(module.weight) in by_parameter]


def write_gradients_directly(
    model: nn.Module,
    grad_views: Mapping[str, GradView],
    compiled: Collection[nn.Module] = (),
    make_matmul: Callable[[nn.Module, bool], Matmul] = Matmul,
) -> dict[nn.Module, Matmul]:
    """Give each stock linear layer (torch's, or GPT-2's transposed Conv1D) of the model the forward above, and the matmuls of all
    of them their main gradient, [N, K] or transposed, in the master dtype. Results are those of autograd. Returns the matmuls.

    compiled: modules within compiled layers, whose stock linears are left to autograd: the compiler cannot trace a write into
    a buffer that is not its own, and would break its graph at each of them. make_matmul: from a module, and whether its weight is
    transposed.
    """
    matmuls = {}
    for module, grad_view in find_linears(model, grad_views, compiled):
        if isinstance(module, MatmulLinear):
            matmul = module.matmul = make_matmul(module, module.matmul.is_transposed)
        else:
            matmul = make_matmul(module, isinstance(module, Conv1D))
            module.forward = _direct_forward(module, matmul)  # type: ignore[method-assign]
        matmul.write_gradient_to(grad_view)
        matmuls[module] = matmul
    return matmuls


def _direct_forward(module: nn.Module, matmul: Matmul) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return _DirectLinear.apply(x, matmul.tick, module.bias, matmul)

    return forward
