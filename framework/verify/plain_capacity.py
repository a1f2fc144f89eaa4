"""Capacity of experts on a stock model, written plainly: what a dropped pair adds is weighted with zero."""

from typing import Any

from torch import Tensor, nn

from framework.model.capacity import UNITS, Capacity
from framework.model.experts import count_experts, find_experts


def drop_beyond_capacity(model: nn.Module, capacity: Capacity, context: int) -> None:
    """From now on experts of the stock model drop what is beyond their capacity in each sequence of `context` tokens."""
    for _, experts, form in find_experts(model):
        assert not form.is_expert_major, "llama4's experts are told no weights"
        num_experts = count_experts(experts)

        def drop(module: nn.Module, args: tuple[Tensor, Tensor, Tensor], count: int = num_experts) -> tuple[Any, ...]:
            hidden, index, weights = args
            kept = weights.new_ones(weights.shape)
            for first in range(0, len(index), context):
                for token, slot in _find_dropped(
                    index[first : first + context], weights[first : first + context], capacity, count
                ):
                    kept[first + token, slot] = 0
            return hidden, index, weights * kept

        experts.register_forward_pre_hook(drop)


def _find_dropped(index: Tensor, weights: Tensor, capacity: Capacity, num_experts: int) -> list[tuple[int, int]]:
    """The (token, slot) pairs of one sequence that find no room.  index, weights: [S, k]."""
    pairs = [(token, slot) for token in range(index.shape[0]) for slot in range(index.shape[1])]
    if capacity.priority == "weight":
        # In units in which weights that differ by rounding are equal; the sort leaves those in order.
        pairs.sort(key=lambda pair: -round(float(weights[pair].detach()) * UNITS))
    room = capacity.room(index.shape[0], index.shape[1], num_experts)
    taken: dict[int, int] = {}
    dropped = []
    for pair in pairs:
        expert = int(index[pair])
        taken[expert] = taken.get(expert, 0) + 1
        if taken[expert] > room:
            dropped.append(pair)
    return dropped
