"""Numbers in 8 bits, by blocks: floating-point numbers of 3 mantissa bits whose largest exponent is the block's.

    code 0            0
    code c >= 1       the bits of fp32 that begin with  c + 8 * (exponent + 1) - count,  and go on with zeros
    count             128 with a sign: 16 octaves below the block's largest number; 256 without: 32 octaves

It is a dynamic map, as Dettmers et al. (2022, arXiv 2110.02861) ask for, logarithmic throughout. A scale that is a power of two
has two uses. The grid is the same in every block, so that layouts that cut blocks differently agree in all numbers that are less
than 14 (30) octaves below a block's largest. And every number is one of bf16, which is how checkpoints keep it.

Below the smallest number a signed value is rounded stochastically to it or to 0. A positive one without sign becomes the
smallest: a second moment of 0 would divide by eps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256  # elements that share an exponent: a byte for each block, 0.4%
MANTISSA_BITS = 3
DROPPED_BITS = 23 - MANTISSA_BITS
RANDOM_BITS = 16
SIGN = -(1 << 31)


@dataclass(frozen=True)
class CodeRange:
    """What 8 bits are spent on. count: magnitudes, 0 included; dtype: of codes."""

    count: int
    dtype: torch.dtype

    def base(self, exponents: Tensor) -> Tensor:
        """What is added to the codes of each block: int32 [blocks, 1]. exponents: biased, uint8 [blocks]."""
        return (((exponents.int() + 1) << MANTISSA_BITS) - self.count).clamp_(min=0)[:, None]


SIGNED, UNSIGNED = CodeRange(128, torch.int8), CodeRange(256, torch.uint8)


def encode(values: Tensor, bits: Tensor, codes: Tensor, exponents: Tensor, kind: CodeRange) -> None:
    """Write the codes of `values`, fp32 [blocks * BLOCK], rounded stochastically by the lowest 16 of `bits`, int32.

    codes: of `kind.dtype`, [blocks * BLOCK]; exponents: uint8 [blocks]. What `decode` returned gets its codes, whatever the bits.
    """
    words, chance = values.view(torch.int32).view(-1, BLOCK), (bits & 0xFFFF).view(-1, BLOCK)
    magnitudes = words & ~SIGN
    rounded = (magnitudes + (chance << (DROPPED_BITS - RANDOM_BITS))) >> DROPPED_BITS
    exponents.copy_(rounded.amax(1) >> MANTISSA_BITS)
    base = kind.base(exponents)
    smallest = (base + 1) << DROPPED_BITS
    if kind is SIGNED:
        is_kept = values.view(-1, BLOCK).abs() > chance * 2.0**-RANDOM_BITS * smallest.view(torch.float32)
    else:
        is_kept = magnitudes > 0
    found = torch.where(magnitudes < smallest, is_kept, rounded.sub_(base))
    if kind is SIGNED:
        found = torch.where(words < 0, -found, found)
    codes.view(-1, BLOCK).copy_(found)


def decode(codes: Tensor, exponents: Tensor, kind: CodeRange) -> Tensor:
    """The numbers of codes [blocks * BLOCK]: fp32."""
    signed = codes.view(-1, BLOCK).int()
    magnitudes = signed.abs()
    words = torch.where(magnitudes > 0, (magnitudes + kind.base(exponents)) << DROPPED_BITS, 0)
    return words.bitwise_or_(signed & SIGN).view(torch.float32).view(-1)
