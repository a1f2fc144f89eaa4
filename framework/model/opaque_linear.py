"""Linear layers as operators of torch's: a compiler puts the call into its graph and does not look inside.

    linear             Y = X W^T + b
    linear_backward    dX = dY W, and dW into the main gradient

Traced, a linear layer would be its weight and a matmul: the compiler would hold the weight, which ZeRO takes away, return dW in
the compute dtype, and multiply in bf16 what the recipe multiplies in fp8. Behind an operator the layer's `Matmul` does what it
does in eager mode. A graph must not name the layer, or it would serve this one alone: the operator is given the matmul's number
in a scalar (`LayerWeight.tick`), which also stands for the weight in autograd's graph.

    ... sequences and tokens, K features in, N features out
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from framework.model.kept_outputs import ATTENTION, ATTENTIONS
from framework.model.matmul import Matmul, find_matmul

# The operator of `parallel/attention/opaque_attention.py`.
ATTEND = "meshwright::attend"


def linear(x: Tensor, matmul: Matmul, bias: Tensor | None, num_outputs: int, operation: str) -> Tensor:
    """Y = X W^T + b of a trained layer, differentiable: for code that is being compiled.  x: [..., K]; bias: [N] -> [..., N].

    num_outputs: N; operation: the layer's name in `memory.kept_operations`.
    """
    return _linear(x, matmul.tick, bias, num_outputs, operation)


@torch.library.custom_op("meshwright::linear", mutates_args=())
def _linear(x: Tensor, number: Tensor, bias: Tensor | None, num_outputs: int, operation: str) -> Tensor:
    return find_matmul(number).forward(x, bias)


@_linear.register_fake
def _(x: Tensor, number: Tensor, bias: Tensor | None, num_outputs: int, operation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


@torch.library.custom_op("meshwright::linear_backward", mutates_args=())
def _linear_backward(dy: Tensor, x: Tensor, number: Tensor, needs_dx: bool) -> tuple[Tensor, Tensor]:
    """(dX, or nothing where nobody asks; the gradient of `number`: zero, and what keeps this call in the graph)."""
    matmul = find_matmul(number)
    dx = matmul.input_gradient(dy) if needs_dx else dy.new_empty(0)
    assert matmul.grad_view is not None, "an operator of a layer that is not trained"
    if matmul.grad_view.is_deferred:
        # Factors that are kept beyond the graph: the compiler writes its next tensors into their memory.
        x, dy = x.clone(), dy.clone()
    matmul.weight_gradient(x, dy)
    return dx, torch.zeros_like(number)


@_linear_backward.register_fake
def _(dy: Tensor, x: Tensor, number: Tensor, needs_dx: bool) -> tuple[Tensor, Tensor]:
    dx = x.new_empty(x.shape) if needs_dx else dy.new_empty(0)
    return dx, torch.empty_like(number)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, number, *_ = inputs
    ctx.save_for_backward(x, number)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, number = ctx.saved_tensors
    needs_dx, _, needs_db, *_ = ctx.needs_input_grad
    dx, zero = _linear_backward(dy, x, number, needs_dx)
    db = dy.flatten(0, -2).sum(0) if needs_db else None
    return dx if needs_dx else None, zero, db, None, None


_linear.register_autograd(_differentiate, setup_context=_save)


def keep_named(forward: Callable[..., Any], operations: Collection[str]) -> Callable[..., Any]:
    """A layer's forward that keeps the outputs of these operations and computes the rest again in backward; to be compiled into
    one graph. Not for a mixture: its router's choice would have to be kept as well.

    The compiler then chooses as `KeptOutputs` does in eager mode, whose choice it could not see: by name for linear layers.
    """
    contexts = partial(create_selective_checkpoint_contexts, partial(_choose, frozenset(operations)))
    return partial(_checkpoint, forward, contexts)


def _checkpoint(
    forward: Callable[..., Any],
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _choose(operations: frozenset[str], ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = _name_of(func, args) in operations
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _name_of(func: Any, args: Sequence[Any]) -> str | None:
    """The name in `memory.kept_operations` of an operator's call."""
    if func is torch.ops.meshwright.linear.default:
        name: str = args[4]
        return name
    is_attention = func.name() == ATTEND or any(func is each for each, _ in ATTENTIONS)
    return ATTENTION if is_attention else None
