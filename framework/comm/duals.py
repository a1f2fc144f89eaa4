"""Duals: linear maps between the ranks of an axis that autograd can differentiate, each with its adjoint.

A tensor along an axis is *replicated* (the same on all ranks: one vector x), or *independent* (x_r on rank r; a shard,
a partial sum). The inner product of replicated tensors is <x, y> on any one rank, of independent ones sum_r <x_r,
y_r>. With these, a map A and its adjoint B satisfy <y, A x> = <B y, x>, so B takes the gradient of A's result to the
gradient of A's input:

    map             from         to           result on rank r                     adjoint
    copy_to         replicated   independent  x                                    reduce_from
    reduce_from     independent  replicated   sum_s x_s                            copy_to
    reduce_scatter  independent  independent  part r of sum_s x_s                  all x_s, concatenated
    scatter         replicated   independent  part r of x                          join
    join            independent  replicated   all x_s, concatenated                scatter
    gather          independent  independent  all x_s, concatenated                reduce_scatter

A gradient has the kind of its tensor: that of a replicated tensor is the same on all ranks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from framework.comm import collectives
from framework.comm.communicator import Communicator

Map = Callable[..., Tensor]


def copy_to(x: Tensor, axis: Communicator) -> Tensor:
    """Enter a region where each rank uses the replicated x in its own way: x itself; the gradients are summed.

    x: any shape and floating dtype, the same on all ranks of the axis. Backward: an all-reduce of x's size.
    """
    return _apply(x, axis, _alias, partial(_all_reduce, axis=axis))


def reduce_from(x: Tensor, axis: Communicator) -> Tensor:
    """Leave such a region: the sum of all ranks' x, replicated; its gradient goes to every rank.

    x: one shape on all ranks of the axis, any floating dtype; the result has both. Forward: an all-reduce of x's size.
    """
    return _apply(x, axis, partial(_all_reduce, axis=axis), _alias)


def reduce_scatter(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    """This rank's part along dim of the sum of all ranks' x.

    x: [..., axis.size * part, ...] of one shape on all ranks -> [..., part, ...]. Forward: a reduce-scatter, backward an
    all-gather, each of x's size. Raises AssertionError when axis.size does not divide the dim.
    """
    return _apply(x, axis, partial(_reduce_scatter, axis=axis, dim=dim), partial(_all_gather, axis=axis, dim=dim))


def scatter(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    """This rank's part along dim of the replicated x; the gradient is gathered.

    x: [..., axis.size * part, ...], the same on all ranks -> [..., part, ...]. Forward sends nothing, backward
    is an all-gather of x's size. Raises AssertionError when axis.size does not divide the dim.
    """
    return _apply(x, axis, partial(_take_part, axis=axis, dim=dim), partial(_all_gather, axis=axis, dim=dim))


def join(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    """All ranks' x, concatenated along dim, for ranks that go on with it alike; each gets its part of the gradient.

    x: [..., part, ...] of one shape on all ranks of the axis -> [..., axis.size * part, ...]. Forward: an all-gather of the
    result's size, backward sends nothing.
    """
    return _apply(x, axis, partial(_all_gather, axis=axis, dim=dim), partial(_take_part, axis=axis, dim=dim))


def gather(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    """All ranks' x, concatenated along dim, for ranks that go on with it each in its own way; gradients are summed.

    x: [..., part, ...] of one shape on all ranks of the axis -> [..., axis.size * part, ...]. Forward: an all-gather, backward a
    reduce-scatter, each of the result's size.
    """
    return _apply(x, axis, partial(_all_gather, axis=axis, dim=dim), partial(_reduce_scatter, axis=axis, dim=dim))


class _Linear(torch.autograd.Function):
    """A linear map whose gradient is its adjoint, applied by this same function: so derivatives of any order are
    right."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_map: Map, adjoint: Map, *tensors: Tensor) -> Tensor:
        # Not x: a linear map's gradient does not depend on its input.
        ctx.save_for_backward(*tensors)
        ctx.maps = forward_map, adjoint
        return forward_map(x, *tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Asked for once: within activation checkpointing a second time is an error.
        (forward_map, adjoint), tensors = ctx.maps, ctx.saved_tensors
        dx = _Linear.apply(gradient, adjoint, forward_map, *tensors)
        return dx, None, None, *(None for _ in tensors)


@torch.compiler.disable
def linear(x: Tensor, forward_map: Map, adjoint: Map, *tensors: Tensor) -> Tensor:
    """forward_map(x, *tensors), linear in x, whose gradient is adjoint(dy, *tensors). tensors: indices, without gradient."""
    return _Linear.apply(x, forward_map, adjoint, *tensors)


def _apply(x: Tensor, axis: Communicator, forward_map: Map, adjoint: Map) -> Tensor:
    # One rank gets x itself and no node in the graph: a layer that is not split is compiled and differentiated as if stock.
    return x if axis.size == 1 else linear(x, forward_map, adjoint)


def _alias(x: Tensor) -> Tensor:
    """The same memory and version counter. Not a view: models write to activations in place (mixtral's router jitter),
    which autograd forbids on views made here."""
    return x.detach()


def _all_reduce(x: Tensor, axis: Communicator) -> Tensor:
    # Summed in a copy: x is an activation that the caller may still need, or a gradient that autograd adds others to.
    out = x.clone(memory_format=torch.contiguous_format)
    collectives.all_reduce(out, axis)
    return out


def _all_gather(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    dim %= x.ndim
    # Ranks' x arrive one after another, which is concatenation along dim 0; another dim takes a copy here, in `flatten`.
    gathered = x.new_empty(axis.size, *x.shape)
    collectives.all_gather(gathered, x.contiguous(), axis)
    return gathered.movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    dim %= x.ndim
    # The collective divides memory evenly: parts along another dim than 0 are made contiguous first.
    parts = _parts(x, axis, dim).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    collectives.reduce_scatter(out, parts, axis)
    return out


def _take_part(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    """This rank's part, as a copy, so that the whole of x can be freed."""
    dim %= x.ndim
    return _parts(x, axis, dim).select(dim, axis.rank).clone(memory_format=torch.contiguous_format)


def _parts(x: Tensor, axis: Communicator, dim: int) -> Tensor:
    """x with dim split in two: [..., axis.size, part, ...]."""
    assert x.shape[dim] % axis.size == 0, (
        f"{axis.size} ranks of {axis.name} do not divide dim {dim} of {tuple(x.shape)}"
    )
    return x.unflatten(dim, (axis.size, -1))
