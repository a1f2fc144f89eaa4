"""Attention, of sequences whose tokens are divided over `cp` or are all on one rank.

`attention` is what a layer calls; `ulysses` exchanges heads for tokens, `ring` brings keys and values. `blocks` says which
queries meet which keys, `passes` makes one softmax of them, `block_attention` computes one of them, piece by piece
(`visible_rows`), by `kernels` and `cuda_kernels`. `hook` puts it all into a model, `recurrent` does so for mixers that carry a
state (`recurrences`, on `pieces` of sequences), and `probe` says of which models that is exact.
"""

from framework.parallel.attention.hook import (
    find_context_attentions,
    is_operator,
    refuse_uneven_heads,
    split_context,
    watch_logits,
)
from framework.parallel.attention.probe import (
    find_shared_rope,
    find_stock_attention,
    find_whole,
    probe_causes,
    refuse_undivided_context,
)
from framework.parallel.attention.visible_rows import Documents, select_sequences
from framework.parallel.attention.whole_tokens import refuse_sequence

__all__ = [
    "Documents",
    "find_context_attentions",
    "find_shared_rope",
    "find_stock_attention",
    "find_whole",
    "is_operator",
    "probe_causes",
    "refuse_sequence",
    "refuse_undivided_context",
    "refuse_uneven_heads",
    "select_sequences",
    "split_context",
    "watch_logits",
]
