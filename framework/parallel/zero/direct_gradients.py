"""Layers that write their weight's gradient where it will be reduced.

    linear      Y = X W^T + b     G += dY^T X
    embedding   Y = W[ids]        G[ids] += dY

Autograd would allocate dY^T X anew in every microbatch, and of an embedding a gradient as large as the whole table, zeros but for
the rows that were looked up; someone would copy or add it into the unit's gradient buffer. Here the layer's `Matmul` adds to the
main gradient, in place where the kernel can accumulate, as Megatron's fused gradient accumulation does. An embedding adds rows;
those of the padding id get none, as in torch. Tables whose forward is not torch's own keep autograd's way.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from framework.model.adapters import has_adapter
from framework.model.matmul import Matmul, MatmulLinear
from framework.model.opaque_linear import linear
from framework.parallel.zero.buffers import MainGradView


class _DirectLinear(torch.autograd.Function):
    """x: [..., K] -> [..., N]. `tick` stands for the weight in autograd's graph (`Matmul.graph_input`)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tick: Tensor, bias: Tensor | None, matmul: Matmul) -> Tensor:
        ctx.matmul = matmul = matmul.begin(x)
        matmul.save(ctx, x)
        # No view, which a model could not write to in place (roc_bert's embedding).
        return matmul.compute(matmul.forward, x, bias).detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,), matmul, needs = ctx.saved_tensors, ctx.matmul, ctx.needs_input_grad
        dx = matmul.input_gradient(dy) if needs[0] else None
        matmul.weight_gradient(x, dy)
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if needs[2] else None
        return dx, None, db, None


def write_gradients_directly(
    model: nn.Module,
    grad_views: Mapping[str, MainGradView],
    make_matmul: Callable[[nn.Module, bool], Matmul] = Matmul,
    adapt: Callable[[nn.Module, Matmul], Matmul] = lambda module, matmul: matmul,
) -> dict[nn.Module, Matmul]:
    """Give each stock linear layer (torch's, or GPT-2's transposed Conv1D) of the model the forward above, and the matmuls of all
    of them their main gradient, [N, K] or transposed, in the master dtype. Results are those of autograd. Returns the matmuls.

    make_matmul: from a module, and whether its weight is transposed. adapt: from a module and these, the matmuls with its
    adapter, which has main gradients of its own.
    """
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    matmuls: dict[nn.Module, Matmul] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.Linear, Conv1D)) or not (
            id(module.weight) in by_parameter or has_adapter(module)
        ):
            if isinstance(module, MatmulLinear):
                module.matmul.give_number()
            continue
        if isinstance(module, MatmulLinear):
            matmul = module.matmul = adapt(module, make_matmul(module, module.matmul.is_transposed))
        # Exactly torch's and transformers' own, a tied head among them: a subclass may compute something else with it;
        # those that have an adapter do not (`find_targets`).
        elif type(module) in (nn.Linear, Conv1D) or has_adapter(module):
            matmul = adapt(module, make_matmul(module, isinstance(module, Conv1D)))
            module.forward = _direct_forward(module, matmul, path.rpartition(".")[2])  # type: ignore[method-assign]
        else:
            continue
        if id(module.weight) in by_parameter:
            matmul.write_gradient_to(by_parameter[id(module.weight)])
        matmuls[module] = matmul
    return matmuls


def _direct_forward(module: Any, matmul: Matmul, operation: str) -> Callable[[Tensor], Tensor]:
    # Only the shape is read: the weight's memory may have been freed.
    num_outputs = module.weight.shape[1 if matmul.is_transposed else 0]

    def forward(x: Tensor) -> Tensor:
        # The compiler cannot trace a write into a buffer that is not its own: it would break its graph here.
        if torch.compiler.is_compiling():
            return linear(x, matmul, module.bias, num_outputs, operation)
        return _DirectLinear.apply(x, matmul.tick, module.bias, matmul)

    return forward


class _DirectLookup(torch.autograd.Function):
    """ids: [..., S] -> [..., S, D]. `tick` stands for the weight in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tick: Tensor, grad_view: MainGradView, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.grad_view, ctx.padding = grad_view, padding
        return F.embedding(ids, grad_view.parameter.data)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, None, None]:
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            # Zeros are added rather than rows left out: to know which they are the host would have to wait for the device.
            dy = dy.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
        ctx.grad_view.add_rows(ids.flatten(), dy.flatten(0, -2))
        return None, None, None, None


def write_embedding_gradients(
    model: nn.Module, grad_views: Mapping[str, MainGradView], compiled: Collection[nn.Module] = ()
) -> None:
    """Give each plain embedding of the model whose weight, [V, D], is trained the forward above. Results are those of autograd,
    to which the modules within compiled layers are left."""
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    for module in (each for each in model.modules() if each not in compiled):
        if type(module) is nn.Embedding and id(module.weight) in by_parameter and _is_plain(module):
            module.forward = _direct_lookup(module, by_parameter[id(module.weight)])  # type: ignore[method-assign]


def _is_plain(embedding: nn.Embedding) -> bool:
    # A forward of its own is tensor parallelism's, which looks up in a part of the vocabulary.
    return not (
        "forward" in vars(embedding)
        or embedding.max_norm is not None
        or embedding.scale_grad_by_freq
        or embedding.sparse
    )


def _direct_lookup(embedding: nn.Embedding, grad_view: MainGradView):
    tick = torch.zeros((), device=grad_view.parameter.device, requires_grad=True)

    def forward(ids: Tensor) -> Tensor:
        return _DirectLookup.apply(ids, tick, grad_view, embedding.padding_idx)

    return forward
