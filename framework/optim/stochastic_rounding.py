"""Stochastic rounding to bf16: up with the probability of the distance, so that sums of many small steps stay right on average.

    round(x) = the bf16 number below x, or with probability (x - below) / (above - below) the one above    (in magnitude)

Rounding to nearest leaves a bf16 number where it is while each step adds less than half of its spacing, 1/512 to 1/256 of it.
The random bits of an element are a function of (key, element), wherever it lies, so that every layout rounds alike.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.model.counter_rng import CounterRng, Key, Rows, batch

# Random bits that a rounding takes, and the bits of fp32 that bf16 does not have.
ROUNDING_BITS = 16


def is_needed(retained: float, mantissa_bits: int, is_signed: bool) -> bool:
    """Whether a moment is right on average only with stochastic rounding. retained: what a step leaves of it, beta.

    To nearest, a number stays where it is while a step changes it by less than half a spacing: 2^-(mantissa_bits + 1) of it at
    most. A first moment whose steps are larger is closer to the truth if rounded to nearest. A second one would still be too
    large: it falls by 1 - beta at most, and rises by more.
    """
    return not is_signed or 1 - retained < 2.0 ** -(mantissa_bits + 1)


def draw_bits(rng: CounterRng, key: Key, rows: Sequence[Rows], out: Tensor) -> None:
    """Fill `out`, int32 [n], with the random words of elements `rows` of stream `key`: 32 bits each, enough for two roundings."""
    first = 0
    for each in batch(rows, rng.size):
        words = rng.words(key, each)
        out[first : first + len(words)] = words
        first += len(words)
    assert first == len(out), (first, len(out))


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """`values` rounded by the lowest 16 of `bits`. values: fp32 [n], finite; bits: int32 [n]. Returns bf16 [n].

    What bf16 has stays as it is, whatever the bits.
    """
    words = values.view(torch.int32) + (bits & 0xFFFF)  # sign and magnitude: a carry goes up in magnitude
    return (words >> ROUNDING_BITS).to(torch.int16).view(torch.bfloat16)
