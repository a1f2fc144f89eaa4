"""RoutedTokens: which rows of a mixture's input are this rank's tokens, and which other ranks see the same tokens or others."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.collectives import all_gather
from framework.comm.communicator import Communicator
from framework.mesh.context import ContextSlices
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis


@dataclass(frozen=True)
class RoutedTokens:
    """The rows that routers and experts of this rank are given, sequence after sequence.

    slices: the tokens of each sequence that this rank of `cp` holds; parts: ranks of `tp` that divide those; rows: of each
    sequence here; valid: those of them, in front, that are tokens: the rest is padding. copies: the ranks that see the same
    tokens; over: those that see other tokens of the same sequences, `parts` of tp in each of cp. sums_copies: whether the copies'
    gradients are parts of a sum, as inside a region, or are alike.
    """

    slices: ContextSlices
    parts: int
    rows: int
    valid: int
    copies: Communicator
    over: Communicator
    sums_copies: bool = False

    @classmethod
    def whole(cls, tokens: TokenLayout, axes: Mapping[str, Communicator]) -> "RoutedTokens":
        """All tokens of the slices on each rank of `tp`: inside a region."""
        return cls._undivided(tokens, axes, sums_copies=True)

    @classmethod
    def outside(cls, tokens: TokenLayout, axes: Mapping[str, Communicator]) -> "RoutedTokens":
        """What a rank of `tp` has between regions, where the routers of whole experts stand: a part of the slices' tokens with
        sequence parallelism, else all of them, alike."""
        if tokens.num_parts > 1:
            return cls.divided(tokens, axes)
        return cls._undivided(tokens, axes, sums_copies=False)

    @classmethod
    def divided(cls, tokens: TokenLayout, axes: Mapping[str, Communicator]) -> "RoutedTokens":
        """A part of the slices' tokens on each rank of `tp`, as between regions under sequence parallelism."""
        rows, valid = tokens.tokens_local, tokens.valid_local
        return cls(_slices_of(tokens), tokens.num_parts, rows, valid, copies=_alone(), over=axes["context_tp"])

    @classmethod
    def _undivided(cls, tokens: TokenLayout, axes: Mapping[str, Communicator], *, sums_copies: bool) -> "RoutedTokens":
        rows, valid = tokens.context, tokens.valid_inside
        return cls(_slices_of(tokens), 1, rows, valid, axes["tp"], axes["cp"], sums_copies)

    @classmethod
    def of_one_rank(cls) -> "RoutedTokens":
        """Rows without padding that no other rank sees."""
        return cls(ContextSlices(1), 1, 1, 1, copies=_alone(), over=_alone())

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
        return self.rows * self.over.size > self.slices.context

    def is_padding(self, rows: Tensor) -> Tensor:
        """[T, 1] bool, rows that are no tokens.  rows: [T, ...]."""
        place = torch.arange(rows.shape[0], device=rows.device) % self.rows
        return (place >= self.valid).unsqueeze(1)

    def join(self, x: Tensor) -> Tensor:
        """x of whole sequences, in their order.  x: [T, k] -> [sequences, context, k]; an all-gather over those who see other
        tokens. Not differentiable."""
        x = x.unflatten(0, (-1, self.rows))
        gathered = x.new_empty(self.over.size, *x.shape)
        all_gather(gathered, x.contiguous(), self.over)
        # Neighbours of tp have the parts of one rank's slices: [cp, parts, sequences, rows, k] -> [cp, sequences, tokens, k].
        parts = gathered.unflatten(0, (self.slices.ranks, self.parts)).transpose(1, 2).flatten(2, 3)
        return self.slices.join(parts[:, :, : self.slices.tokens_local])

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of x: [sequences, context, k] -> [T, k], zeros for padding."""
        x = self.slices.cut(x, 0)
        missing = self.rows * self.parts - x.shape[1]
        return F.pad(x, (0, 0, 0, missing)).chunk(self.parts, dim=1)[self.over.rank % self.parts].flatten(0, 1)

    def cut(self, x: Tensor) -> Tensor:
        """x without padding: [sequences * rows, ...] -> [sequences * valid, ...]."""
        return x if self.valid == self.rows else x.unflatten(0, (-1, self.rows))[:, : self.valid].flatten(0, 1)


def _slices_of(tokens: TokenLayout) -> ContextSlices:
    return tokens.slices or ContextSlices(tokens.context)


def _alone() -> Communicator:
    return Communicator(Axis("alone", 1, 0))
