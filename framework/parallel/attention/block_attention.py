"""Attention of an interval of queries to an interval of keys, forward and backward, in one process, by the kernel that suits the
device and the form (`FLASH`).

Ring attention and its like compute attention block by block: a block's out and log-sum-exp can be merged with those of other
blocks, and its parts of the gradients added to theirs. Memory is linear in the intervals: no tensor is as large as both.

A block is cut into pieces (`visible_rows`), each piece is one call of a kernel (`kernels`), and the pieces of the same queries
are merged.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from framework.comm.fused import compute_apart
from framework.errors import ModelError
from framework.mesh.token_layout import Interval
from framework.model.precision import sums_dtype
from framework.parallel.attention.cuda_kernels import CudaFlash, CudnnFlash, FlexKernel
from framework.parallel.attention.kernels import (
    CpuFlash,
    Heads,
    Kernel,
    Packing,
    Result,
    TileKernel,
    merge_softmax,
)
from framework.parallel.attention.visible_rows import BlockPiece, Documents, PieceKind, Scores, cut_pieces, find_pieces

log = logging.getLogger(__name__)

# Rows: 32 heads of such a tile are 32 MiB of scores in fp32.
TILES_OF_GPU = 512
# The flash kernels of a device, the one to take first; behind them stand the tiles.
FLASH: dict[str, tuple[CpuFlash | CudaFlash, ...]] = {"cpu": (CpuFlash(),), "cuda": (CudnnFlash(), CudaFlash())}
# Kernels that are built for each shape, in a second or more, and kept. Documents that begin on another rank are pieces of other
# sizes in each microbatch.
BUILT_BY_SHAPE = (CudnnFlash, FlexKernel)
# Added to the score of a key that is not chosen. Finite: all keys of a piece may be, and what such a piece gives is merged with
# the weight exp(HIDDEN) = 0.
HIDDEN = -1e30
# Scale of the scores on which kernels are compared.
SCALE = 0.25
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
    documents: Documents | None = None
    """Documents of whole sequences; None: each is one document."""
    chosen: Tensor | None = None
    """Rows of the keys that each query sees no others of, [B, n, k]; None: all."""

    @property
    def packing(self) -> Packing:
        """The block as one call's, where queries and keys are the same rows."""
        assert self.q_rows == self.k_rows, f"queries of {self.q_rows}, keys of {self.k_rows}"
        return Packing(self.q_rows, self.documents, self.scores.window)

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
        """The additive mask of a MASKED piece, [1, 1, n, m], or [B, 1, n, m] with chosen keys; None for others."""
        if piece.kind is not PieceKind.MASKED:
            return None
        device = self.heads.q.device
        queries = torch.arange(*piece.q, device=device)[:, None]
        keys = torch.arange(*piece.k, device=device)
        seen = keys <= queries
        if self.scores.window is not None:
            seen &= keys > queries - self.scores.window
        if self.documents is not None:
            # A piece of all sequences is one of documents that all have.
            first_rows = self.documents.first_rows(device)[piece.sequence or 0, slice(*piece.q), None]
            seen &= keys >= first_rows
        hidden = -math.inf
        if self.chosen is not None:
            seen, hidden = seen & self._is_chosen(piece), HIDDEN
        mask = torch.zeros(seen.shape, dtype=self.sums_dtype, device=device).masked_fill_(~seen, hidden)
        return mask[None, None] if mask.ndim == 2 else mask[:, None]

    def _is_chosen(self, piece: BlockPiece) -> Tensor:
        """Whether each key of a piece is chosen by each query: [B or 1, n, m]."""
        assert self.chosen is not None
        start, stop = piece.k
        of_queries = _rows_of(self.chosen[:, None], piece.q, self.q_rows[0], piece.sequence)[:, 0]
        keys = of_queries.long() - start
        # A place behind the keys for rows of other pieces.
        keys = keys.where((keys >= 0) & (keys < stop - start), stop - start)
        found = torch.zeros(*keys.shape[:2], stop - start + 1, dtype=torch.bool, device=keys.device)
        return found.scatter_(-1, keys, True)[..., :-1]


class BlockAttention:
    """Made once a run: remembers which kernels work on the devices that it has met. tile: rows of one; None: the kernel's own."""

    def __init__(self, tile: int | None = None) -> None:
        self.tile = tile
        self._faults: dict[tuple[Kernel, torch.device, torch.dtype], str | None] = {}

    def forward(self, block: AttentionBlock) -> tuple[Tensor, Tensor] | None:
        """(out, log-sum-exp) of the block; None if no query sees any key.

        out: [B, H, n, Dv] of q's dtype; log-sum-exp: [B, H, n], fp64 for fp64, else fp32; 0 and -inf where a query sees none.
        """
        kernel = self._kernel(block)
        if (packed := _packs(kernel, block)) is not None:
            return packed.forward_packed(block.heads, block.packing, block.scores.scale)
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
        if (packed := _packs(kernel, block)) is not None:
            return packed.backward_packed(block.heads, result, block.packing, block.scores.scale)
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

    def find_largest(self, block: AttentionBlock, num_rows: int) -> Tensor:
        """The largest logit of each query head, [H], without a soft cap; -inf where nothing is seen. num_rows: of a sequence;
        queries behind are padding."""
        q, rows = block.heads.q, min(block.q_rows[1], num_rows)
        largest = q.new_full((q.shape[1],), -math.inf, dtype=block.sums_dtype)
        # Tiles whatever kernel attends: flash kernels return sums of exponentials, which bound a maximum but are none.
        kernel = TileKernel(None, self.tile or TILES_OF_GPU)
        for piece in self._cut(block, kernel) if rows > block.q_rows[0] else ():
            scores = kernel.score(block.heads_of(piece), piece.kind, block.mask_of(piece), block.scores.scale)
            # Padding stands behind all tokens, so no token sees it as a key; as a query it would count.
            if rows > piece.q[0]:
                largest = largest.maximum(scores[:, :, : rows - piece.q[0]].amax((0, 2, 3)))
        return largest

    def _cut(self, block: AttentionBlock, kernel: Kernel) -> list[BlockPiece]:
        tile = self.tile or kernel.tile
        pieces = find_pieces(block.q_rows, block.k_rows, block.scores, block.documents, tile)
        if block.chosen is not None:
            return [replace(piece, kind=PieceKind.MASKED) for piece in cut_pieces(pieces, tile)]
        return list(cut_pieces(pieces, tile)) if isinstance(kernel, TileKernel) else pieces

    def _kernel(self, block: AttentionBlock) -> Kernel:
        q, v, softcap = block.heads.q, block.heads.v, block.scores.softcap
        # Heads of unequal sizes are filled up to the wider one.
        width = max(q.shape[-1], v.shape[-1])
        has_any_size = block.documents is not None and block.q_rows != block.k_rows
        for kernel in self._candidates(q.device, softcap):
            if (
                not (has_any_size and isinstance(kernel, BUILT_BY_SHAPE))
                and q.dtype in kernel.dtypes
                and width <= (kernel.widest or width)
                and self._works(kernel, q.device, q.dtype)
            ):
                return kernel
        return TileKernel(softcap) if q.device.type == "cpu" else TileKernel(softcap, TILES_OF_GPU)

    def _candidates(self, device: torch.device, softcap: float | None) -> Sequence[CpuFlash | CudaFlash | FlexKernel]:
        if softcap is not None:
            # No flash kernel of torch caps scores; on a CPU FlexAttention has no backward.
            return (FlexKernel(softcap),) if device.type == "cuda" else ()
        found = FLASH.get(device.type, ())
        # Only there is cuDNN known to be faster.
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        return [each for each in found if is_hopper or not isinstance(each, CudnnFlash)]

    def _works(self, kernel: CpuFlash | CudaFlash | FlexKernel, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether a kernel is right on the device; asked once. Tiles take its place on a CPU, and flash attention that of cuDNN;
        on a GPU they would be ten times slower and nobody would know: ModelError."""
        # Asked on the device itself, with a wait, in the first layer of the first step and never again.
        if (kernel, device, dtype) not in self._faults:
            fault = self._faults[kernel, device, dtype] = find_fault(kernel, device, dtype)
            where = f"attention on {device.type} in {str(dtype).removeprefix('torch.')}"
            if fault is not None and device.type == "cuda" and not isinstance(kernel, CudnnFlash):
                raise ModelError(
                    f"{where}: {type(kernel).__name__} {fault}. model.attention=sdpa leaves attention to transformers"
                )
            if fault is not None:
                log.warning("%s runs without %s, which %s", where, type(kernel).__name__, fault)
        return self._faults[kernel, device, dtype] is None


def _packs(kernel: Kernel, block: AttentionBlock) -> CudaFlash | FlexKernel | None:
    """The kernel, if it computes the block in one call where it would be several pieces."""
    # A kernel call for each document, and a mask for each edge of a window, would leave a GPU idle between them.
    is_several = block.q_rows == block.k_rows and (block.documents is not None or block.scores.window is not None)
    is_several &= block.chosen is None
    return kernel if is_several and isinstance(kernel, CudaFlash | FlexKernel) else None


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


def find_fault(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """The difference of a kernel from the tiles, forward or backward, for any kind of piece and of packing, if there is one.

    Kernels differ between versions of torch and devices, and an error would show in the loss only.
    """
    return compute_apart(device, _find_fault, kernel, device, dtype)


def _find_fault(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    # Values narrower than keys, and more keys than queries: kernels differ most in what is not square.
    square, oblong = _draw(48, 16, device, dtype), _draw(96, 8, device, dtype)
    try:
        difference = max(_differ(kernel, *square, kind) for kind in PieceKind)
        difference = max(difference, _differ(kernel, *oblong, PieceKind.FULL))
        if isinstance(kernel, CudaFlash | FlexKernel):
            difference = max(difference, *(_differ_packed(kernel, *square, window) for window in (None, 7)))
    except RuntimeError as error:
        return f"fails: {error}"
    return None if difference <= AGREEMENT[dtype] else f"is wrong by {difference:.1g}"


def _draw(num_keys: int, value_dim: int, device: torch.device, dtype: torch.dtype) -> tuple[Heads, Tensor]:
    """48 queries in 4 heads of 16, keys and values in 2, and a gradient of the out."""
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 4, 48, 16), (1, 2, num_keys, 16), (1, 2, num_keys, value_dim), (1, 4, 48, value_dim)
    q, k, v, gradient = (torch.randn(size, generator=generator).to(device, dtype) for size in sizes)
    return Heads(q, k, v), gradient


def _differ(kernel: Kernel, heads: Heads, gradient: Tensor, kind: PieceKind) -> float:
    """The largest difference between a kernel and the tiles, in what they compute forward and backward."""
    n = heads.q.shape[2]
    block, is_masked = AttentionBlock(heads, (0, n), (0, n), Scores(SCALE)), kind is PieceKind.MASKED
    mask = block.mask_of(BlockPiece(kind, (0, n), (0, n))) if is_masked else None
    wanted, result = _compute_tiles(kernel, heads, gradient, kind, mask)
    found = [*kernel.forward(heads, kind, mask, SCALE), *kernel.backward(heads, result, kind, mask, SCALE)]
    return _largest_difference(found, wanted)


def _differ_packed(kernel: CudaFlash | FlexKernel, heads: Heads, gradient: Tensor, window: int | None) -> float:
    """`_differ` of documents in one call."""
    rows = 0, heads.q.shape[2]
    block = AttentionBlock(heads, rows, rows, Scores(SCALE, window), Documents(((0, 5, 31),), rows[1]))
    mask = block.mask_of(BlockPiece(PieceKind.MASKED, rows, rows))
    wanted, result = _compute_tiles(kernel, heads, gradient, PieceKind.MASKED, mask)
    forward = kernel.forward_packed(heads, block.packing, SCALE)
    return _largest_difference([*forward, *kernel.backward_packed(heads, result, block.packing, SCALE)], wanted)


def _compute_tiles(
    kernel: Kernel, heads: Heads, gradient: Tensor, kind: PieceKind, mask: Tensor | None
) -> tuple[list[Tensor], Result]:
    """out, log-sum-exp and gradients of q, k and v by the tiles, and the result that a backward reads."""
    tiles = TileKernel(getattr(kernel, "softcap", None))
    out, log_sum = tiles.forward(heads, kind, mask, SCALE)
    result = Result(out, log_sum, gradient)
    return [out, log_sum, *tiles.backward(heads, result, kind, mask, SCALE)], result


def _largest_difference(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    return max((a.double() - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
