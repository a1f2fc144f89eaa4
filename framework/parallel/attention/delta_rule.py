"""The gated delta rule (Yang et al. 2024), whose state is a matrix [K, V] for each head:

    S_t = (I - b_t k_t k_t^T) D_t S_{t-1} + b_t k_t v_t^T        o_t = S_t^T q_t / sqrt(K)

D_t = exp(g_t) is one number for a head (gated delta net) or one for each of the K channels (KDA, Kimi Linear).

In chunks of C tokens (Yang et al. 2024, 3.2). With G_i = g_1 + .. + g_i within the chunk, and P_ij = exp(G_i - G_j) for j <= i:

    (I + tril(b_i k_i^T P_ij k_j, -1)) [U | W] = [b_i v_i | b_i exp(G_i) k_i]        one triangular system for each chunk
    S' = M S + N        N = sum_j (exp(G_C - G_j) k_j) u_j^T        M = exp(G_C) - sum_j (exp(G_C - G_j) k_j) w_j^T
    o_i = exp(G_i) q_i S + sum_{j <= i} (q_i^T P_ij k_j) (u_j - w_j S)

So all but S' = M S + N is computed for all chunks at once. Over pieces the maps compose: the scan is over [B | A] from [0 | I], A
the product of the M so far; with S_in from the pieces before, each chunk begins with B + A S_in.

A document that begins in a chunk: P_ij is zero where j lies in another than i, exp(G_i) where i's has begun within the chunk,
exp(G_C - G_j) where j lies in another than the chunk's last token.

    B sequences of T tokens on this rank, in P pieces of N, or c chunks of C; H heads of values, on as many or fewer of keys; K, V
    features of a head's keys and values
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.model.precision import sums_dtype
from framework.parallel.attention.pieces import Pieces

# With decays by channel P_ij is [C, C, K] instead of [C, C]: smaller chunks.
CHUNK, CHUNK_OF_CHANNELS = 64, 16
# Added to the square of a key or query, as in all kernels of the rule.
NORM_EPS = 1e-6


def apply_delta_rule(
    pieces: Pieces,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Called as transformers' functions: query, key [B, T, Hk, K], value [B, T, H, V], g [B, T, H] or [B, T, H, K], beta
    [B, T, H] -> ([B, T, H, V], None)."""
    assert others.get("initial_state") is None, "a mixer in training has no cache"
    dtype = sums_dtype(query.dtype)
    decay = g if g.ndim == 4 else g[..., None]
    # [B, P, Hk, H / Hk, N, .], heads of keys beside the heads of values that they serve.
    keys = key.shape[2]
    q, k, v, b, g = (
        pieces.cut(x.to(dtype)).unflatten(3, (keys, -1)).permute(0, 1, 3, 4, 2, 5)
        for x in (query, key, value, beta[..., None], decay)
    )
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (q, k))
    chunk = min(CHUNK if g.shape[-1] == 1 else CHUNK_OF_CHANNELS, v.shape[-2])
    seen = _Seen(pieces, chunk, query.device)
    chunks = [_chunk(x, chunk) for x in (q * key.shape[-1] ** -0.5, k, v, b, g)]
    o = _scan(chunks, seen, pieces)
    # [B, P, Hk, H / Hk, c, C, V], without the tokens that filled the last chunk.
    o = o.flatten(4, 5)[..., : v.shape[-2], :].permute(0, 1, 4, 2, 3, 5).flatten(3, 4)
    return pieces.join(o).to(query.dtype).contiguous(), None


def apply_by(
    function: Callable[..., tuple[Tensor, Tensor]],
    pieces: Pieces,
    *inputs: Tensor,
    g: Tensor,
    beta: Tensor,
    **others: Any,
) -> tuple[Tensor, None]:
    """`apply_delta_rule` by flash-linear-attention's `chunk_gated_delta_rule` or `chunk_kda`.

    [B | A] over pieces is a state of V + K features of values, those of A zeros; it gives [o_B | o_A], and o = o_B + o_A S_in.
    """
    sequences, (width, values) = len(inputs[0]), (inputs[1].shape[-1], inputs[2].shape[-1])
    q, k, v, g, beta = (pieces.cut(x).flatten(0, 1) for x in (*inputs, g, beta))
    runs, shape = pieces.runs(sequences, q.device), v.shape[:-1]
    options = {name: others[name] for name in ("use_qk_l2norm_in_kernel",) if name in others}
    if runs is not None:
        q, k, v, g, beta = (x.flatten(0, 1)[None] for x in (q, k, v, g, beta))
        # Also on the host: to know how many chunks there are it would wait for the device.
        options |= {"cu_seqlens": runs[0], "cu_seqlens_cpu": runs[1]}
    if not pieces.is_whole:
        v = F.pad(v, (0, width))
        first = F.pad(torch.eye(width, dtype=torch.float32, device=q.device), (values, 0)).expand(v.shape[2], -1, -1)
        first = first.repeat(len(q), 1, 1, 1) if runs is None else first * runs[2][:, None, None, None]
        options |= {"initial_state": first, "output_final_state": True}
    o, final = function(q, k, v, g=g, beta=beta, **options)
    o = o.reshape(*shape, -1).unflatten(0, (sequences, -1))
    if not pieces.is_whole:
        final = (final if runs is None else final[runs[3]]).unflatten(0, (sequences, -1))
        before = pieces.states(final, _step, torch.zeros_like(final[:, 0, ..., :values]))
        o = o[..., :values] + torch.einsum("bpnhk,bphkv->bpnhv", o[..., values:], before.to(o.dtype))
    return pieces.join(o), None


def _chunk(x: Tensor, chunk: int) -> Tensor:
    """[..., N, D] -> [..., c, C, D]; tokens that fill the last chunk leave a state as it is: they are zeros."""
    return F.pad(x, (0, 0, 0, -x.shape[-2] % chunk)).unflatten(-2, (-1, chunk))


class _Seen:
    """Where documents begin in chunks of a length, each a factor in front of the last dim; 1 for all where no document begins.

    pairs: [B or 1, P, 1, 1, c, C, C], of tokens of one document; before: [..., C, 1], of tokens whose document has begun in
    front of the chunk; behind: [..., C, 1], of tokens in the document of the chunk's last one.
    """

    def __init__(self, pieces: Pieces, chunk: int, device: torch.device) -> None:
        starts = pieces.starts(device)
        self.pairs: Tensor | None = None
        if starts is None:
            return
        padded = F.pad(starts, (0, -starts.shape[-1] % chunk), mode="replicate")
        first = padded.unflatten(-1, (-1, chunk))[:, :, None, None]  # [B or 1, P, 1, 1, c, C]
        places = torch.arange(padded.shape[-1], device=device).unflatten(0, (-1, chunk))  # [c, C]
        self.pairs = first[..., None] <= places[:, None, :]
        self.before = (first < places[:, :1])[..., None]
        self.behind = (first[..., -1:] <= places)[..., None]

    def mask(self, x: Tensor, name: str) -> Tensor:
        """x where it is seen, else zero: [..., C, .] by `before` or `behind`."""
        return x if self.pairs is None else x.where(getattr(self, name), 0)

    def pair_decays(self, total: Tensor) -> Tensor:
        """P_ij, zero for what i does not see: total [..., C, D] -> [..., C, C, D]."""
        logarithm = total[..., :, None, :] - total[..., None, :, :]
        chunk = total.shape[-2]
        is_seen = torch.ones(chunk, chunk, dtype=torch.bool, device=total.device).tril()
        if self.pairs is not None:
            is_seen = is_seen & self.pairs
        # Before the exponential, which is too large where a later token's decay is taken back.
        return logarithm.masked_fill(~is_seen[..., None], float("-inf")).exp()


def _scan(chunks: Sequence[Tensor], seen: _Seen, pieces: Pieces) -> Tensor:
    """o: [B, P, Hk, H / Hk, c, C, V] of q, k [B, P, Hk, 1, c, C, K], v, b [..., C, 1] and g [..., C, 1 or K]."""
    q, k, v, b, g = chunks
    total = g.cumsum(-2)
    last = total[..., -1:, :]
    pairs, reads = seen.pair_decays(total), seen.mask(total.exp(), "before")
    writes = k * seen.mask((last - total).exp(), "behind")
    # The system's diagonal is taken for one, and what stands above it is not read.
    system, attention = _products(b * k, k, pairs), _products(q, k, pairs)
    new = torch.linalg.solve_triangular(system, torch.cat([b * v, b * k * reads], -1), upper=False, unitriangular=True)
    u, w = new.split([v.shape[-1], k.shape[-1]], -1)
    # [B, P, Hk, H / Hk, c, K, .]
    added = writes.mT @ u
    kept = reads[..., -1, :, None] * torch.eye(k.shape[-1], dtype=k.dtype, device=k.device) - writes.mT @ w
    states = _scan_chunks(kept, added, pieces)
    return (q * reads) @ states + attention @ (u - w @ states)


def _products(x: Tensor, y: Tensor, pairs: Tensor) -> Tensor:
    """x_i^T P_ij y_j: [..., C, K], [..., C, K], [..., C, C, 1 or K] -> [..., C, C]."""
    if pairs.shape[-1] == 1:
        return (x @ y.mT) * pairs[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", x, y, pairs)


def _scan_chunks(kept: Tensor, added: Tensor, pieces: Pieces) -> Tensor:
    """The state with which each chunk begins: kept M, added N [B, P, Hk, H / Hk, c, K, .] -> [..., c, K, V]."""
    values = added.shape[-1]
    *leading, chunks, width, _ = kept.shape
    state = added.new_zeros(*leading, width, values)
    if not pieces.is_whole:
        identity = torch.eye(width, dtype=kept.dtype, device=kept.device).expand(*leading, width, width)
        state, added = torch.cat([state, identity], -1), F.pad(added, (0, width))
    found = []
    # All that one chunk waits for another for.
    for number in range(chunks):
        found.append(state)
        state = kept[..., number, :, :] @ state + added[..., number, :, :]
    states = torch.stack(found, dim=-3)
    if pieces.is_whole:
        return states
    first = pieces.states(state, _step, torch.zeros_like(state[:, 0, ..., :values]))
    return states[..., :values] + states[..., values:] @ first[..., None, :, :]


def _step(of_piece: Tensor, state: Tensor) -> Tensor:
    """The state [B, .., K, V] behind a piece of the map [B | A], [B, .., K, V + K]."""
    values = state.shape[-1]
    return of_piece[..., values:] @ state + of_piece[..., :values]
