"""What attentions of some families do by the rows of tokens, in a way that a rank with some of the rows must correct.

A rule takes (module, query [B, H, C, D], first_rows [B, C] or None, rows [C] or [B, C] int64) and returns query and first rows as
they would be in one process.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

QueryRule = Callable[[Any, Tensor, Tensor | None, Tensor], tuple[Tensor, Tensor | None]]


def _attend_within_chunks(
    module: Any, query: Tensor, first_rows: Tensor | None, rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Llama 4: a query sees its chunk of its document, or in layers without rope all, with a temperature that grows by rows."""
    if module.config.layer_types[module.layer_idx] == "chunked_attention":
        first_rows = _start_of_chunks(rows, first_rows, module.config.attention_chunk_size, query.shape[0])
    if module.attn_temperature_tuning and not module.use_rope:
        # The module has multiplied by those of rows 0 .. C - 1, which are all that its forward knows of.
        local = torch.arange(query.shape[2], device=query.device)
        ratio = _temperature(module, rows) / _temperature(module, local)
        query = query * ratio.to(query.dtype)[..., None, :, None]
    return query, first_rows


def _start_of_chunks(rows: Tensor, first_rows: Tensor | None, chunk: int, num_sequences: int) -> Tensor:
    """The row where each query's chunk of its document begins, [B, C]."""
    starts = torch.zeros_like(rows) if first_rows is None else first_rows
    return (rows - (rows - starts) % chunk).expand(num_sequences, -1)


def _temperature(module: Any, rows: Tensor) -> Tensor:
    steps = torch.floor((rows.float() + 1.0) / module.floor_scale)
    return (torch.log1p(steps) * module.attn_scale + 1.0).double()


# By the class of the attention module.
QUERY_RULES: Mapping[str, QueryRule] = MappingProxyType({"Llama4TextAttention": _attend_within_chunks})
