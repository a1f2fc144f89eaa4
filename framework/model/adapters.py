"""Adapters of a model on meta: the parameters that one adds to a weight, their initial values, the matmuls of a layer
with one, and the weights with it merged.

    lora    W + s B A                        A: [r, K], B: [N, r], s = alpha / r, or alpha / sqrt(r)
    dora    m (W + s B A) / |W + s B A|      m: [N], the length of each row, which starts as that of W

for a weight [N, K] of N outputs and K inputs, however the layer holds it. Stacked experts [E, N, K] have A: [E, r, K] and
B: [E, N, r]. All of the model is frozen but adapters and the modules that the recipe names.

The parameters stand in the module of their weight, so they are in its unit, and find their layouts by their names:

    X.weight               X.lora_A                         X.lora_B, X.lora_magnitude_vector
    X.experts.down_proj    X.experts.down_proj_lora_A       X.experts.down_proj_lora_B

Matmuls of a layer with an adapter stand in the place of the layer's own:

    lora    Y = X W^T + s (X A^T) B^T + b        dX = dY W + s (dY B) A
            dA = s (dY B)^T X                    dB = s dY^T (X A^T)
    dora    Y = c (X W^T + s (X A^T) B^T) + b    c = m / |W + s B A|, whose length is taken as constant in backward
            the same with c dY for dY            dm = sum dY (X W^T + s (X A^T) B^T) / |W + s B A|

A layer's callers know one matmul: what a tensor-parallel region gathers, sums and leaves for later is the same with an adapter.
Column layers have all of A and their rows of B: dA is one rank's part. Row layers have their columns of A and all of B: Y is one
rank's part, and so is dB.

    ... sequences and tokens, R rows, K features in, N features out, r the rank
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.model.experts import find_experts, form_of
from framework.model.matmul import GradView, Matmul, RowGroups, StackedMatmul, accumulate_matmul, stacked_matmul
from framework.model.routers import find_routers
from framework.model.units import Unit
from framework.recipe.schema import Adapter

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"
# A child of a module whose adapter drops inputs: it knows their share, and whether the model is in training.
DROPOUT = "lora_dropout"
ALL_LINEAR = "all-linear"
# The layers of PEFT's `all-linear`; GPT-2's are transposed.
LINEARS = (nn.Linear, Conv1D)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter."""
    return name.endswith((A, B, MAGNITUDE))


def weight_of(name: str) -> str:
    """The weight that the adapter's parameter `name` is beside."""
    prefix = next(name.removesuffix(part) for part in (A, B, MAGNITUDE) if name.endswith(part))
    return f"{prefix}weight" if prefix.endswith(".") else prefix.removesuffix("_")


def name_beside(weight: str, part: str) -> str:
    """The name of an adapter's parameter, A, B or MAGNITUDE, beside a weight."""
    return f"{weight.removesuffix('weight')}{part}" if weight.endswith(".weight") else f"{weight}_{part}"


def find_adapted(names: Iterable[str]) -> list[str]:
    """The weights beside which there are adapters. names: of parameters."""
    return list(dict.fromkeys(weight_of(name) for name in names if is_adapter(name)))


def has_adapter(module: nn.Module, weight: str = "weight") -> bool:
    """Whether there is an adapter beside a module's weight."""
    return name_beside(f".{weight}", B)[1:] in dict(module.named_parameters(recurse=False))


def holds_transposed(module: nn.Module) -> bool:
    """Whether the module holds its weights as [.., K, N]."""
    form = form_of(module)
    return isinstance(module, Conv1D) if form is None else form.is_transposed


class AdapterDropout(nn.Dropout):
    """Dropout in front of A. Its seed is the generator's, exclusive-or `layer` and `mask`. layer: of the layer's name, and what
    the stream of its region has beyond that of all ranks; mask: not 0 where ranks hold other inputs."""

    def __init__(self, p: float, mask: int = 0, layer: int = 0) -> None:
        super().__init__(p)
        self.mask, self.layer = mask, layer

    def find_seed(self, x: Tensor) -> int:
        """The seed of the mask of x, of any shape: the same where a layer is computed again. Nothing is drawn, as streams within
        a region differ between ranks that have the same input and hold copies of the same rows of B."""
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        return generator.initial_seed() ^ self.layer ^ self.mask


def find_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Linear layers by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LINEARS)}


def ends_with(name: str, target: str) -> bool:
    """Whether a name ends with the parts of `target`."""
    return name == target or name.endswith(f".{target}")


def find_trained(model: PreTrainedModel, names: Collection[str], adapter: Adapter) -> set[str]:
    """The parameters that are trained beside an adapter: its own, and those of the modules of `adapter.train`. names: of
    all, each in its unit. Raises ModelError for modules that are not there."""
    trained = {name for name in names if is_adapter(name)}
    modules = dict(model.named_modules())
    for target in adapter.train:
        held = {id(each) for path, module in modules.items() if ends_with(path, target) for each in module.parameters()}
        if not held:
            near = difflib.get_close_matches(target, {path.rpartition(".")[2] for path in modules}, n=3)
            raise ModelError(
                f"adapter.train: no module's name ends with {target}; nearest: {', '.join(near) or 'none'} (see meshwright plan)"
            )
        trained |= {name for name in names if id(model.get_parameter(name)) in held}
    if any(is_adapter(name) and weight_of(name) in trained for name in names):
        raise ModelError("adapter.train names a module that has an adapter as well: take it out of train or of targets")
    return trained


def find_coded(model: PreTrainedModel, units: Iterable[Unit], trained: Collection[str]) -> set[str]:
    """The weights that `adapter.base` keeps in few bits: those of linear layers and of stacked experts in the decoder's layers.
    Embeddings and the head stay as they are, as in QLoRA, and routers, which would choose other experts."""
    routers = {id(each) for router, _ in find_routers(model) for each in router.parameters()}
    found = {f"{path}.weight" for path in find_linears(model)}
    found |= {f"{path}.{name}" for path, _, form in find_experts(model) for name in (form.first, form.last)}
    names = [name for unit in units if unit.is_layer for name in unit.parameters if name not in trained]
    return {name for name in names if name in found and id(model.get_parameter(name)) not in routers}


def draw_pairs(model: nn.Module, parameters: Iterable[str], generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Initial A and B of a unit, fp32 in their whole shapes: A as PEFT draws it, kaiming uniform with a = sqrt(5), which is
    U(-1 / sqrt(K), 1 / sqrt(K)); B zero. generator: of the unit alone."""
    for name in parameters:
        if name.endswith((A, B)):
            values = torch.zeros(model.get_parameter(name).shape, device=generator.device)
            bound = values.shape[-1] ** -0.5
            yield name, values.uniform_(-bound, bound, generator=generator) if name.endswith(A) else values


def measure_rows(weight: Tensor, is_transposed: bool) -> Tensor:
    """The length of each row, [N], of a weight [N, K], or [K, N] if it `is_transposed`."""
    return torch.linalg.vector_norm(weight, dim=0 if is_transposed else 1)


def add_magnitudes(model: nn.Module, values: dict[str, Tensor], parameters: Iterable[str]) -> None:
    """Add initial magnitudes to the values of a unit, whole by name."""
    for name in (each for each in parameters if each.endswith(MAGNITUDE)):
        weight = weight_of(name)
        values[name] = measure_rows(values[weight], holds_transposed(model.get_submodule(weight.rpartition(".")[0])))


@torch.no_grad()
def merge(model: nn.Module, adapter: Adapter, weight: str, base: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """The weight with its adapter, in the base's shape and dtype; computed in at least fp32. model: on meta; read: a parameter by
    name."""
    wide = torch.promote_types(base.dtype, torch.float32)
    a, b = (read(name_beside(weight, part)).to(wide) for part in (A, B))
    is_transposed = holds_transposed(model.get_submodule(weight.rpartition(".")[0]))
    oriented = base.transpose(-2, -1) if is_transposed else base
    merged = oriented.to(wide) + adapter.scale * (b @ a)
    if adapter.kind == "dora":
        merged *= (read(name_beside(weight, MAGNITUDE)).to(wide) / measure_rows(merged, False))[:, None]
    return (merged.transpose(-2, -1) if is_transposed else merged).to(base.dtype).contiguous()


def merge_all(
    model: nn.Module, adapter: Adapter, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]
) -> dict[str, Tensor]:
    """The tensors of a unit of the model without adapters, merged where there is one beside them."""
    names = dict(model.named_parameters())
    return {
        name: merge(model, adapter, name, each, read) if name_beside(name, B) in names else each
        for name, each in tensors.items()
    }


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
            passage._seed, passage._dropped_share = dropout.find_seed(x), dropout.p
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
