"""Compilation of decoder layers, each by itself (`memory.compile: always`).

A layer's forward is compiled, not its call: what this rank does on the way in and out (unshard the unit, seed its random numbers,
scatter tokens) are hooks of the call, and stay outside. Within a layer, collectives, their waits and the borders of
tensor-parallel regions are calls that the compiler leaves alone: `torch.compiler.disable` stands on each of them. So it never
guards on what counts or changes from step to step, and one set of graphs serves all layers that are alike.

Experts that are multiplied one after another (`model.experts: eager`, and `auto` in fp64) are left alone too: which of them have
tokens, and how many, is known from the data only. The compiler would make graphs for each number of tokens that it meets, until
it gave up.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from framework.mesh.layout import Layout
from framework.model.experts import find_experts
from framework.parallel.stage_plan import StagePlan
from framework.recipe.derive import compiles

# Graphs of one layer: in training and in validation, each with an attention mask and without (rows of one document each).
GRAPHS_PER_LAYER = 4


def compile_layers(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Compile each layer's forward for the shapes that it meets, at its first call, if the recipe asks for it. Layouts stay."""
    if layers := compiled_layers(model, plan):
        _allow_graphs(GRAPHS_PER_LAYER * len(layers))
    for layer in layers:
        for _, module, form in find_experts(layer):
            experts: Any = module
            # Experts that dispatch are never traced, and who gives them gradient views knows them by their forward.
            if "forward" in vars(module):
                continue
            if form.has_kernels and experts.config._experts_implementation == "eager":
                experts.forward = torch.compiler.disable(experts.forward)
        layer.forward = torch.compile(layer.forward, dynamic=False)  # type: ignore[method-assign]
    return layouts


def compiled_layers(model: PreTrainedModel, plan: StagePlan) -> list[nn.Module]:
    """The layers of the stage that the recipe asks to compile: all or none."""
    if not compiles(plan.recipe.memory):
        return []
    return [model.get_submodule(unit.root) for unit in plan.own_units if unit.is_layer]


def _allow_graphs(count: int) -> None:
    """Have torch keep at least so many graphs of one function. Layers may differ in a number (diffllama's lambda_init), and by
    default torch gives up after eight: it warns in the log and runs the others uncompiled."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
