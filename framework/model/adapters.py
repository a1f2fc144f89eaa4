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
# What PEFT calls all linear layers; GPT-2's are transposed.
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
    return name_beside(f".{weight}", B)[1:] in module._parameters


def holds_transposed(module: nn.Module) -> bool:
    """Whether the module holds its weights as [.., K, N]."""
    form = form_of(module)
    return isinstance(module, Conv1D) if form is None else form.is_transposed


def add_adapters(model: PreTrainedModel, adapter: Adapter) -> None:
    """Give a model on meta the adapters of the recipe, without memory. Raises ModelError for targets that fit nothing."""
    if not adapter.is_used:
        return
    for weight in find_targets(model, adapter):
        path, _, own_name = weight.rpartition(".")
        module = model.get_submodule(path)
        stack, (outputs, inputs) = _sizes(module, own_name)
        shapes = {A: (*stack, adapter.rank, inputs), B: (*stack, outputs, adapter.rank)}
        if adapter.kind == "dora":
            shapes[MAGNITUDE] = (outputs,)
        for part, shape in shapes.items():
            empty = torch.empty(shape, dtype=module.get_parameter(own_name).dtype, device="meta")
            module.register_parameter(name_beside(f".{own_name}", part)[1:], nn.Parameter(empty))
        if adapter.dropout:
            module.add_module(DROPOUT, AdapterDropout(adapter.dropout))


class AdapterDropout(nn.Dropout):
    """Dropout in front of A. mask: the number with which its seed is exclusive-or'd, not 0 where ranks hold other inputs."""

    def __init__(self, p: float, mask: int = 0) -> None:
        super().__init__(p)
        self.mask = mask


def _sizes(module: nn.Module, weight: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """(E,) or (), and (N, K), of a module's weight."""
    *stack, first, second = module.get_parameter(weight).shape
    return tuple(stack), (second, first) if holds_transposed(module) else (first, second)


def find_targets(model: PreTrainedModel, adapter: Adapter) -> list[str]:
    """The weights that get an adapter, by full name. Raises ModelError with what there is for targets that fit nothing."""
    head, linears = model.get_output_embeddings(), _find_linears(model)
    stacked = {f"{path}.{each}": path for path, _, form in find_experts(model) for each in (form.first, form.last)}
    found: set[str] = set()
    for target in adapter.targets:
        if target == ALL_LINEAR:
            fits = {f"{path}.weight" for path, module in linears.items() if module is not head}
        else:
            fits = {f"{path}.weight" for path in linears if _ends(path, target)}
            # By the module's name, or by the weight's with something of its module: `down_proj` alone is an mlp's.
            fits |= {
                name for name, path in stacked.items() if _ends(path, target) or ("." in target and _ends(name, target))
            }
        if not fits:
            raise ModelError(_explain_target(model, target, [*linears, *stacked]))
        found |= fits
    if (
        of_head := [name for name in found if model.get_submodule(name.rpartition(".")[0]) is head]
    ) and head is not None:
        raise ModelError(
            f"adapter.targets: {of_head[0]} is the head, of which losses in chunks and a tied embedding know no adapter: train"
            f" it whole, adapter.train=[{of_head[0].removesuffix('.weight')}], or leave it out"
        )
    if adapter.kind == "dora" or adapter.dropout:
        key = "kind=dora" if adapter.kind == "dora" else "dropout"
        if of_experts := sorted(found & stacked.keys()):
            raise ModelError(
                f"adapter.{key} is not for stacked experts ({of_experts[0]}), as in PEFT: use lora, without dropout"
            )
    for path in (path for path in linears if f"{path}.weight" in found and not _is_plain(linears[path])):
        kind = type(linears[path]).__name__
        raise ModelError(f"adapter.targets: {path} ({kind}) computes more than a linear layer: leave it out")
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name in found]


def _is_plain(linear: nn.Module) -> bool:
    """Whether a layer computes what its base class does, also if that is written anew (falcon's)."""
    plain, x = nn.Linear(3, 2), torch.ones(1, 3)
    try:
        return type(linear) in LINEARS or torch.allclose(type(linear).forward(plain, x), plain(x))  # type: ignore[arg-type]
    except (AttributeError, TypeError, RuntimeError):
        return False


def _find_linears(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules() if isinstance(module, LINEARS)}


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _explain_target(model: PreTrainedModel, target: str, places: Iterable[str]) -> str:
    others = [
        path for path, module in model.named_modules() if _ends(path, target) and any(True for _ in module.parameters())
    ]
    if others:
        return (
            f"adapter.targets: {others[0]} ({type(model.get_submodule(others[0])).__name__}) is no linear layer, and no stack of"
            f" experts: train it whole, adapter.train=[{target}], or leave it out"
        )
    names = sorted(
        {path.rpartition(".")[2] if "experts" not in path else ".".join(path.split(".")[-2:]) for path in places}
    )
    near = difflib.get_close_matches(target, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = f"Those of {model.config.model_type}: {', '.join(names)}"
    return f"adapter.targets: no module's name ends with {target}{hint or '.'} {known}"


def find_trained(model: PreTrainedModel, names: Collection[str], adapter: Adapter) -> set[str]:
    """The parameters that are trained beside an adapter: its own, and those of the modules of `adapter.train`. names: of
    all, each in its unit. Raises ModelError for modules that are not there."""
    trained = {name for name in names if is_adapter(name)}
    modules = dict(model.named_modules())
    for target in adapter.train:
        held = {id(each) for path, module in modules.items() if _ends(path, target) for each in module.parameters()}
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
    found = {f"{path}.weight" for path in _find_linears(model)}
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
