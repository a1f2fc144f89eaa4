"""Tensors that are not in memory, as those who own parameters and those who save them see them."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class StoredTensor(Protocol):
    """A flat tensor, [n], that is not in memory, such as one on a disk (`optim/disk_ring.py`). Slices are views of it."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def numel(self) -> int: ...

    def __getitem__(self, where: slice, /) -> "StoredTensor": ...

    def pieces(self) -> Iterator[Tensor]:
        """The values from first to last in a few MiB at a time, each until the next is asked for."""

    def read(self) -> Tensor:
        """All values, in memory of their own."""

    def write(self, values: Tensor) -> None:
        """Set all values, [n]."""
