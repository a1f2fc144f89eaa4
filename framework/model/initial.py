"""Initial values of a model that is built on meta: parameters, drawn a unit at a time, and buffers, as the stock model has them.

    seed of a unit = hash(train.seed, name of the unit)

Each unit is drawn whole by its family's `_init_weights`. A rank draws the units of its stages one after the other and keeps the
elements that it owns, so every layout starts from the same weights, on one kind of device: generators of CPUs and of GPUs differ.
Memory: one whole unit in fp32.

Any module may write a buffer (rotary tables, masks, scales, multipliers): in its constructor, in its parent's, or in the
`_init_weights` of either, so no single module can be asked for one. The whole model is built as transformers builds it, with real
buffers and parameters without memory.

muP makes them those of a wider model than a base model, so that its best learning rate carries over (Yang et al. 2022, arXiv
2203.03466, table 3, for Adam and its like).

With r = inputs of a matrix over those in the base model:

    hidden matrices, whose outputs grow too     deviation / sqrt(r)     rate / r
    head and routers, whose outputs do not      deviation / r           rate / r
    embeddings, norms, biases                   as in the base model

The base model itself is as without muP. No multipliers: what is trained and exported is the family's own model.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError
from framework.model.adapters import add_magnitudes, draw_pairs, is_adapter
from framework.model.experts import find_experts
from framework.model.load import build_meta
from framework.model.shrink import shrink
from framework.model.units import Unit, find_units, tied_names
from framework.torch_private import TorchDispatchMode

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
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in names and not is_adapter(names[parameter])
    ]
    # NaN marks elements that are not written. A tied parameter is one tensor under all of its names.
    drawn = {
        parameter: nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=torch.float32, device=device), False)
        for _, _, parameter in held
    }
    try:
        for module, own_name, parameter in held:
            module.register_parameter(own_name, drawn[parameter])
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
            module.register_parameter(own_name, parameter)
    unwritten = [name for name, value in values.items() if bool(value.isnan().any())]
    if unwritten:
        constants = find_fixed_values(model.config)
        values |= {name: constants[star(name)].to(device) for name in unwritten if star(name) in constants}
        unwritten = [name for name in unwritten if star(name) not in constants]
    if unwritten:
        raise ModelError(
            f"{model.config.model_type} models cannot start from random weights: transformers has no initialiser for"
            f" {', '.join(unwritten)}. Set model.weights, or choose another model.family"
        )
    values |= draw_adapters(model, unit, seed, device)
    add_magnitudes(model, values, unit.parameters)
    return values


def find_fixed_values(config: PretrainedConfig) -> dict[str, Tensor]:
    """Values of one number that constructors give to parameters whatever the seed (apertus' activation), of a small copy: fp32,
    by name with a star for numbers."""
    copies = []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=[]):
            seed_rng(seed)
            copies.append(AutoModelForCausalLM.from_config(shrink(config), dtype=torch.float32))
    pairs = zip(copies[0].named_parameters(), copies[1].parameters(), strict=True)
    return {star(name): one.detach().float() for (name, one), other in pairs if one.numel() == 1 and one.equal(other)}


def star(name: str) -> str:
    """A parameter's name with a star for each number: what one layer has, all have."""
    return re.sub(r"(?<=[.])[0-9]+(?=[.])", "*", name)


def draw_adapters(model: nn.Module, unit: Unit, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Initial A and B of the adapters in a unit, by name: as `draw_unit`, and the same whatever the model's weights are."""
    if not any(map(is_adapter, unit.parameters)):
        return {}
    generator = torch.Generator(device).manual_seed(seed_for(seed, "adapter", unit.name))
    return dict(draw_pairs(model, unit.parameters, generator))


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

    A family without a small copy is not checked here; its ranks raise.
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


# Operations that allocate without giving values, and those that give them.
EMPTY = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
)
FILLED = frozenset(f"aten::{name}" for name in ("zeros", "ones", "full", "rand", "randn"))
# Most elements that either allocates: a larger tensor is a weight, which takes time to fill and may not fit the host's memory.
# GPT-Neo's mask of 2,048 x 2,048 is the largest buffer that a family fills with ones first.
MOST_EMPTY, MOST_FILLED = 1 << 20, 1 << 27


def build_buffers(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Buffers of the whole model of `config` by all their names, on the CPU: bitwise those of `from_config` in `dtype`.

    Raises ModelError for a buffer that has no values.
    """
    with torch.random.fork_rng(devices=[]), _parameters_on_meta(), MarkUnwritten():
        torch.default_generator.manual_seed(0)  # a random buffer is equal on all ranks
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)
    buffers = dict(model.named_buffers(remove_duplicate=False))
    unwritten = [name for name, buffer in buffers.items() if _is_unwritten(buffer)]
    if unwritten:
        raise ModelError(
            f"{config.model_type} models cannot be built: transformers gives no values to their buffers"
            f" {', '.join(unwritten)}. Choose another model.family, or another version of transformers"
        )
    return buffers


def set_buffers(model: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the buffers of the model, or of a stage of it, on `device`. values: by name, of the whole model."""
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}" if path else name
            value = values.get(full_name, buffer)
            assert not value.is_meta, f"{full_name} has no values"
            assert value.shape == buffer.shape, f"{full_name} has {buffer.shape}, its values {value.shape}"
            setattr(module, name, value.to(device))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers in the model's state dict, by name: weights that no optimizer changes, as the bias of DeepSeek's router."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


class MarkUnwritten(TorchDispatchMode):
    """Fills tensors that are allocated without values by NaN or the largest integer, and leaves large ones on meta."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name().partition(".")[0]
        if name not in EMPTY | FILLED:
            return func(*args, **kwargs)
        planned = func(*args, **kwargs | {"device": torch.device("meta")})
        if planned.numel() > (MOST_EMPTY if name in EMPTY else MOST_FILLED):
            return planned
        made = func(*args, **kwargs)
        return made.fill_(_mark_of(made.dtype)) if name in EMPTY else made


def _mark_of(dtype: torch.dtype) -> float | int:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return False if dtype == torch.bool else torch.iinfo(dtype).max


def _is_unwritten(buffer: Tensor) -> bool:
    """Whether an element has no value; of a bool, which has no third value to mark it, only whether it was allocated."""
    if buffer.is_meta or buffer.dtype == torch.bool:
        return buffer.is_meta
    mark = _mark_of(buffer.dtype)
    return bool((buffer.isnan() if mark != mark else buffer == mark).any())


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Free the memory of each parameter when its module registers it, before anything is drawn into it."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        handle.remove()


# Attributes of an attention by which logits are scaled.
HEAD_SIZES = ("head_dim", "head_size", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class WidthScale(NamedTuple):
    """Factors of a parameter's initial deviation and of its learning rate."""

    initial: float
    rate: float


SAME = WidthScale(1.0, 1.0)


def find_scales(whole: PreTrainedModel, base_values: Mapping[str, Any]) -> dict[str, WidthScale]:
    """The factors of each parameter, by all of its names; none without a base model. base_values: of its config.

    Raises ModelError where the models differ in more than widths, or where a parameter would have to be two things."""
    if not base_values:
        return {}
    base = build_meta(_with_values(whole.config, base_values))
    shapes, of_base = ({name: tuple(p.shape) for name, p in each.named_parameters()} for each in (whole, base))
    if shapes.keys() != of_base.keys():
        raise _refuse(whole, f"only one model has {min(shapes.keys() ^ of_base.keys())}: only widths may differ")
    for name, module in base.named_modules():
        for size in (each for each in HEAD_SIZES if each in vars(module)):
            if vars(module)[size] != vars(whole.get_submodule(name))[size]:
                raise _refuse(
                    whole, f"heads are scaled by their size, which differs ({size} of {name}): let their number grow"
                )
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    if head.weight is embedding.weight:
        raise _refuse(
            whole, "embedding and head are one weight, of which they need two scales: tie_word_embeddings=false"
        )
    transposed = {
        f"{name}.{weight}"
        for name, _, form in find_experts(whole)
        if form.is_transposed
        for weight in (form.first, form.last)
    }
    found = {}
    for aliases in tied_names(whole).values():
        for name in aliases:
            module = whole.get_submodule(name.rpartition(".")[0])
            is_transposed = isinstance(module, Conv1D) or name in transposed
            is_matrix = len(shapes.get(name, ())) > 1 and not isinstance(module, nn.Embedding)
            found[name] = _scale(shapes[name], of_base[name], is_transposed) if is_matrix else SAME
    return found


def _scale(shape: tuple[int, ...], base: tuple[int, ...], is_transposed: bool) -> WidthScale:
    rows, columns = (own / before for own, before in zip(shape[-2:], base[-2:], strict=True))
    inputs, outputs = (rows, columns) if is_transposed else (columns, rows)
    return WidthScale(1 / inputs if outputs == 1 else inputs**-0.5, 1 / inputs)


def _with_values(config: PretrainedConfig, values: Mapping[str, Any]) -> PretrainedConfig:
    made = deepcopy(config)
    for name, value in values.items():
        if not hasattr(made, name):
            raise ModelError(f"model.mup_base.{name}: a {config.model_type} config has no such value")
        setattr(made, name, value)
    return made


def _refuse(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(f"model.mup_base: no base model of this {model.config.model_type}: {reason}")
