"""Tensor, sequence and vocabulary parallelism (Shoeybi et al. 2019, Korthikanti et al. 2022), for any model of Hugging Face's.

`rules` says what each module is, `find_regions` finds the regions of a model, `partition` how a weight divides, `layers` compute
with the parts, `regions` and their `borders` are where ranks communicate, `async_tp` under matmuls. `split` puts it
all into a model.
"""
