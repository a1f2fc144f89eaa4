"""Initial values of a model on meta: each unit is drawn whole, from a seed of its own, by its family's `_init_weights`.

    seed of a unit = hash(train.seed, name of the unit)

A rank draws the units of its stages one after the other and keeps the elements that it owns. So every layout starts from the
same weights, on one kind of device: generators of CPUs and of GPUs differ. Memory: one whole unit in fp32.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.load import build_meta
from framework.model.shrink import shrink
from framework.model.units import Unit, find_units

# Parameters of a copy that is drawn on the host: blt's tables of hashes stay as large as they are.
LARGEST_COPY = 1 << 24


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


def draw_unit(model: PreTrainedModel, unit: Unit, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Initial values of all parameters of a unit, by name: fp32 on `device`, in their whole shapes.

    model: the whole one, on meta, and left as it is. Raises ModelError for a parameter that the family does not initialise.
    """
    modules = {path: model.get_submodule(path) for path in unit.modules}
    names = {model.get_parameter(name): name for name in unit.parameters}
    held = [
        (module, own_name, parameter)
        for module in modules.values()
        for own_name, parameter in module._parameters.items()
        if parameter in names
    ]
    # NaN marks elements that nobody writes. A tied parameter is one tensor under all of its names.
    drawn = {
        parameter: nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=torch.float32, device=device), False)
        for parameter in names
    }
    try:
        for module, own_name, parameter in held:
            module._parameters[own_name] = drawn[parameter]
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            seed_rng(seed_for(seed, "initial", unit.name))
            # Children before parents, which may write to them once more. Parameters of other units stay on meta: such writes
            # do nothing and draw nothing.
            for path, module in modules.items():
                _initialiser(model, path)(module)
        # Read from the modules: an initialiser may have put another parameter there.
        values = {names[parameter]: module.get_parameter(own_name).detach() for module, own_name, parameter in held}
    finally:
        for module, own_name, parameter in held:
            module._parameters[own_name] = parameter
    unwritten = [name for name, value in values.items() if bool(value.isnan().any())]
    if unwritten:
        raise ModelError(
            f"{model.config.model_type} models cannot start from random weights: transformers has no initialiser for"
            f" {', '.join(unwritten)}. Set model.weights, or choose another model.family"
        )
    return values


def draw_with_ties(
    model: PreTrainedModel, units: Sequence[Unit], unit: Unit, seed: int, device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """`draw_unit` of each unit that has parameters of a stage's `unit`: a tied head is drawn with the embedding, on every stage.

    units: of the whole model.
    """
    for origin in units:
        if not set(unit.parameters).isdisjoint(origin.parameters):
            yield draw_unit(model, origin, seed, device)


def refuse_uninitialised(config: PretrainedConfig) -> None:
    """Raise ModelError where the family's initialiser leaves a parameter without values, found by drawing a small copy.

    A family without a copy that is small is not asked: its ranks find out.
    """
    try:
        model = build_meta(shrink(config))
    except ModelError:
        return
    if sum(parameter.numel() for parameter in model.parameters()) <= LARGEST_COPY:
        for unit in find_units(model):
            draw_unit(model, unit, 0, torch.device("cpu"))


def _initialiser(model: PreTrainedModel, path: str) -> Callable[[nn.Module], None]:
    """The initialiser of the nearest enclosing pretrained model: composite models dispatch to their parts' own."""
    owner, module = model, model
    for part in path.split(".") if path else []:
        module = getattr(module, part)
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner._init_weights
