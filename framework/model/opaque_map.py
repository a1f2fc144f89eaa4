"""Objects that operators of compiled layers find by number, and the linear maps between ranks among them.

Graphs hold tensors and no objects, so that one serves all layers that are alike. A map's gradient is its adjoint; in code that
is being compiled it is one operator of torch's, which a compiler puts into its graph and does not look inside. Messages begin and
end within a call: in memory of one that is on its way the compiler would write its next tensors.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

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
