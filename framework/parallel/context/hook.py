"""The attention function that a model's modules call under context parallelism, and the Hook by which a module finds its own.

Hugging Face's modules ask a registry of attention functions for the one that their config names. Ours is registered once, at
import, and holds nothing: the module that calls it carries a Hook, which knows this rank's ContextAttention and rows.

The registry of mask functions does not know the name, so a model computes no mask, and hands on what it gets if that has four
dims: the stage's `first_rows`, [B, 1, C, 1] int64. An argument of layers is the same when they are computed again in backward.

    B sequences, C tokens of each on this rank, H query heads, Hk key-value heads, D and Dv features of a head
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from framework.errors import ModelError
from framework.model.block_attention import Scores
from framework.parallel.context.family_rules import QUERY_RULES

# What a model's config is told; without an entry among the mask functions.
IMPLEMENTATION = "meshwright_context"
# Tensors that a module may hand over: sinks and slopes, and positions, which queries and keys have been rotated by.
TENSOR_OPTIONS = ("s_aux", "slopes", "position_ids", "cache_position")

# (q [B, H, C, D], k [B, Hk, C, D], v [B, Hk, C, Dv], scores, sinks [H], first_rows [B, C]) -> [B, C, H, Dv]: a ContextAttention.
Attention = Callable[[Tensor, Tensor, Tensor, Scores, Tensor | None, Tensor | None], Tensor]


class AttentionDropout(ModelError):
    """Attention was called with dropout."""


@dataclass(frozen=True)
class Hook:
    """What an attention module carries. attention: a ContextAttention; rows: of a device, the global rows [C] or [B, C] of the
    tokens of each sequence that the rank holds."""

    attention: Attention
    rows: Callable[[torch.device], Tensor]


def attend_module(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens to the sequence, called as Hugging Face's attention functions are.

    query: [B, H, C, D]; key: [B, Hk, C, D]; value: [B, Hk, C, Dv]; attention_mask: the stage's first rows, [B, 1, C, 1] int64.
    options: dropout, scaling, sliding_window, softcap, s_aux (sinks [H]) as Hugging Face names them; slopes [H], of ALiBi.
    Numbers and flags beside these are left out: where one matters, the probe finds a difference. Returns ([B, C, H, Dv], None).

    Raises AttentionDropout, and ModelError for a module without a Hook, for a mask that is none of ours and for tensors that are
    not known: a choice of keys may leave none out in the probe's short sequences.
    """
    hook = find_hook(module)
    unknown = [name for name, value in options.items() if isinstance(value, Tensor) and name not in TENSOR_OPTIONS]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} hands {' and '.join(unknown)} to its attention function, which Meshwright does not know"
        )
    if dropout := options.get("dropout"):
        raise AttentionDropout(f"{type(module).__name__} drops {dropout:g} of its attention's probabilities")
    first_rows = None if attention_mask is None else _read_first_rows(module, attention_mask)
    rule = QUERY_RULES.get(type(module).__name__)
    if rule is not None:
        query, first_rows = rule(module, query, first_rows, hook.rows(query.device))
    scores = _find_scores(query, options)
    return hook.attention(query, key, value, scores, options.get("s_aux"), first_rows), None


def _find_scores(query: Tensor, options: Mapping[str, Any]) -> Scores:
    scale, window, softcap, slopes = (options.get(name) for name in ("scaling", "sliding_window", "softcap", "slopes"))
    return Scores(query.shape[-1] ** -0.5 if scale is None else scale, window, softcap, slopes)


def find_hook(module: Any) -> Hook:
    """The Hook that the module carries."""
    hook = vars(module).get("context_hook")
    if not isinstance(hook, Hook):
        raise ModelError(f"{type(module).__name__} calls an attention function in a way that its source does not show")
    return hook


def _read_first_rows(module: nn.Module, attention_mask: Tensor) -> Tensor:
    if attention_mask.dtype != torch.int64 or attention_mask.ndim != 4 or attention_mask.shape[-1] != 1:
        raise ModelError(
            f"{type(module).__name__} computes an attention mask of its own,"
            f" {str(attention_mask.dtype).removeprefix('torch.')} {[*attention_mask.shape]}"
        )
    return attention_mask[:, 0, :, 0]


AttentionInterface.register(IMPLEMENTATION, attend_module)
