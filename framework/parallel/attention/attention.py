"""ContextAttention: causal attention where each rank of `cp` holds some of a sequence's tokens. A transport of keys and
values is an entry of TRANSPORTS.

    heads for tokens    over `ulysses`: this rank's heads of whole chunks         `ulysses`
    blocks              over `ring`: queries of this rank against the K/V of      `ring`, `gather`, `blocks`, `merge`
                        every rank, one softmax over all of them
    tokens for heads    back

It is exact: out and the gradients of q, k, v and sinks are those of one rank with the whole sequence, up to the rounding of sums
in another order. Saved for backward are q, k, v, out and its log-sum-exp of this rank's tokens, nothing that grows with cp: other
ranks' K/V are sent once more in backward.

    B sequences; C tokens of each on this rank, padding included; H query heads, Hk key-value heads; D, Dv per head
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from framework.comm.communicator import Communicator
from framework.mesh.token_layout import ContextSlices
from framework.model.kept_outputs import KeptOutputs
from framework.model.opaque_map import MAPS, Numbered
from framework.parallel.attention.block_attention import BlockAttention
from framework.parallel.attention.blocks import BackwardPass, ForwardPass, RankBlocks
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.kernels import Result
from framework.parallel.attention.key_values import KeyValues
from framework.parallel.attention.logit_maxima import HeadMaxima
from framework.parallel.attention.merge import sinks_gradient
from framework.parallel.attention.ring import Gather, Ring, Transport
from framework.parallel.attention.ulysses import HeadExchange
from framework.parallel.attention.visible_rows import Scores

# Plugins add to it.
TRANSPORTS: dict[str, Callable[[Communicator], Transport]] = {"ring": Ring, "gather": Gather}


class ContextAttention:
    """Attention over the tokens of all ranks of two axes, whose product is `cp`. method: the way in which keys and values come
    over `ring`."""

    def __init__(
        self,
        slices: ContextSlices,
        ulysses: Communicator,
        ring: Communicator,
        method: str,
        block: BlockAttention,
    ):
        assert (ulysses.size, ring.size) == (slices.ulysses, slices.ring), f"{ulysses.size} x {ring.size} for {slices}"
        self.slices, self.block = slices, block
        self.heads = HeadExchange(ulysses, slices.chunks)
        self.transport = TRANSPORTS[method](ring)
        self.kept = KeptOutputs()
        # The number under which a compiled layer's operator finds this; a tensor, so given once there is memory.
        self.number: Tensor | None = None
        # Where its largest logits are noted, if anybody asks.
        self.maxima: HeadMaxima | None = None

    def give_number(self) -> None:
        """Give it a number, as compiled layers need."""
        self.number, self.heads.number = ATTENTIONS.number(self), MAPS.number(self.heads)

    def keep_outputs(self, kept: KeptOutputs, _operation: str) -> None:
        """From now on the layer that calls this attention, and no other, is recomputed in backward."""
        self.kept = kept

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        sinks: Tensor | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Returns [B, C, H, Dv], contiguous.

        q: [B, H, C, D], k: [B, Hk, C, D], v: [B, Hk, C, Dv], of one floating dtype and in any memory order. sinks: [H]; their
        gradients are those of this rank's queries and heads. documents: of the whole sequences, outside of which a query sees
        nothing. All ranks of the axes call it, and run its backward, in the same order.
        """
        assert q.shape[2] == self.slices.tokens_local, f"{q.shape[2]} tokens of each sequence for {self.slices}"
        q, k, v = self.heads.enter(q, k, v)
        if documents is not None and documents.chosen is not None:
            documents = documents.choosing(self.heads.gather(documents.chosen))
        # GPUs' kernels read tokens before heads as projections leave them, and a copy would be a pass over memory.
        if k.device.type == "cpu":
            # Head by head: the keys of a head are read again for every block of queries, from fewer lines of the cache.
            k, v = k.contiguous(), v.contiguous()
        # Sinks are replicated: each rank has those of all heads, and learns from its own.
        own_sinks = None if sinks is None else self.heads.select(sinks)
        return self.heads.leave(_Attend.apply(q, k, v, own_sinks, documents, scores, self))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, documents: Documents | None, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        """(out [B, C, H, Dv], log-sum-exp [B, H, C]) of this rank's heads, not differentiable. sinks: [H]."""
        own, blocks = KeyValues(k, v), RankBlocks(self.slices, scores, documents)
        counts = self.maxima is not None and self.maxima.maxima.is_counting
        work = ForwardPass(q, own, sinks, blocks, self.block, counts)
        self.transport.forward(own, blocks.route(own), work)
        if self.maxima is not None and work.largest is not None:
            self.maxima.note(work.largest)
        assert work.out is not None
        return work.out.transpose(1, 2), work.log_sum

    def differentiate(
        self,
        saved: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
        gradient: Tensor,
        documents: Documents | None,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(dQ, dK, dV, dsinks). saved: q, k, v, sinks, out and log-sum-exp of `attend`; gradient: of out, [B, C, H, Dv]."""
        q, k, v, sinks, out, log_sum = saved
        own, blocks = KeyValues(k, v), RankBlocks(self.slices, scores, documents)
        # It may come as an expanded view, which kernels do not take.
        result = Result(out.transpose(1, 2), log_sum, gradient.contiguous().transpose(1, 2))
        work = BackwardPass(q, result, own, blocks, self.block)
        self.transport.backward(own, blocks.route(own), work)
        dsinks = None if sinks is None else sinks_gradient(sinks, result.gradient, result.out, log_sum)
        assert work.dq is not None
        assert work.total is not None
        return work.dq, work.total.k, work.total.v, dsinks


# Keyed by the numbers that graphs carry (`opaque_attention.py`).
ATTENTIONS: Numbered[ContextAttention] = Numbered()


class _Attend(torch.autograd.Function):
    """Attention of a rank's queries to the keys of all ranks of a ring: [B, C, H, Dv] of q, k, v and sinks.

    q: [B, H, C, D]; k: [B, Hk, C, D]; v: [B, Hk, C, Dv]; sinks: [H].
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        documents: Documents | None,
        scores: Scores,
        attention: ContextAttention,
    ) -> Tensor:
        attend = partial(attention.attend, q, k, v, sinks, documents, scores)
        out, log_sum = attention.kept.compute_attention(attend)
        # Saved in no other way, so that checkpointing recomputes and offload moves them.
        ctx.save_for_backward(q, k, v, sinks, out, log_sum)
        ctx.documents, ctx.scores, ctx.attention = documents, scores, attention
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.attention.differentiate(ctx.saved_tensors, gradient, ctx.documents, ctx.scores)
        return *found, None, None, None
