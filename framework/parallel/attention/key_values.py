"""Keys and values of one rank's tokens and their gradients, and the portions of them that travel as one message each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from framework.mesh.token_layout import Interval

# Buffers are as large as a message, so a rank's K/V travel in several. A message is worth its cost if enough is computed with it:
# 2^20 pairs of a query and a key, and no more than 16 messages, so that blocks of long sequences are large enough for a GPU.
PORTION_PAIRS = 2**20
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
            del dk, dv  # before the next are computed

    def set(self, contributions: Iterable[Contribution]) -> None:
        """Become the sums of what blocks give, zero where none gives anything. Two blocks are of the same tokens or of others."""
        seen: set[Interval] = set()
        for tokens, dk, dv in contributions:
            # The first are written, not added to zeros: that would write most of it twice.
            if tokens in seen:
                self.add([(tokens, dk, dv)])
            else:
                self.k[:, :, slice(*tokens)] = dk
                self.v[:, :, slice(*tokens)] = dv
            seen.add(tokens)
            del dk, dv
        # The intervals between those that blocks have written: nobody has set them.
        ends = [0, *(end for tokens in sorted(seen) for end in tokens), self.k.shape[2]]
        for start, stop in zip(ends[::2], ends[1::2], strict=True):
            self.k[:, :, start:stop] = 0
            self.v[:, :, start:stop] = 0

    def new_message(self, dtype: torch.dtype | None = None) -> "KeyValues":
        """A message of these shapes, of this dtype unless another is given. Its values are not set."""
        return self.view(self.k.new_empty(self.k.numel() + self.v.numel(), dtype=dtype))

    def view(self, message: Tensor) -> "KeyValues":
        """A message, [elements of k and v], as tensors of these shapes."""
        keys, values = message.split([self.k.numel(), self.v.numel()])
        return KeyValues(keys.view(self.k.shape), values.view(self.v.shape), message)


@dataclass(frozen=True)
class Portion:
    """One message: the tokens (start, stop) of every chunk, in the key-value heads (start, stop)."""

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
        # One copy on this side; on the other the message is read where it landed.
        packed.k.copy_(views.k)
        packed.v.copy_(views.v)
        return KeyValues(packed.k.flatten(2, 3), packed.v.flatten(2, 3), packed.message)


@dataclass(frozen=True)
class HeadGroup:
    """Key-value heads that are attended to together, and the portions in which they come from other ranks."""

    heads: Interval
    portions: tuple[Portion, ...]


@dataclass(frozen=True)
class RingRoute:
    """The order in which K/V travel. steps: s > 0 for every rank whose K/V, s before this one's, are needed; rising. chunks: of a
    rank's tokens."""

    groups: Sequence[HeadGroup]
    steps: Sequence[int]
    chunks: int


def group_heads(of: KeyValues, chunks: int, num_portions: int) -> list[HeadGroup]:
    """`num_portions` portions or a few more: heads are divided first, since that divides queries, too, then tokens of a chunk."""
    kv_heads, length = of.k.shape[1], of.k.shape[2] // chunks
    # The least number of groups that divides the heads and is as many as asked for, if heads suffice.
    groups = next(count for count in range(min(num_portions, kv_heads), kv_heads + 1) if kv_heads % count == 0)
    # Tokens give the portions that heads did not; no portion may be empty.
    parts = min(-(-num_portions // groups), length)
    bounds = [length * number // parts for number in range(parts + 1)]
    heads = pairwise(range(0, kv_heads + 1, kv_heads // groups))
    return [HeadGroup(each, tuple(Portion(each, tokens) for tokens in pairwise(bounds))) for each in heads]


def count_portions(tokens: int) -> int:
    """Messages in which the K/V of so many tokens travel. With one, buffers would outweigh what a rank saves by having fewer
    tokens."""
    return max(1, min(MOST_PORTIONS, tokens**2 // PORTION_PAIRS))
