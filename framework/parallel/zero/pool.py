"""Memory in which the units of a stage take turns, with their full gradients and with messages that are unpacked or decoded."""

import torch
from torch import Tensor

# A pooled tensor serves a need of at least half its size: embedding and head, which are about as large, share one, but a shard
# never takes a whole unit's memory, which the next unit would then have to allocate anew.
LARGEST_WASTE = 2


class BufferPool:
    """Flat tensors that outlive their use, so that units take turns in the same memory. num_bytes: of all that it made.

    New memory would cost a page fault every 4 KiB on CPUs.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._idle: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor [numel] of any content that nobody else holds until it is given back."""
        fits = [
            i
            for i, each in enumerate(self._idle)
            if each.dtype == dtype and numel <= each.numel() < LARGEST_WASTE * numel
        ]
        if fits:
            # The smallest that fits: a larger one may be the only one for the largest unit.
            return self._idle.pop(min(fits, key=lambda i: self._idle[i].numel()))[:numel]
        made = torch.zeros(numel, dtype=dtype, device=device)
        self.num_bytes += made.nbytes
        return made

    def give_back(self, tensor: Tensor) -> None:
        """Return the whole memory behind a tensor, [n], from `take`, not only the elements that were asked for."""
        self._idle.append(tensor.new_empty(0).set_(tensor.untyped_storage()))
