"""Values of a model's buffers: rotary tables, masks, scales, multipliers.

Any module may write a buffer: in its constructor, in its parent's, or in the `_init_weights` of either, so no single module can
be asked for one. The whole model is built as transformers builds it, with real buffers and parameters without memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PretrainedConfig

from framework.errors import ModelError

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

    Raises ModelError for a buffer to which nobody writes.
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
    """Give the model, or a stage of it, the values of its buffers on `device`.

    values: by name, of the whole model.
    """
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            full_name = f"{path}.{name}" if path else name
            value = values.get(full_name, buffer)
            assert not value.is_meta, f"{full_name} has no values"
            assert value.shape == buffer.shape, f"{full_name} has {buffer.shape}, its values {value.shape}"
            module._buffers[name] = value.to(device)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that are part of the model's state dict, by name, in their own shapes and dtypes: values that no
    optimizer changes, yet weights all the same (DeepSeek's correction of its router's bias)."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers}


class MarkUnwritten(TorchDispatchMode):
    """Fills tensors that are allocated without values by NaN or the largest integer, and leaves large ones on meta."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
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
