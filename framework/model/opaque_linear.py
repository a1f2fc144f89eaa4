"""Linear layers as operators of torch's: a compiler puts the call into its graph and does not look inside.

    linear             Y = X W^T + b
    input_gradient     dX = dY W
    weight_gradient    dW = dY^T X, into the main gradient

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

from framework.model.kept_outputs import ATTENTION, aten
from framework.model.matmul import Matmul, find_matmul
from framework.torch_private import ATTENTIONS, schema_of

# The operator of `parallel/attention/attention.py`.
ATTEND = "meshwright::attend"


def linear(
    x: Tensor, matmul: Matmul, bias: Tensor | None, num_outputs: int, operation: str, slot: Tensor | None = None
) -> Tensor:
    """Y = X W^T + b, differentiable: for code that is being compiled.  x: [..., K]; bias: [N] -> [..., N].

    num_outputs: N; operation: the layer's name in `memory.kept_operations`. slot: [..., N], gets dY as its gradient, for its
    maker to compute dW from; None: dW is computed here.
    """
    return _linear(x, matmul.tick, bias, slot, num_outputs, operation)


@torch.library.custom_op("meshwright::linear", mutates_args=())
def _linear(
    x: Tensor, number: Tensor, bias: Tensor | None, slot: Tensor | None, num_outputs: int, operation: str
) -> Tensor:
    return find_matmul(number).forward(x, bias)


@_linear.register_fake
def _(x: Tensor, number: Tensor, bias: Tensor | None, slot: Tensor | None, num_outputs: int, operation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], num_outputs)


@torch.library.custom_op("meshwright::input_gradient", mutates_args=())
def _input_gradient(dy: Tensor, number: Tensor, num_inputs: int) -> Tensor:
    return find_matmul(number).input_gradient(dy)


@_input_gradient.register_fake
def _(dy: Tensor, number: Tensor, num_inputs: int) -> Tensor:
    return dy.new_empty(*dy.shape[:-1], num_inputs)


@torch.library.custom_op("meshwright::weight_gradient", mutates_args=())
def _weight_gradient(dy: Tensor, x: Tensor, number: Tensor) -> Tensor:
    """The gradient of `number`: zero, and what keeps this call in the graph."""
    write_weight_gradient(find_matmul(number), x, dy)
    return torch.zeros_like(number)


@_weight_gradient.register_fake
def _(dy: Tensor, x: Tensor, number: Tensor) -> Tensor:
    return torch.empty_like(number)


def write_weight_gradient(matmul: Matmul, x: Tensor, dy: Tensor) -> None:
    """Add dY^T X to a trained matmul's main gradient, from within an operator.  x: [..., K]; dy: [..., N]."""
    assert matmul.grad_view is not None, "an operator of a layer that is not trained"
    if matmul.grad_view.is_deferred:
        # Factors that are kept beyond the graph: the compiler writes its next tensors into their memory.
        x, dy = x.clone(), dy.clone()
    matmul.weight_gradient(x, dy)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, number, _, slot, *_ = inputs
    ctx.num_inputs = x.shape[-1]
    writes = slot is None and ctx.needs_input_grad[1]
    ctx.save_for_backward(number, x if writes else None)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    number, x = ctx.saved_tensors
    needs_dx, _, needs_db, needs_slot, *_ = ctx.needs_input_grad
    dx = _input_gradient(dy, number, ctx.num_inputs) if needs_dx else None
    zero = None if x is None else _weight_gradient(dy, x, number)
    db = dy.flatten(0, -2).sum(0) if needs_db else None
    return dx, zero, db, dy if needs_slot else None, None, None


_linear.register_autograd(_differentiate, setup_context=_save)


def keep_named(forward: Callable[..., Any], operations: Collection[str]) -> Callable[..., Any]:
    """A layer's forward that keeps the outputs of these operations, and a router's choice, and computes the rest again in
    backward; to be compiled into one graph.

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
    # The choices that `KeptOutputs` keeps, too: recomputed, a choice may differ.
    is_choice = func is aten.topk.default or (func is aten.max.dim and args[0].ndim == 2)
    is_kept = is_choice or _name_of(func, args) in operations
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _name_of(func: Any, args: Sequence[Any]) -> str | None:
    """The name in `memory.kept_operations` of an operator's call."""
    # Operators of ours are told it.
    for argument, value in zip(schema_of(func).arguments, args, strict=False):
        if argument.name == "operation":
            return str(value)
    is_attention = func.name() == ATTEND or any(func is each for each, _ in ATTENTIONS)
    return ATTENTION if is_attention else None
