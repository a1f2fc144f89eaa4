"""The spine of a rank, from its saved recipe to its exit code: plan, connect, build, restore, train."""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.held import StartPoint
from framework.checkpoint.load import BeforeStage
from framework.comm.connect import (
    Mesh,
    choose_device,
    connect,
    connect_beside,
    launched_place,
    num_nodes,
    open_store_beside,
    ranks_per_node,
    stay_beside,
)
from framework.comm.objects import all_gather_object, broadcast_object
from framework.data.beside import tokenizing
from framework.data.growing import Say
from framework.data.loader import Hear, Loader, open_data, validation_batches
from framework.data.prepared import Prepared
from framework.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_RESUME,
    DataError,
    HungError,
    LeaseLost,
    MeshwrightError,
    TopologyError,
)
from framework.launch.directory import RunDirectory
from framework.launch.identity import settle_identity
from framework.launch.process import describe_job
from framework.launch.resume import copy_curves, find_origin
from framework.lease import Lease
from framework.mesh.topology import make_grid
from framework.model.hub import find_base, find_folder, fingerprint_base
from framework.model.load import load_config
from framework.monitor.goodput import Goodput, open_goodput
from framework.monitor.hang import SAVES, TRAINING
from framework.monitor.progress import Phase, Phases, Progress, StepPace, StopRequest, end_process, name_coordinates
from framework.monitor.watchdog import Watchdog
from framework.optim.disk_file import refuse_folder
from framework.parallel.layer_matmuls import emulates_fp8
from framework.parallel.pipeline.draw import save_timeline
from framework.parallel.pipeline.pipeline import UNITS_FILE, encode_unit_times
from framework.parallel.pipeline.simulate import Timeline
from framework.plan.advice import explain_out_of_memory
from framework.plan.check import check_machine
from framework.plan.plan import Plan, make_plan
from framework.recipe.derive import Derived, derive
from framework.recipe.machines import find_deadlines
from framework.recipe.schema import Recipe
from framework.recipe.stages import RunStage, describe_stage, stage_after
from framework.track.report import Observers
from framework.track.sample_ledger import SampleLedger, next_start
from framework.train.build import build
from framework.train.loop import Loop, SavePolicy
from framework.train.probe import probe
from framework.train.profiler import StepProfiler, UnitClock
from framework.train.reference import add_reference
from framework.train.reports import Reporter, describe_run, open_observers
from framework.train.saves import Saves
from framework.train.state import RunState, begin_from, report_new_moments
from framework.train.validation import Validation, open_evaluation

# In debug mode a rank that starts no collective for so long while others wait is taken for lost.
COLLECTIVE_CHECK_S = 120.0


def train_rank(
    recipe: Recipe,
    run_dir: Path,
    stop: StopRequest | None = None,
    fingerprint: Mapping[str, str] | None = None,
    phases: Phases | None = None,
    end_hung: Callable[[HungError], None] = end_process,
    lease: Lease | None = None,
) -> int:
    """Train one rank of a run, from its saved recipe to its exit code. Resumes where the run directory has a checkpoint.

    stop: requests to stop that count already while this rank connects; None: they count from the first step on.
    fingerprint: values that must be equal on all ranks. phases: of this rank, from its start on, with its observer.
    end_hung: ends this process where the run hangs. lease: of the run, on rank 0; None without a launcher.
    """
    assert recipe.precision.compute != "auto", "precision.compute=auto reached a rank: the launcher resolves it"
    phases = phases or Phases()
    place, derived = launched_place(), derive(recipe)
    goodput = open_goodput(place, run_dir, phases, lease, describe_job(run_dir))
    progress, deadlines = Progress(phases), find_deadlines(recipe)
    say = partial(print, "[rank 0]", file=sys.stderr, flush=True) if place[0] == 0 else None
    watching = Watchdog(
        progress, deadlines, place, name_place(derived, place[0]), open_store_beside, end_hung, run_dir, say
    )
    with watching as watchdog:
        check_nodes(recipe, derived)
        plan = plan_stage(recipe)
        if recipe.memory.offload.disk_path is not None:
            refuse_folder(Path(recipe.memory.offload.disk_path))
        check_s = COLLECTIVE_CHECK_S if recipe.track.debug_collectives else None
        progress.phases.begin(Phase.CONNECT)
        device = choose_device(recipe.launch.device)
        stay_beside(device)
        mesh = connect(plan.topology, device, timeout_s=deadlines.collective, check_s=check_s, fingerprint=fingerprint)
        progress.communicators[TRAINING] = tuple(mesh.axes.values())
        lease = progress.lease = broadcast_object(lambda: lease or Lease(run_dir), mesh.axis("world"))
        goodput.hold(lease)
        if recipe.launch.probe:
            probe(plan, mesh, lease)
        progress.phases.begin(Phase.OPEN_DATA)
        prepared = open_data(recipe, plan.config, mesh.axis("world"))
        with nullcontext(stop) if stop else StopRequest() as requests, watchdog.hear(requests):
            whole = recipe if recipe.train.stages else None
            code = train_connected(plan, prepared, mesh, lease, watchdog, goodput, whole)
        watchdog.stop_talking()
        # Not after an error: closing waits for the other ranks, which may be waiting for this one.
        mesh.close()
        goodput.end(code)
    return code


def name_place(derived: Derived, rank: int) -> str:
    """This rank's coordinates, as in `pp0 dp1 cp0 tp0`."""
    topology = make_grid(derived)
    return name_coordinates(topology, rank % topology.world)  # `connect` refuses one beyond the world


def check_nodes(recipe: Recipe, derived: Derived) -> None:
    """Raise TopologyError where ZeRO shards within a node and the launcher's nodes are not those that the recipe plans with."""
    here, nodes = ranks_per_node(), num_nodes()
    keys = [f"zero.{name}" for name in ("shard_within", "secondary_shard") if getattr(recipe.zero, name) == "node"]
    if keys and (here, nodes) != (derived.ranks_per_node, derived.nodes):
        raise TopologyError(
            f"{keys[0]}=node needs equally many ranks on every node, as the recipe plans them:"
            f" {derived.ranks_per_node} on each of {derived.nodes}, but this node has {here} ranks, of {nodes} nodes. Start"
            f" what launch.nodes and launch.ranks_per_node say, or set {keys[0]} to a degree or null"
        )


def train_connected(
    plan: Plan,
    prepared: Prepared,
    mesh: Mesh,
    lease: Lease,
    watchdog: Watchdog,
    goodput: Goodput | None = None,
    whole: Recipe | None = None,
) -> int:
    """Train what is left of a run on connected ranks, stage by stage, and return the exit code.

    A stage begins as a branch would, with the checkpoint of the one before, on a model, loader and optimizer that are built for
    its recipe: whatever a stage may change, there is one way. plan, prepared: of the run's recipe without its stages; whole: that
    recipe where it has stages.
    """
    recipe, meet = whole or plan.recipe, cache(partial(connect_beside, mesh, SAVES))
    goodput = goodput or Goodput(watchdog.progress.phases)
    code = EXIT_FAILED
    try:
        while True:
            saves = Saves(recipe.checkpoint, mesh, lease, watchdog, meet)
            stage = stage_after(recipe, _find_step(recipe, saves.start, mesh))
            own, data = plan, prepared
            if recipe.train.stages:
                if mesh.rank == 0:
                    print(f"stage {stage.name}: {describe_stage(stage)}", file=sys.stderr, flush=True)
                watchdog.progress.phases.begin(Phase.OPEN_DATA)
                own = plan_stage(stage.recipe)
                data = open_data(stage.recipe, own.config, mesh.axis("world"))
                assert own.topology == plan.topology, "the mesh belongs to the run"
            reached = train_stage(stage, own, data, saves, goodput)
            if reached is not None:
                code = reached
                if code != EXIT_DONE or stage.is_last:
                    return code
            free_memory(mesh.device)
    except MeshwrightError as error:
        code = error.exit_code
        raise
    finally:
        with suppress(LeaseLost):  # which the run ends with already
            goodput.end(code)


def plan_stage(recipe: Recipe) -> Plan:
    """The plan of a recipe for which this machine has what it needs. Raises what speaks against it."""
    plan = make_plan(recipe, load_config(recipe.model, find_folder))
    check_machine(plan)
    return plan


def _find_step(recipe: Recipe, start: StartPoint, mesh: Mesh) -> int:
    """The step from which a start goes on: of the run, else of the run whose checkpoint it begins with. Collective."""
    origin = recipe.run.start_from
    if start.resumes or origin is None:
        return start.step
    return broadcast_object(lambda: find_origin(origin).step, mesh.axis("world"))


def free_memory(device: torch.device) -> None:
    """Give back the memory of a stage that has ended: hooks and modules refer to each other, so it waits for the collector."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def train_stage(stage: RunStage, plan: Plan, prepared: Prepared, saves: Saves, goodput: Goodput) -> int | None:
    """Build and restore a stage of the run, train it, and return the exit code; None where its checkpoint is damaged, and the run
    goes on from one of an earlier stage. saves: of this stage, which have not begun."""
    recipe, mesh, lease, watchdog = stage.recipe, saves.mesh, saves.lease, saves.watchdog
    run_dir, phases = lease.run, saves.phases
    resumes, start_from, origin = saves.start.resumes, recipe.run.start_from, None
    if start_from is not None and not resumes:
        origin = broadcast_object(partial(find_origin, start_from), mesh.axis("world"))
    has_weights = resumes or (origin is not None and origin.step > 0)
    evaluation = open_evaluation(plan, prepared.tokenizer, mesh)
    phases.begin(Phase.BUILD)
    with explain_out_of_memory(plan, mesh.rank):
        read_rows = partial(validation_batches, prepared, seed=recipe.train.seed, **_sequences(plan, mesh))
        add_reference(plan, prepared, mesh, read_rows, lambda: phases.begin(Phase.BUILD))
        if recipe.loss.needs_reference:
            free_memory(mesh.device)
        run = build(plan, mesh, has_weights, run_dir.name)
        phases.begin(Phase.RESTORE)
        try:
            if resumes and saves.start.step == stage.start:
                state = saves.begin_stage(run, prepared.fingerprint, recipe)
            elif resumes:
                state = saves.restore(run, since=stage.start + 1)
            elif origin is not None and has_weights:
                state, new = begin_from(run, run_dir.name, origin, prepared.fingerprint, recipe)
                report_new_moments(new, f"{origin.run.id}@{origin.step}", mesh.axis("world"))
                broadcast_object(partial(copy_curves, origin, RunDirectory(run_dir), lease), mesh.axis("world"))
            else:
                state = RunState(run_dir.name, prepared.fingerprint)
        except BeforeStage:
            run.close()
            return None
    _settle_identity(stage.whole, prepared, mesh, lease, state)
    state.weights = {source.name: source.weight for source in prepared.sources}
    info = describe_run(stage.whole, plan, prepared, mesh, run_dir, state)
    watchdog.progress.pace = StepPace()  # of other steps
    saver = saves.open(state.step)
    phases.begin(Phase.STEP, state.step)
    if mesh.rank == 0 and mesh.device.type == "cuda" and emulates_fp8(recipe.precision, mesh.device):
        print(
            "fp8 is emulated: this GPU has no kernel for it. It is the same numbers, slower than bf16", file=sys.stderr
        )
    observers = open_observers(recipe, run_dir, info, lease, state.spikes.seen) if mesh.rank == 0 else Observers()
    # One of the ranks that read the same samples writes them.
    is_writer = all(mesh.axis(name).rank == 0 for name in ("pp", "cp", "tp"))
    writer = mesh.axis("dp").rank if is_writer and recipe.track.sample_ledger else None
    samples = SampleLedger(run_dir, writer, stage.start)
    _begin_samples(samples, plan, mesh, run_dir, state.samples)
    say = watchdog.say if mesh.rank == 0 else None
    loader = _open_loader(plan, prepared, mesh, state, [phases.observer.read_batch, samples.note], say)
    tokenizer = tokenizing(stage.recipe, prepared) if mesh.rank == 0 else nullcontext()
    reporter = Reporter(run, plan, info, observers, saver, watchdog, goodput)
    policy = SavePolicy(recipe.checkpoint, recipe.train.steps, saver)
    loop = Loop(run, state, plan, loader, policy, reporter, watchdog, stage.start, evaluation)
    code = EXIT_FAILED
    try:
        with explain_out_of_memory(plan, mesh.rank), tokenizer, loader:
            _train_steps(plan, prepared, mesh, lease, loop, saves, samples, observers)
            phases.begin(Phase.SAVE)
            saves.finish(loop, is_stopped=lambda: watchdog.requests.requested)
            phases.begin(Phase.CLOSE)
        code = EXIT_DONE if loop.is_done else EXIT_RESUME
    except Exception as error:  # any but a second Ctrl-C, which waits for nothing
        code = error.exit_code if isinstance(error, MeshwrightError) else EXIT_FAILED
        saves.abandon()
        raise
    finally:
        saves.end()
        observers.close(code if stage.is_last or code != EXIT_DONE else None)
        run.close()
    return code


def _train_steps(
    plan: Plan,
    prepared: Prepared,
    mesh: Mesh,
    lease: Lease,
    loop: Loop,
    saves: Saves,
    samples: SampleLedger,
    observers: Observers,
) -> None:
    """Train to the last step, or until the run is asked to stop; validate, save and go back behind the steps that call for it."""
    recipe, run = plan.recipe, loop.run
    profiler = StepProfiler(run, plan.units, recipe.track, lease, print)
    clock = UnitClock(run, plan.units, recipe.track.timeline_step)
    loop.clock = clock.begin_step(loop.state.step + 1)
    observers.contain("profile", partial(profiler.begin_step, loop.state.step + 1))
    saves.phases.observer.begin_step(loop.state.step + 1, run)
    for step in loop.steps():
        loop.compare_replicas(is_saved=False)
        if step == recipe.track.timeline_step:
            _draw_timeline(plan, loop, lease, observers, clock)
        validates, evaluates = loop.is_validated(step), loop.evaluation.is_due(step)
        if (validates or evaluates) and loop.rewind_due is None:
            open_validation = partial(_open_validation, plan, prepared, mesh, loop)
            if recipe.train.ema is not None and (validates or recipe.eval.average):
                loop.validate_average(open_validation(validates, evaluates and recipe.eval.average))
            loop.begin_validation(open_validation(validates, evaluates))
            if loop.is_done or recipe.pipeline.fill_bubbles == "none":
                loop.end_validation()
        if goal := loop.find_goal():
            with saves.phases.within(Phase.SAVE):
                saves.save(loop, goal, is_last=loop.is_done)
        if saves.rewind_if_due(loop):
            _begin_samples(samples, plan, mesh, lease.run, loop.state.samples)
        following = loop.state.step + 1  # of an older step, if the run has gone back
        loop.clock = clock.begin_step(following)
        observers.contain("profile", partial(profiler.begin_step, following))
        if not loop.is_done:
            saves.phases.observer.begin_step(following, run)
    observers.contain("profile", profiler.close)


def _begin_samples(samples: SampleLedger, plan: Plan, mesh: Mesh, run_dir: Path, cursor: int) -> None:
    """Begin the ledger of samples anew at `cursor`, if the run has one. Collective: all ranks note the same number."""
    if plan.recipe.track.sample_ledger:
        samples.begin(broadcast_object(partial(next_start, run_dir), mesh.axis("world")), cursor)


def _settle_identity(recipe: Recipe, prepared: Prepared, mesh: Mesh, lease: Lease, state: RunState) -> None:
    """Refuse other data, another recipe or another tokenizer than the run was trained with, and record them in its state."""
    if state.data != prepared.fingerprint:
        raise DataError(
            f"the prepared data is not what {lease.run.name} was trained on (fingerprint {prepared.fingerprint}, was"
            f" {state.data}): its data cursor would point elsewhere. Restore the files of data.sources, or start a new run"
        )
    if recipe.adapter.is_used:
        state.base = broadcast_object(partial(_settle_base, recipe, state.base), mesh.axis("world"))
    settle = partial(settle_identity, RunDirectory(lease.run), lease, recipe, state.to_json(), prepared.tokenizer)
    identity = broadcast_object(settle, mesh.axis("world"))
    state.recipe, state.tokenizer = identity["recipe"], identity["tokenizer"]


def _settle_base(recipe: Recipe, recorded: str) -> str:
    """The fingerprint of the frozen weights beside an adapter. recorded: by the checkpoint from which the run goes on."""
    find_base(recipe.model, recorded)
    return recorded or fingerprint_base(recipe.model)


def _open_loader(
    plan: Plan, prepared: Prepared, mesh: Mesh, state: RunState, hear: Sequence[Hear], say: Say | None
) -> Loader:
    """The loader of this rank's microbatches, from the run's cursor on. hear: called with each batch; say: prints a line."""
    loader = Loader(
        prepared,
        seed=plan.recipe.train.seed,
        num_microbatches=plan.derived.accumulation,
        device=mesh.device,
        hear=hear,
        starts=state.read,
        say=say,
        **_sequences(plan, mesh),
    )
    loader.skip(state.skipped_samples)
    return loader


def _open_validation(
    plan: Plan, prepared: Prepared, mesh: Mesh, loop: Loop, validates: bool, evaluates: bool
) -> Validation:
    """A validation of the held-out sequences, if it validates, and of the tasks' documents, if it evaluates."""
    limit, sequences = plan.recipe.train.validation_sequences, _sequences(plan, mesh)
    # Every pass begins at the first sequence of the validation split.
    held_out = validation_batches(prepared, limit=limit, **sequences) if validates else ()
    questions = loop.evaluation.microbatches(plan, mesh) if evaluates else ()
    return Validation(chain(held_out, questions), len(prepared.sources))


def _sequences(plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """Arguments of what reads sequences: this rank's microbatches, and its tokens of each sequence."""
    dp = mesh.axis("dp")
    return {
        "context": plan.derived.context,
        "pack": plan.recipe.data.packing,
        "overlong": plan.recipe.data.overlong,
        "sequences_per_microbatch": plan.derived.sequences_per_microbatch,
        "dp_rank": dp.rank,
        "dp_size": dp.size,
        "slices": plan.context_slices(mesh.rank),
    }


def _draw_timeline(plan: Plan, loop: Loop, lease: Lease, observers: Observers, clock: UnitClock) -> None:
    """Draw the last step's actions of this rank's pipeline, and write the times of its units; rank 0 does so for its own."""
    gathered = all_gather_object((loop.timed, clock.measure(loop.timed)), loop.run.mesh.axis("pp"))
    timeline = Timeline(tuple(timed for timed, _ in gathered))
    units = dict(chain(*(each.items() for _, each in gathered)))
    if loop.run.mesh.rank == 0:
        simulated = loop.run.pipeline.simulated(plan.derived.accumulation, timeline)
        encoded = encode_unit_times(plan.config.model_type, plan.size.total, units)
        observers.contain("unit times", partial(lease.write, lease.run / UNITS_FILE, encoded))
        observers.contain("timeline", partial(save_timeline, lease, plan.title, simulated, timeline))
