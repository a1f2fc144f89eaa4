"""The oracle's moments in bf16 and int8: those of a stock optimizer, rounded after each step by arithmetic in fp64.

Random words are those of the layout, functions of (seed, step, parameter, element). In int8 the smallest number of a block
depends on its largest, and blocks are cut where ranks' shards are: the oracle takes from the layout which elements share a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from framework.model.counter_rng import Rows, fill
from framework.optim.low_bit import BLOCK, SIGNED, UNSIGNED, CodeRange
from framework.optim.stochastic_rounding import is_needed
from framework.recipe.schema import Optim

SECOND = "exp_avg_sq"
LEAST_EXPONENT = -126  # of normal fp32 numbers


@dataclass(frozen=True)
class PlainMoments:
    """What rounds the moments of `optim`. dtype: `precision.moments`. blocks: by parameter, of its shape, the number of the first
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
            words = _draw(master, (self.seed, "moments", step, name)) if moments else torch.empty(0)
            for index, (key, moment) in enumerate(moments.items()):
                chance = ((words >> 16 * index) & 0xFFFF).double() / 65536
                if not is_needed(self._retained()[key], self._mantissa_bits(key), key != SECOND):
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

    def _mantissa_bits(self, key: str) -> int:
        return 7 if self.dtype == "bf16" else (UNSIGNED if key == SECOND else SIGNED).mantissa_bits

    def _round(self, name: str, values: Tensor, chance: Tensor, key: str) -> Tensor:
        rounded = _round_mantissa(values, chance, self._mantissa_bits(key))
        if self.dtype == "bf16":
            return rounded
        starts = self.blocks[name].flatten() if name in self.blocks else torch.arange(len(values)) // BLOCK * BLOCK
        starts = starts.to(values.device, torch.int64)
        largest = torch.zeros_like(values).scatter_reduce_(0, starts, rounded.abs(), "amax")[starts]
        smallest = _find_smallest(largest, UNSIGNED if key == SECOND else SIGNED)
        is_kept = values > 0 if key == SECOND else values.abs() > chance * smallest
        return torch.where(values.abs() < smallest, is_kept * smallest * values.sign(), rounded)


def _draw(master: Tensor, key: tuple[int | str, ...]) -> Tensor:
    """The random words of a parameter's elements: int64, of which the lower 32 bits count."""
    words = torch.empty(master.numel(), dtype=torch.int64, device=master.device)
    rows = [Rows(0, 1, 0, master.numel())]
    fill(words, rows, lambda rng, part: rng.words(key, part))
    return words


def _round_mantissa(values: Tensor, chance: Tensor, bits: int) -> Tensor:
    """Numbers of so many mantissa bits: the one below in magnitude, or the next if `chance` carries the value over it."""
    spacing = _power(_exponent(values).clamp(min=LEAST_EXPONENT) - bits)
    return values.sign() * (values.abs() / spacing + chance).floor() * spacing


def _find_smallest(largest: Tensor, codes: CodeRange) -> Tensor:
    """The smallest number of a block, by its largest: its fp32 bits begin with `base + 1`."""
    exponent = _exponent(largest).clamp(min=LEAST_EXPONENT - 1) - LEAST_EXPONENT + 1
    base = ((exponent + 1) * 2**codes.mantissa_bits - codes.count).clamp(min=0)
    return ((base + 1) << codes.dropped_bits).int().view(torch.float32).double()


def _exponent(values: Tensor) -> Tensor:
    """floor(log2 |x|), int64; far below all of fp32's for 0."""
    exponent = torch.frexp(values).exponent.long() - 1
    return torch.where(values == 0, 2 * LEAST_EXPONENT, exponent)


def _power(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, exact."""
    return ((exponent + 1023) << 52).view(torch.float64)
