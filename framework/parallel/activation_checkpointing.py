"""Keep a layer's input instead of its activations, and compute them again in backward (Chen et al. 2016).

Our own wrapper around the layer's forward rather than Hugging Face's flag, whose versions disagree on whether a layer's
hooks run again in the recomputation. The layer's random state is restored, so dropout is the same both times.
"""

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from framework.mesh.layout import Layout
from framework.parallel.stage_plan import StagePlan


def checkpoint_layers(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Make each layer's forward recompute in backward, if the recipe asks for it: bitwise the same result. Layouts stay."""
    if plan.recipe.memory.activation_checkpointing == "full":
        for layer in (model.get_submodule(unit.root) for unit in plan.own_units if unit.is_layer):
            checkpoint_activations(layer)
    return layouts


def checkpoint_activations(layer: nn.Module) -> None:
    """Make this layer's forward recompute in backward."""
    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
