"""AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101): torch's fused kernel."""

from typing import Any

import torch

from framework.optim.contract import Method, UpdateKind
from framework.recipe.schema import Optim


def make(optim: Optim, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer over groups as torch's optimizers take them."""
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)


ADAMW = Method(
    UpdateKind.PER_ELEMENT,
    lambda optim: dict(zip(("exp_avg", "exp_avg_sq"), optim.betas, strict=True)),
    make,
    counts_updates=True,
    nonnegative=("exp_avg_sq",),
)
