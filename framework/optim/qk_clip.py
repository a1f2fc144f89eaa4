"""QK-clip: attention logits bounded by their projections (MuonClip, Kimi Team 2025, arXiv 2507.20534, section 2.1).

    after an update, for each key head g with S_g > t:    W_q, W_k of the head <- (t / S_g)^(1/2) of them

S_g is the largest logit of the step (`parallel/attention/logit_maxima.py`), over all ranks: one all-reduce of a number a head.
Biases are scaled with their weights, and all queries of a group with its key. Each rank scales the elements that it owns.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.transfer import fetch
from framework.optim.qk_rows import QkRows
from framework.optim.update_clipping import ParameterPart
from framework.optim.update_rules import FlatShard
from framework.parallel.attention.logit_maxima import LogitMaxima
from framework.recipe.schema import Optim


class QkClip:
    """optim: has t above. rows: of all projections, by parameter; parts: all that this rank updates."""

    def __init__(
        self,
        optim: Optim,
        rows: Mapping[str, QkRows],
        parts: Sequence[ParameterPart],
        maxima: LogitMaxima,
        world: Communicator,
    ):
        assert optim.qk_clip is not None, "no limit (optim.qk_clip)"
        self._limit, self._maxima, self._world = optim.qk_clip, maxima, world
        self._parts = [(part, rows[part.name], _find_own(part, rows[part.name])) for part in parts if part.name in rows]

    def gather(self) -> None:
        """Make the maxima those of all ranks. Collective over the world."""
        all_reduce(self._maxima.values, self._world, "max", label="attention logits")

    def forget(self) -> None:
        """Begin a step's maxima anew."""
        self._maxima.values.fill_(-inf)

    def clip(self, shards: Iterable[FlatShard], skip: Tensor) -> None:
        """Scale the projections in these shards, which were updated, unless `skip`, a scalar on their device, is 1."""
        own, taken = set(shards), 1.0 - skip.double()
        largest = fetch(self._maxima.values, skip.device)
        factors = torch.where(largest > self._limit, self._limit / largest, 1.0) ** taken
        for part, rows, (heads, powers) in self._parts:
            if part.shard in own:
                scale = factors[rows.layer][heads] ** powers
                part.value.mul_(_expand(scale, part, rows.dim).to(part.value.dtype))


def _find_own(part: ParameterPart, rows: QkRows) -> tuple[Tensor, Tensor]:
    """Head and power of each of the part's local indices."""
    indices = torch.cat([torch.arange(*run) for run in part.layout.runs[rows.dim]])
    device = part.value.device
    return rows.heads[indices].to(device), rows.powers[indices].to(device)


def _expand(scale: Tensor, part: ParameterPart, dim: int) -> Tensor:
    """A number of each local index along `dim`, for the elements of the part: [n]."""
    low, high = part.layout.interval or (0, part.layout.numel_local)
    inner = part.layout.numel_local // part.layout.shape_local[0]  # elements of an index along dim 0
    first, last = low // inner, -(-high // inner)
    rows = scale[first:last].repeat_interleave(inner) if dim == 0 else scale.repeat(last - first)
    return rows[low - first * inner : high - first * inner]
