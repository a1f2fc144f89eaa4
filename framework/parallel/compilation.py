"""Compilation of decoder layers, each by itself (`memory.compile: always`).

A layer's forward is compiled, not its call: what this rank does on the way in and out (gather the unit, seed its random draws,
scatter tokens) are hooks of the call, and stay outside. Within a layer, collectives, their waits and the borders of
tensor-parallel regions are calls that the compiler leaves alone: `torch.compiler.disable` stands on each of them. So it never
guards on what counts or changes from step to step, and one set of graphs serves all layers that are alike.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from framework.model.units import Unit
from framework.recipe.schema import Memory


def compiled_layers(model: PreTrainedModel, units: Sequence[Unit], memory: Memory) -> list[nn.Module]:
    """The layers that the recipe asks to compile: all or none."""
    if memory.compile != "always":
        return []
    return [model.get_submodule(unit.root) for unit in units if unit.is_layer]


def compile_layer(layer: nn.Module) -> None:
    """Compile the layer's forward for the shapes that it meets, at its first call."""
    layer.forward = torch.compile(layer.forward, dynamic=False)  # type: ignore[method-assign]
