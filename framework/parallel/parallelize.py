"""Everything that lays a model out over the mesh, in the one order that works: a list of transforms.

A transform takes a stage's model on meta, the layout of each of its parameters, and the StagePlan. It changes the model in
place and returns refined layouts. It keeps every global shape, knows no other transform, and is the identity where its axes have
size 1. Nothing here owns memory or sends a byte, so a plan for thousands of ranks can be made on a laptop. What a run adds once
there is memory (gradient views, hooks) is in `attach.py`.

A new parallelism is one file and one line in TRANSFORMS.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from framework.mesh.layout import Layout
from framework.model.load import choose_experts, kept_in_fp32
from framework.model.stage import find_shared, hollow_out
from framework.parallel.compilation import compile_layers
from framework.parallel.context import split_context
from framework.parallel.experts import split_experts
from framework.parallel.fp8_layers import gather_in_fp8
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor import split_over_tp
from framework.parallel.zero.plan_buffers import shard_over_batch

Layouts = Mapping[str, Layout]
Transform = Callable[[PreTrainedModel, Layouts, StagePlan], Layouts]


def select_experts_kernel(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Choose how stacked experts are multiplied (`model.experts`)."""
    choose_experts(model, plan.recipe.model.experts, plan.compute_dtype)
    return layouts


def cut_to_stage(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Replace what other pipeline stages compute, and keep the layouts of this stage's parameters, each under its one name.

    A tied embedding that the first and the last stage share is one more replica (law 1), over the axis `embedding`.
    """
    hollow_out(model, plan.units, plan.bounds, plan.returns_tuple, plan.compute_dtype)
    shared = find_shared(plan.units, plan.ties, plan.bounds)
    own = {name: layouts[name] for unit in plan.own_units for name in unit.parameters}
    return {name: _share(layout) if name in shared else layout for name, layout in own.items()}


def name_zero_axes(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Say over which axes ZeRO shards and replicates what no transform has said that of: all of dp x cp.

    Buffers divide among replicas what each of them counts, so an interval is left to what is shared in part only.
    """
    counted = {name: replace(each, interval=None) if each.replicated else each for name, each in layouts.items()}
    return shard_over_batch(counted)


TRANSFORMS: tuple[Transform, ...] = (
    select_experts_kernel,  # first: what follows may replace the module that asks for it
    split_experts,  # whole experts: of what is left of them tensor parallelism may take slices
    split_over_tp,  # weights of all that is here: vocabulary, layers, and the tokens between regions
    split_context,  # of the heads that are left to this rank
    cut_to_stage,  # then embedding and head may go: until here both are needed to split what they share
    gather_in_fp8,  # of the shapes that are left to this rank
    compile_layers,  # of the layers as they are computed; around it they are checkpointed, once there is memory (`attach`)
    name_zero_axes,  # last: ZeRO divides what all else has left to this rank
)


def _share(layout: Layout) -> Layout:
    return replace(layout, replicated=(*layout.replicated, "embedding"), partial=(*layout.partial, "embedding"))


def parallelize(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Apply all transforms to a stage's model; the layouts of its parameters, by their names in their units."""
    for transform in TRANSFORMS:
        layouts = transform(model, layouts, plan)
    return layouts


def whole_layouts(model: PreTrainedModel) -> dict[str, Layout]:
    """What transforms begin with: every parameter whole, under each of its names."""
    return {name: Layout(tuple(p.shape)) for name, p in model.named_parameters(remove_duplicate=False)}


def find_compute_dtypes(model: PreTrainedModel, plan: StagePlan) -> dict[str, torch.dtype]:
    """The dtype in which forward reads each of the stage's parameters: some families keep some in fp32."""
    fp32 = kept_in_fp32(model, plan.compute_dtype)
    names = [name for unit in plan.own_units for name in unit.parameters]
    return {name: torch.float32 if fp32 & {*plan.ties[name]} else plan.compute_dtype for name in names}
