"""Keys and values of one rank's tokens and their gradients, and the portions of them that travel as one message each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from framework.mesh.context import Interval

# A message should be large enough for the full rate of a link, and its blocks for a GPU: no smaller than 1 MiB (2048 keys and
# values of 128 in bf16), and no more than 16 of them.
PORTION_BYTES = 2**20
MOST_PORTIONS = 16

# (tokens, gradient of their keys [B, Hk, n, D], of their values [B, Hk, n, Dv]): what one block adds.
Contribution = tuple[Interval, Tensor, Tensor]


@dataclass(frozen=True)
class KeyValues:
    """k: [B, Hk, n, D], v: [B, Hk, n, Dv], of one dtype. message: [elements of both], contiguous, of which they are views; None
    where they are not."""

    k: Tensor
    v: Tensor
    message: Tensor | None = None

    def add(self, contributions: Iterable[Contribution]) -> None:
        """Add what blocks give to the gradients of some of these tokens."""
        for (start, stop), dk, dv in contributions:
            self.k[:, :, start:stop] += dk
            self.v[:, :, start:stop] += dv

    def set(self, contributions: Sequence[Contribution]) -> None:
        """Become the sums of what blocks give, zero where none gives anything. Two blocks are of the same tokens or of others."""
        position, first_of = 0, {tokens: (dk, dv) for tokens, dk, dv in reversed(contributions)}
        # Not zeroed and then added to: that would write most of it twice.
        for (start, stop), (dk, dv) in sorted(first_of.items(), key=lambda item: item[0]):
            for x, first in ((self.k, dk), (self.v, dv)):
                x[:, :, position:start] = 0
                x[:, :, start:stop] = first
            position = stop
        self.k[:, :, position:] = 0
        self.v[:, :, position:] = 0
        self.add(each for each in contributions if each[1] is not first_of[each[0]][0])

    def new_message(self, dtype: torch.dtype | None = None) -> "KeyValues":
        """A message of these shapes, of this dtype unless another is given. Its values are not set."""
        return self.view(self.k.new_empty(self.k.numel() + self.v.numel(), dtype=dtype))

    def view(self, message: Tensor) -> "KeyValues":
        """A message as tensors of these shapes."""
        keys, values = message.split([self.k.numel(), self.v.numel()])
        return KeyValues(keys.view(self.k.shape), values.view(self.v.shape), message)


@dataclass(frozen=True)
class Portion:
    """What is one message: the tokens (start, stop) of every chunk, in the key-value heads (start, stop)."""

    heads: Interval
    tokens: Interval

    def select(self, of: KeyValues, chunks: int) -> KeyValues:
        """Views of them: [B, heads, chunks, tokens, D] of the k and v [B, Hk, chunks * L, D]."""
        k, v = (x[:, slice(*self.heads)].unflatten(2, (chunks, -1))[:, :, :, slice(*self.tokens)] for x in (of.k, of.v))
        return KeyValues(k, v)

    def pack(self, of: KeyValues, chunks: int, message: Tensor | None = None) -> KeyValues:
        """A copy of them as a message, in new memory if none is given: k and v [B, heads, chunks * tokens, D]."""
        views = self.select(of, chunks)
        packed = views.new_message() if message is None else views.view(message)
        packed.k.copy_(views.k)
        packed.v.copy_(views.v)
        return KeyValues(packed.k.flatten(2, 3), packed.v.flatten(2, 3), packed.message)


@dataclass(frozen=True)
class HeadGroup:
    """Key-value heads that are attended to together, and the portions in which they come from other ranks."""

    heads: Interval
    portions: tuple[Portion, ...]


def group_heads(of: KeyValues, chunks: int, num_portions: int, divides_tokens: bool) -> list[HeadGroup]:
    """`num_portions` portions or a few more: heads are divided first, since that divides queries, too, then tokens of a chunk."""
    kv_heads, length = of.k.shape[1], of.k.shape[2] // chunks
    groups = next(count for count in range(min(num_portions, kv_heads), kv_heads + 1) if kv_heads % count == 0)
    parts = min(-(-num_portions // groups), length) if divides_tokens else 1
    bounds = [length * number // parts for number in range(parts + 1)]
    heads = pairwise(range(0, kv_heads + 1, kv_heads // groups))
    return [HeadGroup(each, tuple(Portion(each, tokens) for tokens in pairwise(bounds))) for each in heads]


def count_portions(of: KeyValues) -> int:
    """Messages in which a rank's keys and values travel. Buffers are as large as one of them: with few, they would outweigh what
    a rank saves by holding fewer tokens."""
    num_bytes = of.k.nbytes + of.v.nbytes
    return max(1, min(MOST_PORTIONS, num_bytes // PORTION_BYTES))
