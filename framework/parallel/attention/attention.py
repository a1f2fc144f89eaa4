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

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from framework.comm.communicator import Communicator
from framework.mesh.context import ContextSlices, Interval
from framework.model.kept_outputs import KeptOutputs
from framework.model.numbered import Numbered
from framework.model.opaque_map import MAPS
from framework.model.precision import sums_dtype
from framework.parallel.attention.block_attention import BlockAttention
from framework.parallel.attention.blocks import RankBlocks
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.kernels import Result
from framework.parallel.attention.key_values import Contribution, HeadGroup, KeyValues, Portion
from framework.parallel.attention.logit_maxima import HeadMaxima
from framework.parallel.attention.merge import ChunkSums, MergedOutput, sinks_gradient
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
        work = _Forward(q, own, sinks, blocks, self.block, counts)
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
        work = _Backward(q, result, own, blocks, self.block)
        self.transport.backward(own, blocks.route(own), work)
        dsinks = None if sinks is None else sinks_gradient(sinks, result.gradient, result.out, log_sum)
        assert work.dq is not None
        assert work.total is not None
        return work.dq, work.total.k, work.total.v, dsinks


# Keyed by the numbers that graphs carry (`opaque_attention.py`).
ATTENTIONS: Numbered[ContextAttention] = Numbered()


class _Forward:
    """Attends to keys as they come: `ring.Attends`. q: [B, H, C, D]; out: [B, H, C, Dv]; log_sum: [B, H, C]; largest: logits,
    [H], if they are counted."""

    def __init__(
        self,
        q: Tensor,
        own: KeyValues,
        sinks: Tensor | None,
        blocks: RankBlocks,
        attention: BlockAttention,
        counts: bool = False,
    ):
        self.largest = q.new_full((q.shape[1],), -inf, dtype=sums_dtype(q.dtype)) if counts else None
        self.q, self.own, self.sinks, self.blocks, self.attention = q, own, sinks, blocks, attention
        self.out: Tensor | None = None
        self.log_sum = q.new_empty(q.shape[:3], dtype=sums_dtype(q.dtype))

    def start(self, group: HeadGroup) -> None:
        # This rank's own keys first: every query sees itself, so what is merged later finds a finite sum; and the first message
        # is on its way meanwhile.
        self.merged = MergedOutput(self.blocks.slices.chunks, self.q.shape[2], self.q.dtype)
        self.attend(self.blocks.whole(group), self.blocks.slices.ring_index, _select_heads(self.own, group.heads))

    def attend(self, portion: Portion, source: int, held: KeyValues) -> None:
        heads = _query_heads(portion.heads, self.q, self.own)
        q = self.q[:, heads]
        for block, tensors in self.blocks.cut(q, held, portion, source):
            if self.largest is not None:
                own = self.attention.find_largest(tensors, self.blocks.slices.context)
                self.largest[heads] = self.largest[heads].maximum(own)
            # None where the window or the documents of these sequences leave no pair, which no plan of blocks knows.
            found = self.attention.forward(tensors)
            if found is not None:
                self.merged.merge(block.queries, *found)

    def finish(self, group: HeadGroup) -> None:
        heads = _query_heads(group.heads, self.q, self.own)
        # Last, once for each query: a sink in every block would count once for each block.
        if self.sinks is not None:
            self.merged.add_sinks(self.sinks[heads])
        self.out = self.merged.write(self.out, heads, self.q.shape[1], self.q.dtype)
        self.merged.write_log_sums(self.log_sum[:, heads])


class _Backward:
    """Differentiates by keys and values as they come: `ring.Differentiates`.

    q: [B, H, C, D]; result: out and its gradient [B, H, C, Dv], log-sum-exp [B, H, C]; dq: [B, H, C, D]; total: of this rank's K
    and V.
    """

    def __init__(self, q: Tensor, result: Result, own: KeyValues, blocks: RankBlocks, attention: BlockAttention):
        self.q, self.result, self.own, self.blocks, self.attention = q, result, own, blocks, attention
        self.dq: Tensor | None = None
        self.total: KeyValues | None = None

    def start(self, group: HeadGroup) -> None:
        self.dq_sums = ChunkSums(self.blocks.slices.chunks, self.q.shape[2], self.q.dtype)
        self.sums: KeyValues | None = None

    def differentiate(self, portion: Portion, source: int, held: KeyValues) -> list[Contribution]:
        return list(self._contributions(portion, source, held))

    def differentiate_own(self, group: HeadGroup) -> None:
        own = _select_heads(self.own, group.heads)
        contributions = self._contributions(self.blocks.whole(group), self.blocks.slices.ring_index, own)
        # Where others' sums have come home already, own ones are added to them.
        if self.sums is not None:
            self.sums.add(contributions)
        elif self.blocks.slices.chunks == 1:
            # One chunk of queries and one of keys: one block.
            ((_, dk, dv),) = contributions
            self.sums = KeyValues(dk, dv)
        else:
            self.sums = self._new_sums(group.heads)
            self.sums.set(contributions)

    def _contributions(self, portion: Portion, source: int, held: KeyValues) -> Iterator[Contribution]:
        """One at a time, so that no more than one need be held."""
        heads = _query_heads(portion.heads, self.q, self.own)
        for block, tensors in self.blocks.cut(self.q[:, heads], held, portion, source):
            # Results over all keys, not of this block: then the block's part of the gradient needs no other block.
            of = self.result
            result = Result(*(x[:, heads, slice(*block.queries)] for x in (of.out, of.log_sum, of.gradient)))
            found = self.attention.backward(tensors, result)
            if found is not None:
                self.dq_sums.add(block.queries, found[0])
                contribution = block.keys, found[1], found[2]
                # The consumer adds it up and drops it before the next block's is computed.
                del found
                yield contribution
                del contribution

    def add(self, portion: Portion, sums: KeyValues) -> None:
        if self.sums is None:
            self.sums = self._new_sums(portion.heads)
            self.sums.set([])
        # A portion has the same tokens of every chunk, which lie apart in the rank's own order.
        chunks, tokens = self.blocks.slices.chunks, slice(*portion.tokens)
        for total, given in ((self.sums.k, sums.k), (self.sums.v, sums.v)):
            total.unflatten(2, (chunks, -1))[:, :, :, tokens] += given.unflatten(2, (chunks, -1))

    def finish(self, group: HeadGroup) -> None:
        heads = _query_heads(group.heads, self.q, self.own)
        self.dq = self.dq_sums.write(self.dq, heads, self.q.shape[1], self.q.dtype)
        assert self.sums is not None
        # Rounded to the dtype of K and V once, here: sums over blocks and ranks are in fp32 at least.
        if group.heads == self._all_heads:
            self.total = KeyValues(self.sums.k.to(self.own.k.dtype), self.sums.v.to(self.own.v.dtype))
        elif self.total is not None and self.sums.k.dtype != self.total.k.dtype:
            place = _select_heads(self.total, group.heads)
            place.k.copy_(self.sums.k)
            place.v.copy_(self.sums.v)

    @property
    def _all_heads(self) -> Interval:
        return 0, self.own.k.shape[1]

    def _new_sums(self, heads: Interval) -> KeyValues:
        """For gradients of this rank's K/V in some heads; values are not set."""
        dtype = self.own.k.dtype
        # The whole is made with the first group: later ones are written beside it.
        if heads != self._all_heads and self.total is None:
            self.total = self._new_heads(self._all_heads, dtype)
        if self.total is not None and dtype == sums_dtype(dtype):
            # Summed where they are to be.
            return _select_heads(self.total, heads)
        return self._new_heads(heads, sums_dtype(dtype))

    def _new_heads(self, heads: Interval, dtype: torch.dtype) -> KeyValues:
        return KeyValues(*(_new_heads(x, heads, dtype) for x in (self.own.k, self.own.v)))


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


def _query_heads(heads: Interval, q: Tensor, own: KeyValues) -> slice:
    """The query heads that use some key-value heads."""
    group = q.shape[1] // own.k.shape[1]
    return slice(heads[0] * group, heads[1] * group)


def _select_heads(of: KeyValues, heads: Interval) -> KeyValues:
    return KeyValues(of.k[:, slice(*heads)], of.v[:, slice(*heads)])


def _new_heads(like: Tensor, heads: Interval, dtype: torch.dtype) -> Tensor:
    """like: [B, H, C, D] -> [B, heads, C, D], memory in the order [B, C, heads, D], which is that of projections."""
    B, _, C, D = like.shape
    return like.new_empty(B, C, heads[1] - heads[0], D, dtype=dtype).transpose(1, 2)
