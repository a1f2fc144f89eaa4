"""LocalParameters: what this rank holds of each parameter of a model on meta, and the layouts that say so.

Every parameter is taken (this rank's part of it, with shards over `tp`), replicated (whole on all ranks of `tp`), or kept.
Layouts are refined, never replaced: the global shape and what earlier transforms have sharded stay.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout, part
from framework.parallel.tensor.partition import PartitionedDim


class LocalParameters:
    """Parameters are known by identity, so a tied one is dealt with once, under whichever name comes first."""

    def __init__(self, layouts: Mapping[str, Layout], tp: Communicator, kv: Communicator) -> None:
        """layouts: of every parameter, under each of its names."""
        self.tp, self.kv = tp, kv
        self._given = layouts
        self._local: dict[nn.Parameter, nn.Parameter] = {}
        self._refined: dict[nn.Parameter, Layout] = {}

    def take(self, name: str, whole: Any, dim: PartitionedDim) -> nn.Parameter:
        """This rank's part of the parameter `name`, on meta, with whole's dtype."""
        if whole not in self._local:
            given = self._given[name]
            layout = self._count(replace(given, shards=(*given.shards, *dim.shards)), dim)
            empty = torch.empty(layout.shape_local, dtype=whole.dtype, device="meta")
            self._add(whole, nn.Parameter(empty, requires_grad=whole.requires_grad), layout)
        return self._local[whole]

    def replicate(self, name: str, whole: nn.Parameter, is_partial: bool) -> nn.Parameter:
        """The whole parameter on all ranks. is_partial: each rank's gradient is one part of a sum over `tp`."""
        given = self._given[name]
        # An equal interval each: the norm counts every element once, whoever holds it.
        interval = part(given.numel_local, self.tp.rank, self.tp.size)
        partial = (*given.partial, "tp") if is_partial else given.partial
        layout = replace(given, replicated=(*given.replicated, "tp"), partial=partial, interval=interval)
        return self._add(whole, whole, layout)

    def keep(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        """The parameter as it was given: an earlier transform has said what this rank has of it."""
        return self._add(whole, whole, self._given[name])

    def replicate_rest(self, parameters: Iterable[tuple[str, nn.Parameter]], is_partial: Callable[[str], bool]) -> None:
        """Replicate those of the named parameters that nobody has dealt with."""
        done = set(self._local.values())
        for name, parameter in parameters:
            if parameter not in done:
                self.replicate(name, parameter, is_partial(name))

    def layouts(self, model: nn.Module) -> dict[str, Layout]:
        """Of every parameter, under each of its names; those that the model lacks as they were given."""
        names = model.named_parameters(remove_duplicate=False)
        return {**self._given, **{name: self._refined[parameter] for name, parameter in names}}

    def _add(self, whole: nn.Parameter, local: nn.Parameter, layout: Layout) -> nn.Parameter:
        self._local[whole], self._refined[local] = local, layout
        return local

    def _count(self, held: Layout, dim: PartitionedDim) -> Layout:
        """The layout with what this rank counts of its part, and over which axis the gradient is partial."""
        if not dim.copied:
            return held
        axis = dim.shards[0].dim
        rows = held.shape_local[axis]
        if dim.copied == rows:
            interval = part(held.numel_local, self.kv.rank, self.kv.size)
            return replace(held, replicated=(*held.replicated, "kv"), partial=(*held.partial, "kv"), interval=interval)
        # An interval of the flattened part can leave out the last rows only if they lie together.
        assert axis == 0, f"a packed weight with shared keys is split along dim 0, not {axis}"
        # No layout says that some rows are replicated: backward sums their output's gradient (`ColumnLinear.sum_copied`), and
        # the first of those who share them counts them.
        counted = rows if self.kv.rank == 0 else rows - dim.copied
        return replace(held, interval=(0, counted * (held.numel_local // rows)))
