"""SGD with momentum: torch's fused kernel."""

from typing import Any

import torch

from framework.optim.contract import Method, UpdateKind
from framework.recipe.schema import Optim


def states(optim: Optim) -> dict[str, float]:
    """Without momentum there is nothing to keep."""
    return {"momentum_buffer": optim.momentum} if optim.momentum else {}


def make(optim: Optim, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Over groups as torch's optimizers take them."""
    return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, fused=True)


SGD = Method(UpdateKind.PER_ELEMENT, states, make)
