"""Matmuls of a layer with an adapter: low-rank weights beside a frozen one, in the place of the layer's own.

    lora    Y = X W^T + s (X A^T) B^T + b        dX = dY W + s (dY B) A
            dA = s (dY B)^T X                    dB = s dY^T (X A^T)
    dora    Y = c (X W^T + s (X A^T) B^T) + b    c = m / |W + s B A|, whose length is taken as constant in backward
            the same with c dY for dY            dm = sum dY (X W^T + s (X A^T) B^T) / |W + s B A|

A layer's callers know one matmul: what a tensor-parallel region gathers, sums and leaves for later is the same with an adapter.
Column layers have all of A and their rows of B: dA is one rank's part. Row layers have their columns of A and all of B: Y is one
rank's part, and so is dB.

    ... sequences and tokens, R rows, K features in, N features out, r the rank
"""

from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.model.adapters import DROPOUT, MAGNITUDE, A, B, name_beside
from framework.model.matmul import GradView, Matmul, RowGroups, StackedMatmul, accumulate_matmul, stacked_matmul


@dataclass
class AdapterSwitch:
    """Whether forwards of a stage add what its adapters give. Off, they are the frozen model's, to the bit."""

    is_on: bool = True


class AdapterMatmul(Matmul):
    """The matmuls of a linear layer with an adapter. base: of its frozen weight; scale: s.

    views: main gradients of the adapter's parameters, by their names in the layer. over: the ranks that hold other columns of the
    weight, over which the length of rows is summed. copied, copies: the last of the outputs, which so many ranks compute, and of
    which dY comes summed over them.
    """

    def __init__(
        self,
        base: Matmul,
        layer: nn.Module,
        scale: float,
        views: dict[str, GradView],
        switch: AdapterSwitch,
        over: Communicator | None = None,
        copied: int = 0,
        copies: int = 1,
    ) -> None:
        super().__init__(layer, base.is_transposed)
        self.base, self.scale, self.views, self.over, self.switch = base, scale, views, over, switch
        self.copied, self.copies = copied, copies
        # Dropout of the low-rank path: the seed of its mask, and the dropped share. The mask is drawn again where it is needed:
        # kept, it would hold a byte for each input of the layer beyond activation checkpointing.
        self._seed: int | None = None
        self._dropped_share = 0.0
        # State of one forward and backward: the number of rows, and the low-rank activations and gradients.
        self._rows = -1
        self._low: Tensor | None = None
        self._low_gradient: Tensor | None = None
        # Norms of the merged columns (DoRA). Each forward computes them anew, and backward belongs to the same step.
        self._lengths: Tensor | None = None
        # Stands for all: whether gradients are left for later, and that something is trained.
        self.write_gradient_to(views[B])

    @property
    def a(self) -> Tensor:
        """[r, K], out of autograd."""
        return self._layer.get_parameter(A).data

    @property
    def b(self) -> Tensor:
        """[N, r], out of autograd."""
        return self._layer.get_parameter(B).data

    @property
    def is_dora(self) -> bool:
        return MAGNITUDE in self.views

    def begin(self, x: Tensor) -> "AdapterMatmul":
        passage = copy(self)
        passage._rows = x.shape[:-1].numel()
        dropout: Any = getattr(self._layer, DROPOUT, None)
        if dropout is not None and dropout.training:
            # Drawn where forward is, so that a layer that is computed again finds the same ones.
            # On the host, whose stream is seeded as the device's, so that nobody waits for it.
            passage._seed, passage._dropped_share = int(torch.randint(2**62, ())) ^ dropout.mask, dropout.p
        return passage

    def forward(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if not self.switch.is_on:
            return self.base.forward(x, bias, out)
        if not self.is_dora:
            return self._add(
                self.base.forward(x, bias, out), self._keep("_low", self._dropped(x) @ self.a.t()), self.b.t()
            )
        self._lengths = self._measure_rows()
        y = self._project(x, out).mul_(self._factors(self._lengths))
        return y if bias is None else y.add_(bias)

    def input_gradient(self, dy: Tensor, out: Tensor | None = None) -> Tensor:
        dy = self._scaled(dy)
        dx = self.base.input_gradient(dy, out)
        if self._seed is None:
            return self._add(dx, self._keep("_low_gradient", dy @ self.b), self.a)
        return dx.add_(self._dropped(self._keep("_low_gradient", dy @ self.b) @ self.a), alpha=self.scale)

    def weight_gradient(self, x: Tensor, dy: Tensor) -> None:
        """Add dA, dB and dm to their main gradients."""
        x, dy = self._dropped(x).reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        if self.is_dora:
            assert self._lengths is not None, "backward comes behind a forward"
            wide = self._lengths.dtype
            self.views[MAGNITUDE].add((dy.to(wide) * self._project(x)).sum(0) / self._lengths)
            dy = self._scaled(dy)
        low = x @ self.a.t() if self._low is None else self._low
        accumulate = partial(accumulate_matmul, scale=self.scale)
        self.views[B].add_matmul(dy, low, accumulate)
        if self.copied:
            # Each holder of these outputs has the sum of all: together they would count it once for each.
            dy = dy.clone()
            dy[:, -self.copied :] /= self.copies
        of_low = dy @ self.b if self._low_gradient is None or self.copied else self._low_gradient
        self.views[A].add_matmul(of_low, x, accumulate)

    def _dropped(self, x: Tensor) -> Tensor:
        """x as the low-rank path has it, [..., K]: without what is dropped, and the rest larger."""
        if self._seed is None:
            return x
        generator, rest = torch.Generator(x.device).manual_seed(self._seed), 1 - self._dropped_share
        return x * torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(rest, generator=generator) / rest

    def _keep(self, name: str, low: Tensor) -> Tensor:
        """Keep X A^T or dY B, [..., r], for the weights' gradients, in a passage that has computed it for all rows at once."""
        rows = low.reshape(-1, low.shape[-1])
        # Not of a layer that is computed again in backward, which is to keep little.
        if len(rows) == self._rows and self.kept is None:
            setattr(self, name, rows)
        return low

    def _project(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """X W^T + s (X A^T) B^T.  x: [..., K] -> [..., N]."""
        return self._add(self.base.forward(x, None, out), x @ self.a.t(), self.b.t())

    def _add(self, y: Tensor, low: Tensor, matrix: Tensor) -> Tensor:
        """y += s low matrix, in place.  y: [..., n]; low: [..., r]; matrix: [r, n]."""
        if not y.is_contiguous():
            return y.add_(low @ matrix, alpha=self.scale)
        y.view(-1, y.shape[-1]).addmm_(low.reshape(-1, low.shape[-1]), matrix, alpha=self.scale)
        return y

    def _measure_rows(self) -> Tensor:
        """|W + s B A| of each row, [N], of all ranks' columns, in at least fp32."""
        merged = torch.addmm(self.matrix, self.b, self.a, alpha=self.scale)
        squares = merged.to(torch.promote_types(merged.dtype, torch.float32)).square_().sum(1)
        if self.over is not None:
            all_reduce(squares, self.over, label="lengths of an adapter's rows")
        return squares.sqrt_()

    def _factors(self, lengths: Tensor) -> Tensor:
        """c: [N], in the dtype of the weight."""
        magnitude = self._layer.get_parameter(MAGNITUDE).data
        return (magnitude.to(lengths.dtype) / lengths).to(magnitude.dtype)

    def _scaled(self, dy: Tensor) -> Tensor:
        """c dY.  dy: [..., N]."""
        if not self.is_dora:
            return dy
        assert self._lengths is not None, "backward comes behind a forward"
        return dy * self._factors(self._lengths)


class StackedAdapterMatmul(StackedMatmul):
    """The matmuls of a stack of experts' weights with adapters: as `AdapterMatmul`, each group with its own pair."""

    def __init__(
        self, base: StackedMatmul, layer: nn.Module, scale: float, views: dict[str, GradView], switch: AdapterSwitch
    ) -> None:
        """views: of A and B, by those words."""
        super().__init__(layer, base.name, base.is_transposed)
        self.scale, self.views, self.switch = scale, views, switch
        self._names = {part: name_beside(f".{base.name}", part)[1:] for part in (A, B)}
        self.write_gradient_to(views[B])

    @property
    def a(self) -> Tensor:
        """[E, r, K], out of autograd."""
        return self._layer.get_parameter(self._names[A]).data

    @property
    def b(self) -> Tensor:
        """[E, N, r], out of autograd."""
        return self._layer.get_parameter(self._names[B]).data

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        if not self.switch.is_on:
            return super().forward(x, groups)
        low = stacked_matmul(x, self.a, groups)
        return super().forward(x, groups).add_(stacked_matmul(low, self.b, groups), alpha=self.scale)

    def input_gradient(self, dy: Tensor, groups: RowGroups) -> Tensor:
        low = stacked_matmul(dy, self.b.transpose(1, 2), groups)
        added = stacked_matmul(low, self.a.transpose(1, 2), groups)
        return super().input_gradient(dy, groups).add_(added, alpha=self.scale)

    def weight_gradient(self, x: Tensor, dy: Tensor, groups: RowGroups) -> None:
        """Add dA and dB to their main gradients.  x: [R, K]; dy: [R, N]."""
        low = stacked_matmul(dy, self.b.transpose(1, 2), groups).mul_(self.scale)
        self.views[A].add_stacked_matmul(low, x, groups)
        self.views[B].add_stacked_matmul(dy, stacked_matmul(x, self.a, groups).mul_(self.scale), groups)
