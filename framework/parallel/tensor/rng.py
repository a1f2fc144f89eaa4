"""RNG streams: alike on all ranks where they compute alike, different where each computes its own.

    outside regions, tokens replicated       alike: residual dropout must drop the same elements everywhere
    outside regions, tokens sharded          different: other tokens
    inside attention and mlp                 different: other heads and features
    inside a mixture of experts              alike: a router that uses random numbers must route alike

A step seeds its generator by microbatch and layer, equally on all ranks, but for `mask_of` the rank where layers hold other
tokens. Every other stream is seeded by that seed, exclusive-or what is particular to the rank or the region: a function of where
we are. So nothing has to be kept for recomputation, which restores the generator's state: the seed is part of it, and both masks
can be taken off again.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.model.initial import seed_for

RANDOM_WORDS = ("drop", "jitter")
# Classes of modules that draw whatever their config says: phimoe's routers draw lots among experts of equal scores.
DRAWING_MODULES = ("PhimoeTopKRouter",)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def uses_rng_in_training(model: PreTrainedModel) -> bool:
    """Whether the model takes random numbers: a dropout or jitter of the config or of a module is not zero, a module draws in any
    case, or the model's code is not Hugging Face's and the names of its settings are unknown."""
    is_foreign = not type(model).__module__.startswith("transformers.models.")
    drops = any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules())
    draws = any(type(module).__name__ in DRAWING_MODULES for module in model.modules())
    return is_foreign or drops or draws or _is_random(model.config.to_dict())


def mask_of(tokens: TokenLayout) -> int:
    """The number with which a rank's seed of a layer is exclusive-or'd: 0 where all hold the same tokens, else the rank's own."""
    return _rank_mask(tokens.tp) if tokens.num_parts > 1 else 0


class RngStreams:
    """The streams of one rank, all on the generator of the device that a tensor is on; no random number is ever sent."""

    def __init__(self, tokens: TokenLayout) -> None:
        self._rank_mask, self._outside_mask = _rank_mask(tokens.tp), mask_of(tokens)
        # State of the generator in front of the first layer; None before it, and wherever no microbatch is in the layers.
        self._before: tuple[torch.Generator, Tensor] | None = None

    def start_outside(self, x: Tensor) -> None:
        """Begin the stream of the tokens that this rank alone holds, until `end_outside`. x: any shape; its device counts."""
        generator = torch_generator(x)
        self._before = generator, self._switch(generator, generator.initial_seed() ^ self._outside_mask)

    def end_outside(self) -> None:
        """Go on where `start_outside` left the stream that all ranks share. Nothing where it was not called."""
        if self._before is not None:
            generator, state = self._before
            generator.set_state(state)
            self._before = None

    def start_inside(self, x: Tensor, name: str, differs: bool) -> Tensor:
        """Begin the stream of region `name`, of this rank alone if it differs. Returns the generator's state until then, bytes
        [n]. x: any shape; its device counts."""
        generator = torch_generator(x)
        seed = generator.initial_seed() ^ seed_for("region", name)
        # The seed outside may carry the rank's mask already: a second one would take it off again.
        return self._switch(generator, seed ^ self._outside_mask ^ (self._rank_mask if differs else 0))

    def restore(self, x: Tensor, state: Tensor) -> None:
        """Go on where an outer stream was left. x: any shape, on its device; state: what `start_inside` has returned, [n]."""
        torch_generator(x).set_state(state)

    def _switch(self, generator: torch.Generator, seed: int) -> Tensor:
        # The state holds the seed, too: who restores it goes on in the outer stream, and masks are taken of the outer seed again.
        state = generator.get_state()
        generator.manual_seed(seed)
        return state


def torch_generator(x: Tensor) -> torch.Generator:
    """The generator that operations on x's device take random numbers from. x: any shape."""
    return torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator


def _rank_mask(tp: Axis) -> int:
    return seed_for("tensor-parallel rank", tp.rank)


def _is_random(value: Any, name: str = "") -> bool:
    if isinstance(value, dict):
        return any(_is_random(inner, str(key)) for key, inner in value.items())
    # Probabilities are floats; an int or a bool of such a name (a number of dropped layers) takes no random numbers by itself.
    return isinstance(value, float) and value > 0 and any(word in name for word in RANDOM_WORDS)
