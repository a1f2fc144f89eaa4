"""Indexers: the choice of keys of a sparse attention (DeepSeek's), made over the keys of all ranks of `cp`.

An indexer scores the keys of a sequence by a few small heads of its own, and a query of the attention sees those of the k largest
scores alone. It runs without gradients and is Hugging Face's own, called with

    attention_mask    [B, C, S] bool: what each query may see. The attention is given it as [B, 1, C, S], with the documents on
                      it, where its model would compute no mask
    cache             hands back the keys of all ranks, [B, S, Di], for those of this rank's tokens, [B, C, Di]

It gives rows of keys, [B, C, k], to the attention function, which knows them as `indices`. A layer without an indexer of its own
(glm_moe_dsa's) is handed the choice of the one before.

    B sequences, C tokens of each on this rank, S rows of the whole sequence, Di features of an indexer's head
"""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from framework.parallel.attention.documents import Documents

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class GatheredKeys:
    """The place of an indexer's cache of keys. gather: [B, C, Di] of this rank's tokens -> [B, S, Di] of all."""

    gather: Callable[[Tensor], Tensor]

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """The keys of all ranks."""
        return self.gather(keys)


def has_indexer(attention: nn.Module) -> bool:
    """Whether an attention sees keys that an indexer has chosen, its own or that of a layer before. MiniMax's chooses blocks, and
    takes no mask."""
    indexer = getattr(attention, "indexer", None)
    return hasattr(attention, "indexer") and (indexer is None or "attention_mask" in _parameters_of(indexer))


def hook_indexer(attention: Any) -> None:
    """Have an attention with a `context_hook` choose among the keys of all ranks."""
    attention.register_forward_pre_hook(_give_mask, with_kwargs=True)
    if attention.indexer is not None:
        attention.indexer.context_hook_of_keys = GatheredKeys(attention.context_hook.gather)
        attention.indexer.register_forward_pre_hook(_give_keys, with_kwargs=True)


def _give_mask(attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    hook, given = attention.context_hook, kwargs.get("attention_mask")
    device = (args[0] if args else kwargs["hidden_states"]).device
    documents: Documents = hook.whole if given is None else Documents.of_mask(given) or hook.whole
    mask: Any = find_visible(documents, hook.rows(device))[:, None]
    mask.documents = documents
    return args, kwargs | {"attention_mask": mask}


def _give_keys(indexer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    # Its older name, before transformers 5.24.
    name = "cache" if "cache" in _parameters_of(indexer) else "past_key_values"
    return args, kwargs | {name: indexer.context_hook_of_keys}


def _parameters_of(indexer: Any) -> Collection[str]:
    return inspect.signature(inspect.unwrap(indexer.forward)).parameters.keys()


def find_visible(documents: Documents, rows: Tensor) -> Tensor:
    """Whether each query sees each key, as far as order and documents go: [B or 1, C, S]. rows: of the queries, [C] or [B, C]."""
    first = documents.first_rows(rows.device)
    first = first[:, rows] if rows.ndim == 1 else first[0, rows]
    keys = torch.arange(documents.length, device=rows.device)
    return (keys <= rows[..., None]) & (keys >= first[..., None])
