"""ContextAttention: causal attention where each rank of `cp` holds some of a sequence's tokens. A transport of keys and
values is an entry of TRANSPORTS.

    heads for tokens    over `ulysses`: this rank's heads of whole chunks         `ulysses`
    blocks              over `ring`: queries of this rank against the K/V of      `ring`, `blocks`, `passes`
                        every rank, one softmax over all of them
    tokens for heads    back

It is exact: out and the gradients of q, k, v and sinks are those of one rank with the whole sequence, up to the rounding of sums
in another order. Saved for backward are q, k, v, out and its log-sum-exp of this rank's tokens, nothing that grows with cp: other
ranks' K/V are sent once more in backward.

A compiler puts the call into its graph as one operator (`attend_in_graph`) and does not look inside: traced, it would be compiled
again for every microbatch's documents. The operator finds the module's ContextAttention by its number, and the documents on the
mask that carries them.

    B sequences; C tokens of each on this rank, padding included; H query heads, Hk key-value heads; D, Dv per head
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from framework.comm.communicator import Communicator
from framework.mesh.token_layout import ContextSlices
from framework.model.kept_outputs import KeptOutputs
from framework.model.opaque import MAPS, Numbered
from framework.model.opaque_linear import ATTEND
from framework.model.precision import sums_dtype
from framework.parallel.attention.block_attention import BlockAttention
from framework.parallel.attention.blocks import KeyValues, RankBlocks
from framework.parallel.attention.kernels import Result
from framework.parallel.attention.passes import BackwardPass, ForwardPass, sinks_gradient
from framework.parallel.attention.ring import Gather, Ring, Transport
from framework.parallel.attention.ulysses import HeadExchange
from framework.parallel.attention.visible_rows import Documents, Scores

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
        # Sinks are replicated: each rank has those of all heads, and learns from its own.
        own_sinks = None if sinks is None else self.heads.select(sinks)
        return self.heads.leave(_Attend.apply(q, *_order(k, v), own_sinks, documents, scores, self))

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


# Keyed by the numbers that graphs carry.
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


def attend_in_graph(
    attention: ContextAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    sinks: Tensor | None,
    mask: Tensor | None,
) -> Tensor:
    """`ContextAttention.__call__`, for code that is being compiled: [B, C, H, Dv]. mask: None, or one that carries Documents."""
    assert attention.number is not None, "a compiled layer whose attention was not attached"
    # Operators of their own exchange heads, so that what this one saves need not be exchanged again in backward.
    q, k, v = attention.heads.enter(q, k, v)
    own_sinks = None if sinks is None else attention.heads.select(sinks)
    # The log-sum-exp is for backward alone.
    out: Tensor = _attend(q, k, v, own_sinks, mask, attention.number, _encode(scores))[0]
    return attention.heads.leave(out)


@torch.library.custom_op(ATTEND, mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None, number: Tensor, form: list[float]
) -> tuple[Tensor, Tensor]:
    keys = _order(k, v)
    out, log_sum = ATTENTIONS.find(number).attend(q, *keys, sinks, _documents_of(mask), _decode(form))
    # The strides that the compiler has been told: what follows reads tokens before heads.
    return out.contiguous(), log_sum


@_attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    B, H, C, _ = q.shape
    return q.new_empty(B, C, H, v.shape[-1]), q.new_empty(B, H, C, dtype=sums_dtype(q.dtype))


@torch.library.custom_op(f"{ATTEND}_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, saved: Sequence[Tensor | None], number: Tensor, form: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dQ, dK, dV, dsinks or nothing). saved: q, k, v, sinks, mask, out, log-sum-exp."""
    q, k, v, sinks, mask, out, log_sum = saved
    tensors: Any = q, *_order(k, v), sinks, out, log_sum
    *found, dsinks = ATTENTIONS.find(number).differentiate(tensors, gradient, _documents_of(mask), _decode(form))
    dq, dk, dv = (each.transpose(1, 2).contiguous().transpose(1, 2) for each in found)
    # An operator returns as many tensors in every call, and none that a caller has given.
    return dq, dk, dv, gradient.new_empty(0) if dsinks is None else dsinks


@_attend_backward.register_fake
def _(gradient: Tensor, saved: Sequence[Any], *_others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in saved[:3])
    return dq, dk, dv, gradient.new_empty(0) if saved[3] is None else torch.empty_like(saved[3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, number, ctx.form = inputs
    ctx.save_for_backward(*tensors, *output, number)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, number = ctx.saved_tensors
    dq, dk, dv, dsinks = _attend_backward(gradient, saved, number, ctx.form)
    return dq, dk, dv, None if saved[3] is None else dsinks, None, None, None


_attend.register_autograd(_differentiate, setup_context=_save)


def _encode(scores: Scores) -> list[float]:
    """Scores as numbers, constants of a graph: layers with other windows have graphs of their own."""
    return [scores.scale, float(scores.window or 0), scores.softcap or 0.0]


def _decode(form: Sequence[float]) -> Scores:
    scale, window, softcap = form
    # Neither a window nor a cap is ever 0.
    return Scores(scale, int(window) or None, softcap or None)


def _order(k: Any, v: Any) -> tuple[Tensor, Tensor]:
    """Keys and values head by head on a CPU: those of a head are read again for every block of queries, from fewer lines of the
    cache. GPUs' kernels read tokens before heads as projections leave them, and a copy would be a pass over memory."""
    return (k.contiguous(), v.contiguous()) if k.device.type == "cpu" else (k, v)


def _documents_of(mask: Tensor | None) -> Documents | None:
    if mask is None:
        return None
    # The very tensor that the model was given, in backward as well: autograd saves inputs of a graph as they are.
    found = Documents.of_mask(mask)
    assert found is not None, f"an attention mask of the model's own, {mask.dtype} {[*mask.shape]}"
    return found


class LogitMaxima:
    """Largest attention logits of each key head that a rank sees in a step, for QK-clip (`optim/qk_clip.py`).

        S_g = max over microbatches, queries i of head g's group, keys j that i sees, of scale q_i . k_j

    before a soft cap. Kernels of flash attention return no maxima, so scores are computed once more for them, tile by tile: a
    second Q K^T in forward alone. What backward computes again and what a validation sees does not count.

    num_heads: key heads of each layer of the whole model; values: [layers, most key heads], fp64, -inf where it has seen none.
    """

    def __init__(self, num_heads: Sequence[int], device: torch.device):
        self.num_heads = num_heads
        self.values = torch.full((len(num_heads), max(num_heads)), -inf, dtype=torch.float64, device=device)
        self.is_counting = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the forwards that run within."""
        self.is_counting = True
        yield
        self.is_counting = False


@dataclass(frozen=True)
class HeadMaxima:
    """The maxima of one attention, whose heads `num_parts` ranks divide, this one being number `part` of them."""

    maxima: LogitMaxima
    layer: int
    num_parts: int
    part: int

    def note(self, found: Tensor) -> None:
        """Take the largest logits of this rank's query heads, [H]."""
        # From the call, not from the config: layers may differ in their heads, and ranks have a part of each.
        num_queries, num_keys = self.num_parts * len(found), self.maxima.num_heads[self.layer]
        heads = torch.arange(len(found), device=found.device) + self.part * len(found)
        self.maxima.values[self.layer].scatter_reduce_(0, heads // (num_queries // num_keys), found.double(), "amax")
