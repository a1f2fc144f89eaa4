"""Averages of the weights over the steps of a run (`train.ema`), as validation and export may read them in place of the weights.

    E <- E + (1 - d) (W - E)        after each update; E begins as W does

An average lies where its masters do and is cut as they are, so it sends nothing, and a checkpoint keeps it as a state of the
optimizer. It is in the moments' dtype, at least fp32: in bf16 a change of (1 - d) would be rounded away.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from framework.optim.update_clipping import ParameterPart
from framework.optim.update_rules import FlatShard

# The kind of its entries in checkpoints.
AVERAGE = "ema"


class WeightAverages:
    """The averages of shards, which have their values. decay: d above, the share of an average that a step keeps."""

    def __init__(self, shards: Iterable[FlatShard], decay: float):
        self._decay = decay
        self._values = {shard: shard.value.detach().to(shard.gradient.dtype, copy=True) for shard in shards}

    def of(self, shard: FlatShard) -> Tensor:
        """The average of a shard, [n]."""
        return self._values[shard]

    def update(self, shards: Iterable[FlatShard], skip: Tensor) -> None:
        """Move the averages of shards that were updated; no effect where `skip`, a scalar on their device, is 1."""
        taken = 1.0 - skip.double()
        for shard in shards:
            average = self._values[shard]
            average.lerp_(shard.value.to(average.dtype), (taken * (1 - self._decay)).to(average.dtype))

    def restart(self, parts: Iterable[ParameterPart]) -> None:
        """Begin anew with the values that these parameters have now."""
        for part in parts:
            self._values[part.shard][part.start : part.stop].copy_(part.value)

    @contextmanager
    def in_place_of_values(self) -> Iterator[None]:
        """Have shards hold their averages for a while. Memory: a copy of the values."""
        kept = [shard.value.clone() for shard in self._values]
        for shard, average in self._values.items():
            shard.value.copy_(average)
        yield
        torch._foreach_copy_([shard.value for shard in self._values], kept)
