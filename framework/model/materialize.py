"""Values for a model on meta: seeded by (seed, unit), so that every layout starts with the same weights.

While one unit is initialised all others stay on meta, where in-place initialisers neither write nor draw random numbers.
The values of a unit are therefore a function of the seed, the unit's name and the config alone: not of the rank, not of
which other units this rank holds, not of the order.
"""

import hashlib
import inspect
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.model.plan import Unit, find_units


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed from a path of numbers and names, equal on every rank and every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_draws(seed: int) -> None:
    """Seed what operations draw from, on the CPU and on all GPUs.

    torch.manual_seed also asks every kind of device that is not there, and notes the caller's stack for each: a millisecond or
    more within a model, where a step seeds each layer for each microbatch.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def initialize_unit(model: PreTrainedModel, unit: Unit, seed: int, names: Collection[str]) -> dict[str, Tensor]:
    """Initial values of the unit's parameters `names`: full, fp32, on the CPU, as the model's own initialiser draws them.

    The model's parameters stay on meta; the unit's buffers (rotary tables, masks, scales) are left in the model with their
    values, also when `names` is empty because the parameters come from a file. Raises ModelError for a parameter that the
    family does not initialise.
    """
    meta: list[tuple[nn.Module, str, nn.Parameter]] = []
    values: dict[str, Tensor] = {}
    for path in unit.modules:
        module = model.get_submodule(path)
        module.__dict__.pop("_is_hf_initialized", None)
        for name, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{path}.{name}" if path else name
            if full_name in unit.parameters and full_name in names:
                meta.append((module, name, parameter))
                values[full_name] = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
                module._parameters[name] = nn.Parameter(values[full_name], requires_grad=False)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_draws(seed_for(seed, unit.name))
        for path in unit.modules:
            _initialiser(model, path)(model.get_submodule(path))
    for module, name, parameter in meta:
        module._parameters[name] = parameter
    forgotten = [name for name, value in values.items() if value.isnan().any()]
    if forgotten:
        raise ModelError(f"{type(model).__name__} has no initialiser for {', '.join(forgotten)}: set model.weights")
    return values


def initialize_with_ties(model: PreTrainedModel, unit: Unit, seed: int, draws: bool) -> dict[str, Tensor]:
    """`initialize_unit` of the unit's parameters, or, without `draws`, of its buffers only. A parameter that is tied to another
    unit has the value that it has there, which is drawn with all of that unit."""
    values: dict[str, Tensor] = {}
    names = set(unit.parameters) if draws else set()
    for each in find_units(model):
        if each.name == unit.name or names & set(each.parameters):
            values |= initialize_unit(model, each, seed, each.parameters if names & set(each.parameters) else ())
    return values


def set_parameter(model: nn.Module, names: tuple[str, ...], parameter: nn.Parameter) -> None:
    """Put one Parameter under all its (tied) names."""
    for full_name in names:
        path, _, name = full_name.rpartition(".")
        model.get_submodule(path)._parameters[name] = parameter


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of the model's state dict, by name: values that no optimizer changes, yet weights all the same
    (DeepSeek's correction of its router's bias)."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


def kept_in_fp32(model: PreTrainedModel, compute: torch.dtype) -> set[str]:
    """Names of the parameters that the family keeps in fp32 beside a lower compute dtype (routers' biases, some norms)."""
    patterns = [pattern for pattern, dtype in model._get_dtype_plan(compute).items() if dtype == torch.float32]
    return {
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if any(f".{pattern.strip('.')}." in f".{name}." for pattern in patterns)
    }


def accepted_arguments(model: PreTrainedModel) -> set[str]:
    """Names that the model's forward declares."""
    return set(inspect.signature(model.forward).parameters)


def _initialiser(model: PreTrainedModel, path: str) -> Callable[[nn.Module], None]:
    """The initialiser of the nearest enclosing pretrained model: composite models dispatch to their parts' own."""
    owner = model
    module: nn.Module = model
    for part in path.split(".") if path else []:
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner._init_weights
