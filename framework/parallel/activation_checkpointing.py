"""Keep a layer's input instead of its activations, and compute them again in backward (Chen et al. 2016).

Our own wrapper around the layer's forward rather than Hugging Face's flag, whose versions disagree on whether a layer's
hooks run again in the recomputation. The layer's random state is restored, so dropout is the same both times.
"""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(layer: nn.Module) -> None:
    """Make this layer's forward recompute in backward. The result is bitwise equal."""
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
