"""Attention of an interval of queries to an interval of keys, forward and backward, in one process.

Ring attention and its like compute attention block by block: a block's out and log-sum-exp can be merged with those of other
blocks, and its parts of the gradients added to theirs. Memory is linear in the intervals: no tensor is as large as both.

A block is cut into pieces (`visible_rows`), each piece is a call of a kernel (`attention_kernels`), and pieces of the same
queries are merged:

    L = log(exp(L1) + exp(L2))      out = out1 + sigmoid(L2 - L1) (out2 - out1)
"""

import logging
import math
from dataclasses import replace

import torch
from torch import Tensor

from framework.mesh.context import Interval
from framework.model.attention_kernels import CpuFlash, CudaFlash, Heads, Kernel, Result, TileKernel
from framework.model.precision import sums_dtype
from framework.model.visible_rows import Kind, Piece, Scores, find_pieces, visible_pairs

__all__ = ["BlockAttention", "Scores", "merge_softmax", "visible_pairs"]

log = logging.getLogger(__name__)

# Rows: 32 heads of such a tile are 32 MiB of scores in fp32.
TILES_OF_GPU = 512
FLASH: dict[str, CpuFlash | CudaFlash] = {"cpu": CpuFlash(), "cuda": CudaFlash()}
# Where a kernel for bf16 and the tiles may differ: each rounds out to 8 bits, and a gradient comes through two of these.
AGREEMENT = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class BlockAttention:
    """Made once a run: remembers which kernels work on the devices that it has met. tile: rows of one; None: the kernel's own."""

    def __init__(self, tile: int | None = None) -> None:
        self.tile = tile
        self._works: dict[tuple[str, torch.dtype], bool] = {}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_rows: Interval,
        k_rows: Interval,
        scores: Scores,
        first_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor] | None:
        """(out, log-sum-exp) of this block; None if no query sees any key.

        q: [B, H, n, D]; k: [B, Hk, m, D]; v: [B, Hk, m, Dv]; H a multiple of Hk, any strides.
        first_rows: [B, n], the row at which each query's document begins; None: 0. Best on the host, which reads them.
        out: [B, H, n, Dv] of q's dtype; log-sum-exp: [B, H, n], fp64 for fp64, else fp32; 0 and -inf where a query sees none.
        """
        block = _Block(Heads(q, k, v), q_rows, k_rows, scores, first_rows)
        kernel = self._kernel(q, scores, max(q.shape[-1], v.shape[-1]))
        pieces = self._cut(block, kernel)
        if not pieces:
            return None
        if _is_whole(pieces, q_rows):
            return _forward_piece(block, kernel, pieces[0])
        merged = _Merged(block)
        for piece in pieces:
            merged.add(piece, *_forward_piece(block, kernel, piece))
        return merged.out.to(q.dtype), merged.log_sum

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        log_sum: Tensor,
        q_rows: Interval,
        k_rows: Interval,
        scores: Scores,
        first_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """(dQ, dK, dV): the parts of the gradients that come from this block; None if no query sees any key.

        gradient: [B, H, n, Dv], of the attention's out; out, log_sum: of all blocks merged, with sinks: then exp(S - log_sum) is
        the probability; gradient and out may be of a wider dtype than q. Parts have the dtypes of q, k and v.
        """
        block = _Block(Heads(q, k, v), q_rows, k_rows, scores, first_rows)
        kernel = self._kernel(q, scores, max(q.shape[-1], v.shape[-1]))
        pieces = self._cut(block, kernel)
        if not pieces:
            return None
        result = Result(out, log_sum, gradient)
        if _is_whole(pieces, q_rows) and pieces[0].k == k_rows:
            return _backward_piece(block, kernel, result, pieces[0])
        parts = _Parts(block)
        for piece in pieces:
            parts.add(piece, *_backward_piece(block, kernel, result, piece))
        return parts.dq.to(q.dtype), parts.dk.to(k.dtype), parts.dv.to(v.dtype)

    def _cut(self, block: "_Block", kernel: Kernel) -> list[Piece]:
        tile = self.tile or kernel.tile
        pieces = find_pieces(block.q_rows, block.k_rows, block.scores, block.first_rows, tile)
        return kernel.cut(pieces, tile)

    def _kernel(self, q: Tensor, scores: Scores, width: int) -> Kernel:
        """width: of a head of q, k or v, the widest."""
        device = q.device.type
        if scores.softcap is None and (device == "cpu" or scores.slopes is None) and self._has_flash(q, width):
            return FLASH[device]
        return TileKernel(scores.softcap) if device == "cpu" else TileKernel(scores.softcap, TILES_OF_GPU)

    def _has_flash(self, q: Tensor, width: int) -> bool:
        device = q.device.type
        if device not in FLASH or q.dtype not in FLASH[device].dtypes or width > (FLASH[device].widest or width):
            return False
        if (device, q.dtype) not in self._works:
            self._works[device, q.dtype] = check_kernel(FLASH[device], q.device, q.dtype)
        return self._works[device, q.dtype]


class _Block:
    """The tensors of a block, by the rows of a piece."""

    def __init__(
        self, heads: Heads, q_rows: Interval, k_rows: Interval, scores: Scores, first_rows: Tensor | None
    ) -> None:
        self.heads, self.q_rows, self.k_rows, self.scores, self.first_rows = heads, q_rows, k_rows, scores, first_rows
        self.dtype = sums_dtype(heads.q.dtype)  # of scores and of sums

    def heads_of(self, piece: Piece) -> Heads:
        k, v = self.keys_of(self.heads.k, piece), self.keys_of(self.heads.v, piece)
        return Heads(self.queries_of(self.heads.q, piece), k, v)

    def queries_of(self, x: Tensor, piece: Piece) -> Tensor:
        """x: [B, H, n, ...]"""
        return _rows_of(x, piece.q, self.q_rows[0], piece.sequence)

    def keys_of(self, x: Tensor, piece: Piece) -> Tensor:
        """x: [B, Hk, m, ...]"""
        return _rows_of(x, piece.k, self.k_rows[0], piece.sequence)

    def bias(self, piece: Piece) -> Tensor | None:
        """The additive bias of a piece: [1, 1, n, m] where keys are masked, [1, H, 1 or n, m] with slopes."""
        mask = self._mask(piece) if piece.kind is Kind.MASKED else None
        slopes = self.scores.slopes
        if slopes is None:
            return mask
        # Rows count from the first query of the piece, not of the sequence: fp32 has 7 digits for row and score.
        rows = torch.arange(piece.k[0] - piece.q[0], piece.k[1] - piece.q[0], device=slopes.device)
        alibi = (slopes[:, None].to(self.dtype) * rows)[None, :, None]
        return alibi if mask is None else alibi + mask

    def to_own_row(self, piece: Piece) -> Tensor:
        """slope * (row of the query - first row of the piece's queries): [H, n]."""
        slopes = self.scores.slopes
        assert slopes is not None
        return slopes[:, None].to(self.dtype) * torch.arange(piece.q[1] - piece.q[0], device=slopes.device)

    def _mask(self, piece: Piece) -> Tensor:
        device = self.heads.q.device
        queries = torch.arange(*piece.q, device=device)[:, None]
        keys = torch.arange(*piece.k, device=device)
        seen = keys <= queries
        if self.scores.window is not None:
            seen &= keys > queries - self.scores.window
        if self.first_rows is not None:
            # A piece of a sequence: find_pieces makes no other where there are documents.
            assert piece.sequence is not None
            start = piece.q[0] - self.q_rows[0]
            seen &= keys >= self.first_rows[piece.sequence, start : start + len(queries), None].to(device)
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=device)
        return mask.masked_fill_(~seen, -math.inf)[None, None]


def _rows_of(x: Tensor, rows: Interval, start: int, sequence: int | None) -> Tensor:
    """x: [B, H, n, ...], row 0 being `start`."""
    found = x[:, :, rows[0] - start : rows[1] - start]
    return found if sequence is None else found[sequence : sequence + 1]


def _is_whole(pieces: list[Piece], q_rows: Interval) -> bool:
    """Whether one piece is all there is to compute."""
    return len(pieces) == 1 and pieces[0].sequence is None and pieces[0].q == q_rows


def _forward_piece(block: _Block, kernel: Kernel, piece: Piece) -> tuple[Tensor, Tensor]:
    out, log_sum = kernel.forward(block.heads_of(piece), piece.kind, block.bias(piece), block.scores.scale)
    return out, log_sum if block.scores.slopes is None else log_sum - block.to_own_row(piece)


def _backward_piece(block: _Block, kernel: Kernel, result: Result, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
    of_piece = Result(*(block.queries_of(x, piece) for x in (result.out, result.log_sum, result.gradient)))
    if block.scores.slopes is not None:
        of_piece = replace(of_piece, log_sum=of_piece.log_sum + block.to_own_row(piece))
    return kernel.backward(block.heads_of(piece), of_piece, piece.kind, block.bias(piece), block.scores.scale)


class _Merged:
    """out and log-sum-exp of the pieces so far, in fp32 or fp64."""

    def __init__(self, block: _Block) -> None:
        q, v = block.heads.q, block.heads.v
        self.block = block
        shape = (q.shape[0], q.shape[2], q.shape[1])
        # Tokens before heads, as the layer behind attention wants them.
        self.out = q.new_zeros((*shape, v.shape[-1]), dtype=block.dtype).transpose(1, 2)
        self.log_sum = q.new_full(shape, -math.inf, dtype=block.dtype).transpose(1, 2)

    def add(self, piece: Piece, out: Tensor, log_sum: Tensor) -> None:
        merged_out, merged_sum = self.block.queries_of(self.out, piece), self.block.queries_of(self.log_sum, piece)
        merge_softmax(merged_out, merged_sum, out.to(merged_out.dtype), log_sum.to(merged_sum.dtype))


def merge_softmax(out: Tensor, log_sum: Tensor, more: Tensor, log_sum_of_more: Tensor) -> None:
    """In place: then out and log_sum are of the keys of both. All of one dtype.

    out: [..., n, Dv], sum over keys of probability and value; log_sum: [..., n], log of the sum of exp(score), -inf where no key
    was seen.
    """
    out.lerp_(more, torch.sigmoid(log_sum_of_more - log_sum).unsqueeze(-1))
    torch.logaddexp(log_sum, log_sum_of_more, out=log_sum)


class _Parts:
    """Sums of the gradients of pieces, in fp32 or fp64."""

    def __init__(self, block: _Block) -> None:
        self.block = block
        heads = block.heads
        self.dq, self.dk, self.dv = (torch.zeros_like(x, dtype=block.dtype) for x in (heads.q, heads.k, heads.v))

    def add(self, piece: Piece, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
        self.block.queries_of(self.dq, piece).add_(dq)
        self.block.keys_of(self.dk, piece).add_(dk)
        self.block.keys_of(self.dv, piece).add_(dv)


def check_kernel(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel computes what the tiles do, forward and backward, for every kind of piece; warns where it does not.

    Kernels differ between versions of torch and devices, and an error would show in the loss only.
    """
    square, oblong = _draw(48, 16, device, dtype), _draw(96, 8, device, dtype)
    try:
        difference = max(_differ(kernel, *square, kind) for kind in Kind)
        difference = max(difference, _differ(kernel, *oblong, Kind.FULL))
    except RuntimeError as error:
        log.warning("attention on %s in %s runs without flash attention, which fails: %s", device.type, dtype, error)
        return False
    if difference > AGREEMENT[dtype]:
        where = f"{device.type} in {dtype}"
        log.warning("attention on %s runs without flash attention, which is wrong by %.1g", where, difference)
    return difference <= AGREEMENT[dtype]


def _draw(num_keys: int, value_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Heads, Tensor]:
    """48 queries in 4 heads of 16, keys and values in 2, and a gradient of the out."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 4, 48, 16), (1, 2, num_keys, 16), (1, 2, num_keys, value_dim), (1, 4, 48, value_dim)
    q, k, v, gradient = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    return Heads(q, k, v), gradient


def _differ(kernel: Kernel, heads: Heads, gradient: Tensor, kind: Kind) -> float:
    """The largest difference between a kernel and the tiles, in what they compute forward and backward."""
    wide, n = sums_dtype(heads.q.dtype), heads.q.shape[2]
    ahead = torch.ones(n, n, dtype=torch.bool, device=heads.q.device).triu_(1)
    mask = heads.q.new_zeros((1, 1, n, n), dtype=wide).masked_fill_(ahead, -math.inf)
    bias = mask if kind is Kind.MASKED else None
    out, log_sum = TileKernel().forward(heads, kind, bias, 0.25)
    result = Result(out, log_sum, gradient)
    wanted = [out, log_sum, *TileKernel().backward(heads, result, kind, bias, 0.25)]
    found = [*kernel.forward(heads, kind, bias, 0.25), *kernel.backward(heads, result, kind, bias, 0.25)]
    return max((a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
