"""Rounding of the oracle's moments to bf16 and int8, and of its weights without masters: those of a stock optimizer, after each
step, by arithmetic in fp64.

Random words are functions of (seed, step, parameter, element), defined in `draw_words`. In int8 the smallest number of a block
depends on its largest, and blocks are cut where ranks' shards are: the oracle takes from the layout which elements share a block.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from framework.recipe.schema import Optim, Precision

SECOND = "exp_avg_sq"
LEAST_EXPONENT = -126  # of normal fp32 numbers
BLOCK = 64  # elements that share an exponent in int8
MASK = 0xFFFFFFFF
# Rounds of the hash `triple32`: (shift, factor) each, then a last shift.
ROUNDS, LAST_SHIFT = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)), 14


def draw_words(numel: int, key: tuple[int | str, ...]) -> Tensor:
    """The random words of a parameter's elements in row-major order, int64 [numel] in [0, 2^32): triple32 of an element's number,
    with a word of the key's digest added before each of its rounds."""
    assert numel <= MASK, "numbers of elements are 32 bits here"
    digest = hashlib.blake2b("/".join(map(str, (*key, 0))).encode(), digest_size=12).digest()
    words = torch.arange(numel)
    for at, (shift, factor) in enumerate(ROUNDS):
        words = (words + int.from_bytes(digest[4 * at : 4 * at + 4], "little")) & MASK
        words = ((words ^ (words >> shift)) * factor) & MASK
    return words ^ (words >> LAST_SHIFT)


def has_no_master(precision: Precision) -> bool:
    """Whether the optimizer updates the weights that are computed with."""
    return precision.master == "none" and precision.compute == "bf16"


@torch.no_grad()
def round_master(master: Tensor, key: tuple[int | str, ...]) -> None:
    """Round a parameter, fp32 of any shape, in place: to the bf16 number on its side of zero, or with the probability of the
    distance to the next one."""
    words = draw_words(master.numel(), key).to(master.device)
    exact = master.flatten().double()
    nearest = exact.bfloat16()
    is_beyond = nearest.double().abs() > exact.abs()
    below = torch.where(is_beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    above = torch.nextafter(below, torch.full_like(below, torch.inf).copysign(master.flatten().bfloat16()))
    share = (exact - below.double()) / (above.double() - below.double())
    chosen = torch.where(share + (words & 0xFFFF).double() / 65536 >= 1.0, above, below)
    master.copy_(chosen.view_as(master))


@dataclass(frozen=True)
class PlainMoments:
    """Rounds the moments of `optim`. dtype: `precision.moments`. blocks: by parameter, of its shape, the number of the first
    element of each element's block; empty: blocks of BLOCK elements."""

    optim: Optim
    dtype: str
    seed: int
    blocks: Mapping[str, Tensor]

    def round(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter], step: int) -> None:
        """Round the moments that the step has left, in place."""
        if self.dtype == "fp32":
            return
        for name, master in masters.items():
            moments = {key: optimizer.state[master][key] for key in self._retained() if key in optimizer.state[master]}
            words = draw_words(master.numel() if moments else 0, (self.seed, "moments", step, name)).to(master.device)
            for index, (key, moment) in enumerate(moments.items()):
                chance = ((words >> 16 * index) & 0xFFFF).double() / 65536
                if not self._is_drawn(key):
                    chance = torch.full_like(chance, 0.5)  # to nearest
                rounded = self._round(name, moment.detach().float().double().flatten(), chance, key)
                moment.copy_(rounded.view_as(moment))

    def _retained(self) -> dict[str, float]:
        """The states of stock optimizers and the share of each that a step retains, in the order in which they take their random
        bits: the lower half of a word, the upper."""
        betas = self.optim.betas
        names = {"adamw": ("exp_avg", SECOND), "lion": ("", "m"), "sgd": ("momentum_buffer",)}[self.optim.name]
        retained = (self.optim.momentum,) if self.optim.name == "sgd" else betas
        return {name: share for name, share in zip(names, retained, strict=True) if name}

    def _is_drawn(self, key: str) -> bool:
        """Whether a moment is rounded stochastically: a second one, and a first one that moves by less than half a spacing."""
        return key == SECOND or 1 - self._retained()[key] < 2.0 ** -(self._mantissa_bits(key) + 1)

    def _mantissa_bits(self, key: str) -> int:
        if self.dtype == "bf16":
            return 7
        return 4 if key == SECOND else 3

    def _round(self, name: str, values: Tensor, chance: Tensor, key: str) -> Tensor:
        rounded = _round_mantissa(values, chance, self._mantissa_bits(key))
        if self.dtype == "bf16":
            return rounded
        starts = self.blocks[name].flatten() if name in self.blocks else torch.arange(len(values)) // BLOCK * BLOCK
        starts = starts.to(values.device, torch.int64)
        largest = torch.zeros_like(values).scatter_reduce_(0, starts, rounded.abs(), "amax")[starts]
        smallest = _find_smallest(largest, self._mantissa_bits(key), 256 if key == SECOND else 128)
        is_kept = values > 0 if key == SECOND else values.abs() > chance * smallest
        return torch.where(values.abs() < smallest, is_kept * smallest * values.sign(), rounded)


def _round_mantissa(values: Tensor, chance: Tensor, bits: int) -> Tensor:
    """Numbers of so many mantissa bits: the one below in magnitude, or the next if `chance` carries the value over it."""
    spacing = _power(_exponent(values).clamp(min=LEAST_EXPONENT) - bits)
    return values.sign() * (values.abs() / spacing + chance).floor() * spacing


def _find_smallest(largest: Tensor, mantissa_bits: int, count: int) -> Tensor:
    """The smallest number of a block, by its largest: its fp32 bits begin with `base + 1`. count: magnitudes of a code."""
    exponent = _exponent(largest).clamp(min=LEAST_EXPONENT - 1) - LEAST_EXPONENT + 1
    base = ((exponent + 1) * 2**mantissa_bits - count).clamp(min=0)
    return ((base + 1) << (23 - mantissa_bits)).int().view(torch.float32).double()


def _exponent(values: Tensor) -> Tensor:
    """floor(log2 |x|), int64; far below all of fp32's for 0."""
    exponent = torch.frexp(values).exponent.long() - 1
    return torch.where(values == 0, 2 * LEAST_EXPONENT, exponent)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, exact."""
    return ((exponent + 1023) << 52).view(torch.float64)
