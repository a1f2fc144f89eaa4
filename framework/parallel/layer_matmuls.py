"""Matmuls of a stage's layers that are not the stock ones: with adapters, and of fp8 numbers (`precision.compute=fp8`).

`place_adapters` gives each rank its part of the adapters' parameters, whose layouts follow their weight's.

    weight                      A                              B, magnitude
    whole on this rank          whole                          whole
    rows split (column)         replicated, gradient partial   rows split as the weight's, packed and copied alike
    columns split (row)         columns split                  replicated, gradient partial
    experts of ep               experts of ep                  experts of ep
    replicated                  as the weight                  as the weight

Linear layers of decoder layers multiply fp8 numbers where they are trained and kernels take them. Embedding, head, routers,
stacked experts, norms and attention stay bf16, and so do recurrent mixers (state-space models, linear attention with a
convolution): their code and their fused kernels read weights without calling the layers that hold them.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError
from framework.mesh.layout import Layout
from framework.model.adapters import (
    DROPOUT,
    MAGNITUDE,
    A,
    AdapterDropout,
    AdapterMatmul,
    AdapterSwitch,
    B,
    StackedAdapterMatmul,
    find_adapted,
    has_adapter,
    holds_transposed,
    name_beside,
)
from framework.model.initial import seed_for
from framework.model.load import kept_in_fp32
from framework.model.matmul import GradView, Matmul, MatmulLinear, StackedMatmul
from framework.model.routers import find_routers
from framework.parallel.stage_plan import StagePlan
from framework.recipe.schema import Precision


def place_adapters(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Register this rank's part of each adapter's parameters, without memory, beside its weight; the layouts with theirs."""
    placed = dict(layouts)
    for weight in find_adapted(layouts):
        path, _, own_name = weight.rpartition(".")
        module = model.get_submodule(path)
        for part in (A, B, MAGNITUDE):
            name = name_beside(weight, part)
            if name not in layouts:
                continue
            whole = layouts[name].shape
            layout = placed[name] = _follow(layouts[weight], whole, part, _is_transposed(module))
            empty = torch.empty(layout.shape_local, dtype=module.get_parameter(own_name).dtype, device="meta")
            module.register_parameter(name.rpartition(".")[2], nn.Parameter(empty))
        if plan.recipe.adapter.dropout:
            is_cut = any(shard.axis == "tp" for shard in placed[name_beside(weight, A)].shards)
            mask = seed_for("rank of an adapter's inputs", plan.tokens.tp.rank) if is_cut else 0
            layer = seed_for("dropout of an adapter", path) ^ getattr(module, "stream_mask", 0)
            module.add_module(DROPOUT, AdapterDropout(plan.recipe.adapter.dropout, mask, layer))
    return placed


def _is_transposed(module: Any) -> bool:
    """Whether a stock module, or what tensor parallelism has put in its place, holds its weights as [.., K, N]."""
    return module.matmul.is_transposed if hasattr(module, "matmul") else holds_transposed(module)


def _follow(base: Layout, shape: tuple[int, ...], part: str, is_transposed: bool) -> Layout:
    """The layout of an adapter's parameter of this whole shape. base: of its weight, [.., N, K] or transposed."""
    last = len(base.shape) - 1
    outputs, inputs = (last, last - 1) if is_transposed else (last - 1, last)
    # The dim of the weight that the parameter shares with it, and that dim's place in the parameter.
    shared = {inputs: last} if part == A else {outputs: len(shape) - 1 if part == MAGNITUDE else last - 1}
    places = {dim: dim for dim in range(last - 1)} | shared
    shards = tuple(replace(each, dim=places[each.dim]) for each in base.shards if each.dim in places)
    cut = dict.fromkeys(each.axis for each in base.shards if each.dim not in places)
    layout = replace(base, shape=shape, shards=shards, interval=None)
    if cut:
        # All ranks that hold other parts of the weight have the whole, `kv` among them.
        replicated = [*(axis for axis in base.replicated if axis != "kv"), *cut]
        partial = [*(axis for axis in base.partial if axis != "kv"), *cut]
        return replace(layout, replicated=tuple(replicated), partial=tuple(partial))
    if base.interval is None:
        return layout
    # Other ranks count the last rows of such a packed weight: the same rows here.
    low, high = (bound * layout.numel_local // base.numel_local for bound in base.interval)
    return replace(layout, interval=(low, high))


class AdaptMatmuls:
    """Makes the matmuls of layers with an adapter. views: main gradients, by the parameter's id; switch: of all of them."""

    def __init__(self, plan: StagePlan, views: Mapping[str, Any], switch: AdapterSwitch) -> None:
        self._switch = switch
        self._scale, self._tp = plan.recipe.adapter.scale, plan.axes["tp"]
        self._views: dict[int, GradView] = {id(each.parameter): each for each in views.values()}

    def linear(self, layer: Any, base: Matmul) -> Matmul:
        """The matmuls of a linear layer: `base` where it has no adapter."""
        if not has_adapter(layer):
            return base
        views = self._find_views(layer, "weight")
        copied, copies = getattr(layer, "copied", 0), layer.kv.size if hasattr(layer, "kv") else 1
        # A layer of which each rank has other inputs sums over ranks by itself or by its region.
        over = self._tp if hasattr(layer, "leaves") else None
        return AdapterMatmul(base, layer, self._scale, views, self._switch, over, copied, copies)

    def stacked(self, layer: nn.Module, base: StackedMatmul) -> StackedMatmul:
        """The matmuls of a stack of experts: `base` where it has no adapter."""
        if not has_adapter(layer, base.name):
            return base
        return StackedAdapterMatmul(base, layer, self._scale, self._find_views(layer, base.name), self._switch)

    def _find_views(self, layer: nn.Module, weight: str) -> dict[str, GradView]:
        names = {part: name_beside(f".{weight}", part)[1:] for part in (A, B, MAGNITUDE)}
        own = dict(layer.named_parameters(recurse=False))
        return {
            part: self._views[id(parameter)] for part, name in names.items() if (parameter := own.get(name)) is not None
        }


# Rows and columns of a weight that fp8 kernels take are multiples of it.
ALIGNMENT = 16


def require_torchao() -> None:
    """Raises ModelError where it is not installed."""
    if find_spec("torchao") is None:
        raise ModelError(
            "precision.compute=fp8: torchao is not installed: pip install 'meshwright[fp8]'; or precision.compute=bf16"
        )


def gather_in_fp8(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Where ZeRO unshards weights for each use (stage 3), those that are multiplied in fp8 with one scale each travel so. The
    model stays. Raises ModelError where the recipe asks for fp8 and the model cannot have it."""
    if plan.recipe.precision.compute != "fp8":
        return layouts
    found = find_fp8_linears(model, plan)
    wide = kept_in_fp32(model, plan.compute_dtype)
    kept = [name for name in found if f"{name}.weight" in wide]
    if kept:
        raise ModelError(
            f"precision.compute=fp8: {model.config.model_type} keeps linear layers in fp32 ({', '.join(kept[:3])}), which fp8"
            " would undo: precision.compute=bf16"
        )
    if plan.recipe.zero.stage < 3 or plan.recipe.precision.fp8_scaling != "tensor":
        return layouts
    weights = {f"{name}.weight" for name in found}
    return {name: replace(layout, gathered_in="fp8") if name in weights else layout for name, layout in layouts.items()}


def find_fp8_linears(model: PreTrainedModel, plan: StagePlan) -> dict[str, nn.Module]:
    """The linear modules that multiply fp8 numbers, by name."""
    if plan.recipe.precision.compute != "fp8":
        return {}
    others = {id(part) for router, _ in find_routers(model) for part in router.modules()}
    others |= {id(part) for mixer in model.modules() if _is_recurrent(mixer) for part in mixer.modules()}
    roots = [unit.root for unit in plan.own_units if unit.is_layer]
    return {
        f"{root}.{name}": module
        for root in roots
        for name, module in model.get_submodule(root).named_modules()
        if (isinstance(module, MatmulLinear) or type(module) in (nn.Linear, Conv1D))
        and id(module) not in others
        and f"{root}.{name}.weight" in plan.groups
        and all(size % ALIGNMENT == 0 for size in module.weight.shape)
    }


def _is_recurrent(module: nn.Module) -> bool:
    """Whether this is a mixer with a state: it has a decay of its own, or a convolution over tokens."""
    has_decay = any("A_log" in name for name, _ in module.named_parameters(recurse=False))
    return has_decay or any(isinstance(part, nn.Conv1d) for part in module.children())


def emulates_fp8(precision: Precision, device: torch.device) -> bool:
    """Whether fp8 is asked for of a device that does not multiply it."""
    if precision.compute != "fp8":
        return False
    # torchao is an optional dependency, and takes two seconds to import.
    from framework.model.fp8 import has_kernel

    return not has_kernel(device, precision.fp8_scaling)


def make_matmul(module: nn.Module, is_transposed: bool, fp8: set[nn.Module], plan: StagePlan) -> Matmul:
    """The matmuls of a linear module: in fp8 if it is one of those."""
    if module not in fp8:
        return Matmul(module, is_transposed)
    require_torchao()
    from framework.model.fp8 import Fp8Matmul

    return Fp8Matmul(module, is_transposed, plan.recipe.precision.fp8_scaling)
