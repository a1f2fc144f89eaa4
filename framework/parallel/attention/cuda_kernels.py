"""Flash attention on CUDA, dense and packed.

torch's operators below `F.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn`, called without autograd:
a piece's backward wants the log-sum-exp of all pieces. Packed, all documents of a microbatch are one call, whatever their number
and lengths: tokens [T, H, D] of all sequences, one behind the other, and the ends of the documents. No kernel here takes a mask.
Key-value heads are shared, not repeated.

`check_kernel` compares each kernel with the tiles before its first use on a device.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from framework.parallel.attention.kernels import Heads, Packing, Result, TileKernel, pad, pad_heads
from framework.parallel.attention.visible_rows import PieceKind
from framework.torch_private import cudnn, cudnn_backward, flash, flash_backward

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
