"""Embeddings that add to their weight's gradient only the rows that were looked up, where it will be reduced.

    Y = W[ids]        G[ids] += dY

Autograd would make a gradient as large as the whole table in every microbatch, zeros but for those rows, and someone would add
it. Rows of the padding id get none, as in torch. Tables whose forward is not torch's own keep autograd's way.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.parallel.zero.buffers import GradView


class _DirectLookup(torch.autograd.Function):
    """ids: [..., S] -> [..., S, D]. `tick` stands for the weight in autograd's graph, as in `linear.py`."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, tick: Tensor, grad_view: GradView, padding: int | None) -> Tensor:
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
    model: nn.Module, grad_views: Mapping[str, GradView], compiled: Collection[nn.Module] = ()
) -> None:
    """Give each plain embedding of the model whose weight, [V, D], is trained the forward above. Results are those of autograd,
    to which the modules within compiled layers are left, as in `linear.py`."""
    by_parameter = {id(view.parameter): view for view in grad_views.values()}
    for module in (each for each in model.modules() if each not in compiled):
        if type(module) is nn.Embedding and id(module.weight) in by_parameter and _is_plain(module):
            module.forward = _direct_forward(module, by_parameter[id(module.weight)])  # type: ignore[method-assign]


def _is_plain(embedding: nn.Embedding) -> bool:
    # A forward of its own is tensor parallelism's, which looks up in a part of the vocabulary.
    return not (
        "forward" in vars(embedding)
        or embedding.max_norm is not None
        or embedding.scale_grad_by_freq
        or embedding.sparse
    )


def _direct_forward(embedding: nn.Embedding, grad_view: GradView):
    tick = torch.zeros((), device=grad_view.parameter.device, requires_grad=True)

    def forward(ids: Tensor) -> Tensor:
        return _DirectLookup.apply(ids, tick, grad_view, embedding.padding_idx)

    return forward
