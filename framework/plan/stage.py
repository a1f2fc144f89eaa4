"""A stage laid out on meta: its model with every transform applied, and the unit buffers that will hold its parameters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout
from framework.model.routers import Routers
from framework.model.stage import StageModel, own_ties
from framework.model.units import Unit
from framework.parallel.parallelize import find_compute_dtypes, parallelize, whole_layouts
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor.regions import mask_of, uses_rng_in_training
from framework.parallel.zero.buffer_plan import FROZEN, BufferPlan, Lifetimes, lifetimes_of
from framework.parallel.zero.plan_buffers import choose_homes, plan_buffers


@dataclass(frozen=True)
class PlannedStage:
    """ties: all names of each of the stage's parameters in its model; buffers: without memory."""

    plan: StagePlan
    model: StageModel
    ties: Mapping[str, tuple[str, ...]]
    buffers: list[BufferPlan]

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units that are whole or in part this stage's."""
        return self.plan.own_units


def lay_out_stage(model: PreTrainedModel, plan: StagePlan) -> PlannedStage:
    """Apply the transforms to a copy of the model on meta, and plan its buffers."""
    parameters = lay_out_parameters(model, plan)
    routers, is_random = None, uses_rng_in_training(model)
    if plan.load_balancing is not None:
        routers = Routers(model, plan.load_balancing, plan.compute_dtype, plan.device, plan.routed_tokens)
    borders = plan.received, plan.sent
    stage = StageModel(model, plan.own_units, plan.bounds, *borders, mask_of(plan.tokens), routers, is_random)
    lifetimes = lifetimes_of(plan.recipe.zero)
    buffers = parameters.plan_buffers(plan.own_units, plan.master_dtype, lifetimes, plan.axes)
    placed = choose_homes(buffers, plan.recipe.memory.offload)
    return PlannedStage(plan, stage, own_ties(model, plan.ties), placed)


@dataclass(frozen=True)
class RankParameters:
    """The parameters of a stage on one rank, by name: what their buffers follow from. groups: of the optimizer, in the order
    that buffers have them; dtypes: in which forward reads them."""

    layouts: Mapping[str, Layout]
    groups: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]

    def plan_buffers(
        self,
        units: Iterable[Unit],
        master_dtype: torch.dtype | None,
        lifetimes: Lifetimes,
        axes: Mapping[str, Communicator],
    ) -> list[BufferPlan]:
        """Their buffers, on the device."""
        return plan_buffers(units, self.layouts, self.groups, self.dtypes, master_dtype, lifetimes, axes)


def lay_out_parameters(model: PreTrainedModel, plan: StagePlan) -> RankParameters:
    """Apply the transforms to a copy of the model on meta; what they leave this rank of its parameters."""
    layouts = parallelize(model, whole_layouts(model), plan)
    groups = dict.fromkeys(layouts, FROZEN) | {name: key for name, key in plan.groups.items() if name in layouts}
    return RankParameters(layouts, groups, find_compute_dtypes(model, plan))
