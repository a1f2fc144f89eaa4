"""TokenLayout: which tokens of every sequence of a microbatch this rank holds, between and inside the regions of its layers.

    parallel.sequence   between regions                                inside regions
    off                 [sequences, context, D]                        [sequences, context, D]
    on                  [sequences, ceil(context / tp), D], padded     [sequences, context, D]

With sequence parallelism each rank of `tp` holds an interval of every sequence's tokens; if the ranks do not divide the context,
the last intervals are filled up with padding, which is taken away before anything mixes tokens. Without it, and on one rank, the
tokens are one part: nothing is padded, nothing is scattered.

With context parallelism a rank of `cp` holds slices of every sequence (`ContextSlices`) before anything else is divided:
`context` counts their tokens, padding included, and sequence parallelism divides these as it divides a whole sequence. The
padding of the slices lies behind a rank's tokens and goes through the layers as tokens do: nothing that counts sees it.
"""

from dataclasses import dataclass

from framework.mesh.context import ContextSlices
from framework.mesh.topology import Axis


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
