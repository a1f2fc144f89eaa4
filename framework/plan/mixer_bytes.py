"""Bytes that recurrent mixers keep for backward, counted: each computes once on meta, by the functions that ranks use.

A closed form would have to follow every one of those functions: chunks, triangular systems, scans over states. Of T tokens on t
ranks of tp each keeps the mixer's input, T h e, and 1/t of all else. Beside the mixer a layer keeps T' h (4 + e) for its norm and
its mlp if it has one, by the estimate of `activations`.
"""

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from framework.mesh.token_layout import ContextSlices
from framework.model.units import find_mixers
from framework.parallel.attention.pieces import ONE_RANK, Pieces
from framework.parallel.attention.recurrent import hook_mixer
from framework.plan.activations import ESTIMATED_BEHIND, ESTIMATED_VALUES

# Tokens that are counted; what more of them keep is in proportion.
COUNTED = 1024


class MixerBytes(NamedTuple):
    """kept: bytes that a whole mixer keeps of a sequence, beside its input; replaced: of the estimated values of its layer, those
    that are not estimated then."""

    kept: int
    replaced: int


def measure_mixer(layer: nn.Module, hidden: int, tokens: int, dtype: torch.dtype) -> MixerBytes | None:
    """The bytes of a layer on meta; None where it has no mixer, or several, or one that asks for more than hidden states."""
    mixers = [mixer for _, mixer in find_mixers(layer)]
    if len(mixers) != 1:
        return None
    mixer, counted = deepcopy(mixers[0]).to(dtype), min(tokens, COUNTED)
    hook_mixer(mixer, Pieces(ContextSlices(counted), ONE_RANK))
    x = torch.empty(1, counted, hidden, dtype=dtype, device="meta", requires_grad=True)
    sizes = {id(each.untyped_storage()): 0 for each in (x, *mixer.parameters())}
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)  # so that no other storage gets its id
        sizes.setdefault(id(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
        return tensor

    try:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            mixer(hidden_states=x)
    except (TypeError, RuntimeError, NotImplementedError):
        return None
    own = {id(each) for each in mixers[0].parameters()}
    has_mlp = any(each.ndim > 1 and id(each) not in own for each in layer.parameters())
    return MixerBytes(
        sum(sizes.values()) * tokens // counted, ESTIMATED_VALUES - ESTIMATED_BEHIND if has_mlp else ESTIMATED_VALUES
    )
