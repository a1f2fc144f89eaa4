"""Initial values beside those of stock's own initialiser, by distribution: both are random, from generators of their own.

A parameter that stock makes of one number must be that number. Of others four things are compared, each over a limit that
chance exceeds once in 1e9 times: mean and variance; the two-sample Kolmogorov-Smirnov statistic, which sees any other shape; and
how many numbers of one side are larger than all of the other, by which bounds differ (a normal and a truncated normal).
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

# Standard deviations of a mean. The statistic's limit is sqrt(-ln(1e-9 / 2) / 2). Of equally many numbers k are beyond the other
# side's with the chance 2^-k.
DEVIATIONS, STATISTIC, BEYOND = 6.2, 3.28, 30
FEW = 30  # of fewer numbers nothing can be said


def compare_initial(found: Mapping[str, Tensor], config: PretrainedConfig) -> dict[str, float]:
    """The worst measure over the limit, by parameter. found: initial values of the whole model, by name."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock = dict(AutoModelForCausalLM.from_config(config, dtype=torch.float32).named_parameters())
    if found.keys() != stock.keys():
        return {f"only one side has {', '.join(sorted(found.keys() ^ stock.keys()))}": float("inf")}
    return {
        name: max(_measure(found[name].flatten().double(), value.detach().flatten().double()))
        for name, value in stock.items()
        if value.numel()
    }


def _measure(found: Tensor, stock: Tensor) -> Iterator[float]:
    if bool((stock == stock[0]).all()):
        yield 0.0 if torch.equal(found, stock) else float("inf")
        return
    if not bool(found.isfinite().all()):
        yield float("inf")
        return
    if len(stock) < FEW:
        yield 0.0
        return
    both = torch.cat([found, stock])
    for moment in (1, 2):  # mean and spread: their standard errors are those of a mean of powers
        power = (both - both.mean()) ** moment if moment > 1 else both
        ours, theirs = power.tensor_split(2)
        yield float((ours.mean() - theirs.mean()).abs() / (DEVIATIONS * power.std() * (2 / len(stock)) ** 0.5))
    values = both.sort().values
    shares = [torch.searchsorted(each.sort().values, values, right=True) / len(each) for each in (found, stock)]
    yield float((shares[0] - shares[1]).abs().max() / (STATISTIC * (2 / len(stock)) ** 0.5))
    for one, other in ((found.abs(), stock.abs()), (stock.abs(), found.abs())):
        yield int((one > other.max()).sum()) / BEYOND
