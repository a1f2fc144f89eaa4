"""Kernel, the interface of kernels for one piece of attention, and those that run on any device: out =
softmax(S) V and the log-sum-exp of S, and the gradients of a piece.

    S = scale Q K^T + mask      P = exp(S - L)      out = P V
    dV = P^T dO      dS = P * (dO V^T - rowsum(dO * out))      dQ = scale dS K      dK = scale dS^T Q

In a gradient L and out are those of all keys of a query, in however many pieces and on however many ranks they were computed:
then P is the probability, and the parts of all pieces add up to the gradient.

Shapes: q [B, H, n, D]; k [B, Hk, m, D]; v [B, Hk, m, Dv]; head h of q reads head h // (H / Hk) of k and v. mask: additive,
[1, 1, n, m], 0 or -inf where a query does not see a key; None: it sees all.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.mesh.token_layout import Interval
from framework.parallel.attention.visible_rows import Documents, Ends, PieceKind
from framework.torch_private import flash_cpu, flash_cpu_backward


@dataclass(frozen=True)
class Heads:
    """The heads of a piece, as this file's first lines have them."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Result:
    """out: [B, H, n, Dv]; log_sum: [B, H, n] fp32 or fp64; gradient: of `out`, in backward."""

    out: Tensor
    log_sum: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class Packing:
    """Queries and keys of the same rows, where a query sees its document, or `window` rows of it, up to and with itself."""

    rows: Interval
    documents: Documents | None = None
    window: int | None = None

    def ends(self, sequences: int, device: torch.device) -> Ends:
        """The ends of the documents, over all sequences. On the device from the host's numbers: nobody waits."""
        documents = self.documents or Documents(((0,),), self.rows[1])
        return documents.ends(self.rows, sequences, device)

    def first_rows(self, device: torch.device) -> Tensor:
        """The first row, counted from the first of these rows, that each query sees: [B or 1, n] int64."""
        start, stop = self.rows
        rows = torch.arange(start, stop, device=device)[None]
        # The device's arithmetic on what it has: no number comes back to the host.
        lowest = rows.new_full((1, 1), start) if self.window is None else rows - (self.window - 1)
        if self.documents is not None:
            lowest = lowest.maximum(self.documents.first_rows(device)[:, start:stop])
        return lowest.clamp(min=start).expand(-1, stop - start) - start


class Kernel(Protocol):
    """A kernel. It masks CAUSAL pieces itself: they come without a mask."""

    @property
    def tile(self) -> int:
        """Rows of a tile, unless the caller knows better."""

    def forward(self, heads: Heads, kind: PieceKind, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        """(out [B, H, n, Dv], log-sum-exp [B, H, n]) of a piece. mask: [1, 1, n, m] or None."""

    def backward(
        self, heads: Heads, result: Result, kind: PieceKind, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dQ, dK, dV), in the shapes of q, k and v: the piece's part of the gradients."""


@dataclass(frozen=True)
class TileKernel:
    """Plain torch operations that hold the scores of a piece: for any device, any dtype, any head size, and for a soft cap.

    Computes in fp64 for fp64 and in fp32 for all other dtypes. softcap: c in S = c tanh(scale Q K^T / c) + mask.
    tile: the scores of a tile should stay in a processor's cache; a GPU needs larger ones to be busy.
    """

    softcap: float | None = None
    tile: int = 128

    def forward(self, heads: Heads, kind: PieceKind, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = _group_heads(heads)
        scores = self._score(q, k, scale)[0]
        # In place from here on: the scores are the largest tensor, and nobody else has them.
        scores = _add_mask(scores, heads, kind, mask)
        # Divided behind the matmul: exp(S - log-sum-exp) would round by the size of the log-sum-exp once more.
        highest = scores.amax(-1, keepdim=True)
        total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
        out, log_sum = torch.matmul(scores, v).div_(total), highest + total.log()
        n = heads.q.shape[2]
        return out.unflatten(2, (-1, n)).flatten(1, 2).to(heads.q.dtype), log_sum.view(*heads.q.shape[:3])

    def backward(
        self, heads: Heads, result: Result, kind: PieceKind, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = _group_heads(heads)
        scores, capped = self._score(q, k, scale)
        gradient, out = (_group_queries(x, k.shape[1]).to(q.dtype) for x in (result.gradient, result.out))
        # A copy of the scores where the cap's derivative still needs them.
        scores = _add_mask(scores if capped is None else scores.clone(), heads, kind, mask)
        p = scores.sub_(_group_queries(result.log_sum[..., None], k.shape[1])).exp_()
        # p is over all keys of a query, as log_sum is, so the parts of pieces add up without being scaled again.
        dv = torch.matmul(p.mT, gradient)
        ds = torch.matmul(gradient, v.mT).sub_((gradient * out).sum(-1, keepdim=True)).mul_(p)
        if capped is not None:
            # d tanh(x) = 1 - tanh(x)^2.
            ds.mul_(1 - capped.square())
        dq = torch.matmul(ds, k).mul_(scale).unflatten(2, (-1, heads.q.shape[2])).flatten(1, 2)
        dk = torch.matmul(ds.mT, q).mul_(scale)
        return dq.to(heads.q.dtype), dk.to(heads.k.dtype), dv.to(heads.v.dtype)

    def score(self, heads: Heads, kind: PieceKind, mask: Tensor | None, scale: float) -> Tensor:
        """The masked scores of a piece, [B, H, n, m], before a cap."""
        q, k, _ = _group_heads(heads)
        scores = _add_mask(torch.matmul(q, k.mT).mul_(scale), heads, kind, mask)
        return scores.view(*heads.q.shape[:3], -1)

    def _score(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """Scores without mask, and tanh(scale Q K^T / c), whose square the derivative of a cap needs."""
        scores = torch.matmul(q, k.mT).mul_(scale)
        if self.softcap is None:
            return scores, None
        capped = scores.div_(self.softcap).tanh_()
        return capped * self.softcap, capped


def _group_queries(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, H, n, ...] to [B, Hk, H / Hk * n, ...], so that a kv head is not repeated for its query heads."""
    return x.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _group_heads(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    # Wider than bf16: a softmax of thousands of keys loses its small terms there.
    dtype = torch.float64 if heads.q.dtype == torch.float64 else torch.float32
    return _group_queries(heads.q, heads.k.shape[1]).to(dtype), heads.k.to(dtype), heads.v.to(dtype)


def _add_mask(scores: Tensor, heads: Heads, kind: PieceKind, mask: Tensor | None) -> Tensor:
    """scores: [B, Hk, H / Hk * n, m], written to; the mask as the kernels get it."""
    per_head = scores.view(*heads.q.shape[:3], -1)
    if mask is not None:
        per_head += mask
    if kind is PieceKind.CAUSAL:
        unseen = torch.ones(per_head.shape[2:], dtype=torch.bool, device=scores.device).triu_(1)
        per_head.masked_fill_(unseen, -math.inf)
    return scores


def merge_softmax(out: Tensor, log_sum: Tensor, more: Tensor, log_sum_of_more: Tensor) -> None:
    """Merge `more` into out and log_sum, in place. All of one dtype.

    out, more: [..., n, Dv], sum over keys of probability and value; log_sum, log_sum_of_more: [..., n], log of the sum of
    exp(score), -inf where no key was seen.
    """
    out.lerp_(more, torch.sigmoid(log_sum_of_more - log_sum).unsqueeze(-1))
    torch.logaddexp(log_sum, log_sum_of_more, out=log_sum)


def pad(x: Tensor, head_size: int) -> Tensor:
    """Zeros behind the last dim: they add nothing to a score, and what they are as a value is cut off again."""
    return x if x.shape[-1] == head_size else F.pad(x, (0, head_size - x.shape[-1]))


def pad_heads(heads: Heads, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of one size, as flash kernels need them; DeepSeek's have keys of 192 and values of 128."""
    size = -(-max(heads.q.shape[-1], heads.v.shape[-1]) // multiple) * multiple
    return pad(heads.q, size), pad(heads.k, size), pad(heads.v, size)


@dataclass(frozen=True)
class CpuFlash:
    """torch's flash attention for CPUs, which `F.scaled_dot_product_attention` calls. It accumulates in fp64 or fp32."""

    tile: int = 256
    widest: int | None = None
    dtypes: ClassVar = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def forward(self, heads: Heads, kind: PieceKind, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        q, k, v = pad_heads(heads, 1)
        out, log_sum = flash_cpu(q, k, v, 0.0, kind is PieceKind.CAUSAL, attn_mask=mask, scale=scale)
        return out[..., : heads.v.shape[-1]], log_sum

    def backward(
        self, heads: Heads, result: Result, kind: PieceKind, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = pad_heads(heads, 1)
        gradient, out = (pad(x.to(q.dtype), q.shape[-1]) for x in (result.gradient, result.out))
        is_causal = kind is PieceKind.CAUSAL
        dq, dk, dv = flash_cpu_backward(
            gradient, q, k, v, out, result.log_sum, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return dq[..., : heads.q.shape[-1]], dk[..., : heads.k.shape[-1]], dv[..., : heads.v.shape[-1]]
