"""Attentions with code of their own, of families that ask no registry for an attention function: the method that is replaced, and
what replaces it. Projections, biases and residuals stay the module's.

    B sequences, C tokens of each on this rank, H query heads, D features of a head, E hidden features
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType, MethodType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.parallel.context.hook import attend_module


def _forward_bloom(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """hidden_states, residual: [B, C, E]; alibi: [B * H, 1, C], slope times row of these heads."""
    slopes = _slopes(alibi[: self.num_heads, 0, :2])
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    options = {"dropout": _dropout(self, self.attention_dropout.p), "scaling": self.inv_norm_factor, "slopes": slopes}
    out, _none = attend_module(self, query, key, value, attention_mask, **options)
    out = F.dropout(self.dense(out.flatten(2)), self.hidden_dropout, self.training)
    return residual + out, None


def _forward_mpt(self: Any, hidden_states: Tensor, position_bias: Tensor, **_: Any) -> tuple[Tensor, None]:
    """hidden_states: [B, C, E]; position_bias: [H, 1, positions], of these heads."""
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in mixed.chunk(3, dim=-1))
    slopes = _slopes(position_bias[:, 0, -2:])
    options = {"dropout": _dropout(self, self.attn_dropout_p), "scaling": self.softmax_scale, "slopes": slopes}
    out, _none = attend_module(self, query, key, value, None, **options)
    return self.out_proj(out.flatten(2)), None


def _forward_falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """hidden_states: [B, C, E]; alibi: None."""
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    if alibi is not None or position_embeddings is None:
        raise ModelError("its ALiBi is rounded to bfloat16, by rows of the whole sequence")
    query, key, value = (x.transpose(1, 2) for x in _split_falcon(self, self.query_key_value(hidden_states)))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    out, _none = attend_module(self, query, key, value, attention_mask)
    return self.dense(out.flatten(2)), None


def _split_falcon(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [B, C, heads, D]. The module itself repeats keys for each query of a group, which would travel."""
    if not module.new_decoder_architecture:
        return module._split_heads(fused)
    groups = fused.unflatten(-1, (-1, module.num_heads // module.num_kv_heads + 2, module.head_dim))
    return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


def _attend_scaled(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """GPT-J and CodeGen: query, key, value [B, H, C, D] -> [B, H, C, D]."""
    options = {"dropout": _dropout(self, self.attn_dropout.p), "scaling": 1 / self.scale_attn}
    # Both rotate in fp32 whatever the model's dtype.
    query, key = query.to(value.dtype), key.to(value.dtype)
    return attend_module(self, query, key, value, attention_mask, **options)[0].transpose(1, 2), None


def _attend_gpt_neo(
    self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, None]:
    """query, key, value: [B, H, C, D] -> [B, H, C, D], without a scale, in local layers within a window."""
    window = self.config.window_size if self.attention_type == "local" else None
    options = {"dropout": _dropout(self, self.attn_dropout.p), "scaling": 1.0, "sliding_window": window}
    return attend_module(self, query, key, value, attention_mask, **options)[0].transpose(1, 2), None


def _dropout(module: Any, probability: float) -> float:
    return probability if module.training else 0.0


def _slopes(bias: Tensor) -> Tensor:
    """Slopes of heads, [H], from their biases at the two rows next to zero, [H, 2], where they are exact. The bias that a module
    is given has the heads of this rank already."""
    assert bias.shape[1] == 2, f"no slope can be read off biases of {bias.shape[1]} rows"
    return bias[:, 1] - bias[:, 0]


# By the class of the attention module: the method, and what replaces it.
METHODS: Mapping[str, tuple[str, Callable[..., Any]]] = MappingProxyType({
    "BloomAttention": ("forward", _forward_bloom),
    "MptAttention": ("forward", _forward_mpt),
    "FalconAttention": ("forward", _forward_falcon),
    "GPTJAttention": ("_attn", _attend_scaled),
    "CodeGenAttention": ("_attn", _attend_scaled),
    "GPTNeoSelfAttention": ("_attn", _attend_gpt_neo),
})  # fmt: skip


def replace_method(module: Any) -> None:
    """Replace the method that computes attention, of a module whose class METHODS names."""
    name, function = METHODS[type(module).__name__]
    setattr(module, name, MethodType(function, module))


def give_mask(model: PreTrainedModel) -> None:
    """Have a model that computes biases or masks by a mask of its own find one in which they are right for ranks of `cp`."""
    add = MASKS.get(model.config.model_type)
    if add is not None:
        model.register_forward_pre_hook(add, with_kwargs=True)


def _add_mask_of_mpt(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Its code wants one though nothing reads it: four dims, so that none is computed."""
    ids = kwargs["input_ids"]
    return args, kwargs | {"attention_mask": ids.new_zeros(()).expand(ids.shape[0], 1, ids.shape[1], 1)}


def _add_mask_of_bloom(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Biases are of as many rows as its mask has: two, of which slopes are read, also where a rank has one token."""
    ids, given = kwargs["input_ids"], kwargs.get("attention_mask")
    return args, kwargs | {"attention_mask": ids.new_ones(ids.shape[0], 2) if given is None else given}


# By model_type.
MASKS = MappingProxyType({"mpt": _add_mask_of_mpt, "bloom": _add_mask_of_bloom})
