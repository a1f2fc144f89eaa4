"""Pieces: the parts of every sequence that a rank has, and the inputs and states that recurrent mixers carry over from the
parts before them.

A rank of `cp` has one or two intervals of every sequence (`ContextSlices`); all intervals are equally long, and in the order of
rows they are the pieces 0, 1, ... of the sequence. A recurrent mixer computes each piece as if a sequence began with it, and
then needs of those before

    window    the last w tokens of the one before                     each rank sends its own to who has the next piece
    state     S_p = F_{p-1}(F_{p-2}( ... F_0(0)))                     all ranks gather the maps F of all pieces, and apply them

F_p takes the state in front of a piece to that behind it: S -> A_p S + B_p, where A_p is the product of all that the piece's
tokens do to a state, and B_p the state behind it if it begins with none. What is sent is a window's tokens and one map for each
piece, however long these are. The adjoint of either way back is autograd's: the sender gets the window's gradient, and a map's
gradient is the sum over all ranks that have applied it.

The short convolution of a mixer is here, since a window is all that it needs: depthwise and causal, over the last K tokens,

    y_t = f( b + sum_{j < K} w_j x_{t-j} )        x_{t-j} = 0 in front of the token's document

for each channel alone.

Documents are known by one number for each token: the place in its piece, negative where it lies before, of the first token of
its document. A token sees those from there on.

    B sequences, T tokens of each on this rank, in P pieces of N; `all` pieces of a sequence on all ranks; D channels
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from framework.comm import duals
from framework.comm.communicator import Communicator
from framework.comm.p2p import exchange
from framework.comm.transfer import upload
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import Axis
from framework.model.opaque import apply_map
from framework.parallel.attention.visible_rows import Documents

# The axis of a caller with whole sequences, outside of any layout.
ONE_RANK = Communicator(Axis("cp", 1, 0))


class Pieces:
    """The pieces of this rank of `cp`, and the documents of the microbatch that a layer computes just now."""

    def __init__(self, slices: ContextSlices, cp: Communicator) -> None:
        self.slices, self.cp = slices, cp
        self.documents: Documents | None = None
        # [all] (rank, number on the rank) in the order of rows.
        held = [(rank, number) for rank in range(cp.size) for number in range(slices.chunks)]
        self._order = sorted(held, key=lambda at: slices.of_rank(at[0]).intervals[at[1]])
        self._own = [self._order.index((cp.rank, number)) for number in range(slices.chunks)]
        self._windows = _Windows(self._order, self._own, cp)

    @property
    def is_whole(self) -> bool:
        """Whether one piece is the whole sequence."""
        return len(self._order) == 1

    @contextmanager
    def of(self, documents: Documents | None) -> Iterator[None]:
        """While a layer computes a microbatch with these documents; None: each sequence is one."""
        outer, self.documents = self.documents, documents
        try:
            yield
        finally:
            self.documents = outer

    def cut(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [B, P, N, ...]."""
        return x.unflatten(1, (self.slices.chunks, -1))

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`: [B, P, N, ...] -> [B, T, ...]."""
        return x.flatten(1, 2)

    def starts(self, device: torch.device) -> Tensor | None:
        """The place in its piece at which each token's document begins, [B or 1, P, N] int64; None where every sequence is one
        document."""
        documents, intervals = self.documents, self.slices.intervals
        if documents is None:
            return None

        def find() -> Tensor:
            rows = documents.first_rows(device)
            return torch.stack([rows[:, start:stop] - start for start, stop in intervals], dim=1)

        return documents.keep(("starts", intervals, device), find)

    def runs(self, sequences: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Documents in the pieces of so many sequences, one behind the other as kernels for sequences of any length take them;
        None where every sequence is one document.

        Cumulative lengths [runs + 1] int32, on the device and on the host; whether each run's document began in front of its
        piece, bool [runs]; the number of each piece's last run, [B P].
        """
        documents, intervals = self.documents, self.slices.intervals
        if documents is None:
            return None

        def find() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            given = zip(*([runs for _, runs in documents.runs(each)] for each in intervals), strict=True)
            pieces = [runs for sequence in given for runs in sequence] * (sequences // len(documents.starts))
            ends = torch.tensor(
                [0, *accumulate(run.stop - run.start for runs in pieces for run in runs)], dtype=torch.int32
            )
            goes_on = torch.tensor([run.first < run.start for runs in pieces for run in runs])
            last = torch.tensor([*accumulate(map(len, pieces))]) - 1
            return upload(ends, device), ends, upload(goes_on, device), upload(last, device)

        return documents.keep(("runs", intervals, sequences, device), find)

    def window(self, x: Tensor, length: int) -> Tensor:
        """The last tokens of the piece before each, zeros in front of the first: x: [B, P, N, ...] -> [B, P, length, ...]. With
        shorter pieces than that they are the last of those before that one, and their ranks send in turn."""
        tokens = min(length, x.shape[2])
        tail = x[:, :, x.shape[2] - tokens :].contiguous()
        parts: list[Tensor] = []
        # Pieces shorter than a window pass on what has come to them; in the same number of rounds on all ranks.
        while sum(part.shape[2] for part in parts) < length:
            tail = self._windows.apply(tail)
            parts.insert(0, tail)
        return torch.cat(parts, dim=2)[:, :, -length:] if len(parts) > 1 else tail

    def states(self, maps: Tensor, step: Callable[[Tensor, Tensor], Tensor], first: Tensor) -> Tensor:
        """The state with which each piece begins, [B, P, ...], by the maps of all pieces before it.

        maps: [B, P, ...], of each piece whatever `step` reads: (map of a piece, state [B, ...]) -> the state behind the piece.
        first: the state in front of a sequence, [B, ...].
        """
        gathered = duals.gather(maps.unsqueeze(0), self.cp, 0)
        states = [first]
        # To the last piece on every rank: what it gathers has part in its result, so all come to the gather's adjoint.
        for rank, number in self._order:
            states.append(step(gathered[rank][:, number], states[-1]))
        return torch.stack(states, dim=1)[:, self._own]


class _Windows:
    """Tokens of each piece for who has the next one: a map [B, P, w, ...] -> [B, P, w, ...] between ranks, zeros for the first
    piece. Its adjoint goes from each piece to the one before."""

    def __init__(self, order: Sequence[tuple[int, int]], own: Sequence[int], cp: Communicator) -> None:
        self._order, self._own, self._cp = order, own, cp
        self.number: Tensor | None = None

    def apply(self, x: Tensor) -> Tensor:
        """x: [B, P, w, ...], contiguous."""
        return apply_map(self, [x], [x.shape])[0]

    def map(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], is_adjoint: bool) -> list[Tensor]:
        """`apply` of one tensor, or its adjoint."""
        parts, step = tensors[0].unbind(1), -1 if is_adjoint else 1
        sends, receives, own = [], [], dict(zip(self._own, range(len(parts)), strict=True))
        came = [torch.zeros_like(each, memory_format=torch.contiguous_format) for each in parts]
        # In the order of the pieces that are sent, on both sides: so messages between two ranks match.
        for piece, (rank, _) in enumerate(self._order):
            if not 0 <= piece + step < len(self._order):
                continue
            to, place = self._order[piece + step]
            if rank == to == self._cp.rank:
                came[place].copy_(parts[own[piece]])
            elif rank == self._cp.rank:
                sends.append((parts[own[piece]].contiguous(), to))
            elif to == self._cp.rank:
                receives.append((came[place], rank))
        if sends or receives:
            exchange(sends, receives, self._cp, "windows of tokens").wait()
        return [torch.stack(came, dim=1)]


def convolve(
    pieces: Pieces,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_others: Any,
) -> Tensor:
    """Called as transformers' `causal_conv1d_fn`: hidden_states [B, D, T], weight [D, K], bias [D] -> [B, D, T]."""
    length = weight.shape[-1] - 1
    x = pieces.cut(hidden_states.transpose(1, 2)).to(weight.dtype)
    # [B, P, D, K - 1 + N]
    x = torch.cat([pieces.window(x, length), x], dim=2).transpose(2, 3)
    starts = pieces.starts(x.device)
    if starts is None:
        y = F.conv1d(x.flatten(0, 1), weight[:, None], bias, groups=len(weight)).unflatten(0, x.shape[:2])
    else:
        y = _convolve_documents(x, weight, bias, starts)
    y = y if activation is None else ACT2FN[activation](y)
    return pieces.join(y.transpose(2, 3)).transpose(1, 2).to(hidden_states.dtype)


def _convolve_documents(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
    """x: [B, P, D, K - 1 + N], weight [D, K], bias [D], starts [B or 1, P, N] -> [B, P, D, N]."""
    taps, tokens = weight.shape[-1], starts.shape[-1]
    places = torch.arange(tokens, device=x.device)
    y = weight[:, -1:] * x[..., taps - 1 :]
    # Left out and not taken back: the sum has exactly what a document's own tokens give.
    for back in range(1, taps):
        is_own = (starts <= places - back)[:, :, None]
        y = y + weight[:, taps - 1 - back, None] * x[..., taps - 1 - back : taps - 1 - back + tokens].where(is_own, 0)
    return y if bias is None else y + bias[:, None]
