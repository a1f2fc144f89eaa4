"""Hooks: how the recurrent mixers of a model compute by our functions, on the pieces of a rank.

The forward of a mixer stays the family's; the functions that it calls for what mixes tokens become ours. The model is told the
documents of a microbatch on its attention mask, which it keeps from its mixers. So the model notes them when it is called, each
layer is called with them, and while the layer computes, its mixers find them with their pieces: again where it is recomputed,
because checkpointing keeps a layer's arguments.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.model.mixers import (
    CHANNEL_DELTA_RULE,
    CONVOLUTION,
    DELTA_RULE,
    MASK,
    STATE_OF_CHANNELS,
    STATE_OF_HEADS,
    WHOLE_MIXERS,
    call_by,
    called_names,
    find_mixers,
)
from framework.model.units import find_layers
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.recurrent.convolution import convolve
from framework.parallel.attention.recurrent.delta_rule import apply_delta_rule
from framework.parallel.attention.recurrent.libraries import Libraries
from framework.parallel.attention.recurrent.pieces import Pieces
from framework.parallel.attention.recurrent.state_space import have_no_kernel, scan_channels, scan_heads


def keep_padding(pieces: Pieces, hidden_states: Tensor, mask: Tensor | None) -> Tensor:
    """Called as transformers' `apply_mask_to_padding_states`. mask: carries documents if there is one (mamba hands on what the
    model gets): rows have no padding in front of tokens."""
    return hidden_states


# The argument by which a layer gets its documents.
ARGUMENT = "meshwright_documents"
# Each called with the pieces in front of the arguments of the function that it stands for.
FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    CONVOLUTION: convolve,
    DELTA_RULE: apply_delta_rule,
    CHANNEL_DELTA_RULE: apply_delta_rule,
    STATE_OF_HEADS: scan_heads,
    STATE_OF_CHANNELS: scan_channels,
    MASK: keep_padding,
    **dict.fromkeys(WHOLE_MIXERS, have_no_kernel),
})  # fmt: skip


def hook_mixers(model: PreTrainedModel, pieces: Pieces, libraries: Libraries | None = None) -> None:
    """Have every recurrent mixer of the model compute on these pieces; without one nothing changes. libraries: of kernels for
    them."""
    mixers, libraries = dict(find_mixers(model)), libraries or Libraries()
    found = find_layers(model)
    if not mixers or found is None:
        return
    for mixer in mixers.values():
        hook_mixer(mixer, pieces, libraries)
    notes = _Notes()
    model.register_forward_pre_hook(notes.read, with_kwargs=True)
    for layer in found[1]:
        if any(module in mixers.values() for module in layer.modules()):
            layer.register_forward_pre_hook(notes.hand_over, with_kwargs=True)
            layer.forward = partial(_compute_layer, pieces, layer.forward)


def hook_mixer(mixer: nn.Module, pieces: Pieces, libraries: Libraries | None = None) -> None:
    """Have one recurrent mixer compute on these pieces."""
    names, compute = called_names(mixer), (libraries or Libraries()).compute
    call_by(mixer, {name: partial(compute, name, each, pieces) for name, each in FUNCTIONS.items() if name in names})


class _Notes:
    """The documents of the microbatch with which a model was called last."""

    def __init__(self) -> None:
        self.documents: Documents | None = None

    def read(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """In front of the model."""
        mask = kwargs.get("attention_mask")
        self.documents = Documents.of_mask(mask) if isinstance(mask, Tensor) else None

    def hand_over(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In front of a layer."""
        return args, kwargs | {ARGUMENT: self.documents}


def _compute_layer(pieces: Pieces, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # For as long as it computes: by the time that a layer is recomputed, the model may have been called with another microbatch.
    with pieces.of(kwargs.pop(ARGUMENT, None)):
        return forward(*args, **kwargs)
