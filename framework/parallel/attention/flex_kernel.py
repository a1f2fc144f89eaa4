"""FlexAttention as a kernel of forms for which no other has one: scores with a soft cap, on CUDA.

It is differentiated by autograd, which knows of the block's own keys alone. For the gradient over all keys, with their
log-sum-exp L and out O, let l and o be the block's and w = exp(l - L). Then P = w exp(S - l), and

    dS = P * (dO V^T - rowsum(dO * O))  is autograd's of  (o, l)  with  d o = w dO,  d l = w rowsum(dO * (o - O)).

Backward computes the forward once more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from framework.parallel.attention.kernels import Heads, Packing, Result, TileKernel
from framework.parallel.attention.visible_rows import PieceKind
from framework.torch_private import without_modes

# (q, k, v, score_mod, block mask, scale) -> (out [B, H, n, Dv], log-sum-exp [B, H, n]).
Attend = Callable[[Tensor, Tensor, Tensor, Any, BlockMask | None, float], tuple[Tensor, Tensor]]
BLOCK = 128


def attend_compiled(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: BlockMask | None, scale: float
) -> tuple[Tensor, Tensor]:
    """FlexAttention's kernel. Without the modes that catch a layer's outputs: under these nothing is compiled, and scores of all
    pairs are made."""
    with without_modes():
        out, aux = _compiled()(q, k, v, score_mod, mask, scale, True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


@cache
def _compiled() -> Any:
    # One for all layers. Shapes are static: a run has few, and static ones give the faster kernel.
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class FlexKernel:
    """S = c tanh(scale Q K^T / c) with the cap c. MASKED pieces go to tiles."""

    softcap: float
    attend: Attend = attend_compiled
    tile: int = 512
    widest: int | None = 256
    dtypes: ClassVar = (torch.bfloat16, torch.float16)

    def forward(self, heads: Heads, kind: PieceKind, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        if mask is not None:
            return TileKernel(self.softcap).forward(heads, kind, mask, scale)
        return self._attend(heads, _mask_of(heads, kind), scale)

    def backward(
        self, heads: Heads, result: Result, kind: PieceKind, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask is not None:
            return TileKernel(self.softcap).backward(heads, result, kind, mask, scale)
        return self._differentiate(heads, result, _mask_of(heads, kind), scale)

    def forward_packed(self, heads: Heads, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        return self._attend(heads, make_block_mask(packing, heads.q.device), scale)

    def backward_packed(
        self, heads: Heads, result: Result, packing: Packing, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._differentiate(heads, result, make_block_mask(packing, heads.q.device), scale)

    def _attend(self, heads: Heads, mask: BlockMask | None, scale: float) -> tuple[Tensor, Tensor]:
        cap = self.softcap

        def cap_score(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return cap * torch.tanh(score / cap)

        return self.attend(heads.q, heads.k, heads.v, cap_score, mask, scale)

    def _differentiate(
        self, heads: Heads, result: Result, mask: BlockMask | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        leaves = tuple(x.detach().requires_grad_() for x in (heads.q, heads.k, heads.v))
        with torch.enable_grad():
            out, log_sum = self._attend(Heads(*leaves), mask, scale)
        # Gradients of the merged result, as this block's own backward has to be given them (this file's first lines).
        weight = torch.exp(log_sum.detach() - result.log_sum)[..., None]
        gradient = weight * result.gradient
        of_sum = (gradient * (out.detach() - result.out)).sum(-1)
        found = torch.autograd.grad((out, log_sum), leaves, (gradient.to(out.dtype), of_sum.to(log_sum.dtype)))
        return cast(tuple[Tensor, Tensor, Tensor], found)


def _mask_of(heads: Heads, kind: PieceKind) -> BlockMask | None:
    is_causal = kind is PieceKind.CAUSAL
    return make_block_mask(Packing((0, heads.q.shape[2])), heads.q.device) if is_causal else None


def make_block_mask(packing: Packing, device: torch.device) -> BlockMask:
    """The blocks of keys that some queries of a block see, and those that all see, from the first row that each query sees.

    Of [B, n / 128, n / 128] elements at the most, where torch's own way evaluates a mask of all pairs.
    """
    first = packing.first_rows(device)
    n = first.shape[1]
    rows = torch.arange(0, n, BLOCK, device=device)
    last = (rows + BLOCK - 1).clamp(max=n - 1)
    # The first row that is seen rises along a sequence: a block's first query sees the oldest keys, its last one the fewest.
    oldest, fewest = first[:, rows, None], first[:, last, None]
    is_seen = (rows[None, None] <= rows[None, :, None]) & (last[None, None] >= oldest)
    is_full = (last[None, None] <= rows[None, :, None]) & (rows[None, None] >= fewest)

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (k >= first[b * (first.shape[0] > 1), q])

    # Full blocks are computed without a mask, others ask `sees` for each pair.
    partial, full = (_order(each[:, None]) for each in (is_seen & ~is_full, is_full))
    return BlockMask.from_kv_blocks(*partial, *full, BLOCK, sees, (n, n))


def _order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 1, q blocks, k blocks] bool -> how many of a row are set, and their numbers in front of the others'."""
    return blocks.sum(-1, dtype=torch.int32), blocks.to(torch.int8).argsort(stable=True, dim=-1, descending=True).to(
        torch.int32
    )
