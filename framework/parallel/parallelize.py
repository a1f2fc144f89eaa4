"""Everything that is done to a model on meta to lay it out over the mesh, in the one order that works.

Nothing here owns memory or sends a byte, so a plan for thousands of ranks can be made on a laptop.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from framework.mesh.axis import Axis
from framework.mesh.layout import Layout
from framework.model.materialize import kept_in_fp32
from framework.model.units import Unit
from framework.parallel.activation_checkpointing import checkpoint_activations
from framework.parallel.compilation import compile_layer, compiled_layers
from framework.parallel.zero.buffers import UnitBuffer, plan_buffers
from framework.parallel.zero.lifetimes import Lifetimes
from framework.recipe.schema import Memory


def parallelize(
    model: PreTrainedModel,
    units: Sequence[Unit],
    ties: Mapping[str, tuple[str, ...]],
    layouts: Mapping[str, Layout],
    shared: Collection[str],
    groups: Mapping[str, str],
    memory: Memory,
    compute_dtype: torch.dtype,
    master_dtype: torch.dtype,
    lifetimes: Lifetimes,
    axes: Mapping[str, Axis],
) -> list[UnitBuffer]:
    """Transform the layers and plan the unit buffers.

    ties: the names of each parameter in this model. layouts: of each, as tensor parallelism has left it. shared: parameters
    that are on the other end of the pipeline as well. groups: optimizer group of each parameter, "" if frozen.
    """
    layers = [model.get_submodule(unit.root) for unit in units if unit.is_layer]
    for layer in compiled_layers(model, units, memory):
        compile_layer(layer)
    # Around what is compiled: the layer runs again in backward as it ran in forward, whatever breaks its graph.
    if memory.activation_checkpointing == "full":
        for layer in layers:
            checkpoint_activations(layer)
    # Last: buffers hold the parameters that are left to this rank, in the dtypes that forward reads.
    names = [name for unit in units for name in unit.parameters]
    # Law 1: a tied embedding across stages is one more replica axis.
    ends = {name: ("ends",) if name in shared else () for name in names}
    layouts = {
        name: replace(
            layouts[name],
            replicated=(*layouts[name].replicated, *ends[name]),
            partial=(*layouts[name].partial, *ends[name]),
            # Buffers divide among replicas what is counted; an interval is for what is shared in part.
            interval=None if layouts[name].replicated else layouts[name].interval,
        )
        for name in names
    }
    fp32 = kept_in_fp32(model, compute_dtype)
    dtypes = {name: torch.float32 if fp32 & {*ties[name]} else compute_dtype for name in names}
    return plan_buffers(units, layouts, groups, dtypes, master_dtype, lifetimes, axes)
