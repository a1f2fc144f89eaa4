"""Capacity: how many tokens of a sequence an expert takes at most, and which are dropped.

    C = ceil(factor * S k / E)        tokens of one sequence that an expert takes, of S tokens with k experts each of E

Counted by sequence and not by microbatch or rank, so that every layout drops the same pairs of a token and an expert. A dropped
pair adds nothing to its token, and the weights of the others stay as the router gave them. By default nothing is dropped.

    B sequences of S tokens, k experts per token, E experts
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch
from torch import Tensor

from framework.recipe.schema import Model

Priority = Literal["weight", "position"]
# Weights are compared in units of 2^-16. Equal first tokens of a sequence have equal hidden states and so equal weights, and
# rounding, which differs between layouts, must not decide which of them is dropped.
UNITS = 1 << 16


@dataclass(frozen=True)
class Capacity:
    """factor: at least 1, where 1 is room for exactly an even load. priority: which pairs an expert takes first: those with the
    largest weights, or the sequence's first."""

    factor: float
    priority: Priority

    def room(self, tokens: int, top_k: int, num_experts: int) -> int:
        """C of a sequence of so many tokens."""
        return ceil(self.factor * tokens * top_k / num_experts)

    def find_dropped(self, index: Tensor, weights: Tensor, num_experts: int) -> Tensor:
        """[B, S, k] bool: the pairs that find no room.  index, weights: [B, S, k], the router's."""
        tokens, top_k = index.shape[1:]
        experts = index.flatten(1)
        pairs = torch.arange(experts.shape[1], device=index.device).expand_as(experts)
        if self.priority == "weight":
            # Stable: of equal weights the first in the sequence.
            units = (weights.detach().flatten(1).to(torch.float64) * UNITS).round()
            pairs = units.argsort(dim=1, descending=True, stable=True)
        # By expert, and within each by priority; then a pair's place within its expert's run is its number less the run's first.
        by_expert, order = experts.gather(1, pairs).sort(dim=1, stable=True)
        first = torch.searchsorted(by_expert, by_expert)
        place = torch.arange(experts.shape[1], device=index.device) - first
        is_dropped = torch.empty_like(experts, dtype=torch.bool)
        is_dropped.scatter_(1, pairs.gather(1, order), place >= self.room(tokens, top_k, num_experts))
        return is_dropped.view_as(index)


def capacity_of(model: Model) -> Capacity | None:
    """What the recipe bounds; None where nothing is dropped."""
    return None if model.expert_capacity is None else Capacity(model.expert_capacity, model.expert_drop)
