"""Initial values for a model on meta: seeded by (seed, parameter), so that every layout starts from the same weights.

A unit's initialiser is recorded, and each rank evaluates the recording for the elements that it owns. The value of an element is
a function of the seed, the parameter's name, the element's number and the config alone: not of the rank, not of what else this
rank holds, not of the order.
"""

import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.model.initial import Program
from framework.model.record import record
from framework.model.units import Unit

# Arguments of the model that are False wherever it takes them. With a cache, packed positions would be ignored and documents
# would see one another; a load-balancing loss of the model's own would be of the layers of one stage.
DISABLED = ("use_cache", "output_router_logits")


def seed_for(*parts: int | str) -> int:
    """A 63-bit seed from a path of numbers and names, equal on every rank and every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_rng(seed: int) -> None:
    """Seed torch's RNG streams on the CPU and on all GPUs.

    torch.manual_seed also asks every kind of device that is not there, and notes the caller's stack for each: a millisecond or
    more within a model, and a step seeds each layer for each microbatch.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def initialize_unit(model: PreTrainedModel, unit: Unit, seed: int, names: Collection[str]) -> dict[str, Program]:
    """Programs of the initial values of the unit's parameters `names`, as the model's own initialiser writes them.

    The model stays on meta. Raises ModelError for a parameter that the family does not initialise.
    """
    modules = {path: model.get_submodule(path) for path in unit.modules}
    for module in modules.values():
        module.__dict__.pop("_is_hf_initialized", None)
    parameters = {name: model.get_parameter(name) for name in unit.parameters if name in names}
    programs = record(seed, parameters, {path: (each, _initialiser(model, path)) for path, each in modules.items()})
    forgotten = [name for name, program in programs.items() if not program.is_complete]
    if forgotten:
        raise ModelError(
            f"{model.config.model_type} models cannot start from random weights: transformers has no initialiser for"
            f" {', '.join(forgotten)}. Set model.weights, or choose another model.family"
        )
    return programs


def initialize_with_ties(model: PreTrainedModel, units: Sequence[Unit], unit: Unit, seed: int) -> dict[str, Program]:
    """`initialize_unit` of the unit; a parameter that is tied to another unit gets the values that it has there. units: all of
    the model."""
    names, programs = set(unit.parameters), dict[str, Program]()
    for each in units:
        if names & set(each.parameters):
            programs |= initialize_unit(model, each, seed, each.parameters)
    return programs


def refuse_uninitialised(model: PreTrainedModel, units: Sequence[Unit]) -> None:
    """Raises ModelError where the family's initialiser leaves a parameter without values, as ranks would that start from random
    weights. One unit of each kind is asked. model: on meta, and left as it is; units: all of it."""
    kinds = {tuple(_describe_kind(model, unit)): unit for unit in reversed(units)}
    for unit in kinds.values():
        initialize_unit(model, unit, 0, unit.parameters)


def _describe_kind(model: PreTrainedModel, unit: Unit) -> Iterator[tuple[str, ...]]:
    """What units have alike that are initialised by the same code: the names of modules and parameters within, and classes."""
    for path in unit.modules:
        module = model.get_submodule(path)
        names = [
            name for name, _ in module.named_parameters(recurse=False) if f"{path}.{name}".strip(".") in unit.parameters
        ]
        yield (path.removeprefix(unit.root), type(module).__name__, *names)


def set_parameter(model: nn.Module, names: tuple[str, ...], parameter: nn.Parameter) -> None:
    """Register one Parameter under all its (tied) names."""
    for full_name in names:
        path, _, name = full_name.rpartition(".")
        model.get_submodule(path)._parameters[name] = parameter


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of the model's state dict, by name, in their own shapes and dtypes: values that no
    optimizer changes, yet weights all the same (DeepSeek's correction of its router's bias)."""
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
