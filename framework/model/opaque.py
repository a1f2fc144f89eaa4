"""Operators of compiled layers: calls that a compiler puts into its graph and does not look inside.

Graphs hold tensors and no objects, so that one serves all layers that are alike: operators find the objects by number.

    map        a linear map between ranks; its gradient is its adjoint
    experts    the output of a mixture's experts, of rows whose numbers are known from the data only
    note       hands tensors to a counter on the host, and returns the last one

A map's messages begin and end within a call: in memory of one that is on its way the compiler would write its next tensors.

Experts run within the operator as they do in eager mode, messages between ranks included. The graph that autograd records there
lives as long as `call`, a scalar that the operator returns and its backward takes in: a recomputation has one of its own, and
where no backward comes it goes with the scalar.

    T rows of hidden states, H features, k experts for each row
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from framework.torch_private import recording

T = TypeVar("T")


class Numbered(Generic[T]):
    """Objects of the process, each under a number, held weakly. Operators belong to the process, and so do these."""

    def __init__(self) -> None:
        self._objects: WeakValueDictionary[int, T] = WeakValueDictionary()
        self._numbers = count()

    def number(self, each: T) -> Tensor:
        """A new number for the object: a scalar on the host, where an operator reads it without waiting for a device."""
        found = next(self._numbers)
        self._objects[found] = each
        # Exact, and of a dtype that may require a gradient.
        return torch.tensor(float(found), dtype=torch.float64)

    def find(self, number: Tensor) -> T:
        """The object with this number, which is in use."""
        return self._objects[int(number)]


class RankMap(Protocol):
    """A linear map of tensors, and its adjoint. number: under which the operator finds it."""

    number: Tensor | None

    def map(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], is_adjoint: bool) -> list[Tensor]:
        """Contiguous tensors of these shapes and of memory of their own, as many as are given."""


# Keyed by the numbers that graphs carry.
MAPS: Numbered[RankMap] = Numbered()


def apply_map(
    rank_map: RankMap, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], operation: str = ""
) -> Sequence[Tensor]:
    """The map of tensors, differentiable. shapes: of the results, of as many dims each; operation: the name of these in
    `memory.kept_operations`, where a graph keeps them."""
    if not torch.compiler.is_compiling():
        return _Map.apply(rank_map, shapes, *tensors)
    assert rank_map.number is not None, "a compiled layer whose maps were not attached"
    found: list[Tensor] = _map(tensors, rank_map.number, [size for each in shapes for size in each], False, operation)
    return found


class _Map(torch.autograd.Function):
    # Nothing is saved: the map is linear.

    @staticmethod
    def forward(ctx: Any, rank_map: RankMap, shapes: Sequence[Sequence[int]], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.map, ctx.shapes = rank_map.map, [x.shape for x in tensors]
        return tuple(rank_map.map(tensors, shapes, False))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.map(gradients, ctx.shapes, True)


@torch.library.custom_op("meshwright::map", mutates_args=())
def _map(
    tensors: Sequence[Tensor], number: Tensor, sizes: Sequence[int], is_adjoint: bool, operation: str
) -> list[Tensor]:
    return MAPS.find(number).map(tensors, _shapes(tensors, sizes), is_adjoint)


@_map.register_fake
def _(tensors: Sequence[Tensor], number: Tensor, sizes: Sequence[int], *_others: Any) -> list[Tensor]:
    return [x.new_empty(shape) for x, shape in zip(tensors, _shapes(tensors, sizes), strict=True)]


def _shapes(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[int]]:
    dims = len(sizes) // len(tensors)
    return [sizes[start : start + dims] for start in range(0, len(sizes), dims)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, number, _, ctx.is_adjoint, _ = inputs
    ctx.sizes = [size for x in tensors for size in x.shape]
    ctx.save_for_backward(number)


def _differentiate(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    return _map(gradients, *ctx.saved_tensors, ctx.sizes, not ctx.is_adjoint, ""), None, None, None, None


_map.register_autograd(_differentiate, setup_context=_save)


# (hidden [T, H], index [T, k], weights [T, k]) -> [T, H], differentiable.
ComputeExperts = Callable[[Tensor, Tensor, Tensor], Tensor]


class OpaqueExperts:
    """The forward of a module of experts, `compute`, an operator in code that is being compiled.

    operation: the name in `memory.kept_operations`; "": never kept. keeps_input: whether the graph that autograd records keeps
    the rows themselves.
    """

    def __init__(self, experts: nn.Module, compute: ComputeExperts, operation: str = "", keeps_input: bool = False):
        self.experts, self.compute, self.operation, self.keeps_input = experts, compute, operation, keeps_input
        # A tensor, so given once there is memory.
        self.number: Tensor | None = None

    def give_number(self) -> None:
        """Give it a number, as compiled layers need."""
        trained = any(parameter.requires_grad for parameter in self.experts.parameters())
        self.number = COMPUTED.number(self).requires_grad_(trained)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] -> [T, H].  index, weights: [T, k]."""
        if not torch.compiler.is_compiling():
            return self.compute(hidden_states, top_k_index, top_k_weights)
        is_kept = torch.is_grad_enabled()
        out: Tensor = _experts(hidden_states, top_k_index, top_k_weights, self.number, is_kept, self.operation)[0]
        return out

    def run(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """`compute`, in an operator: between the hooks that a graph cannot show."""
        before, behind = vars(self.experts).get("untraced_hooks", (None, None))
        if before is None:
            return self.compute(hidden, index, weights)
        before(self.experts, ())
        try:
            return self.compute(hidden, index, weights)
        finally:
            behind(self.experts, (), None)


COMPUTED: Numbered[OpaqueExperts] = Numbered()


def replace_forward(experts: Any, opaque: OpaqueExperts, call: Callable[..., Tensor]) -> None:
    """Give a module of experts the forward `call`, which goes through `opaque`."""

    # A function: a graph that calls any other object is for that one alone.
    def forward(hidden_states: Tensor, top_k_index: Any = None, top_k_weights: Tensor | None = None):
        return call(hidden_states, top_k_index, top_k_weights)

    experts.opaque, experts.forward = opaque, forward


def find_opaque_experts(model: nn.Module) -> Iterator[OpaqueExperts]:
    """The experts of a model whose forwards were replaced so."""
    found = (vars(module).get("opaque") for module in model.modules())
    return (each for each in found if isinstance(each, OpaqueExperts))


@torch.library.custom_op("meshwright::experts", mutates_args=())
def _experts(
    hidden: Tensor, index: Tensor, weights: Tensor, number: Tensor, is_kept: bool, operation: str
) -> tuple[Tensor, Tensor]:
    """(the output, `call`). is_kept: for a backward."""
    experts = COMPUTED.find(number)
    call: Any = torch.zeros((), dtype=torch.float64)
    if not is_kept:
        return experts.run(hidden, index, weights), call
    # Copies of what is kept beyond this call: the compiler writes its next tensors where these are.
    hidden, index, weights = hidden.clone() if experts.keeps_input else hidden, index.clone(), weights.clone()
    with recording():
        inputs = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
        out = experts.run(inputs[0], index, inputs[1])
    call.graph = inputs, get_gradient_edge(out)
    return out.detach(), call


@_experts.register_fake
def _(
    hidden: Tensor, index: Tensor, weights: Tensor, number: Tensor, is_kept: bool, operation: str
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape), torch.empty_like(number)


@torch.library.custom_op("meshwright::experts_backward", mutates_args=())
def _experts_backward(dout: Tensor, call: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden states, of weights [T, k = width] and of `call`, which is zero. Experts get theirs by the way."""
    held: Any = call
    inputs, edge = held.graph
    del held.graph
    # Recomputation inside of this backward is recorded, too.
    with recording():
        torch.autograd.backward([edge], [dout])
    dhidden, dweights = (torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
    return dhidden, dweights, torch.zeros_like(call)


@_experts_backward.register_fake
def _(dout: Tensor, call: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    return dout.new_empty(dout.shape), dout.new_empty(dout.shape[0], width), torch.empty_like(call)


def _save_experts(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.width = inputs[2].shape[1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _differentiate_experts(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    dhidden, dweights, zero = _experts_backward(dout, *ctx.saved_tensors, ctx.width)
    needs = ctx.needs_input_grad
    return dhidden if needs[0] else None, None, dweights if needs[2] else None, zero, None, None


_experts.register_autograd(_differentiate_experts, setup_context=_save_experts)


class ShownTensors:
    """A counter that is shown tensors of a model, `show`, also in code that is being compiled."""

    def __init__(self, show: Callable[[Sequence[Tensor]], None]) -> None:
        self.show, self.number = show, SHOWN.number(self)

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The last of the tensors, for the model to go on with: what nobody reads a compiler leaves out."""
        if torch.compiler.is_compiling():
            *others, last = tensors
            found: Tensor = _note([*(each.detach() for each in others), last], self.number)
            return found
        self.show(tensors)
        return tensors[-1]


SHOWN: Numbered[ShownTensors] = Numbered()


@torch.library.custom_op("meshwright::note", mutates_args=())
def _note(tensors: Sequence[Tensor], number: Tensor) -> Tensor:
    SHOWN.find(number).show(tensors)
    return tensors[-1].clone()


@_note.register_fake
def _(tensors: Sequence[Tensor], number: Tensor) -> Tensor:
    return torch.empty_like(tensors[-1])


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.count = len(inputs[0])


def _pass_on(ctx: Any, gradient: Tensor) -> tuple[list[Tensor | None], None]:
    return [*[None] * (ctx.count - 1), gradient], None


_note.register_autograd(_pass_on, setup_context=_save_nothing)
