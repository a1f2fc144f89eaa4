"""Numbers in 8 bits, by blocks: floating-point numbers of few mantissa bits whose largest exponent is the block's.

    code 0        0
    code c > 0    the bits of fp32 that begin with  c + 2^mantissa_bits * (exponent + 1) - count,  and go on with zeros

              count   mantissa bits   octaves below the block's largest
    signed    128     3               16
    unsigned  256     4               16

It is a dynamic map, as Dettmers et al. (2022, arXiv 2110.02861) ask for, logarithmic throughout. A scale that is a power of two
has two uses. The grid is the same in every block, so that layouts that cut blocks differently agree in all numbers that are less
than 14 octaves below a block's largest. And every number is one of bf16, which is how checkpoints keep it.

Below the smallest number a signed value is rounded stochastically to it or to 0. A positive one without sign becomes the
smallest: a second moment of 0 would divide by eps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Elements that share an exponent, of a byte. With 256, updates of a small Llama's embedding were off by 15% instead of 2%: where
# two rows share a block, one may be of a token a thousand times as frequent as the other's.
BLOCK = 64
FP32_MANTISSA_BITS = 23
RANDOM_BITS = 16
SIGN = -(1 << 31)


@dataclass(frozen=True)
class CodeRange:
    """The numbers that 8 bits can have. count: magnitudes, 0 included; dtype: of codes."""

    count: int
    mantissa_bits: int
    dtype: torch.dtype

    @property
    def dropped_bits(self) -> int:
        """Bits of fp32's mantissa that a number does not have."""
        return FP32_MANTISSA_BITS - self.mantissa_bits

    def base(self, exponents: Tensor) -> Tensor:
        """Offset of the codes of each block: int32 [blocks, 1]. exponents: biased, uint8 [blocks]."""
        return (((exponents.int() + 1) << self.mantissa_bits) - self.count).clamp_(min=0)[:, None]


SIGNED, UNSIGNED = CodeRange(128, 3, torch.int8), CodeRange(256, 4, torch.uint8)


def encode(values: Tensor, bits: Tensor, codes: Tensor, exponents: Tensor, kind: CodeRange) -> None:
    """Write the codes of `values`, fp32 [blocks * BLOCK], rounded stochastically by the lowest 16 of `bits`, int32.

    codes: of `kind.dtype`, [blocks * BLOCK]; exponents: uint8 [blocks]. What `decode` returned gets its codes, whatever the bits.
    """
    words, chance = values.view(torch.int32).view(-1, BLOCK), (bits & 0xFFFF).view(-1, BLOCK)
    magnitudes = words & ~SIGN
    rounded = (chance << (kind.dropped_bits - RANDOM_BITS)).add_(magnitudes) >> kind.dropped_bits
    exponents.copy_(rounded.amax(1) >> kind.mantissa_bits)
    base = kind.base(exponents)
    found = rounded.sub_(base)
    if kind is SIGNED:
        smallest = (base + 1) << kind.dropped_bits
        limit = chance * (2.0**-RANDOM_BITS * smallest.view(torch.float32))
        is_below = _is_negative(magnitudes - smallest)
        is_kept = _is_negative(limit.view(torch.int32) - magnitudes)
        sign = words >> 31
        found = found.bitwise_and_(~is_below).sub_(is_kept & is_below).bitwise_xor_(sign).sub_(sign)
    else:
        found = found.clamp_(min=1).bitwise_and_(_is_negative(-magnitudes))
    codes.view(-1, BLOCK).copy_(found)


def decode(codes: Tensor, exponents: Tensor, kind: CodeRange) -> Tensor:
    """The numbers of codes [blocks * BLOCK]: fp32."""
    signed = codes.view(-1, BLOCK).int()
    magnitudes = signed.abs()
    is_number = _is_negative(-magnitudes)
    words = magnitudes.add_(kind.base(exponents)).bitwise_left_shift_(kind.dropped_bits).bitwise_and_(is_number)
    return words.bitwise_or_(signed & SIGN).view(torch.float32).view(-1)


def _is_negative(numbers: Tensor) -> Tensor:
    """All bits set where a number is below zero, else none: int32. `torch.where` takes 20 times as long."""
    return numbers >> 31
