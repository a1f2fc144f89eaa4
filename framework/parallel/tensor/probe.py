"""Whether sequence parallelism finds a family's layers in their order, found by running a small copy of the model.

Tokens are scattered in front of the first layer and come together behind the last module of the decoder. So the first layer runs
first and once, with all tokens of a sequence, and a last module with weights runs behind all layers only. Neither config nor
modules tell: hrm_text goes through one list of layers again and again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.load import FORWARD_ERRORS
from framework.model.probe import small_copy
from framework.model.units import find_last_module, find_layers

NUM_TOKENS = 6
# In the place of a layer's index.
LAST = -1

Call = tuple[int, int | None]


def refuse_unordered_layers(config: PretrainedConfig) -> None:
    """Raises ModelError for a family whose tokens cannot be divided between layers, which ranks find out in their first forward.

    Says nothing where there is no small copy that runs: what is in the way of that is told by others.
    """
    try:
        with small_copy(config) as model:
            has_weights = any(parameter.requires_grad for parameter in find_last_module(model).parameters())
            reason = _find_reason(_record_calls(model), has_weights)
    except (ModelError, *FORWARD_ERRORS):
        return
    if reason is not None:
        raise ModelError(
            f"parallel.sequence=true cannot divide the tokens of {config.model_type} models between layers: {reason}. Use"
            " parallel.sequence=false"
        )


def _record_calls(model: PreTrainedModel) -> list[Call]:
    """The layers by index, and the last module, as the model calls them, each with the tokens of its input; None: unknown."""
    calls: list[Call] = []
    found = find_layers(model)
    assert found is not None, "a model was split that has no layers"
    for index, layer in enumerate(found[1]):
        layer.register_forward_pre_hook(partial(_note, calls, index), with_kwargs=True)
    find_last_module(model).register_forward_pre_hook(partial(_note, calls, LAST), with_kwargs=True)
    model(input_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.int64))
    return calls


def _note(calls: list[Call], index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else kwargs.get("hidden_states")
    calls.append((index, x.shape[-2] if isinstance(x, Tensor) and x.ndim > 1 else None))


def _find_reason(calls: list[Call], has_weights: bool) -> str | None:
    """The reason why tokens cannot be divided, if there is one. has_weights: of the last module."""
    layers = [call for call in calls if call[0] != LAST]
    if not layers:
        return None
    if layers[0][0] != 0 or sum(index == 0 for index, _ in layers) > 1:
        return "its first layer does not run first and once"
    if layers[0][1] != NUM_TOKENS:
        return f"its first layer gets {layers[0][1] or 'unknown'} tokens of a sequence of {NUM_TOKENS}"
    first = next((index for index, call in enumerate(calls) if call[0] == LAST), len(calls))
    is_early = first < max(index for index, call in enumerate(calls) if call[0] != LAST)
    return (
        "the norm behind its layers, which has weights, runs in front of one, too" if is_early and has_weights else None
    )
