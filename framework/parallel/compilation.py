"""Compilation of decoder layers, each by itself (`memory.compile: always`).

A layer's forward is compiled, not its call: what this rank does on the way in and out (gather the unit, seed its random draws,
scatter tokens) are hooks of the call, and stay outside. Within a layer, collectives, their waits and the borders of
tensor-parallel regions are calls that the compiler leaves alone: `torch.compiler.disable` stands on each of them. So it never
guards on what counts or changes from step to step, and one set of graphs serves all layers that are alike.
"""

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from framework.mesh.layout import Layout
from framework.parallel.stage_plan import StagePlan


def compile_layers(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Compile each layer's forward for the shapes that it meets, at its first call, if the recipe asks for it. Layouts stay."""
    for layer in compiled_layers(model, plan):
        layer.forward = torch.compile(layer.forward, dynamic=False)  # type: ignore[method-assign]
    return layouts


def compiled_layers(model: PreTrainedModel, plan: StagePlan) -> list[nn.Module]:
    """The layers of the stage that the recipe asks to compile: all or none."""
    if plan.recipe.memory.compile != "always":
        return []
    return [model.get_submodule(unit.root) for unit in plan.own_units if unit.is_layer]
