"""RoutedTokens: which rows of a mixture's input are this rank's tokens, and which other ranks see the same tokens or others."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.collectives import all_gather
from framework.comm.communicator import Communicator
from framework.mesh.axis import Axis
from framework.mesh.token_layout import TokenLayout


@dataclass(frozen=True)
class RoutedTokens:
    """The rows that routers and experts of this rank are given, sequence after sequence.

    context: tokens of a whole sequence; rows: of each sequence here; valid: those of them, in front, that are tokens: the rest is
    padding. copies: the ranks that see the same tokens, over: those that see other tokens of the same sequences; one of the two
    has size 1. sums_copies: whether the copies' gradients are parts of a sum, as inside a region, or are alike.
    """

    context: int
    rows: int
    valid: int
    copies: Communicator
    over: Communicator
    sums_copies: bool = False

    @classmethod
    def whole(cls, tokens: TokenLayout, tp: Communicator) -> "RoutedTokens":
        """All tokens of every sequence on each rank of `tp`: inside a region."""
        return cls(*(tokens.context,) * 3, copies=tp, over=_alone(), sums_copies=True)

    @classmethod
    def outside(cls, tokens: TokenLayout, tp: Communicator) -> "RoutedTokens":
        """What a rank of `tp` has between regions, where the routers of whole experts stand: a part of every sequence's tokens
        with sequence parallelism, else all of them, alike."""
        if tokens.num_parts > 1:
            return cls.divided(tokens, tp)
        return cls(*(tokens.context,) * 3, copies=tp, over=_alone())

    @classmethod
    def divided(cls, tokens: TokenLayout, tp: Communicator) -> "RoutedTokens":
        """A part of every sequence's tokens on each rank of `tp`, as between regions under sequence parallelism."""
        return cls(tokens.context, tokens.tokens_local, tokens.valid_local, copies=_alone(), over=tp)

    @classmethod
    def of_one_rank(cls) -> "RoutedTokens":
        """Rows without padding that no other rank sees."""
        return cls(1, 1, 1, copies=_alone(), over=_alone())

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts its tokens: one of those that see them does."""
        return self.copies.rank == 0

    @property
    def are_shared_out(self) -> bool:
        """Whether the copies may divide the rows among them: each sees all, and what they make of them is alike."""
        return self.copies.size > 1 and not self.sums_copies

    @property
    def has_padding(self) -> bool:
        """Whether some rank's rows are filled up."""
        return self.rows * self.over.size > self.context

    def is_padding(self, rows: Tensor) -> Tensor:
        """[T, 1] bool, rows that are no tokens.  rows: [T, ...]."""
        place = torch.arange(rows.shape[0], device=rows.device) % self.rows
        return (place >= self.valid).unsqueeze(1)

    def join(self, x: Tensor) -> Tensor:
        """x of whole sequences.  x: [T, k] -> [sequences, context, k]; an all-gather over those who see other tokens. Not
        differentiable."""
        x = x.unflatten(0, (-1, self.rows))
        parts = x.new_empty(self.over.size, *x.shape)
        all_gather(parts, x.contiguous(), self.over)
        return parts.transpose(0, 1).flatten(1, 2)[:, : self.context]

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of x: [sequences, context, k] -> [T, k], zeros for padding."""
        missing = self.rows * self.over.size - self.context
        return F.pad(x, (0, 0, 0, missing)).chunk(self.over.size, dim=1)[self.over.rank].flatten(0, 1)

    def cut(self, x: Tensor) -> Tensor:
        """x without padding: [sequences * rows, ...] -> [sequences * valid, ...]."""
        return x if self.valid == self.rows else x.unflatten(0, (-1, self.rows))[:, : self.valid].flatten(0, 1)


def _alone() -> Communicator:
    return Communicator(Axis("alone", 1, 0))
