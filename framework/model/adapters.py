"""Adapters of a model on meta: which weights get one, the parameters that it adds, and their initial values.

    lora    W + s B A                        A: [r, K], B: [N, r], s = alpha / r, or alpha / sqrt(r)
    dora    m (W + s B A) / |W + s B A|      m: [N], the length of each row, which starts as that of W

for a weight [N, K] of N outputs and K inputs, however the layer holds it. Stacked experts [E, N, K] have A: [E, r, K] and
B: [E, N, r]. All of the model is frozen but adapters and the modules that the recipe names.

The parameters stand in the module of their weight, so they are in its unit, and find their layouts by their names:

    X.weight               X.lora_A                         X.lora_B, X.lora_magnitude_vector
    X.experts.down_proj    X.experts.down_proj_lora_A       X.experts.down_proj_lora_B
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError
from framework.model.experts import find_experts, form_of
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
    """Dropout in front of A. mask: the number with which its seed is exclusive-or'd, not 0 where ranks hold other inputs."""

    def __init__(self, p: float, mask: int = 0) -> None:
        super().__init__(p)
        self.mask = mask


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
