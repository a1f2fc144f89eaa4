"""ContextAttention: causal attention where each rank of `cp` holds some of a sequence's tokens.

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
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from framework.comm.communicator import Communicator
from framework.mesh.context import ContextSlices
from framework.model.block_attention import BlockAttention, Scores
from framework.parallel.context.blocks import Block, Joining, find_steps, plan_blocks
from framework.parallel.context.gather import Gather
from framework.parallel.context.key_values import Contribution, KeyValues
from framework.parallel.context.merge import ChunkSums, MergedOutput, sinks_gradient
from framework.parallel.context.ring import Ring
from framework.parallel.context.ulysses import HeadExchange

Transport = Ring | Gather

TRANSPORTS: dict[str, Callable[[Communicator], Transport]] = {"ring": Ring, "gather": Gather}


class ContextAttention:
    """Attention over the tokens of all ranks of two axes, whose product is `cp`. method: how keys and values come over `ring`."""

    def __init__(
        self,
        slices: ContextSlices,
        ulysses: Communicator,
        ring: Communicator,
        method: Literal["ring", "gather"],
        block: BlockAttention,
    ):
        assert (ulysses.size, ring.size) == (slices.ulysses, slices.ring), f"{ulysses.size} x {ring.size} for {slices}"
        self.slices, self.block = slices, block
        self.heads = HeadExchange(ulysses, slices.chunks)
        self.transport = TRANSPORTS[method](ring)

    # Its shapes differ between ranks and steps, and messages are counted: traced, it would be compiled again and again.
    @torch.compiler.disable
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scores: Scores,
        sinks: Tensor | None = None,
        first_rows: Tensor | None = None,
    ) -> Tensor:
        """Returns [B, C, H, Dv], contiguous.

        q: [B, H, C, D], k: [B, Hk, C, D], v: [B, Hk, C, Dv], of one floating dtype and in any memory order. sinks: [H]; their
        gradients are those of this rank's queries and heads. first_rows: [B, C] int64, the global row of the first token that
        each query may see. All ranks of the axes call it, and run its backward, in the same order.
        """
        q, k, v = self.heads.enter(q, k, v)
        blocks = RankBlocks(self.block, self.slices, self.heads.select_scores(scores))
        own_sinks = None if sinks is None else self.heads.select(sinks)
        rows = None if first_rows is None else self.heads.gather_rows(first_rows)
        return self.heads.leave(_Attend.apply(q, k, v, own_sinks, rows, blocks, self.transport))


@dataclass(frozen=True)
class RankBlocks:
    """The blocks of one rank's queries with the keys of any rank of the ring."""

    block: BlockAttention
    slices: ContextSlices
    scores: Scores

    def find_steps(self) -> tuple[int, ...]:
        """As `blocks.find_steps`."""
        return find_steps(self.slices, self.scores.window)

    def plan(self, source: int, first_rows: Tensor | None) -> list[tuple[Block, Scores, Tensor | None]]:
        """The blocks with the keys of the rank at an index of the ring, their scores, and what documents their queries see."""
        # A slope weighs rows, and a document ends at a row: they want those that keys and queries have.
        joining = Joining(queries=self.scores.slopes is None, keys=self.scores.slopes is None and first_rows is None)
        keys = self.slices.of_rank(source * self.slices.ulysses).chunk_intervals
        blocks = plan_blocks(self.slices.chunk_intervals, keys, self.scores.window, joining)
        unbounded = replace(self.scores, window=None)
        return [
            (
                block,
                unbounded if block.is_whole else self.scores,
                None if first_rows is None else first_rows[:, slice(*block.queries)],
            )
            for block in blocks
        ]

    def attend(self, source: int, q: Tensor, held: KeyValues, first_rows: Tensor | None, merged: MergedOutput) -> None:
        """Merge what the queries find among the keys of one rank. q: [B, H, C, D]; first_rows: [B, C]."""
        for block, scores, rows in self.plan(source, first_rows):
            mine, k, v = _select(q, block.queries), _select(held.k, block.keys), _select(held.v, block.keys)
            found = self.block.forward(mine, k, v, block.q_rows, block.k_rows, scores, rows)
            if found is not None:
                merged.merge(block.queries, *found)

    def differentiate(
        self, source: int, attended: "Attended", held: KeyValues, gradient: Tensor, sums: ChunkSums
    ) -> list[Contribution]:
        """The gradients of the keys and values of one rank; those of the queries are added to `sums`. gradient: [B, H, C, Dv]."""
        contributions = []
        for block, scores, rows in self.plan(source, attended.first_rows):
            mine = [_select(x, block.queries) for x in (gradient, attended.q, attended.out)]
            k, v = _select(held.k, block.keys), _select(held.v, block.keys)
            log_sum = attended.log_sum[:, :, slice(*block.queries)]
            found = self.block.backward(
                mine[0], mine[1], k, v, mine[2], log_sum, block.q_rows, block.k_rows, scores, rows
            )
            if found is not None:
                sums.add(block.queries, found[0])
                contributions.append((block.keys, found[1], found[2]))
        return contributions


@dataclass(frozen=True)
class Attended:
    """What backward knows of a rank's queries. q: [B, H, C, D]; out: [B, H, C, Dv]; log_sum: [B, H, C]; first_rows: [B, C]."""

    q: Tensor
    out: Tensor
    log_sum: Tensor
    first_rows: Tensor | None


class _Attend(torch.autograd.Function):
    """Attention of a rank's queries to the keys of all ranks of a ring: [B, C, H, Dv] of q, k, v and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        first_rows: Tensor | None,
        blocks: RankBlocks,
        transport: Transport,
    ) -> Tensor:
        merged = MergedOutput(blocks.slices.chunks, q.shape[2], q.dtype)

        def attend(source: int, held: KeyValues) -> None:
            blocks.attend(source, q, held, first_rows, merged)

        transport.forward(KeyValues(k, v), blocks.find_steps(), attend)
        if sinks is not None:
            merged.add_sinks(sinks)
        out = merged.join(q.dtype).transpose(1, 2)
        # Saved in no other way, so that checkpointing recomputes and offload moves them.
        ctx.save_for_backward(q, k, v, sinks, first_rows, out, merged.join_log_sums())
        ctx.blocks, ctx.transport = blocks, transport
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, first_rows, out, log_sum = ctx.saved_tensors
        blocks: RankBlocks = ctx.blocks
        gradient, out = gradient.contiguous().transpose(1, 2), out.transpose(1, 2)
        attended = Attended(q, out, log_sum, first_rows)
        sums = ChunkSums(blocks.slices.chunks, q.shape[2], q.dtype)

        def differentiate(source: int, held: KeyValues) -> list[Contribution]:
            return blocks.differentiate(source, attended, held, gradient, sums)

        total = ctx.transport.backward(KeyValues(k, v), blocks.find_steps(), differentiate)
        dsinks = None if sinks is None else sinks_gradient(sinks, gradient, out, log_sum)
        return sums.join(q.dtype), total.k.to(k.dtype), total.v.to(v.dtype), dsinks, None, None, None


def _select(x: Tensor, tokens: tuple[int, int]) -> Tensor:
    """x: [B, H, C, D], its tokens (start, stop)."""
    return x[:, :, slice(*tokens)]
