"""TokenLayout: which tokens of every sequence of a microbatch this rank holds, between and inside the regions of its layers.

    parallel.sequence   between regions                                inside regions
    off                 [sequences, context, D]                        [sequences, context, D]
    on                  [sequences, ceil(context / tp), D], padded     [sequences, context, D]

With sequence parallelism each rank of `tp` holds an interval of every sequence's tokens; if the ranks do not divide the context,
the last intervals are filled up with padding, which is taken away before anything mixes tokens. Without it, and on one rank, the
tokens are one part: nothing is padded, nothing is scattered.

Context parallelism would be one more field, the slices of the context that this rank of `cp` has (a zig-zag pair of intervals).
`context` then counts the tokens of these slices, sequence parallelism divides them as it does now, and two methods would say what
the loader cuts out of a microbatch: the global positions of the slices, and their labels. Whatever asks for a shape, an interval
or a seed asks this value already, so it would not learn of the slices.
"""

from dataclasses import dataclass

from framework.mesh.axis import Axis


@dataclass(frozen=True)
class TokenLayout:
    """The tokens of one rank. sequences, context: of a microbatch, whole; tp: its ranks share the tokens where `is_sharded`."""

    sequences: int
    context: int
    tp: Axis
    is_sharded: bool = False

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
        """Those of `tokens_local` that are tokens of the sequence; the rest, behind them, is padding."""
        first = self.tp.rank * self.tokens_local if self.is_sharded else 0
        return max(0, min(self.tokens_local, self.context - first))

    @property
    def padding(self) -> int:
        """Tokens of padding behind each sequence, so that all parts are equally long."""
        return self.num_parts * self.tokens_local - self.context

    def hidden_shape(self, width: int) -> tuple[int, int, int]:
        """Shape [sequences, tokens_local, width] of hidden states between regions, and between pipeline stages."""
        return self.sequences, self.tokens_local, width
