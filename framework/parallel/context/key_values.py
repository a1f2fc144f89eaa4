"""Keys and values of one rank's tokens, and their gradients, as one message."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.mesh.context import Interval

# (tokens, gradient of their keys [B, Hk, n, D], of their values [B, Hk, n, Dv]): what one block adds.
Contribution = tuple[Interval, Tensor, Tensor]


@dataclass(frozen=True)
class KeyValues:
    """k: [B, Hk, C, D], v: [B, Hk, C, Dv], of one dtype. flat: [elements of both], of which they are views; None where they are
    not one message."""

    k: Tensor
    v: Tensor
    flat: Tensor | None = None

    @property
    def message(self) -> Tensor:
        """All elements, contiguous: what travels."""
        assert self.flat is not None, "these keys and values are not one message: pack() makes one"
        return self.flat

    def pack(self) -> "KeyValues":
        """A copy that is one message."""
        return self.pack_into(self.k.new_empty(self.k.numel() + self.v.numel()))

    def pack_into(self, flat: Tensor) -> "KeyValues":
        """A copy in the memory of `flat`, [elements of both]."""
        packed = self.like(flat)
        packed.k.copy_(self.k)
        packed.v.copy_(self.v)
        return packed

    def like(self, flat: Tensor) -> "KeyValues":
        """Views of these shapes of a message, of any dtype."""
        keys, values = flat.split([self.k.numel(), self.v.numel()])
        return KeyValues(keys.view(self.k.shape), values.view(self.v.shape), flat)

    def new_empty(self) -> "KeyValues":
        """A message of these shapes and this dtype, to receive into."""
        return self.like(torch.empty_like(self.message))

    def new_zeros(self, dtype: torch.dtype) -> "KeyValues":
        """A message of these shapes, to add to."""
        return self.like(self.k.new_zeros(self.k.numel() + self.v.numel(), dtype=dtype))

    def add(self, contributions: Iterable[Contribution]) -> None:
        """Add what blocks give to the gradients of some of these tokens."""
        for (start, stop), dk, dv in contributions:
            self.k[:, :, start:stop] += dk
            self.v[:, :, start:stop] += dv
