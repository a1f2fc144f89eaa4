"""Embeddings that add to their weight's gradient only the rows that were looked up, where it will be reduced.

    Y = W[ids]        G[ids] += dY

Autograd would make a gradient as large as the whole table in every microbatch, zeros but for those rows, and someone would add
it. Rows of the padding id get none, as in torch. Tables whose forward is not torch's own keep autograd's way.
"""

from collections.abc import Collection, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.parallel.zero.buffers import GradView


class _DirectLookup(torch.autograd.Function):
    """`tick` stands for the weight in autograd's graph, as in `linear.py`."""

    @staticmethod
    def forward(ctx, ids, tick, place, padding):
        ctx.save_for_backward(ids)
        ctx.place, ctx.padding = place, padding
        return F.embedding(ids, place.parameter.data)

    @staticmethod
    def backward(ctx, dy):
        (ids,) = ctx.saved_tensors
        if ctx.padding is not None:
            dy = dy.masked_fill((ids == ctx.padding).unsqueeze(-1), 0)
        ctx.place.add_rows(ids.flatten(), dy.flatten(0, -2))
        return None, None, None, None


def write_embedding_gradients(
    model: nn.Module, grad_views: Mapping[str, GradView], compiled: Collection[nn.Module] = ()
) -> None:
    """Give each plain embedding of the model whose weight is trained the forward above. Results are those of autograd, to which
    the modules within compiled layers are left, as in `linear.py`."""
    by_parameter = {id(place.parameter): place for place in grad_views.values()}
    for module in (each for each in model.modules() if each not in compiled):
        if type(module) is nn.Embedding and id(module.weight) in by_parameter and _is_plain(module):
            module.forward = _direct_forward(module, by_parameter[id(module.weight)])  # type: ignore[method-assign]


def _is_plain(embedding: nn.Embedding) -> bool:
    return not (
        "forward" in vars(embedding)
        or embedding.max_norm is not None
        or embedding.scale_grad_by_freq
        or embedding.sparse
    )


def _direct_forward(embedding: nn.Embedding, place: GradView):
    tick = torch.zeros((), device=place.parameter.device, requires_grad=True)

    def forward(ids: Tensor) -> Tensor:
        return _DirectLookup.apply(ids, tick, place, embedding.padding_idx)

    return forward
