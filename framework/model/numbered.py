"""Objects that operators find by number: graphs hold tensors and no objects, so that one serves all layers that are alike."""

from itertools import count
from typing import Generic, TypeVar
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
