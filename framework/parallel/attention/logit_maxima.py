"""Largest attention logits of each key head, for QK-clip (`optim/qk_clip.py`).

    S_g = max over microbatches, queries i of head g's group, keys j that i sees, of scale q_i . k_j

before a soft cap. Kernels of flash attention return no maxima, so scores are computed once more for them, tile by tile: a second
Q K^T in forward alone. What backward computes again and what a validation sees does not count.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor


class LogitMaxima:
    """The maxima of a rank in a step. num_heads: key heads of each layer of the whole model; values: [layers, most key heads],
    fp64, -inf where it has seen none."""

    def __init__(self, num_heads: Sequence[int], device: torch.device):
        self.num_heads = num_heads
        self.values = torch.full((len(num_heads), max(num_heads)), -inf, dtype=torch.float64, device=device)
        self.is_counting = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the forwards that run within."""
        self.is_counting = True
        yield
        self.is_counting = False


@dataclass(frozen=True)
class HeadMaxima:
    """The maxima of one attention, whose heads `num_parts` ranks divide, this one being number `part` of them."""

    maxima: LogitMaxima
    layer: int
    num_parts: int
    part: int

    def note(self, found: Tensor) -> None:
        """Take the largest logits of this rank's query heads, [H]."""
        # From the call, not from the config: layers may differ in their heads, and ranks have a part of each.
        num_queries, num_keys = self.num_parts * len(found), self.maxima.num_heads[self.layer]
        heads = torch.arange(len(found), device=found.device) + self.part * len(found)
        self.maxima.values[self.layer].scatter_reduce_(0, heads // (num_queries // num_keys), found.double(), "amax")
