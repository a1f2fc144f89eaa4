"""RoutedTokens: which rows of a router's input are this rank's tokens, and which other ranks see the same tokens or others."""

from dataclasses import dataclass

from torch import Tensor

from framework.comm.communicator import Communicator
from framework.mesh.axis import Axis
from framework.mesh.token_layout import TokenLayout


@dataclass(frozen=True)
class RoutedTokens:
    """The rows that the routers of this rank see, sequence after sequence.

    rows: of each sequence; valid: those of them, in front, that are tokens: the rest is padding. copies: the ranks that see the
    same tokens, over: those that see other tokens of the same sequences; one of the two has size 1. sums_copies: whether the
    copies' gradients are parts of a sum, as inside a region, or are alike.
    """

    rows: int
    valid: int
    copies: Communicator
    over: Communicator
    sums_copies: bool = False

    @classmethod
    def whole(cls, tokens: TokenLayout, tp: Communicator) -> "RoutedTokens":
        """All tokens of every sequence on each rank of `tp`: inside a region."""
        return cls(tokens.context, tokens.context, copies=tp, over=_alone(), sums_copies=True)

    @classmethod
    def outside(cls, tokens: TokenLayout, tp: Communicator) -> "RoutedTokens":
        """What a rank of `tp` has between regions, where the routers of whole experts stand: a part of every sequence's tokens
        with sequence parallelism, else all of them, alike."""
        if tokens.num_parts > 1:
            return cls.divided(tokens, tp)
        return cls(tokens.context, tokens.context, copies=tp, over=_alone())

    @classmethod
    def divided(cls, tokens: TokenLayout, tp: Communicator) -> "RoutedTokens":
        """A part of every sequence's tokens on each rank of `tp`, as between regions under sequence parallelism."""
        return cls(tokens.tokens_local, tokens.valid_local, copies=_alone(), over=tp)

    @classmethod
    def of_one_rank(cls) -> "RoutedTokens":
        """Rows without padding that no other rank sees."""
        return cls(1, 1, copies=_alone(), over=_alone())

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts its tokens: one of those that see them does."""
        return self.copies.rank == 0

    def cut(self, x: Tensor) -> Tensor:
        """x without padding: [sequences * rows, ...] -> [sequences * valid, ...]."""
        return x if self.valid == self.rows else x.unflatten(0, (-1, self.rows))[:, : self.valid].flatten(0, 1)


def _alone() -> Communicator:
    return Communicator(Axis("alone", 1, 0))
