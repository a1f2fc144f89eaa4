"""The oracle's weights without masters: those of a stock optimizer in fp32, rounded to bf16 after each step in fp64.

Random words are those of the layout, functions of (seed, step, parameter, element).
"""

import torch
from torch import Tensor

from framework.model.counter_rng import Key, Rows, fill
from framework.recipe.schema import Precision


def has_no_master(precision: Precision) -> bool:
    """Whether the optimizer updates the weights that are computed with."""
    return precision.master == "none" and precision.compute == "bf16"


@torch.no_grad()
def round_master(master: Tensor, key: Key) -> None:
    """Round a parameter, fp32 of any shape, in place: to the bf16 number on its side of zero, or with the probability of the
    distance to the next one."""
    words = torch.empty(master.numel(), dtype=torch.int64, device=master.device)
    fill(words, [Rows(0, 1, 0, master.numel())], lambda rng, part: rng.words(key, part))
    exact = master.flatten().double()
    nearest = exact.bfloat16()
    is_beyond = nearest.double().abs() > exact.abs()
    below = torch.where(is_beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    above = torch.nextafter(below, torch.full_like(below, torch.inf).copysign(master.flatten().bfloat16()))
    share = (exact - below.double()) / (above.double() - below.double())
    chosen = torch.where(share + (words & 0xFFFF).double() / 65536 >= 1.0, above, below)
    master.copy_(chosen.view_as(master))
