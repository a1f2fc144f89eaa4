"""One rank of a run, from its saved recipe to its exit code: plan, connect, build, train."""

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from framework.build import build
from framework.checkpoint.commit import Retention, find_newest
from framework.checkpoint.save import Saver
from framework.checkpoint.staging import StagingMemory
from framework.comm.collectives import gather_objects
from framework.comm.connect import Mesh, choose_device, connect, connect_beside, num_nodes, ranks_per_node
from framework.comm.objects import tell
from framework.data.loader import Loader, validation_batches
from framework.data.open_data import open_data
from framework.data.prepared import Prepared
from framework.data.tokenize import decode_start
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUME, DataError, HungError, MeshwrightError, TopologyError
from framework.model.hub import find_folder
from framework.model.load import load_config
from framework.optim.disk_file import refuse_folder
from framework.parallel.fp8_layers import emulates_fp8
from framework.parallel.pipeline.draw import save_timeline
from framework.parallel.pipeline.simulate import Timeline
from framework.plan.host_memory import check_host_memory
from framework.plan.plan import Plan, make_plan
from framework.plan.relief import explain_out_of_memory
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.track.observers import Observers, open_observers
from framework.track.run_info import describe_run
from framework.train.faults import StepWatch, StopRequest, end_process
from framework.train.loop import Loop
from framework.train.phases import Phase, Phases
from framework.train.profiler import StepProfiler
from framework.train.rewind import rewind
from framework.train.state import RunState, restore, saved_entries
from framework.train.validation import Validation

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
) -> int:
    """One rank of a run: from its saved recipe to its exit code. Resumes where the run directory has a checkpoint.

    stop: requests to stop that count already while this rank connects; None: they count from the first step on.
    fingerprint: what must be equal on all ranks. phases: of this rank, from its start on.
    end_hung: ends this process where a step hangs and it is asked to stop.
    """
    phases = phases or Phases()
    assert recipe.precision.compute != "auto", "precision.compute=auto reached a rank: the launcher resolves it"
    check_nodes(recipe)
    plan = make_plan(recipe, load_config(recipe.model, find_folder))
    check_host_memory(plan)
    if recipe.memory.offload.disk_path is not None:
        refuse_folder(Path(recipe.memory.offload.disk_path))
    check_s = COLLECTIVE_CHECK_S if recipe.track.debug_collectives else None
    phases.begin(Phase.CONNECT)
    mesh = connect(plan.topology, choose_device(recipe.launch.device), check_s=check_s, fingerprint=fingerprint)
    phases.begin(Phase.OPEN_DATA)
    prepared = open_data(recipe, plan.config, mesh.axis("world"))
    say = partial(print, "[rank 0]", file=sys.stderr, flush=True) if mesh.rank == 0 else None
    folder = run_dir if mesh.rank == 0 else None
    with nullcontext(stop) if stop else StopRequest() as requests, StepWatch(requests, end_hung, say, folder) as watch:
        code = _train(plan, prepared, mesh, run_dir, requests, watch, phases)
    # Not after an error: closing waits for the other ranks, which may be waiting for this one.
    mesh.close()
    return code


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
    run_dir: Path,
    stop: StopRequest,
    watch: StepWatch,
    phases: Phases,
) -> int:
    recipe, derived = plan.recipe, plan.derived
    world, dp, root = mesh.axis("world"), mesh.axis("dp"), run_dir / "checkpoints"
    # Rank 0 decides: two ranks may see two states of the folder (NFS), and some would start over while others resume.
    found = tell(partial(find_newest, root), world)
    resumes = found.newest is not None
    phases.begin(Phase.BUILD)
    with explain_out_of_memory(plan, mesh.rank):
        run = build(plan, mesh, resumes, run_dir.name)
        phases.begin(Phase.RESTORE)
        state = restore(run, root, found) if resumes else RunState(run_dir.name, prepared.fingerprint)
    if state.data != prepared.fingerprint:
        raise DataError(
            f"the prepared data is not what {run_dir.name} was trained on (fingerprint {prepared.fingerprint}, was {state.data}):"
            " its data cursor would point elsewhere. Restore the files of data.sources, or start a new run"
        )
    prompt = _find_prompt(recipe, prepared) if mesh.rank == 0 else ""
    sources = tuple(source.name for source in prepared.sources)
    info = describe_run(plan, mesh, state.run_id, state.step, prepared.unigram_entropy, sources, prompt)
    phases.begin(Phase.STEP, state.step)
    if mesh.rank == 0 and mesh.device.type == "cuda" and emulates_fp8(recipe.precision, mesh.device):
        print(
            "fp8 is emulated: this GPU has no kernel for it. It is the same numbers, slower than bf16", file=sys.stderr
        )
    observers = open_observers(recipe, run_dir, info) if mesh.rank == 0 else Observers()

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
    )
    loader.skip(state.skipped_samples)
    saver = _open_saver(recipe, mesh, root, watch)
    loop = Loop(run, state, recipe, loader, observers, info, saver, phases)
    code = EXIT_FAILED
    profiler = StepProfiler(run, plan.units, recipe.track, run_dir, print)
    observers.contain("profile", partial(profiler.begin_step, state.step + 1))
    try:
        with explain_out_of_memory(plan, mesh.rank), loader:
            for step in loop.steps(stop, watch):
                loop.compare_replicas(is_saved=False)
                if step == recipe.track.timeline_step:
                    _draw_timeline(loop, plan.title, run_dir, observers)
                if loop.must_validate() and loop.rewind_due is None:
                    loop.begin_validation(Validation(open_validation(), len(sources)))
                    if loop.is_done or recipe.pipeline.fill_bubbles == "none":
                        loop.end_validation()
                if loop.must_save():
                    with phases.within(Phase.SAVE):
                        _start_save(loop, saver, watch, phases, is_last=loop.is_done)
                _rewind_if_due(loop, saver, root, phases)
                observers.contain("profile", partial(profiler.begin_step, step + 1))
            observers.contain("profile", profiler.close)
            phases.begin(Phase.SAVE)
            if not loop.is_done:
                _start_save(loop, saver, watch, phases, is_last=True)
                _rewind_if_due(loop, saver, root, phases)
            saver.finish()
            phases.begin(Phase.CLOSE)
        code = EXIT_DONE if loop.is_done else EXIT_RESUME
    except MeshwrightError as error:
        code = error.exit_code
        saver.abandon(SAVE_PATIENCE_S)
        raise
    finally:
        observers.close(code)
        run.close()
    return code


def _find_prompt(recipe: Recipe, prepared: Prepared) -> str:
    """A line that the model may be asked to continue: the recipe's, else the first words of what it is trained on."""
    if recipe.train.sample is not None:
        return next(iter(recipe.train.sample.splitlines()), "")
    stream = max(prepared.sources, key=lambda source: source.weight).streams["train"]
    return decode_start(prepared.tokenizer, stream.read(0, min(stream.num_tokens, PROMPT_TOKENS)))


def _open_saver(recipe: Recipe, mesh: Mesh, root: Path, watch: StepWatch) -> Saver:
    """The run's saves. Collective: their threads agree over a group of their own."""
    rules = recipe.checkpoint
    is_async = rules.mode == "async"
    return Saver(
        root,
        connect_beside(mesh, "saves"),
        Retention(rules.keep, rules.keep_every),
        StagingMemory(mesh.device, None if is_async else 0, ranks_per_node()),
        is_async,
        rules.max_failures,
        watch.end_save,
    )


def _start_save(loop: Loop, saver: Saver, watch: StepWatch, phases: Phases, is_last: bool) -> None:
    """Start to save the step that was taken last; the next update waits until its tensors are staged. Weights that spikes have
    hurt, by the step that was read for this, are not saved."""
    loop.begin_save()
    if loop.rewind_due is not None:
        return
    loop.compare_replicas(is_saved=True)
    watch.begin_save()
    run, state = loop.run, loop.state

    def wait_until_staged() -> None:
        with watch.waiting(), phases.within(Phase.SAVE):
            saver.wait_until_staged()

    run.optimizer.hold(wait_until_staged)
    saver.start(state.step, saved_entries(run), state.to_json(), run.mesh.device, is_last)
    loop.end_save()


def _rewind_if_due(loop: Loop, saver: Saver, root: Path, phases: Phases) -> None:
    if loop.rewind_due is not None:
        with phases.within(Phase.RESTORE):
            rewind(loop, saver, root)


def _draw_timeline(loop: Loop, title: str, run_dir: Path, observers: Observers) -> None:
    """What the ranks of this rank's pipeline did in the last step; rank 0 draws its own."""
    timeline = Timeline(tuple(gather_objects(loop.timed, loop.run.mesh.axis("pp"))))
    if loop.run.mesh.rank == 0:
        simulated = loop.run.pipeline.simulated(loop.derived.accumulation, timeline)
        observers.contain("timeline", partial(save_timeline, run_dir, title, simulated, timeline))
