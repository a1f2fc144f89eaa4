"""Flash attention and FlexAttention on CUDA, dense and packed.

torch's operators below `F.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn`, called without autograd:
a piece's backward wants the log-sum-exp of all pieces. Packed, all documents of a microbatch are one call, whatever their number
and lengths: tokens [T, H, D] of all sequences, one behind the other, and the ends of the documents. No flash kernel takes a mask.
Key-value heads are shared, not repeated. FlexAttention has the form that no flash kernel has: scores with a soft cap.

`block_attention.find_fault` compares each kernel with the tiles before its first use on a device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from framework.parallel.attention.kernels import Heads, Packing, Result, TileKernel, pad, pad_heads
from framework.parallel.attention.visible_rows import PieceKind
from framework.torch_private import allow_graphs, cudnn, cudnn_backward, flash, flash_backward, recording, without_modes

# Heads are filled up with zeros to a multiple of so many features.
HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class CudaFlash:
    """FlashAttention as torch has it (2, or 3 where `torch.nn.attention.activate_flash_attention_impl` has chosen it). MASKED
    pieces go to tiles."""

    tile: int = 512
    widest: int | None = 256
    dtypes: ClassVar = (torch.bfloat16, torch.float16)

    def forward(self, heads: Heads, kind: PieceKind, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        if mask is not None:
            return TileKernel().forward(heads, kind, mask, scale)
        # Tokens before heads, which is how projections leave them: nothing is copied.
        q, k, v = (x.transpose(1, 2) for x in pad_heads(heads, HEAD_MULTIPLE))
        # Without cumulative lengths: every sequence of the batch is as long as the others.
        lengths = None, None, q.shape[1], k.shape[1]
        out, log_sum, *_ = flash(q, k, v, *lengths, 0.0, kind is PieceKind.CAUSAL, False, scale=scale)
        return out.transpose(1, 2)[..., : heads.v.shape[-1]], log_sum

    def backward(
        self, heads: Heads, result: Result, kind: PieceKind, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask is not None:
            return TileKernel().backward(heads, result, kind, mask, scale)
        q, k, v = (x.transpose(1, 2) for x in pad_heads(heads, HEAD_MULTIPLE))
        gradient, out = (pad(x.to(q.dtype), q.shape[-1]).transpose(1, 2) for x in (result.gradient, result.out))
        lengths = None, None, q.shape[1], k.shape[1]
        is_causal, random = kind is PieceKind.CAUSAL, _no_dropout(q)
        found = flash_backward(
            gradient, q, k, v, out, result.log_sum.contiguous(), *lengths, 0.0, is_causal, *random, scale=scale
        )
        return _cut(heads, *(x.transpose(1, 2) for x in found))

    def forward_packed(self, heads: Heads, packing: Packing, scale: float) -> tuple[Tensor, Tensor]:
        """`forward` of a whole square block, with its documents and window, in one call."""
        q, k, v = (_join_sequences(x) for x in pad_heads(heads, HEAD_MULTIPLE))
        B, _, n, _ = heads.q.shape
        ends, longest = packing.ends(B, q.device)
        sight = _find_sight(packing)
        out, log_sum, *_ = flash(
            q, k, v, ends, ends, longest, longest, 0.0, packing.window is None, False, scale=scale, **sight
        )
        # [H, B n] of a packed call.
        return _part_sequences(out, B)[..., : heads.v.shape[-1]], log_sum.unflatten(1, (B, n)).transpose(0, 1)

    def backward_packed(
        self, heads: Heads, result: Result, packing: Packing, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (_join_sequences(x) for x in pad_heads(heads, HEAD_MULTIPLE))
        gradient, out = (_join_sequences(pad(x.to(q.dtype), q.shape[-1])) for x in (result.gradient, result.out))
        B = heads.q.shape[0]
        ends, longest = packing.ends(B, q.device)
        # Over all blocks and sinks, in the order of a packed call: the kernel's probabilities are those of the merged softmax.
        log_sum = result.log_sum.transpose(0, 1).flatten(1).contiguous()
        lengths, random, sight = (ends, ends, longest, longest), _no_dropout(q), _find_sight(packing)
        is_causal = packing.window is None
        found = flash_backward(gradient, q, k, v, out, log_sum, *lengths, 0.0, is_causal, *random, scale=scale, **sight)
        return _cut(heads, *(_part_sequences(x, B) for x in found))


@dataclass(frozen=True)
class CudnnFlash(CudaFlash):
    """cuDNN's attention for pieces without a mask, which Hopper runs faster than FlashAttention-2; packed calls are flash's."""

    widest: int | None = 128

    def forward(self, heads: Heads, kind: PieceKind, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        if mask is not None:
            return TileKernel().forward(heads, kind, mask, scale)
        # It is asked for the log-sum-exp, which it keeps with a dim more than flash attention does.
        q, k, v = pad_heads(heads, HEAD_MULTIPLE)
        out, log_sum, *_ = cudnn(q, k, v, None, True, 0.0, kind is PieceKind.CAUSAL, False, scale=scale)
        return out[..., : heads.v.shape[-1]], log_sum.view(q.shape[:3])

    def backward(
        self, heads: Heads, result: Result, kind: PieceKind, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if mask is not None:
            return TileKernel().backward(heads, result, kind, mask, scale)
        q, k, v = pad_heads(heads, HEAD_MULTIPLE)
        gradient, out = (pad(x.to(q.dtype), q.shape[-1]) for x in (result.gradient, result.out))
        lengths = None, None, q.shape[2], k.shape[2]
        # The random state of a dropout of zero, which is not read.
        seed, offset = torch.zeros(2, dtype=torch.int64, device=q.device).unbind()
        found = cudnn_backward(
            gradient, q, k, v, out, result.log_sum.unsqueeze(-1).contiguous(), seed, offset, None, *lengths, 0.0,
            kind is PieceKind.CAUSAL, scale=scale,
        )  # fmt: skip
        return _cut(heads, *found)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """The random state of a dropout, of which there is none."""
    return torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)


def _cut(heads: Heads, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients without the features that heads were filled up with."""
    return dq[..., : heads.q.shape[-1]], dk[..., : heads.k.shape[-1]], dv[..., : heads.v.shape[-1]]


def _join_sequences(x: Tensor) -> Tensor:
    """[B, H, n, D] -> [B n, H, D]; a view of what projections leave."""
    return x.transpose(1, 2).flatten(0, 1)


def _part_sequences(x: Tensor, sequences: int) -> Tensor:
    """[B n, H, D] -> [B, H, n, D]."""
    return x.unflatten(0, (sequences, -1)).transpose(1, 2)


def _find_sight(packing: Packing) -> dict[str, int]:
    """The rows that a query sees in front of itself and behind, -1 for all there are."""
    # A window counts a query's own row, the kernels do not.
    return {"window_size_left": -1 if packing.window is None else packing.window - 1, "window_size_right": 0}


# (q, k, v, score_mod, block mask, scale) -> (out [B, H, n, Dv], log-sum-exp [B, H, n]).
Attend = Callable[[Tensor, Tensor, Tensor, Any, BlockMask | None, float], tuple[Tensor, Tensor]]
BLOCK = 128
# Sizes of queries and keys, with and without a mask, forward and backward: more than a run has.
FORMS = 128


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
    # One for all layers. Shapes are static: a run has few, and static ones give the faster kernel. Behind the limit torch
    # computes the scores of all pairs, with a warning in the log.
    allow_graphs(FORMS)
    return torch.compile(flex_attention, dynamic=False)


@dataclass(frozen=True)
class FlexKernel:
    """FlexAttention with S = c tanh(scale Q K^T / c), the cap being c. MASKED pieces go to tiles.

    It is differentiated by autograd, which knows of the block's own keys alone, and computes the forward once more. For the
    gradient over all keys, with their log-sum-exp L and out O, let l and o be the block's and w = exp(l - L). Then
    P = w exp(S - l), and

        dS = P * (dO V^T - rowsum(dO * O))  is autograd's of  (o, l)  with  d o = w dO,  d l = w rowsum(dO * (o - O)).
    """

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
        # Also within the operator of a compiled layer, where autograd otherwise records nothing.
        with recording():
            out, log_sum = self._attend(Heads(*leaves), mask, scale)
        # Gradients of the merged result, as this block's own backward has to be given them.
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
