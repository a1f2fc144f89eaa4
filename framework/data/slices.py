"""Microbatches cut for context parallelism: once, after packing, from whole sequences. Labels are shifted and positions counted
by then, so both are facts of the whole sequence and no rank looks beyond its slices for them.

    input_ids, labels    the rank's tokens; padding is token 0, without a label
    position_ids         always there: a rank's tokens do not begin at 0 and are not neighbours
    first_rows           with packed documents the row where a token's document begins: attention asks it which keys are seen
"""

import torch

from framework.data.pack import Microbatch
from framework.mesh.context import ContextSlices
from framework.model.loss import IGNORE


def cut_context(rows: Microbatch, slices: ContextSlices) -> Microbatch:
    """The tokens of [b, context] that a rank of `cp` holds, [b, tokens_local]; `rows` itself where it holds all of them."""
    if slices.ranks == 1:
        return rows
    context = slices.context
    assert rows.input_ids.shape[1] == context, f"sequences of {rows.input_ids.shape[1]} tokens, not of {context}"
    row = torch.arange(context + slices.padding).expand(len(rows.input_ids), -1)
    positions = row if rows.position_ids is None else _count_on(rows.position_ids, slices.padding)
    whole = slices.padded()
    return Microbatch(
        slices.cut(rows.input_ids, 0),
        slices.cut(rows.labels, IGNORE),
        # A table of positions has no row for those beyond the context.
        whole.cut(positions.clamp(max=context - 1), 0),
        rows.source,
        None if rows.position_ids is None else whole.cut(row - positions, 0),
    )


def _count_on(positions: torch.Tensor, padding: int) -> torch.Tensor:
    """Padding belongs to the last document.  positions: [b, T] -> [b, T + padding]."""
    return torch.cat([positions, positions[:, -1:] + torch.arange(1, padding + 1)], dim=1)
