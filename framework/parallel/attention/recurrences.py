"""Recurrences of mixers, in chunks of a sequence: what is within all chunks at once, then from chunk to chunk.

The gated delta rule (Yang et al. 2024), whose state is a matrix [K, V] for each head:

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

The state of a state-space layer is [P, N] for each head:

    h_t = exp(a_t) h_{t-1} + x_t b_t^T        y_t = h_t c_t        h: [P, N]

Mamba-2 (Dao & Gu 2024, state space duality): a_t <= 0 is one number per head. With A_ts = a_{s+1} + .. + a_t within a chunk, and
h_0 the state before it, what is within a chunk is matmuls:

    y_t = sum_{s <= t} exp(A_ts) (c_t . b_s) x_s  +  exp(A_t0) h_0 c_t
    h_L = exp(A_L0) h_0 + sum_s exp(A_Ls) x_s b_s^T

Mamba-1 (Gu & Dao 2023, selective scan): a_t is a number for each of a channel's N states, so within a chunk one token follows
another, with P = 1.

There a document that begins at token t forgets what was before: every exp over an interval that has t in it, its first token left
out, is 0. With r_t, how many documents have begun in the chunk up to t, these are the pairs with r_t != r_s, and those with h_0
where r_t > 0.

    B sequences of T tokens on this rank, in P pieces of N, or c chunks of C; H heads of values, on as many or fewer of keys; K, V
    features of a head's keys and values

    of state spaces: Z pieces of sequences, T tokens of each in K chunks of L, H heads in G groups of R, P features of a head,
    N of its state, D channels
"""

from collections.abc import Callable, Sequence
from math import inf, isqrt
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


# (state that a piece ends with if it begins with zeros, [Z, ...]; product of its decays, as wide, or 1 wide where features share
# one) -> the state with which each piece begins.
Carry = Callable[[Tensor, Tensor], Tensor]


def scan_heads(
    pieces: Pieces, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any
) -> Tensor:
    """Called as transformers' `mamba2_chunk_scan`: hidden_states [B, T, H, P], dt [B, T, H], A [H], B, C [B, T, G, N] ->
    [B, T, H, P], in the dtype of sums. options: D, dt_bias [H], dt_limit, and others that say nothing here."""
    x, a, b, c = (each.to(sums_dtype(hidden_states.dtype)) for each in (hidden_states, A, B, C))
    # Rounded where torch's own path rounds: with the bias in the dtype of dt, and everything behind it in that of sums.
    step = F.softplus(dt + options["dt_bias"].to(dt.dtype)).clamp(*options.get("dt_limit", (0.0, inf))).to(x.dtype)
    batch = _Batch(pieces, x.device)
    x_dt, decay, b, c = (batch.cut(each) for each in (x * step.unsqueeze(-1), a * step, b, c))
    # Without D: what a token adds to its own output does not pass through the state, and needs no pieces.
    y = scan_in_chunks(x_dt, decay, b, c, chunk_size, batch.starts, batch.carry)
    # Families view it with its last two dims as one, as transformers' own lets them.
    return (batch.join(y) + options["D"].unsqueeze(-1) * x).contiguous()


def scan_channels(
    pieces: Pieces, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> Tensor:
    """Called as transformers' `mamba_selective_scan`: hidden_states, dt [B, D, T], A [D, N], B, C [B, N, T] -> [B, D, T], in the
    dtype of sums. options: z [B, D, T], D, delta_bias [D], and others that say nothing here."""
    x, b, c = (each.mT.to(sums_dtype(each.dtype)) for each in (hidden_states, B, C))
    step = F.softplus(dt + options["delta_bias"].to(dt.dtype).unsqueeze(-1)).mT.to(x.dtype)
    batch = _Batch(pieces, x.device)
    y = scan_tokens(batch.cut(x), batch.cut(step), A, batch.cut(b), batch.cut(c), batch.starts, batch.carry)
    return ((batch.join(y) + options["D"] * x) * F.silu(options["z"].mT)).mT


def have_no_kernel(pieces: Pieces, *_inputs: Any, **_others: Any) -> None:
    """Called as transformers' functions for kernels of a whole mixer, which know no pieces: there is none."""


class _Batch:
    """The pieces of a microbatch as Z = B P sequences, and how they pass states on."""

    def __init__(self, pieces: Pieces, device: torch.device) -> None:
        self._pieces, self._shape = pieces, torch.Size()
        first = pieces.starts(device)
        self._begins = None if first is None else first == torch.arange(first.shape[-1], device=device)

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [Z, N, ...]."""
        x = self._pieces.cut(x)
        self._shape = x.shape[:2]
        return x.flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`."""
        return self._pieces.join(x.unflatten(0, self._shape))

    @property
    def starts(self) -> Tensor | None:
        """Where documents begin: bool [Z, N]."""
        return None if self._begins is None else self._begins.expand(self._shape[0], -1, -1).flatten(0, 1)

    def carry(self, state: Tensor, decay: Tensor) -> Tensor:
        """The states with which pieces begin: a `Carry`."""
        if self._pieces.is_whole:
            return torch.zeros_like(state)
        # One message for both: [B, P, decay | state].
        kept = decay.flatten(1).shape[1]
        maps = torch.cat([decay.flatten(1), state.flatten(1)], 1).unflatten(0, self._shape)

        def step(of_piece: Tensor, before: Tensor) -> Tensor:
            factor, added = of_piece.tensor_split([kept], 1)
            return factor.unflatten(1, decay.shape[1:]) * before + added.unflatten(1, state.shape[1:])

        return self._pieces.states(maps, step, torch.zeros_like(state[: self._shape[0]])).flatten(0, 1)


def scan_in_chunks(
    x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, chunk: int, starts: Tensor | None, carry: Carry
) -> Tensor:
    """The outputs y: [Z, T, H, P], in the dtype of x.

    x: [Z, T, H, P], times dt already; log_decay: a, [Z, T, H]; b, c: [Z, T, G, N]; starts: where a document begins, bool [Z, T];
    None: nowhere. carry: called once, with what the pieces end with.
    """
    (z, length, heads, width), groups = x.shape, b.shape[2]
    x, b, c, log_decay = (_cut(each, chunk) for each in (x, b, c, log_decay))
    begun = None if starts is None else _cut(starts.long(), chunk).cumsum(2)
    x = x.unflatten(3, (groups, -1))  # [Z, K, L, G, R, P]
    log_decay = log_decay.unflatten(3, (groups, -1)).permute(0, 1, 3, 4, 2)  # [Z, K, G, R, L]

    # Logarithms first: a product of many decays would be 0 before it is divided, and its gradient lost.
    logs = _sum_between(log_decay)
    within = _see(logs, begun).exp() * torch.einsum("zklgn,zksgn->zkgls", c, b).unsqueeze(3)
    y = torch.einsum("zkgrls,zksgrp->zklgrp", within, x)

    to_end, from_start = logs[..., -1, :].exp(), log_decay.cumsum(-1).exp()
    if begun is not None:
        to_end = to_end * (begun == begun[..., -1:])[:, :, None, None]
        from_start = from_start * (begun == 0)[:, :, None, None]
    states = torch.einsum("zkgrs,zksgrp,zksgn->zkgrpn", to_end, x, b)
    before = _scan_states(states, from_start[..., -1, None, None], carry)
    y = y + torch.einsum("zklgn,zkgrpn,zkgrl->zklgrp", c, before, from_start)
    return y.reshape(z, -1, heads, width)[:, :length]


def _sum_between(x: Tensor) -> Tensor:
    """x_{s+1} + .. + x_t for s < t, else 0: [..., L] -> [..., t, s]. As a difference of two sums it would be rounded by what lies
    before, also by another document."""
    length = x.shape[-1]
    behind = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)
    return x.unsqueeze(-1).expand(*x.shape, length).where(behind, 0).cumsum(-2)


def _see(logs: Tensor, begun: Tensor | None) -> Tensor:
    """Logarithms of decays [Z, K, G, R, t, s], -inf where token t does not see s."""
    length = logs.shape[-1]
    sees = torch.ones(length, length, dtype=torch.bool, device=logs.device).tril()
    if begun is not None:
        sees = (sees & (begun[..., :, None] == begun[..., None, :]))[:, :, None, None]
    # In front of exp, not behind it: the gradient of what is masked there is exactly 0.
    return logs.masked_fill(~sees, -torch.inf)


def scan_tokens(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, starts: Tensor | None, carry: Carry) -> Tensor:
    """The outputs y: [Z, T, D], in the dtype of x, of Mamba-1's recurrence with a_t = dt_t A.

    x, dt: [Z, T, D]; a: A, [D, N]; b, c: [Z, T, N]; starts, carry: as for `scan_in_chunks`.
    """
    length = x.shape[1]
    # Equal numbers of steps within chunks and from chunk to chunk: 2 sqrt(T) instead of T.
    chunk = isqrt(length - 1) + 1
    inputs, dt, b, c = (_cut(each, chunk) for each in (x * dt, dt, b, c))
    inputs = inputs.unsqueeze(-1) * b.unsqueeze(3)  # [Z, K, L, D, N]
    decays, from_start = (dt.unsqueeze(-1) * a).exp(), (dt.cumsum(2).unsqueeze(-1) * a).exp()
    if starts is not None:
        begins = _cut(starts.long(), chunk)
        decays = decays * (begins == 0)[..., None, None]
        from_start = from_start * (begins.cumsum(2) == 0)[..., None, None]
    states = [torch.zeros_like(inputs[:, :, 0])]
    for state, decay in zip(inputs.unbind(2), decays.unbind(2), strict=True):
        states.append(decay * states[-1] + state)
    # The last token's decay since the chunk began is all that a chunk leaves of the state before it.
    before = _scan_states(states[-1], from_start[:, :, -1], carry)
    within = torch.stack(states[1:], 2) + from_start * before.unsqueeze(2)
    return torch.einsum("zkldn,zkln->zkld", within, c).flatten(1, 2)[:, :length]


def _cut(x: Tensor, chunk: int) -> Tensor:
    """[Z, T, ...] -> [Z, K, L, ...], the last chunk filled up with zeros, which leave the state as it is."""
    return F.pad(x, (*[0, 0] * (x.ndim - 2), 0, -x.shape[1] % chunk)).unflatten(1, (-1, chunk))


def _scan_states(states: Tensor, decays: Tensor, carry: Carry) -> Tensor:
    """The state before each chunk, [Z, K, ...]. states: what each chunk adds; decays: what it leaves of the state before."""
    before, products = [torch.zeros_like(states[:, 0])], [torch.ones_like(decays[:, 0])]
    for state, decay in zip(states.unbind(1), decays.unbind(1), strict=True):
        before.append(decay * before[-1] + state)
        products.append(decay * products[-1])
    # Only now is it known with what the pieces begin: it is added to all chunks at once, so no chunk is computed twice.
    first = carry(before.pop(), products.pop())
    return torch.stack(before, 1) + torch.stack(products, 1) * first[:, None]
