"""Recipe -> Run: the spine. Reads top to bottom: structure, layout, memory, values, data, loop."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from framework.checkpoint.commit import Found as Saved
from framework.checkpoint.commit import find_newest
from framework.checkpoint.load import load_newest
from framework.checkpoint.save import save_checkpoint
from framework.comm.collectives import gather_objects
from framework.comm.connect import Mesh, choose_device, connect, num_nodes, ranks_per_node
from framework.comm.objects import share_errors, tell
from framework.data.fit import check_data_fits
from framework.data.loader import Loader, validation_batches
from framework.data.prepared import Found, Prepared, find_prepared, open_found
from framework.errors import EXIT_FAILED, DataError, MeshwrightError
from framework.mesh.axis import Axis
from framework.mesh.topology import Topology, shards_within_node
from framework.model.flops import unit_flops
from framework.model.hub import find_folder
from framework.model.load import build_meta, choose_experts, load_config
from framework.model.load_balancing import LoadBalancingLoss, Routers, find_load_balancing_loss
from framework.model.loss import CHUNK_TOKENS, TokenLoss
from framework.model.materialize import initialize_with_ties, set_parameter
from framework.model.precision import DTYPES, compute_dtype
from framework.model.stage import StageBounds, StageModel, find_layer_outputs, find_shared, own_ties, own_units
from framework.model.units import Unit, find_units, tied_names
from framework.optim.groups import GroupAssignment, group_trained
from framework.optim.optimizers import FlatOptimizer, FlatSpan
from framework.parallel.compilation import compiled_layers
from framework.parallel.parallelize import parallelize
from framework.parallel.pipeline.draw import save_timeline
from framework.parallel.pipeline.execute import ActivationSpec
from framework.parallel.pipeline.pipeline import Pipeline, plan_pipeline
from framework.parallel.pipeline.simulate import Timeline
from framework.parallel.tensor import mask_of, ranks_per_kv_head, split_over_tp
from framework.parallel.zero.buffers import FROZEN, Span, UnitBuffer
from framework.parallel.zero.embedding_gradient import write_embedding_gradients
from framework.parallel.zero.exposed_communication import ExposedCommunication
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.hooks import UnitHooks
from framework.parallel.zero.lifetimes import lifetimes_of
from framework.parallel.zero.linear import write_gradients_directly
from framework.parallel.zero.load_parameters import initialize_parameters, load_pretrained
from framework.parallel.zero.parameters import ParameterSync
from framework.parallel.zero.replicas import check_replicas
from framework.recipe.derive import Derived, derive
from framework.recipe.schema import Recipe
from framework.track.flops import mfu
from framework.track.observers import Observers, open_observers
from framework.track.run_info import describe_run
from framework.train.faults import StopRequest
from framework.train.loop import Loop, Services
from framework.train.stage import Stage
from framework.train.state import RunState, read_entries, saved_entries, share_read
from framework.train.step import Run
from framework.train.validation import Validation

# In debug mode a rank that starts no collective for so long while others wait is taken for lost.
COLLECTIVE_CHECK_S = 120.0


def build(recipe: Recipe, config: PretrainedConfig, mesh: Mesh, resumes: bool = False) -> Run:
    """This rank's stages of the model of `config`, laid out, with their values and one optimizer.

    resumes: leave the parameters' values to a checkpoint that is loaded next.
    """
    whole = build_meta(config, recipe.model.attention)
    units = find_units(whole)
    vocabulary = whole.get_output_embeddings().weight.shape[0]
    assignments = group(recipe, whole, units)
    pipeline = plan_stages(recipe, whole)
    balance = find_load_balancing_loss(whole)
    plans = lay_out(recipe, config, pipeline, assignments, mesh.device, mesh.axes, balance)
    materialize(whole, plans, recipe, mesh.device, resumes)

    settings = {each.key: each for each in assignments}
    buffers = [buffer for plan in plans for buffer in plan.buffers]
    spans = [(buffer, span) for buffer in buffers if buffer.is_trained for span in buffer.spans]
    flat = [_flat(buffer, span, settings[span.group]) for buffer, span in spans]
    # A rank whose stages are frozen counts updates as the others do.
    nothing = FlatSpan(torch.zeros(0, device=mesh.device), torch.zeros(0, device=mesh.device), 1.0, 0.0)
    optimizer = FlatOptimizer(recipe.optim, flat or [nothing])
    waits = ExposedCommunication(mesh.device)
    return Run(
        stages={plan.model.cut.index: _connect_stage(plan, recipe, waits) for plan in plans},
        pipeline=pipeline,
        optimizer=optimizer,
        spans=spans,
        copies=_find_copies(buffers),
        numbers={each.parameter: number for number, each in enumerate(assignments)},
        hidden=ActivationSpec(
            config.get_text_config().hidden_size,
            mesh.axis("tp").size if recipe.parallel.sequence else 1,
            0 if balance is None else balance.num_sums,
            compute_dtype(recipe.precision, mesh.device),
            mesh.device,
        ),
        waits=waits,
        loss=TokenLoss(mesh.axis("tp"), vocabulary, CHUNK_TOKENS if recipe.memory.chunked_loss else None),
        mesh=mesh,
        clip_norm=recipe.optim.clip_norm,
        seed=recipe.train.seed,
    )


@dataclass(frozen=True)
class StagePlan:
    """A stage before it has memory. units: whole or in part this stage's; ties: names of its parameters in its model."""

    model: StageModel
    units: list[Unit]
    ties: dict[str, tuple[str, ...]]
    buffers: list[UnitBuffer]


def group(recipe: Recipe, whole: PreTrainedModel, units: Sequence[Unit]) -> list[GroupAssignment]:
    """What the optimizer does with each trained parameter: decided on the whole model, so that every rank agrees."""
    shapes = {name: tuple(whole.get_parameter(name).shape) for unit in units for name in unit.parameters}
    return group_trained(shapes, recipe.model.freeze, recipe.optim)


def plan_stages(recipe: Recipe, whole: PreTrainedModel) -> Pipeline:
    """Where the model is cut and in which order stages compute. Raises what does not fit."""
    derived = derive(recipe)
    costs = unit_flops(whole, find_units(whole), derived.context)
    return plan_pipeline(recipe.pipeline, derived.pp, derived.accumulation, costs, recipe.zero)


def lay_out(
    recipe: Recipe,
    config: PretrainedConfig,
    pipeline: Pipeline,
    assignments: Sequence[GroupAssignment],
    device: torch.device,
    axes: Mapping[str, Axis],
    balance: LoadBalancingLoss | None = None,
) -> list[StagePlan]:
    """A rank's stages on meta, planned and not yet allocated: for any rank of any mesh, on any machine."""
    ranks = pipeline.rank_of_stage
    if ranks[0] == ranks[-1]:  # what embedding and head share is on one rank
        axes = {**axes, "ends": Axis("ends", 1, 0)}
    returns_tuple = len(ranks) > 1 and find_layer_outputs(config)
    own = [cut for cut in pipeline.cuts if ranks[cut.index] == axes["pp"].rank]
    return [_lay_out_stage(recipe, config, cut, returns_tuple, assignments, device, axes, balance) for cut in own]


def _lay_out_stage(
    recipe: Recipe,
    config: PretrainedConfig,
    cut: StageBounds,
    returns_tuple: bool,
    assignments: Sequence[GroupAssignment],
    device: torch.device,
    axes: Mapping[str, Axis],
    balance: LoadBalancingLoss | None,
) -> StagePlan:
    compute, master = compute_dtype(recipe.precision, device), DTYPES[recipe.precision.master]
    model = build_meta(config, recipe.model.attention)
    choose_experts(model, recipe.model.experts, compute)
    whole, ties = find_units(model), tied_names(model)
    layouts = split_over_tp(
        model,
        axes["tp"],
        axes["kv"],
        recipe.parallel.sequence,
        recipe.model.tp_plan,
        recipe.memory.gathered_inputs == "regather",
        recipe.parallel.overlap == "always",
    )
    units, shared = own_units(whole, ties, cut), find_shared(whole, ties, cut)
    seed_mask = mask_of(axes["tp"], differs=recipe.parallel.sequence)
    # Inside regions gradients are one rank's part of a sum, and routers stand there.
    routers = None if balance is None else Routers(model, balance, compute, device, num_copies=axes["tp"].size)
    stage = StageModel(model, whole, cut, returns_tuple, compute, seed_mask, routers)
    groups = dict.fromkeys((name for unit in units for name in unit.parameters), FROZEN)
    groups |= {each.parameter: each.key for each in assignments if each.parameter in groups}
    ties = own_ties(model, ties)
    lifetimes = lifetimes_of(recipe.zero)
    buffers = parallelize(model, units, ties, layouts, shared, groups, recipe.memory, compute, master, lifetimes, axes)
    return StagePlan(stage, units, ties, buffers)


def materialize(
    stock: PreTrainedModel, plans: Sequence[StagePlan], recipe: Recipe, device: torch.device, resumes: bool
) -> None:
    """Memory and values: seeded, or read from `model.weights`, one unit at a time, or none yet if a checkpoint follows.

    stock: a model on meta that nobody laid out or cut: initialisers and files know whole modules only.
    """
    draws = recipe.model.weights is None and not resumes
    units = find_units(stock)
    for plan in plans:
        for unit in plan.units:
            programs = initialize_with_ties(stock, units, unit, recipe.train.seed, draws)
            for buffer in (buffer for buffer in plan.buffers if buffer.unit == unit.name):
                buffer.allocate(device)
                initialize_parameters(buffer, programs)
        if recipe.model.weights is not None and not resumes:
            load_pretrained(stock, plan.buffers, find_folder(recipe.model.weights, recipe.model.revision))
        for buffer in plan.buffers:
            buffer.copy_master_to_params()
            for name, parameter in buffer.parameters.items():
                set_parameter(plan.model.model, plan.ties[name], parameter)
    stock_buffers = dict(stock.named_buffers())
    for plan in plans:
        for path, module in plan.model.model.named_modules():
            for name, tensor in module.named_buffers(recurse=False):
                module._buffers[name] = stock_buffers.get(f"{path}.{name}" if path else name, tensor).to(device)


def _connect_stage(plan: StagePlan, recipe: Recipe, waits: ExposedCommunication) -> Stage:
    """The stage with what gathers its parameters and reduces its gradients."""
    model = plan.model.model
    grad_views = {name: place for buffer in plan.buffers for name, place in buffer.grad_views.items()}
    layers = compiled_layers(model, plan.units, recipe.memory)
    compiled = {module for layer in layers for module in layer.modules()}
    write_gradients_directly(model, grad_views, compiled)
    write_embedding_gradients(model, grad_views, compiled)
    gradients = GradientSync(plan.buffers, waits, DTYPES[recipe.precision.reduce])
    by_unit = [[buffer for buffer in plan.buffers if buffer.unit == unit.name] for unit in plan.units]
    parameters = ParameterSync(by_unit, waits)
    hooks = UnitHooks(model, plan.units, plan.ties, parameters, gradients, recipe.zero.prefetch_units)
    return Stage(plan.model, plan.buffers, parameters, gradients, hooks)


def _find_copies(buffers: Sequence[UnitBuffer]) -> list[tuple[UnitBuffer, UnitBuffer]]:
    """Buffers of one parameter in two stages of this rank; the second of each pair counts nothing."""
    known: dict[str, UnitBuffer] = {}
    copies = []
    for buffer in buffers:
        first = known.setdefault(buffer.slots[0].name, buffer)
        if first is not buffer:
            buffer.is_copy = True
            copies.append((first, buffer))
    return copies


def train_rank(
    recipe: Recipe,
    run_dir: Path,
    stop: StopRequest | None = None,
    fingerprint: Mapping[str, str] | None = None,
) -> int:
    """One rank of a run: from its saved recipe to its exit code. Resumes where the run directory has a checkpoint.

    stop: requests to stop that count already while this rank connects; None: they count from the first step on.
    fingerprint: what must be equal on all ranks.
    """
    derived = derive(recipe)
    config = load_config(recipe.model, find_folder)
    whole = build_meta(config, recipe.model.attention)
    find_load_balancing_loss(whole)
    if derived.pp > 1:
        plan_stages(recipe, whole)
        find_layer_outputs(config)
    topology = make_topology(recipe, derived, config)
    check_s = COLLECTIVE_CHECK_S if recipe.track.debug_collectives else None
    assert recipe.precision.compute != "auto", "precision.compute=auto reached a rank: the launcher resolves it"
    mesh = connect(topology, choose_device(recipe.launch.device), check_s=check_s, fingerprint=fingerprint)
    prepared = open_data(recipe, config, mesh.axis("world"))
    with nullcontext(stop) if stop else StopRequest() as requests:
        code = _train(recipe, derived, prepared, config, mesh, run_dir, requests)
    # Not after an error: closing waits for the other ranks, which may be waiting for this one.
    mesh.close()
    return code


def open_data(recipe: Recipe, config: PretrainedConfig, world: Axis) -> Prepared:
    """The prepared data on this rank. Rank 0 alone lists the source files and looks for the stores; the others open the few
    files that it names. An error on one rank is every rank's. Collective."""

    def find() -> Found:
        found = find_prepared(recipe)
        check_data_fits(recipe, found, config)
        return found

    found = tell(find, world)
    return share_errors(lambda: open_found(found), world)


def _train(
    recipe: Recipe,
    derived: Derived,
    prepared: Prepared,
    config: PretrainedConfig,
    mesh: Mesh,
    run_dir: Path,
    stop: StopRequest,
) -> int:
    world, dp, root = mesh.axis("world"), mesh.axis("dp"), run_dir / "checkpoints"
    # Rank 0 decides: two ranks may see two states of the folder (NFS), and some would start over while others resume.
    found = tell(partial(find_newest, root), world)
    resumes = found.newest is not None
    run = build(recipe, config, mesh, resumes)
    state = restore(run, root, found) if resumes else RunState(run_dir.name, prepared.fingerprint)
    if state.data != prepared.fingerprint:
        raise DataError(
            f"the prepared data is not what {run_dir.name} was trained on (fingerprint {prepared.fingerprint}, was {state.data}):"
            " its data cursor would point elsewhere. Restore the files of data.sources, or start a new run"
        )
    info = describe_run(recipe, config, mesh, state.run_id, state.step, prepared.unigram_entropy)
    observers = open_observers(recipe, run_dir, info) if mesh.rank == 0 else Observers()

    def save() -> None:
        state.num_updates = run.optimizer.num_updates
        save_checkpoint(root, state.step, saved_entries(run), state.to_json(), world, recipe.checkpoint.keep)

    def draw() -> None:
        timeline = Timeline(tuple(gather_objects(run.timed, mesh.axis("pp"))))
        if mesh.rank == 0:
            simulated = run.pipeline.simulated(derived.accumulation, timeline)
            observers.contain("timeline", partial(save_timeline, run_dir, simulated, timeline))

    def open_validation() -> Validation:
        return Validation(
            validation_batches(
                prepared,
                context=derived.context,
                pack=recipe.data.pack,
                sequences_per_microbatch=derived.sequences_per_microbatch,
                dp_rank=dp.rank,
                dp_size=dp.size,
                limit=recipe.train.validation_sequences,
            ),
        )

    loader = Loader(
        prepared,
        seed=recipe.train.seed,
        context=derived.context,
        pack=recipe.data.pack,
        sequences_per_microbatch=derived.sequences_per_microbatch,
        num_microbatches=derived.accumulation,
        dp_rank=dp.rank,
        dp_size=dp.size,
        device=mesh.device,
    )
    services = Services(
        open_validation,
        lambda: check_replicas(run.buffers, world, state.step),
        save,
        draw,
        observers.report,
        lambda tokens_per_s: mfu(tokens_per_s, info.flops_per_token or 0.0, world.size, info.peak_flops),
        stop,
    )
    code = EXIT_FAILED
    try:
        with loader:
            code = Loop(run, state, recipe, derived, loader, services).train()
    except MeshwrightError as error:
        code = error.exit_code
        raise
    finally:
        observers.close(code)
    return code


def make_topology(recipe: Recipe, derived: Derived, config: PretrainedConfig) -> Topology:
    """The recipe's degrees. Stage 0 shards over one rank; nodes are what the launcher says, and null is everyone."""
    batch = derived.dp * derived.cp
    within = recipe.zero.shard_within
    if within == "node":
        within = shards_within_node(derived.world, batch, derived.tp, ranks_per_node(), num_nodes())
    shard = batch if within is None else within
    return Topology(
        pp=derived.pp,
        dp=derived.dp,
        cp=derived.cp,
        tp=derived.tp,
        ep=derived.ep,
        kv=ranks_per_kv_head(config, derived.tp),
        shard=1 if recipe.zero.stage == 0 else shard,
    )


def restore(run: Run, checkpoints: Path, found: Saved | None = None) -> RunState:
    """Fill a run from the newest whole checkpoint, whatever layout saved it. found: what rank 0 has told of them already."""
    values = load_newest(checkpoints, read_entries(run), run.mesh.axis("world"), found)
    assert values is not None, f"no checkpoint in {checkpoints}"
    share_read(run)
    state = RunState.from_json(values)
    run.optimizer.num_updates = state.num_updates
    for buffer in run.buffers:
        buffer.copy_master_to_params()
    return state


def _flat(buffer: UnitBuffer, span: Span, assignment: GroupAssignment) -> FlatSpan:
    where = slice(span.start - buffer.start, span.stop - buffer.start)
    return FlatSpan(buffer.master[where], buffer.reduced[where], assignment.lr_ratio, assignment.weight_decay)
