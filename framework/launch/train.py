"""One rank of a run, from its saved recipe to its exit code: plan, connect, build, train."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from framework.build import build
from framework.checkpoint.commit import Fault, Retention, no_fault, report
from framework.checkpoint.held import HeldSteps, Start
from framework.checkpoint.index import Entry
from framework.checkpoint.lineage import begin_generation
from framework.checkpoint.neighbors import CopyKeeper, meet_neighbours
from framework.checkpoint.node_memory import memory_of
from framework.checkpoint.save import Goal, Saver
from framework.checkpoint.staging import StagingMemory
from framework.comm.collectives import gather_objects
from framework.comm.communicator import Communicator
from framework.comm.connect import (
    Mesh,
    choose_device,
    connect,
    connect_beside,
    launched_place,
    node_name,
    num_nodes,
    open_store_beside,
    ranks_per_node,
)
from framework.comm.objects import tell
from framework.data.loader import Hear, Loader, validation_batches
from framework.data.open_data import open_data
from framework.data.prepared import Prepared
from framework.data.tokenize import decode_start
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUME, DataError, HungError, MeshwrightError, TopologyError
from framework.launch.exports import Exports, exports_have_ended
from framework.launch.fault_door import FaultDoor
from framework.launch.goodput import open_goodput
from framework.launch.probe import probe
from framework.lease import Lease
from framework.mesh.topology import Topology
from framework.model.hub import find_folder
from framework.model.load import load_config
from framework.optim.disk_file import refuse_folder
from framework.parallel.fp8_layers import emulates_fp8
from framework.parallel.pipeline.draw import save_timeline
from framework.parallel.pipeline.simulate import Timeline
from framework.parallel.zero.replicas import check_replicas
from framework.plan.host_memory import check_host_memory
from framework.plan.plan import Plan, make_plan
from framework.plan.relief import explain_out_of_memory
from framework.recipe.deadlines import find_deadlines
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.track.observers import Observers, open_observers
from framework.track.run_info import describe_run
from framework.track.sample_ledger import SampleLedger, next_start
from framework.train.faults import StepWatch, StopRequest, end_process
from framework.train.goodput import Goodput
from framework.train.hang import SAVES, TRAINING
from framework.train.loop import Loop
from framework.train.phases import Phase, Phases
from framework.train.profiler import StepProfiler
from framework.train.progress import Progress, name_coordinates
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import Run
from framework.train.validation import Validation
from framework.train.watch import Watch

# In debug mode a rank that starts no collective for so long while others wait is taken for lost.
COLLECTIVE_CHECK_S = 120.0
# An error that ends the run gives a save that is under way so long to come to its end.
SAVE_PATIENCE_S = 30.0
# Of the data's beginning, from which the prompt of a suggested command is taken.
PROMPT_TOKENS = 24


def train_rank(
    recipe: Recipe,
    run_dir: Path,
    stop: StopRequest | None = None,
    fingerprint: Mapping[str, str] | None = None,
    phases: Phases | None = None,
    end_hung: Callable[[HungError], None] = end_process,
    lease: Lease | None = None,
    door: FaultDoor | None = None,
) -> int:
    """One rank of a run: from its saved recipe to its exit code. Resumes where the run directory has a checkpoint.

    stop: requests to stop that count already while this rank connects; None: they count from the first step on.
    fingerprint: what must be equal on all ranks. phases: of this rank, from its start on.
    end_hung: ends this process where a step hangs and it is asked to stop. lease: of the run, on rank 0; None where nobody
    launches it. door: through which faults are injected.
    """
    assert recipe.precision.compute != "auto", "precision.compute=auto reached a rank: the launcher resolves it"
    phases = phases or Phases()
    goodput = open_goodput(recipe, run_dir, phases)
    progress, deadlines = Progress(phases), find_deadlines(recipe)
    place = launched_place(), name_place(recipe)
    with Watch(progress, deadlines, *place, open_store_beside, end_hung, run_dir) as hangs:
        check_nodes(recipe)
        plan = make_plan(recipe, load_config(recipe.model, find_folder))
        check_host_memory(plan)
        if recipe.memory.offload.disk_path is not None:
            refuse_folder(Path(recipe.memory.offload.disk_path))
        check_s = COLLECTIVE_CHECK_S if recipe.track.debug_collectives else None
        progress.phases.begin(Phase.CONNECT)
        device = choose_device(recipe.launch.device)
        mesh = connect(plan.topology, device, timeout_s=deadlines.collective, check_s=check_s, fingerprint=fingerprint)
        progress.communicators[TRAINING] = tuple(mesh.axes.values())
        lease = progress.lease = tell(lambda: lease or Lease(run_dir), mesh.axis("world"))
        goodput.hold(lease)
        if recipe.launch.probe:
            probe(plan, mesh, lease)
        progress.phases.begin(Phase.OPEN_DATA)
        prepared = open_data(recipe, plan.config, mesh.axis("world"))
        say = partial(print, "[rank 0]", file=sys.stderr, flush=True) if mesh.rank == 0 else None
        folder = run_dir if mesh.rank == 0 else None
        watch = partial(StepWatch, end=end_hung, say=say, folder=folder, lease=lease, progress=progress)
        with nullcontext(stop) if stop else StopRequest() as requests, watch(requests) as steps:
            code = _train(plan, prepared, mesh, lease, requests, steps, progress.phases, door, goodput)
        hangs.stop_talking()
        # Not after an error: closing waits for the other ranks, which may be waiting for this one.
        mesh.close()
        goodput.end(code)
    return code


def name_place(recipe: Recipe) -> str:
    """This rank's coordinates, as in `pp0 dp1 cp0 tp0`."""
    derived = derive(recipe)
    topology = Topology(pp=derived.pp, dp=derived.dp, cp=derived.cp, tp=derived.tp)
    return name_coordinates(topology, launched_place()[0] % topology.world)  # `connect` refuses one beyond the world


def check_nodes(recipe: Recipe) -> None:
    """Raises TopologyError where ZeRO shards within a node and the launcher's nodes are not those that the recipe plans with."""
    derived = derive(recipe)
    here, nodes = ranks_per_node(), num_nodes()
    if recipe.zero.shard_within == "node" and (here, nodes) != (derived.ranks_per_node, derived.nodes):
        raise TopologyError(
            "zero.shard_within=node needs equally many ranks on every node, as the recipe plans them:"
            f" {derived.ranks_per_node} on each of {derived.nodes}, but this node has {here} ranks, of {nodes} nodes. Start"
            " what launch.nodes and launch.ranks_per_node say, or set zero.shard_within to a degree or null"
        )


def _train(
    plan: Plan,
    prepared: Prepared,
    mesh: Mesh,
    lease: Lease,
    stop: StopRequest,
    watch: StepWatch,
    phases: Phases,
    door: FaultDoor | None,
    goodput: Goodput | None = None,
) -> int:
    recipe, derived = plan.recipe, plan.derived
    goodput = goodput or Goodput(phases)
    world, dp, run_dir, root = mesh.axis("world"), mesh.axis("dp"), lease.run, lease.run / "checkpoints"
    neighbours = meet_neighbours(node_name(), recipe.checkpoint.neighbor_copies, world)
    copies = HeldSteps(memory_of(run_dir, node_name()), neighbours, world)
    # Rank 0 decides: two ranks may see two states of the folder (NFS), and some would start over while others resume.
    start = copies.find_start(run_dir, root)
    phases.begin(Phase.BUILD)
    with explain_out_of_memory(plan, mesh.rank):
        run = build(plan, mesh, start.resumes, run_dir.name)
        phases.begin(Phase.RESTORE)
        state = _restore(run, lease, start, copies) if start.resumes else RunState(run_dir.name, prepared.fingerprint)
    if state.data != prepared.fingerprint:
        raise DataError(
            f"the prepared data is not what {run_dir.name} was trained on (fingerprint {prepared.fingerprint}, was {state.data}):"
            " its data cursor would point elsewhere. Restore the files of data.sources, or start a new run"
        )
    generation = tell(partial(begin_generation, lease, state.step), world)
    # What is held of other steps, or for a run that keeps no copies any more, only takes memory.
    copies.clear(keep=start.held.name if start.held is not None and neighbours.copies else None)
    prompt = _find_prompt(recipe, prepared) if mesh.rank == 0 else ""
    sources = tuple(source.name for source in prepared.sources)
    info = describe_run(plan, mesh, state.run_id, state.step, prepared.unigram_entropy, sources, prompt)
    phases.begin(Phase.STEP, state.step)
    if mesh.rank == 0 and mesh.device.type == "cuda" and emulates_fp8(recipe.precision, mesh.device):
        print(
            "fp8 is emulated: this GPU has no kernel for it. It is the same numbers, slower than bf16", file=sys.stderr
        )
    observers = open_observers(recipe, run_dir, info, lease) if mesh.rank == 0 else Observers()

    # Draws nothing of what is trained on: every pass begins at the split's first sequence.
    open_validation = partial(
        validation_batches,
        prepared,
        context=derived.context,
        pack=recipe.data.pack,
        sequences_per_microbatch=derived.sequences_per_microbatch,
        dp_rank=dp.rank,
        dp_size=dp.size,
        slices=plan.context_slices(mesh.rank),
        limit=recipe.train.validation_sequences,
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
        slices=plan.context_slices(mesh.rank),
        device=mesh.device,
        hear=_open_hearers(recipe, mesh, run_dir, state, door),
    )
    # One rank asks for them, each in a process of its own; the others have none to wait for.
    exports = Exports(lease, recipe.checkpoint.export_every_steps if mesh.rank == 0 else None)
    open_keeper = partial(CopyKeeper, copies.memory, neighbours, generation)
    saver = _open_saver(recipe, mesh, lease, watch, exports, open_keeper, no_fault if door is None else door.reach)
    loop = Loop(run, state, recipe, loader, observers, info, saver, phases, goodput)
    code = EXIT_FAILED
    profiler = StepProfiler(run, plan.units, recipe.track, lease, print)
    observers.contain("profile", partial(profiler.begin_step, state.step + 1))
    try:
        with explain_out_of_memory(plan, mesh.rank), loader:
            if door is not None:
                door.begin_step(state.step + 1, run)
            for step in loop.steps(stop, watch):
                if recipe.track.debug_collectives:
                    check_replicas(run.buffers, world, step)
                if step == recipe.track.timeline_step:
                    _draw_timeline(loop, plan.title, lease, observers)
                if loop.must_validate():
                    loop.begin_validation(Validation(open_validation(), len(sources)))
                    if loop.is_done or recipe.pipeline.fill_bubbles == "none":
                        loop.end_validation()
                if goal := loop.find_goal():
                    with phases.within(Phase.SAVE):
                        _start_save(loop, saver, watch, phases, goal, loop.is_done, door)
                observers.contain("profile", partial(profiler.begin_step, step + 1))
                if door is not None and not loop.is_done:
                    door.begin_step(step + 1, run)
            observers.contain("profile", profiler.close)
            phases.begin(Phase.SAVE)
            if not loop.is_done:
                _start_save(loop, saver, watch, phases, Goal.DISK, True, door)
            saver.finish()
            while not exports_have_ended(exports, world, is_stopped=stop.requested or not loop.is_done):
                phases.begin(Phase.SAVE)
            phases.begin(Phase.CLOSE)
            copies.clear()  # the last step is on the disk
        code = EXIT_DONE if loop.is_done else EXIT_RESUME
    except MeshwrightError as error:
        code = error.exit_code
        saver.abandon(SAVE_PATIENCE_S)
        raise
    finally:
        exports.end()
        goodput.end(code)
        observers.close(code)
        run.close()
    return code


def _find_prompt(recipe: Recipe, prepared: Prepared) -> str:
    """A line that the model may be asked to continue: the recipe's, else the first words of what it is trained on."""
    if recipe.train.sample is not None:
        return next(iter(recipe.train.sample.splitlines()), "")
    stream = max(prepared.sources, key=lambda source: source.weight).streams["train"]
    return decode_start(prepared.tokenizer, stream.read(0, min(stream.num_tokens, PROMPT_TOKENS)))


def _open_hearers(recipe: Recipe, mesh: Mesh, run_dir: Path, state: RunState, door: FaultDoor | None) -> list[Hear]:
    """Who hears of each batch. Collective where there is a ledger of samples: all of a start's ranks note its number."""
    hearers: list[Hear] = [] if door is None else [door.hear_batch]
    if recipe.track.sample_ledger:
        start = tell(partial(next_start, run_dir), mesh.axis("world"))
        if all(mesh.axis(name).rank == 0 for name in ("pp", "cp", "tp")):  # the others read the same samples
            hearers.append(SampleLedger(run_dir, mesh.axis("dp").rank, start, state.samples).note)
    return hearers


def _restore(run: Run, lease: Lease, start: Start, copies: HeldSteps) -> RunState:
    """Fill the run from where it goes on, and say where that is if it is no checkpoint."""
    held = start.held
    if held is None:
        return restore(run, lease.run / "checkpoints", start.found, lease)

    def load_held(entries: Sequence[Entry]) -> dict[str, Any] | None:
        values = copies.load(held, entries)
        if values is not None and run.mesh.rank == 0:
            report(f"going on from step {held.name.step:,}, which the memory of the run's nodes holds")
        return values

    return restore(run, lease.run / "checkpoints", lease=lease, load_held=load_held)


def _open_saver(
    recipe: Recipe,
    mesh: Mesh,
    lease: Lease,
    watch: StepWatch,
    exports: Exports,
    open_keeper: Callable[[Communicator], CopyKeeper],
    fault: Fault,
) -> Saver:
    """The run's saves. Collective: their threads agree over a group of their own, over which copies travel as well."""

    def end_save(step: int, is_committed: bool) -> None:
        watch.end_save(is_committed)
        exports.end_save(step, is_committed)

    rules, world = recipe.checkpoint, connect_beside(mesh, SAVES)
    is_async = rules.mode == "async"
    watch.progress.communicators[SAVES] = (world,)
    keeper = open_keeper(world)
    if (possible := keeper.neighbours.possible) < rules.neighbor_copies and mesh.rank == 0:
        report(
            f"checkpoint.neighbor_copies={rules.neighbor_copies}, but this start has no more nodes than for {possible}"
        )
    return Saver(
        lease.run / "checkpoints",
        world,
        Retention(rules.keep, rules.keep_every, exports.reads),
        StagingMemory(mesh.device, None if is_async else 0, ranks_per_node()),
        is_async,
        rules.max_failures,
        end_save,
        fault,
        lease=lease,
        hold=keeper.hold,
    )


def _start_save(
    loop: Loop,
    saver: Saver,
    watch: StepWatch,
    phases: Phases,
    goal: Goal,
    is_last: bool,
    door: FaultDoor | None,
) -> None:
    """Start to save the step that was taken last; the next update waits until its tensors are staged."""
    loop.begin_save()
    if Goal.DISK in goal:  # which is what a request asks for
        watch.begin_save()
    run, state = loop.run, loop.state

    def wait_until_staged() -> None:
        with watch.waiting(), phases.within(Phase.SAVE):
            saver.wait_until_staged()

    run.optimizer.hold(wait_until_staged)
    if door is not None:
        door.begin_save(state.step)
    saver.start(state.step, saved_entries(run), state.to_json(), run.mesh.device, is_last, goal)
    loop.end_save(goal)


def _draw_timeline(loop: Loop, title: str, lease: Lease, observers: Observers) -> None:
    """What the ranks of this rank's pipeline did in the last step; rank 0 draws its own."""
    timeline = Timeline(tuple(gather_objects(loop.timed, loop.run.mesh.axis("pp"))))
    if loop.run.mesh.rank == 0:
        simulated = loop.run.pipeline.simulated(loop.derived.accumulation, timeline)
        observers.contain("timeline", partial(save_timeline, lease, title, simulated, timeline))
