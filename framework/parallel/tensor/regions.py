"""Regions: the parts of a layer in which each tensor-parallel rank computes with its own weights, and their borders.

    outside                 border in                    inside                           border out
    x replicated            copy;  dx summed             Y_r = f(x, W_r), a partial sum   sum over ranks
    x sharded by tokens     gather; dx reduce-scattered  the same, of all tokens          reduce-scatter

Either way y = sum_r f(x, W_r). What is inside and not split is computed alike by all ranks from a gradient that is one rank's
part: its own gradient is partial.

Weight gradients of the column layers wait until the region's input gradient is on its way to the other ranks, and are
computed under that communication: dX = sum_r dY_r W_r travels while dW_r = dY_r^T X is multiplied.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm import collectives, duals
from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.model.matmul import matmul
from framework.parallel.tensor.async_tp import AsyncGather, AsyncGatherTensor, matmul_reduce_scatter
from framework.parallel.tensor.rng import RngStreams, torch_generator

# Of hidden states, [B, S, D]; all but the last two dims are batch.
TOKEN_DIM = -2


class TokenShard:
    """Between the first layer and the final norm each rank holds a part of every sequence's tokens (sequence parallelism).

    length: tokens of the sequences that are in the layers now. If the ranks do not divide it, the last part is padded with
    zeros, which a border takes away again before anything mixes tokens. is_sharded: we are between the two now. In a part of
    a model they are the first of its layers, and the final norm or the end of the model.
    """

    def __init__(self, axis: Communicator, draws: RngStreams | None = None) -> None:
        self.axis, self.draws = axis, draws
        self.length = 0
        self.is_sharded = False
        self._outer: tuple[torch.Generator, Tensor] | None = None

    def scatter(self, x: Tensor) -> Tensor:
        """Replicated [B, S, D] to this rank's [B, S'/tp, D]. Behind the first layer they are sharded already."""
        if self.is_sharded:
            return x
        self.length, self.is_sharded = x.shape[TOKEN_DIM], True
        if self.draws is not None:
            self._outer = torch_generator(x), self.draws.start_outside(x)
        return duals.scatter(self.pad(x), self.axis, TOKEN_DIM)

    def end(self) -> None:
        """The tokens have come together again, or left for another rank."""
        self.is_sharded = False
        if self._outer is not None:
            generator, state = self._outer
            generator.set_state(state)
            self._outer = None

    def pad(self, x: Tensor) -> Tensor:
        """Zeros behind the tokens of [B, S, D] up to a multiple of the ranks. [B * S'/tp, D] and such are left alone: they
        hold the padding already."""
        missing = -self.length % self.axis.size
        return F.pad(x, (0, 0, 0, missing)) if missing and x.ndim == 3 and x.shape[TOKEN_DIM] == self.length else x

    def strip(self, x: Tensor) -> Tensor:
        """Undo `pad`."""
        return x[:, : self.length].contiguous() if x.ndim == 3 else x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tokens. Not differentiable."""
        out, pending = self.start_gather(x)
        pending.wait()
        return self.join(out)

    def start_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start gathering; `join` makes the tokens of what has come."""
        self._check_scattered()
        out = x.new_empty(self.axis.size, *x.shape)
        return out, collectives.start_all_gather(out, x.contiguous(), self.axis)

    def arrive(self, x: Tensor) -> AsyncGather:
        """Start gathering piece by piece."""
        self._check_scattered()
        return AsyncGather(x, self.length if x.ndim == 3 else self.axis.size * x.shape[TOKEN_DIM], self.axis)

    def join(self, gathered: Tensor) -> Tensor:
        """[tp, ..., S'/tp, D] to [..., S, D]."""
        return self.strip(gathered.movedim(0, TOKEN_DIM - 1).flatten(TOKEN_DIM - 1, TOKEN_DIM))

    def start_reduce_scatter(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start summing all ranks' [..., S, D]; each gets its tokens' sum."""
        x = self.pad(x)
        parts = x.unflatten(TOKEN_DIM, (self.axis.size, -1)).movedim(TOKEN_DIM - 1, 0).contiguous()
        out = torch.empty_like(parts[0])
        return out, collectives.start_reduce_scatter(out, parts, self.axis)

    def _check_scattered(self) -> None:
        if not self.length:
            raise ModelError(
                "a layer runs before the first one, where tokens are scattered: use parallel.sequence=false"
            )


class Call:
    """One passage of one microbatch through a region. `deferred`: weight gradients that are still to be computed."""

    def __init__(self, shard: Tensor | None) -> None:
        self.deferred: list[Callable[[], None]] = []
        # With re-gathering: the region's input as it is kept, this rank's tokens, until the region is left.
        self.shard = shard
        self.arriving: AsyncGatherTensor | None = None
        self.whole_address = 0
        self._gathering: tuple[Tensor, Pending] | None = None

    def kept_input(self, x: Tensor) -> Tensor | None:
        """The shard of which x is the whole, if it is to be gathered again in backward instead of being kept."""
        if self.shard is None or x is self.arriving:
            return self.shard
        address = self.whole_address if self.arriving is None else self.arriving.arrival.whole().data_ptr()
        return self.shard if x.data_ptr() == address else None

    def start_gather(self, shard: Tensor, tokens: TokenShard) -> None:
        """Gather again, once for all layers that ask."""
        if self._gathering is None:
            self._gathering = tokens.start_gather(shard)

    def gathered(self, tokens: TokenShard) -> Tensor:
        """What `start_gather` started."""
        assert self._gathering is not None, "asked for before it was started"
        out, pending = self._gathering
        pending.wait()
        return tokens.join(out)


class Region:
    """One region of one layer. tokens None: its surroundings are replicated. regathers: keep only this rank's tokens of the
    input for backward, and gather them again there. draws: the random streams, None if nothing draws; differs: inside, every
    rank draws for itself. overlaps: with tokens, both borders communicate in pieces under the products (`pieces`)."""

    def __init__(
        self,
        axis: Communicator,
        tokens: TokenShard | None,
        regathers: bool = False,
        name: str = "",
        draws: RngStreams | None = None,
        differs: bool = True,
        overlaps: bool = False,
    ) -> None:
        self.axis, self.tokens, self.overlaps = axis, tokens, overlaps
        self.regathers = regathers and tokens is not None
        self.name, self.draws, self.differs = name, draws, differs
        self.call = Call(None)
        self._outer: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """The whole input, for ranks that use it in their own ways: [.., S'/tp, D] or [.., S, D] to [.., S, D]."""
        self.call = Call(x.detach() if self.regathers and torch.is_grad_enabled() else None)
        # The tick keeps this function in autograd's graph even where nothing asks for the input's gradient.
        tick = x.new_zeros((), requires_grad=torch.is_grad_enabled())
        whole = _Enter.apply(x, tick, self, self.call)
        if isinstance(whole, AsyncGatherTensor):
            self.call.arriving = whole
        else:
            self.call.whole_address = whole.data_ptr()
        if self.draws is not None:
            self._outer = self.draws.start_inside(x, self.name, self.differs)
        return whole

    def leave(self, y: Tensor) -> Tensor:
        """The sum of all ranks' y, of all tokens or of this rank's."""
        self._end(y)
        if self.tokens is None:
            return duals.reduce_from(y, self.axis)
        return duals.reduce_scatter(self.tokens.pad(y), self.axis, TOKEN_DIM)

    def leave_by(self, x: Tensor, weight: Tensor) -> Tensor:
        """`leave` with x W^T, the last product inside; not differentiable, its adjoint is `spread`."""
        self._end(x)
        if self.overlaps and self.tokens is not None:
            return matmul_reduce_scatter(x, weight, self.axis)
        y = matmul(x, weight)
        if self.tokens is None:
            collectives.all_reduce(y, self.axis)
            return y
        out, pending = self.tokens.start_reduce_scatter(y)
        pending.wait()
        return out

    def _end(self, y: Tensor) -> None:
        self.call.shard = self.call.arriving = None
        if self.draws is not None and self._outer is not None:
            self.draws.restore(y, self._outer)
            self._outer = None

    def spread(self, dy: Tensor, weight: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The adjoint of `leave_by`: dy W, if a weight is given as W^T, and the whole dy, for every rank."""
        if self.overlaps and self.tokens is not None:
            arrival = self.tokens.arrive(dy)
            return None if weight is None else arrival.multiply(weight), arrival.whole()
        if self.tokens is not None:
            dy = self.tokens.gather(dy)
        return None if weight is None else matmul(dy, weight), dy


class _Enter(torch.autograd.Function):
    """A region's border in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tick: Tensor, region: Region, call: Call) -> Tensor:
        ctx.region, ctx.call = region, call
        if region.tokens is None:
            # An alias, not a view: models write to activations in place, which autograd forbids on views made here.
            return x.detach()
        return AsyncGatherTensor(region.tokens.arrive(x), x) if region.overlaps else region.tokens.gather(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, None, None, None]:
        region: Region = ctx.region
        out, pending = None, Pending()
        if ctx.needs_input_grad[0]:
            if region.tokens is None:
                out = dx.clone(memory_format=torch.contiguous_format)
                pending = collectives.start_all_reduce(out, region.axis)
            else:
                out, pending = region.tokens.start_reduce_scatter(dx)
        for compute in ctx.call.deferred:
            compute()
        ctx.call.deferred.clear()
        pending.wait()
        return out, None, None, None
