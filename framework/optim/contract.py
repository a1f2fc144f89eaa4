"""The contract between optimizers and those who own parameters: groups of shards in, updated values out."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from framework.mesh.layout import Layout
from framework.recipe.schema import Optim


class UpdateKind(Enum):
    """What an update must see at once. WHOLE_MATRIX: every element of a matrix; then owners divide matrices, not intervals."""

    PER_ELEMENT = "single elements"
    WHOLE_MATRIX = "whole matrices"


@dataclass(frozen=True, eq=False)
class FlatShard:
    """What this rank updates of one or several parameters. value, gradient: [n] in the master dtype; value is updated in place.
    layouts: which elements of which parameters these are, one after another; parameters: their names."""

    layouts: tuple[Layout, ...]
    value: Tensor
    gradient: Tensor
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShardGroup:
    """Shards that are updated alike. kind: what each of them holds."""

    name: str
    shards: tuple[FlatShard, ...]
    lr_ratio: float
    weight_decay: float
    kind: UpdateKind = UpdateKind.PER_ELEMENT


@dataclass(frozen=True)
class Method:
    """An optimizer as the table of `optimizers` names it.

    states: its states per element, which a checkpoint keeps: by name, the share of it that an update retains. make: torch's
    optimizer over parameter groups of one tensor each; as torch's fused ones it divides gradients by `grad_scale` and does
    nothing where `found_inf` is 1. counts_updates: whether it keeps a state `step` on the device. nonnegative: states that are
    never below zero.
    """

    kind: UpdateKind
    states: Callable[[Optim], dict[str, float]]
    make: Callable[[Optim, list[dict[str, Any]]], torch.optim.Optimizer]
    counts_updates: bool = False
    nonnegative: tuple[str, ...] = ()
