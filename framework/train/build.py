"""Build a rank's TrainingRun: materialize parameters on the mesh, then attach hooks, gradients and loss.

plan = make_plan(recipe, config)       framework/plan: pure, equal on every rank
mesh = connect(plan.topology, ...)     framework/comm: process groups
run  = build(plan, mesh)               here
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from framework.comm.algorithms import ExposedCommunication
from framework.comm.connect import Mesh
from framework.mesh.token_layout import TokenLayout
from framework.model.hub import find_folder
from framework.model.initial import build_buffers, draw_adapters, draw_with_ties, set_buffers
from framework.model.mixtures import ExpertLoad
from framework.model.peft import read_adapter
from framework.model.precision import sums_dtype
from framework.model.units import Unit, set_parameter
from framework.optim.disk_ring import DiskStates, DiskTensor
from framework.optim.qk_clip import QkClip, count_key_heads
from framework.parallel.attention.attention import LogitMaxima
from framework.parallel.parallelize import AttachedStage, attach
from framework.parallel.pipeline.execute import ActivationSpec
from framework.parallel.zero.buffer_plan import Home
from framework.parallel.zero.buffers import UnitBuffer, make_buffers
from framework.parallel.zero.parameters import initialize_parameters, load_pretrained
from framework.plan.plan import Plan, PlannedStage
from framework.train.beside_optimizer import LossScale, RouterBiases
from framework.train.stage import RankStage
from framework.train.step import TrainingRun
from framework.train.update import StepOptimizer, find_copies, find_parts, open_disk, own_shards


def build(plan: Plan, mesh: Mesh, resumes: bool = False, run_id: str | None = None) -> TrainingRun:
    """This rank's stages over a connected mesh, with their values and one optimizer.

    resumes: leave the parameters' values to a checkpoint that is loaded next. run_id: of the folder of states on a disk; None:
    a new one.
    """
    own = plan.lay_out(mesh.rank, mesh.axes, mesh.device)
    disk, masters = open_disk(plan.recipe, own.stages, mesh.rank, run_id)
    values = build_buffers(plan.config, plan.whole.dtype)
    materialized = [(stage, materialize(plan, values, stage, mesh.device, resumes, masters)) for stage in own.stages]
    for stage in own.stages:
        set_buffers(stage.model.model, values, mesh.device)
    exposed = ExposedCommunication(mesh.device)
    load = ExpertLoad(plan.mixtures, mesh.axis("world"), mesh.device, always=plan.recipe.model.router_bias_rate > 0)
    maxima = LogitMaxima(count_key_heads(plan.qk_rows), mesh.device) if plan.qk_rows else None
    stages = {}
    for stage, buffers in materialized:
        logit_map = plan.logit_map if stage.plan.bounds.is_last else None
        attached = AttachedStage(
            stage.model.model, stage.plan, stage.ties, buffers, exposed, load, logit_map, plan.vocabulary_size, maxima
        )
        attach(attached)
        stages[stage.plan.bounds.index] = RankStage(stage.model, attached)
    return assemble(plan, own.tokens, mesh, stages, load, exposed, disk, maxima)


def materialize(
    plan: Plan,
    buffer_values: Mapping[str, Tensor],
    stage: PlannedStage,
    device: torch.device,
    resumes: bool,
    masters: list[DiskTensor],
) -> list[UnitBuffer]:
    """Memory and values of a stage's parameters: seeded, or read from `model.weights`, or none yet if a checkpoint follows.

    One unit at a time, because each is drawn whole. buffer_values: of the whole model's buffers, by name; those in the files of
    `model.weights` are read into them. masters: of the unit buffers whose home is a disk, in their order; those of this stage
    are taken.
    """
    model, buffers = plan.recipe.model, make_buffers(stage.buffers)
    # Checkpoints beside an adapter leave the frozen model out.
    is_read = not resumes or plan.recipe.adapter.is_used
    for unit in stage.units:
        own = [buffer for buffer in buffers if buffer.plan.unit == unit.name]
        for buffer in own:
            buffer.stored = masters.pop(0) if buffer.plan.lifetimes.homes.master == Home.DISK else None
            buffer.allocate(device)
        if model.weights is None and is_read:
            drawn = draw_with_ties(plan.whole, plan.units, unit, plan.recipe.train.seed, device)
            initialize_parameters(own, drawn, plan.initial_scales)
    if model.weights is not None and is_read:
        load_pretrained(plan.whole, buffer_values, buffers, find_folder(model.weights, model.revision))
    if plan.recipe.adapter.is_used and not resumes:
        initialize_parameters(buffers, start_adapters(plan, stage.units, device))
    for buffer in buffers:
        buffer.copy_master_to_params()
        for name, parameter in buffer.parameters.items():
            set_parameter(stage.model.model, stage.ties[name], parameter)
    return buffers


def start_adapters(plan: Plan, units: Iterable[Unit], device: torch.device) -> Iterator[Mapping[str, Tensor]]:
    """The values, whole by name, with which adapters start, where they are not those of `draw_unit`: beside pretrained weights,
    or from a folder, which has modules that are trained whole as well."""
    adapter, seed = plan.recipe.adapter, plan.recipe.train.seed
    if adapter.weights is not None:
        yield read_adapter(Path(adapter.weights).expanduser(), plan.whole, adapter)
    elif plan.recipe.model.weights is not None:
        yield from (draw_adapters(plan.whole, unit, seed, device) for unit in units)


def assemble(
    plan: Plan,
    tokens: TokenLayout,
    mesh: Mesh,
    stages: dict[int, RankStage],
    load: ExpertLoad,
    exposed: ExposedCommunication,
    disk: DiskStates | None,
    maxima: LogitMaxima | None,
) -> TrainingRun:
    """The run of a rank: its stages, one optimizer over all of them, and the values that a step reads."""
    buffers = [buffer for stage in stages.values() for buffer in stage.buffers]
    shards, recipe = own_shards(buffers), plan.recipe
    num_sums = 0 if plan.load_balancing is None else plan.load_balancing.num_sums
    wide = sums_dtype(plan.compute_dtype)
    world, rows = mesh.axis("world"), plan.qk_rows
    qk_clip = None if maxima is None else QkClip(recipe.optim, rows, find_parts(shards), maxima, world)
    return TrainingRun(
        stages=stages,
        pipeline=plan.pipeline,
        optimizer=StepOptimizer(recipe, buffers, shards, plan.groups, mesh, disk, qk_clip),
        disk=disk,
        shards=shards,
        tied_copies=find_copies(buffers),
        parameter_index={each.parameter: index for index, each in enumerate(plan.groups)},
        activations=ActivationSpec(tokens, plan.borders, num_sums, wide, mesh.device),
        loss=recipe.loss,
        load=load,
        biases=RouterBiases(recipe.model.router_bias_rate, load.mixtures, stages, mesh.device),
        loss_scale=LossScale(recipe.precision, wide, mesh.device),
        exposed_communication=exposed,
        mesh=mesh,
        leaves_base=recipe.adapter.is_used,
        clip_norm=recipe.optim.clip_norm,
        seed=recipe.train.seed,
    )
