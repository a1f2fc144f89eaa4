"""Random draws: alike on all ranks where they compute alike, different where each computes its own.

    outside regions, tokens replicated       alike: residual dropout must drop the same elements everywhere
    outside regions, tokens sharded          different: other tokens
    inside attention and mlp                 different: other heads and features
    inside a mixture of experts              alike: a router that draws must route alike

A step seeds its generator by microbatch and layer, equally on all ranks, but for `mask_of` the rank where layers hold other
tokens. Every other stream is seeded by that seed, exclusive-or what is particular to the rank or the region: a function of where
we are. So nothing has to be kept for recomputation, which restores the generator's state: the seed is part of it, and both masks
can be taken off again.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from framework.mesh.axis import Axis
from framework.model.materialize import seed_for

DRAWING_WORDS = ("drop", "jitter")


def uses_rng_in_training(config: PretrainedConfig) -> bool:
    """Some dropout or jitter of the config is not zero."""
    return _draws(config.to_dict())


def mask_of(axis: Axis, differs: bool) -> int:
    """What a rank's seed is exclusive-or'd with where ranks draw differently; 0 where they draw alike, or there is one."""
    return seed_for("tensor-parallel rank", axis.rank) if differs and axis.size > 1 else 0


class RngStreams:
    """The streams of one rank. `outside_differs`: outside regions ranks draw differently, for they hold other tokens."""

    def __init__(self, axis: Axis, outside_differs: bool) -> None:
        self.rank_mask = mask_of(axis, differs=True)
        self.outside_differs = outside_differs

    def start_outside(self, x: Tensor) -> Tensor:
        """Begin the stream of the tokens that this rank alone holds. Returns the generator's state until then."""
        return self._switch(x, torch_generator(x).initial_seed() ^ self.rank_mask)

    def start_inside(self, x: Tensor, name: str, differs: bool) -> Tensor:
        """Begin the stream of region `name`. Returns the generator's state until then."""
        seed = torch_generator(x).initial_seed() ^ seed_for("region", name)
        return self._switch(x, seed ^ self.rank_mask if differs != self.outside_differs else seed)

    def restore(self, x: Tensor, state: Tensor) -> None:
        """Go on where an outer stream was left."""
        torch_generator(x).set_state(state)

    def _switch(self, x: Tensor, seed: int) -> Tensor:
        generator = torch_generator(x)
        state = generator.get_state()
        generator.manual_seed(seed)
        return state


def torch_generator(x: Tensor) -> torch.Generator:
    """The generator that operations on x's device draw from."""
    return torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator


def _draws(value: Any, name: str = "") -> bool:
    if isinstance(value, dict):
        return any(_draws(inner, str(key)) for key, inner in value.items())
    return isinstance(value, float) and value > 0 and any(word in name for word in DRAWING_WORDS)
