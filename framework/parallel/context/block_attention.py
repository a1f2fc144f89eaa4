"""Attention of an interval of queries to an interval of keys, forward and backward, in one process.

Ring attention and its like compute attention block by block: a block's out and log-sum-exp can be merged with those of other
blocks, and its parts of the gradients added to theirs. Memory is linear in the intervals: no tensor is as large as both.

A block is cut into pieces (`visible_rows`), each piece is one call of a kernel (`kernels`), and the pieces of the same queries
are merged (`merge`).
"""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.mesh.context import Interval
from framework.model.precision import sums_dtype
from framework.parallel.context.kernels import CpuFlash, CudaFlash, Heads, Kernel, Result, TileKernel
from framework.parallel.context.merge import merge_softmax
from framework.parallel.context.visible_rows import BlockPiece, PieceKind, Scores, cut_pieces, find_pieces

log = logging.getLogger(__name__)

# Rows: 32 heads of such a tile are 32 MiB of scores in fp32.
TILES_OF_GPU = 512
FLASH: dict[str, CpuFlash | CudaFlash] = {"cpu": CpuFlash(), "cuda": CudaFlash()}
# Where a kernel for bf16 and the tiles may differ: each rounds out to 8 bits, and a gradient comes through two of these.
AGREEMENT = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class AttentionBlock:
    """Queries against keys."""

    heads: Heads
    """q [B, H, n, D], k [B, Hk, m, D], v [B, Hk, m, Dv]; H a multiple of Hk, any strides."""
    q_rows: Interval
    """Global rows of the n queries."""
    k_rows: Interval
    """Global rows of the m keys."""
    scores: Scores
    first_rows: Tensor | None = None
    """[B, n], the row at which each query's document begins; None: 0. Best on the host, which reads them."""

    @property
    def sums_dtype(self) -> torch.dtype:
        """The dtype of scores and of sums over pieces."""
        return sums_dtype(self.heads.q.dtype)

    def heads_of(self, piece: BlockPiece) -> Heads:
        """The heads of a piece, in its rows."""
        k, v = self.keys_of(self.heads.k, piece), self.keys_of(self.heads.v, piece)
        return Heads(self.queries_of(self.heads.q, piece), k, v)

    def queries_of(self, x: Tensor, piece: BlockPiece) -> Tensor:
        """x: [B, H, n, ...] -> its rows of the piece's queries, [B or 1, H, rows, ...]."""
        return _rows_of(x, piece.q, self.q_rows[0], piece.sequence)

    def keys_of(self, x: Tensor, piece: BlockPiece) -> Tensor:
        """x: [B, Hk, m, ...] -> its rows of the piece's keys, [B or 1, Hk, rows, ...]."""
        return _rows_of(x, piece.k, self.k_rows[0], piece.sequence)

    def mask_of(self, piece: BlockPiece) -> Tensor | None:
        """The additive mask of a MASKED piece, [1, 1, n, m]; None for others."""
        if piece.kind is not PieceKind.MASKED:
            return None
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
        mask = torch.zeros(seen.shape, dtype=self.sums_dtype, device=device)
        return mask.masked_fill_(~seen, -math.inf)[None, None]


class BlockAttention:
    """Made once a run: remembers which kernels work on the devices that it has met. tile: rows of one; None: the kernel's own."""

    def __init__(self, tile: int | None = None) -> None:
        self.tile = tile
        self._works: dict[tuple[str, torch.dtype], bool] = {}

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor] | None:
        """(out, log-sum-exp) of the block; None if no query sees any key.

        out: [B, H, n, Dv] of q's dtype; log-sum-exp: [B, H, n], fp64 for fp64, else fp32; 0 and -inf where a query sees none.
        """
        kernel = self._kernel(block)
        pieces = self._cut(block, kernel)
        if not pieces:
            return None
        if _is_whole(pieces, block.q_rows):
            return _forward_piece(block, kernel, pieces[0])
        q, v = block.heads.q, block.heads.v
        shape = (q.shape[0], q.shape[2], q.shape[1])
        # Tokens before heads, as the layer behind attention wants them.
        out = q.new_zeros((*shape, v.shape[-1]), dtype=block.sums_dtype).transpose(1, 2)
        log_sum = q.new_full(shape, -math.inf, dtype=block.sums_dtype).transpose(1, 2)
        for piece in pieces:
            more, sum_of_more = _forward_piece(block, kernel, piece)
            # Views of the rows of the piece: it is merged in place.
            merged = block.queries_of(out, piece), block.queries_of(log_sum, piece)
            merge_softmax(*merged, more.to(out.dtype), sum_of_more.to(log_sum.dtype))
        return out.to(q.dtype), log_sum

    def backward(self, block: AttentionBlock, result: Result) -> tuple[Tensor, Tensor, Tensor] | None:
        """(dQ, dK, dV), in the shapes and dtypes of q, k and v: what this block adds to them; None if no query sees any key.

        result: of all blocks merged, with sinks: then exp(S - log_sum) is the probability. Its out and gradient may be of a wider
        dtype than q.
        """
        kernel = self._kernel(block)
        pieces = self._cut(block, kernel)
        if not pieces:
            return None
        if _is_whole(pieces, block.q_rows) and pieces[0].k == block.k_rows:
            return _backward_piece(block, kernel, result, pieces[0])
        q, k, v = block.heads.q, block.heads.k, block.heads.v
        dq, dk, dv = (torch.zeros_like(x, dtype=block.sums_dtype) for x in (q, k, v))
        for piece in pieces:
            dq_piece, dk_piece, dv_piece = _backward_piece(block, kernel, result, piece)
            block.queries_of(dq, piece).add_(dq_piece)
            block.keys_of(dk, piece).add_(dk_piece)
            block.keys_of(dv, piece).add_(dv_piece)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _cut(self, block: AttentionBlock, kernel: Kernel) -> list[BlockPiece]:
        tile = self.tile or kernel.tile
        pieces = find_pieces(block.q_rows, block.k_rows, block.scores, block.first_rows, tile)
        return list(cut_pieces(pieces, tile)) if isinstance(kernel, TileKernel) else pieces

    def _kernel(self, block: AttentionBlock) -> Kernel:
        device, softcap = block.heads.q.device.type, block.scores.softcap
        if softcap is None and self._has_flash(block.heads):
            return FLASH[device]
        return TileKernel(softcap) if device == "cpu" else TileKernel(softcap, TILES_OF_GPU)

    def _has_flash(self, heads: Heads) -> bool:
        device, dtype, width = heads.q.device, heads.q.dtype, max(heads.q.shape[-1], heads.v.shape[-1])
        flash = FLASH.get(device.type)
        if flash is None or dtype not in flash.dtypes or width > (flash.widest or width):
            return False
        if (device.type, dtype) not in self._works:
            self._works[device.type, dtype] = check_kernel(flash, device, dtype)
        return self._works[device.type, dtype]


def _rows_of(x: Tensor, rows: Interval, start: int, sequence: int | None) -> Tensor:
    """x: [B, H, n, ...], row 0 being `start`."""
    found = x[:, :, rows[0] - start : rows[1] - start]
    return found if sequence is None else found[sequence : sequence + 1]


def _is_whole(pieces: list[BlockPiece], q_rows: Interval) -> bool:
    """Whether one piece is all there is to compute."""
    return len(pieces) == 1 and pieces[0].sequence is None and pieces[0].q == q_rows


def _forward_piece(block: AttentionBlock, kernel: Kernel, piece: BlockPiece) -> tuple[Tensor, Tensor]:
    return kernel.forward(block.heads_of(piece), piece.kind, block.mask_of(piece), block.scores.scale)


def _backward_piece(
    block: AttentionBlock, kernel: Kernel, result: Result, piece: BlockPiece
) -> tuple[Tensor, Tensor, Tensor]:
    of_piece = Result(*(block.queries_of(x, piece) for x in (result.out, result.log_sum, result.gradient)))
    return kernel.backward(block.heads_of(piece), of_piece, piece.kind, block.mask_of(piece), block.scores.scale)


def check_kernel(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel computes what the tiles do, forward and backward, for every kind of piece; warns where it does not.

    Kernels differ between versions of torch and devices, and an error would show in the loss only.
    """
    # Values narrower than keys, and more keys than queries: kernels differ most in what is not square.
    square, oblong = _draw(48, 16, device, dtype), _draw(96, 8, device, dtype)
    try:
        difference = max(_differ(kernel, *square, kind) for kind in PieceKind)
        difference = max(difference, _differ(kernel, *oblong, PieceKind.FULL))
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


def _differ(kernel: Kernel, heads: Heads, gradient: Tensor, kind: PieceKind) -> float:
    """The largest difference between a kernel and the tiles, in what they compute forward and backward."""
    wide, n = sums_dtype(heads.q.dtype), heads.q.shape[2]
    ahead = torch.ones(n, n, dtype=torch.bool, device=heads.q.device).triu_(1)
    mask = heads.q.new_zeros((1, 1, n, n), dtype=wide).masked_fill_(ahead, -math.inf)
    mask_of_kind = mask if kind is PieceKind.MASKED else None
    out, log_sum = TileKernel().forward(heads, kind, mask_of_kind, 0.25)
    result = Result(out, log_sum, gradient)
    wanted = [out, log_sum, *TileKernel().backward(heads, result, kind, mask_of_kind, 0.25)]
    found = [
        *kernel.forward(heads, kind, mask_of_kind, 0.25),
        *kernel.backward(heads, result, kind, mask_of_kind, 0.25),
    ]
    return max((a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
