"""Context parallelism: attention of sequences whose tokens are divided over `cp`.

`attention` is what a layer calls; `ulysses` exchanges heads for tokens, `ring` and `gather` bring keys and values, `blocks` says
which queries meet which keys, `merge` makes one softmax of them. `hook` brings a model's modules to it, with `family_forwards`
and `family_rules` where families need more, `split` puts it all into a model, and `probe` says of which models that is exact.
"""

from framework.parallel.context.probe import probe_causes, refuse_undivided_context
from framework.parallel.context.split import refuse_uneven_heads, split_context

__all__ = ["probe_causes", "refuse_undivided_context", "refuse_uneven_heads", "split_context"]
