"""What a kernel updates of a shard's values: the values themselves or, of values in bf16 (`precision.master=none`), one chunk
after the other in fp32, which is rounded stochastically to where it came from.

    value (bf16) -> scratch (fp32) -> the optimizer's kernel -> round(scratch, bits of the element) -> value (bf16)

To nearest, a weight would stay where it is while updates are below 1/512 of it, as most are; stochastically it is right on
average. The bits are a function of (seed, step, parameter, element): replicas round alike, and so does every layout. A step that
is skipped leaves in the scratch what bf16 has, which no bits round to something else.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.optim.contract import FlatShard
from framework.optim.states import StateChunk, StateRun
from framework.optim.stochastic_rounding import draw_bits, round_to_bf16


def is_rounded(shard: FlatShard) -> bool:
    """Whether a shard's values have fewer bits than its gradient, in whose dtype a kernel updates."""
    return shard.value.dtype != shard.gradient.dtype


class Masters:
    """The values of chunks, by their number, as a kernel updates them. seed: of the rounding.

    Memory: the largest chunk in fp32, and its random bits.
    """

    def __init__(self, chunks: Sequence[StateChunk], device: torch.device, seed: int):
        self._chunks, self._seed = chunks, seed
        self._rounded = [[run for run in chunk.runs if is_rounded(run.shard)] for chunk in chunks]
        size = max((sum(run.numel for run in runs) for runs in self._rounded), default=0)
        self._scratch = torch.zeros(size, device=device)
        self._bits = torch.zeros(size, dtype=torch.int32, device=device)

    def views(self, number: int) -> list[Tensor]:
        """For each run of a chunk the values that a kernel updates between `load` and `store`: [numel], the gradient's dtype."""
        rounded = iter(self._split(self._scratch, number))
        return [next(rounded) if is_rounded(run.shard) else _values(run) for run in self._chunks[number].runs]

    def load(self, number: int) -> None:
        """Bring a chunk's values to its views."""
        for run, scratch in zip(self._rounded[number], self._split(self._scratch, number), strict=True):
            scratch.copy_(_values(run))

    def store(self, number: int, step: int) -> None:
        """Keep what is in a chunk's views; step: what the random bits of this step are drawn for."""
        scratches, bits = self._split(self._scratch, number), self._split(self._bits, number)
        for run, scratch, words in zip(self._rounded[number], scratches, bits, strict=True):
            draw_bits((self._seed, "master", step, run.parameter), run.boxes, run.shape, words)
            _values(run).copy_(round_to_bf16(scratch, words))

    def _split(self, flat: Tensor, number: int) -> Sequence[Tensor]:
        sizes = [run.numel for run in self._rounded[number]]
        return flat[: sum(sizes)].split_with_sizes(sizes) if sizes else ()


def _values(run: StateRun) -> Tensor:
    return run.shard.value[run.start : run.stop]
