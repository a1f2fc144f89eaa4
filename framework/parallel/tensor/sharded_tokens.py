"""ShardedTokens: the tokens of every sequence divided among the ranks of `tp` (sequence parallelism), as operations on tensors.

    B sequences, S tokens of a whole sequence, s = ceil(S / tp) tokens of it on each rank, D hidden features

Between the first layer and the final norm of a model each rank holds x: [B, s, D], the last ranks' filled up with zeros. Some
families flatten hidden states to rows [B * S, D] within a layer; what is gathered from rows keeps the padding, because rows of
several sequences cannot be told apart any more, and only the way back to sequences takes it away.
"""

import torch.nn.functional as F
from torch import Tensor

from framework.comm import collectives, duals
from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.token_layout import TokenLayout
from framework.parallel.tensor.async_tp import AsyncGather

# Of hidden states, [B, S, D]; all but the last two dims are batch.
TOKEN_DIM = -2


class ShardedTokens:
    """Padding, scattering and gathering by one TokenLayout. It has no state: what is sharded, a tensor's shape tells."""

    def __init__(self, layout: TokenLayout, axis: Communicator) -> None:
        """axis: the ranks of layout.tp, connected."""
        self.layout, self.axis = layout, axis
        # Asked for at every border, where the layout would compute them anew.
        self._tokens_local, self._padding = layout.tokens_local, layout.padding

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's tokens [B, s, D] of the replicated x: [B, S, D]. Its gradient is gathered over `tp`.

        ModelError if x has not as many tokens as the layout.
        """
        if x.shape[TOKEN_DIM] != self.layout.context:
            raise ModelError(
                f"the first layer gets {x.shape[TOKEN_DIM]} tokens of a sequence, batch.context is {self.layout.context}:"
                " use parallel.sequence=false"
            )
        return duals.scatter(self.pad(x), self.axis, TOKEN_DIM)

    def is_whole(self, x: Tensor) -> bool:
        """Whether x: [B, ., D] has all tokens: it comes from outside the layers. One token is never taken for a whole."""
        return x.shape[TOKEN_DIM] == self.layout.context != self.layout.tokens_local

    def pad(self, x: Tensor) -> Tensor:
        """Zeros behind the tokens of x: [B, S, D], up to s * tp. Rows [B * s * tp, D] are left alone: they hold the padding
        already."""
        # Zeros add nothing to a sum over ranks, and their own gradient is thrown away with them.
        missing = self._padding
        return F.pad(x, (0, 0, 0, missing)) if missing and self._has_all_tokens(x) else x

    def strip(self, x: Tensor) -> Tensor:
        """Undo `pad`: [B, s * tp, D] to [B, S, D], contiguous."""
        if not self._padding:
            return x.contiguous()
        # Contiguous even where nothing is cut off: families call .view() on their layer's input.
        return x[:, : self.layout.context].contiguous() if x.ndim == 3 else x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tokens: x: [B, s, D] to [B, S, D], over `tp`. Not differentiable."""
        gathered, pending = self.start_gather(x)
        pending.wait()
        return self.join(gathered)

    def start_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start gathering x: [B, s, D] over `tp`; `join` makes the tokens of [tp, B, s, D] when it has come."""
        self._check_sharded(x)
        gathered = x.new_empty(self.axis.size, *x.shape)
        return gathered, collectives.start_all_gather(gathered, x.contiguous(), self.axis, "tokens of a region")

    def start_async_gather(self, x: Tensor) -> AsyncGather:
        """Start gathering x: [B, s, D], one exchange of tokens with each other rank."""
        self._check_sharded(x)
        is_rows = x.ndim != 3
        return AsyncGather(x, self.axis.size * x.shape[TOKEN_DIM] if is_rows else self.layout.context, self.axis)

    def join(self, gathered: Tensor) -> Tensor:
        """[tp, B, s, D] to [B, S, D]; of rows [tp, B * s, D] to [tp * B * s, D]."""
        ranks, *batch, tokens, width = gathered.shape
        if gathered.numel() == ranks * tokens * width:  # one sequence: its parts lie side by side
            return self.strip(gathered.view(*batch, ranks * tokens, width))
        return self.strip(gathered.movedim(0, TOKEN_DIM - 1).flatten(TOKEN_DIM - 1, TOKEN_DIM))

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start summing all ranks' x: [B, S, D] over `tp`; each rank gets the sum of its own tokens, [B, s, D]."""
        x = self.pad(x)
        *batch, tokens, width = x.shape
        out = x.new_empty(*batch, tokens // self.axis.size, width)
        # One part per rank in front, each contiguous: what reduce-scatter divides is the flattened tensor. Of one sequence they
        # are.
        if x.numel() > tokens * width:
            x = x.unflatten(TOKEN_DIM, (self.axis.size, -1)).movedim(TOKEN_DIM - 1, 0)
        return out, collectives.start_reduce_scatter(out, x.contiguous(), self.axis, "tokens of a region")

    def _has_all_tokens(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[TOKEN_DIM] == self.layout.context

    def _check_sharded(self, x: Tensor) -> None:
        """A family that calls its layers in an order of its own would gather what was never scattered."""
        if x.ndim == 3 and x.shape[TOKEN_DIM] != self._tokens_local:
            raise ModelError(
                "a layer runs before the first one, where tokens are scattered: use parallel.sequence=false"
            )
