"""Tensor, sequence and vocabulary parallelism (Shoeybi et al. 2019, Korthikanti et al. 2022), for any model of Hugging Face's.

`rules` says what each module is, `find_regions` finds the regions of a model, `partition` how a weight divides, `layers` compute
with the parts, `regions` and their `borders` are where ranks communicate, `async_tp` under matmuls. `split` puts it
all into a model; `probe` asks a small copy whether tokens can be divided between its layers.
"""

from framework.parallel.tensor.heads import count_kv_heads, ranks_per_kv_head
from framework.parallel.tensor.probe import refuse_unordered_layers
from framework.parallel.tensor.rng import mask_of, uses_rng_in_training
from framework.parallel.tensor.split import split_over_tp

__all__ = [
    "count_kv_heads",
    "mask_of",
    "ranks_per_kv_head",
    "refuse_unordered_layers",
    "split_over_tp",
    "uses_rng_in_training",
]
