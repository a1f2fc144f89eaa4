"""Tokens of a rank: of every sequence the slices that a rank of `cp` holds (context parallelism), and what of these a rank of
`tp` has between and inside the regions of its layers (sequence parallelism). Integers; tensors are cut by their own methods, so
nothing here imports torch.

A sequence of `context` tokens is cut into chunks, 2 for each rank of `ring` (one in all where `ring` has size 1), and each chunk
into `ulysses` parts of equal length. The rank at ring index i and ulysses index j holds

    ring > 1    part j of chunk i, and part j of chunk 2 ring - 1 - i
    ring = 1    part j of the only chunk

A causal query at row t sees t + 1 keys, so a chunk from the front and its mirror from the back are equal work on all ranks
("zig-zag", Zhu 2024). For ring = 2, ulysses = 1:   rows 0 1 | 2 3 | 4 5 | 6 7   ->   rank 0: 0 1 6 7,  rank 1: 2 3 4 5.

Parts are filled up with padding at the END of the sequence. No token attends to what comes after it, so causal attention needs
no mask for padding. The later of a rank's two chunks has padding first, hence a rank's tokens are always in front of its padding.

    parallel.sequence   between regions                                inside regions
    off                 [sequences, context, D]                        [sequences, context, D]
    on                  [sequences, ceil(context / tp), D], padded     [sequences, context, D]

Of these slices, padding included, each rank of `tp` holds an interval with sequence parallelism; if the ranks do not divide them,
the last intervals are filled up with padding, which is taken away before anything mixes tokens. Without it, and on one rank, the
tokens are one part: nothing is padded, nothing is scattered. Padding goes through the layers as tokens do: nothing that counts
sees it.
"""

from dataclasses import dataclass, replace
from typing import Any

from framework.mesh.topology import Axis
from framework.recipe.derive import count_context_parts

Interval = tuple[int, int]


@dataclass(frozen=True)
class ContextSlices:
    """The rows of a sequence of `context` tokens that one rank holds. rank: along `cp`, ring index * ulysses + ulysses index.

    With one rank it is the whole sequence, without padding.
    """

    context: int
    ulysses: int = 1
    ring: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ulysses} x {self.ring} ranks"

    @property
    def ranks(self) -> int:
        """Ranks that divide a sequence: the size of `cp`."""
        return self.ulysses * self.ring

    @property
    def ring_index(self) -> int:
        return self.rank // self.ulysses

    @property
    def ulysses_index(self) -> int:
        return self.rank % self.ulysses

    @property
    def chunks(self) -> int:
        """Chunks of a sequence of which this rank has a part: 1 or 2."""
        return 2 if self.ring > 1 else 1

    @property
    def part(self) -> int:
        """Tokens of each part."""
        return -(-self.context // count_context_parts(self.ulysses, self.ring))

    @property
    def tokens_local(self) -> int:
        """Tokens that each rank holds, padding included."""
        return self.chunks * self.part

    @property
    def valid_local(self) -> int:
        """Number of this rank's tokens that are no padding; they lie in front."""
        return sum(max(0, min(stop, self.context) - start) for start, stop in self.intervals)

    @property
    def padding(self) -> int:
        """Tokens of padding behind the sequence, over all ranks."""
        return self.ranks * self.tokens_local - self.context

    @property
    def chunk_intervals(self) -> tuple[Interval, ...]:
        """(start, stop) of the rows of whole chunks: all ulysses parts of them, as the rank has them with heads exchanged."""
        length = self.part * self.ulysses
        return tuple((number * length, (number + 1) * length) for number in self._chunk_numbers)

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """(start, stop) of the rows of this rank's parts, in its order. Rows of padding count on from `context`."""
        starts = [start + self.ulysses_index * self.part for start, _ in self.chunk_intervals]
        return tuple((start, start + self.part) for start in starts)

    @property
    def _chunk_numbers(self) -> tuple[int, ...]:
        return (self.ring_index, 2 * self.ring - 1 - self.ring_index)[: self.chunks]

    def of_rank(self, rank: int) -> "ContextSlices":
        """The same sequence as another rank of `cp` holds it."""
        return replace(self, rank=rank)

    def padded(self) -> "ContextSlices":
        """The slices of the sequence with its padding: of the same rows, all of them tokens."""
        return ContextSlices(self.context + self.padding, self.ulysses, self.ring, self.rank)

    def cut(self, x: Any, fill: int) -> Any:
        """This rank's tokens of a tensor x: [n, context, ...] -> [n, tokens_local, ...], padding filled with `fill`; contiguous.
        x itself where one rank holds everything. Not differentiable."""
        if self.ranks == 1:
            return x
        own = x.new_full((x.shape[0], self.tokens_local, *x.shape[2:]), fill)
        for number, (start, stop) in enumerate(self.intervals):
            rows = x[:, start : min(stop, self.context)]
            own[:, number * self.part : number * self.part + rows.shape[1]] = rows
        return own

    def join(self, parts: Any) -> Any:
        """Join the tokens of all ranks of `cp` in the order of the sequence: [cp, n, tokens_local, ...] -> [n, context, ...]. Not
        differentiable."""
        assert parts.shape[0] == self.ranks, f"parts of {parts.shape[0]} ranks, not of {self.ranks}"
        if self.ranks == 1:
            return parts[0]
        _, n, _, *rest = parts.shape
        whole = parts.new_empty((n, self.context + self.padding, *rest))
        for rank in range(self.ranks):
            for number, (start, stop) in enumerate(self.of_rank(rank).intervals):
                whole[:, start:stop] = parts[rank][:, number * self.part : (number + 1) * self.part]
        return whole[:, : self.context]


@dataclass(frozen=True)
class TokenLayout:
    """The tokens of one rank."""

    sequences: int
    """Sequences of a microbatch."""
    context: int
    """Tokens of each sequence that the rank has inside regions."""
    tp: Axis
    is_sharded: bool = False
    """Ranks of `tp` share the tokens between regions."""
    slices: ContextSlices | None = None
    """The rows of the sequences that these tokens are; None: all of them."""

    @property
    def num_parts(self) -> int:
        """Ranks that divide the tokens of a sequence between regions."""
        return self.tp.size if self.is_sharded else 1

    @property
    def tokens_local(self) -> int:
        """Tokens of each sequence that this rank holds between regions, padding included."""
        return -(-self.context // self.num_parts)

    @property
    def valid_local(self) -> int:
        """Number of this rank's tokens between regions that are no padding; padding lies behind them."""
        first = self.tp.rank * self.tokens_local if self.is_sharded else 0
        return max(0, min(self.tokens_local, self.valid_inside - first))

    @property
    def valid_inside(self) -> int:
        """Number of tokens of `context` that are no padding of the slices, which lies behind them."""
        return self.context if self.slices is None else self.slices.valid_local

    @property
    def padding(self) -> int:
        """Tokens of padding behind `context`, so that all parts of tp are equally long."""
        return self.num_parts * self.tokens_local - self.context

    def hidden_shape(self, width: int) -> tuple[int, int, int]:
        """Shape [sequences, tokens_local, width] of hidden states between regions, and between pipeline stages."""
        return self.sequences, self.tokens_local, width
