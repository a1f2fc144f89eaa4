"""Saves of one rank: finding and restoring the step from which a start goes on, saving behind training, exports, copies in the
memory of nodes, and rewinds.

    find       saves.start              in the nodes' memory, else in a checkpoint, else the beginning
    restore    saves.restore(run)       fill the run with it
    open       saves.open(step)         a new generation (held.py), the saver's thread, exports
    save       saves.save(loop, ...)    at the end of a step; the next update waits until its tensors are staged
    rewind     saves.rewind_if_due(loop)
    end        saves.finish(loop, ...), then saves.end()

Where spikes persist, all ranks go back to a checkpoint from before them and leave out the data since (`rewind`):

    settle      the save that is under way comes to its end
    retire      rank 0 takes their names from the checkpoints that are newer than `first spike - MARGIN`      commit.py
    restore     all ranks load the newest that is left, as a resume does
    record      the samples from there to the step that completed the spikes join RunState.skipped_samples, in that checkpoint
    go on       at the step and the cursor of the checkpoint; the cursor's samples are now those behind the ones left out

The decision follows from sums that all ranks have read, and is in the checkpoint before a step is trained from it: a resume, on
whatever layout, continues the same run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from framework.checkpoint.commit import (
    Retention,
    amend,
    explain,
    folder_of,
    has_whole,
    list_checkpoints,
    locate,
    retire_newer,
    step_of,
)
from framework.checkpoint.folder import report
from framework.checkpoint.held import HeldSteps, StartPoint, begin_generation
from framework.checkpoint.load import BeforeStage, load_newest
from framework.checkpoint.neighbors import CopyKeeper, Neighbours, meet_neighbours
from framework.checkpoint.node_memory import NO_BIRTH, memory_of
from framework.checkpoint.save import Goal, Saver
from framework.checkpoint.staging import Entry, StagingMemory
from framework.checkpoint.storage import checkpoints_of
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh, node_name, ranks_per_node
from framework.comm.objects import broadcast_object
from framework.data.order import Skipped, add_skipped, index_samples
from framework.errors import NumericsError
from framework.launch.directory import RunDirectory
from framework.launch.exports import Exports, exports_have_ended
from framework.lease import Lease
from framework.monitor.hang import SAVES
from framework.monitor.progress import Phase, Phases
from framework.monitor.watchdog import Watchdog
from framework.object_store import Place
from framework.recipe.schema import Checkpoint, Recipe
from framework.train.loop import Loop, RewindDue
from framework.train.state import RunState, begin_branch, report_new_moments, restore, saved_entries, updated_names
from framework.train.step import TrainingRun

# The time that a save under way has to end, behind an error that ends the run.
PATIENCE_S = 30.0
# Steps between the checkpoint and the first spike, at least: the weights may have been hurt steps before a spike shows it. With
# so long a margin a run that spikes right behind a rewind goes back further.
MARGIN = 10


@dataclass(frozen=True)
class Saves:
    """The saves of a rank. All methods are collective, but for `abandon` and `end`. watchdog: watches them, and knows the
    phases. meet: connects the group over which the ranks' saves agree, once for all stages of a run."""

    rules: Checkpoint
    mesh: Mesh
    lease: Lease
    watchdog: Watchdog
    meet: Callable[[], Communicator]

    @property
    def phases(self) -> Phases:
        return self.watchdog.progress.phases

    @cached_property
    def root(self) -> Place:
        return checkpoints_of(self.lease.run)

    @cached_property
    def birth(self) -> str:
        """The mark that tells this run from earlier ones at its path, of which nodes may hold steps."""
        return broadcast_object(
            lambda: str(RunDirectory(self.lease.run).find_record().get("birth", NO_BIRTH)), self.mesh.axis("world")
        )

    @cached_property
    def neighbours(self) -> Neighbours:
        return meet_neighbours(node_name(), self.rules.neighbor_copies, self.mesh.axis("world"))

    @cached_property
    def copies(self) -> HeldSteps:
        memory = memory_of(self.lease.run, node_name(), epoch=self.lease.epoch, birth=self.birth)
        return HeldSteps(memory, self.neighbours, self.mesh.axis("world"))

    @cached_property
    def start(self) -> StartPoint:
        """The step from which this start goes on. Rank 0 decides: ranks may see the folder in two states (NFS), and some would
        start over while others resume."""
        # First: a checkpoint that a former start commits from here on must not count.
        broadcast_object(self._enter, self.mesh.axis("world"))
        return self.copies.find_start(self.lease.run, self.root)

    @cached_property
    def exports(self) -> Exports:
        # One rank asks for them, each in a process of its own; the others have none to wait for.
        return Exports(self.lease, self.rules.export_every_steps if self.mesh.rank == 0 else None)

    @cached_property
    def keeper(self) -> CopyKeeper:
        """The copies that nodes keep, sent over the group over which the ranks' saves agree."""
        world = self.meet()
        self.watchdog.progress.communicators[SAVES] = (world,)
        return CopyKeeper(self.copies.memory, self.neighbours, "", world)

    @cached_property
    def saver(self) -> Saver:
        rules, is_async = self.rules, self.rules.mode == "async"
        return Saver(
            self.root,
            self.keeper.world,
            Retention(rules.keep, rules.keep_every, self.exports.reads),
            StagingMemory(self.mesh.device, None if is_async else 0, ranks_per_node()),
            is_async,
            rules.max_failures,
            self._end_save,
            self.phases.observer.reach,
            lease=self.lease,
            hold=self.keeper.hold,
        )

    def restore(self, run: TrainingRun, since: int) -> RunState:
        """Fill the run with the step from which it goes on; print which one if nodes held it. Raises BeforeStage where that is
        none since step `since`."""
        held = self.start.held
        if held is None:
            return restore(run, self.root, self.start.found, self.lease, since=since)

        def load_held(entries: Sequence[Entry]) -> dict[str, Any] | None:
            values = self.copies.load(held, entries, updated_names(run))
            if values is not None and run.mesh.rank == 0:
                report(f"going on from step {held.name.step:,}, which the memory of the run's nodes holds")
            return values

        return restore(run, self.root, lease=self.lease, load_held=load_held, since=since)

    def begin_stage(self, run: TrainingRun, data: str, recipe: Recipe) -> RunState:
        """Fill the run with the checkpoint with which the stage before has ended. Arguments as of `begin_branch`. Raises
        BeforeStage where that is damaged."""
        found, world = self.start.found, self.mesh.axis("world")
        assert found is not None, "the last step of a stage is in a checkpoint"
        assert found.manifest is not None, "the last step of a stage is in a checkpoint"

        def load(entries: Sequence[Entry]) -> dict[str, Any] | None:
            finite, since = updated_names(run), self.start.step
            return load_newest(self.root, entries, world, found, self.lease, finite, since)

        state, new = begin_branch(run, self.lease.run.name, found.manifest, load, data, recipe)
        report_new_moments(new, f"{state.run_id}@{state.step}", world)
        return state

    def open(self, step: int) -> Saver:
        """The saver of a start that goes on from `step`."""
        self._begin_generation(step)
        held, possible, wanted = self.start.held, self.neighbours.possible, self.rules.neighbor_copies
        # Copies of other steps, or of a run that keeps no copies any more, only take memory.
        if self.neighbours.copies:
            self.copies.clear(keep=held.name if held is not None else None)
        else:
            self.copies.leave()
        if possible < wanted and self.mesh.rank == 0:
            report(f"checkpoint.neighbor_copies={wanted}, but this start has no more nodes than for {possible}")
        return self.saver

    def save(self, loop: Loop, goal: Goal, is_last: bool = False) -> None:
        """Start to save the last step; the next update waits until its tensors are staged. Nothing is saved if the step that was
        read for this shows that the run has to go back."""
        loop.begin_save()
        if loop.rewind_due is not None:
            return
        loop.compare_replicas(is_saved=True)
        loop.policy.settle_best(loop.state)  # before the state is taken
        if Goal.DISK in goal:  # a request asks for that
            self.watchdog.begin_save()
        run, state = loop.run, loop.state
        run.optimizer.hold(self._wait_until_staged)
        self.phases.observer.begin_save(state.step)
        self.saver.start(state.step, saved_entries(run), state.to_json(), run.mesh.device, is_last, goal)
        loop.end_save(goal)

    def rewind_if_due(self, loop: Loop) -> bool:
        """Go back to an older checkpoint, if the last steps call for it, and remove copies and exports of later steps. Returns
        whether the run has gone back."""
        if loop.rewind_due is None:
            return False
        with self.phases.within(Phase.SAVE):
            self.saver.settle()
        with self.phases.within(Phase.RESTORE):
            rewind(loop, self.saver, self.lease)
            self._begin_generation(loop.state.step)
            self.copies.clear()
            self.exports.go_back_to(loop.state.step)
        return True

    def finish(self, loop: Loop, is_stopped: Callable[[], bool]) -> None:
        """Save the last step, unless that is done, and wait for saves and exports. is_stopped: whether to stop waiting for
        exports."""
        # A stage that ends before its first step has begun with a checkpoint whose state it has changed: that one stays.
        is_saved = self.start.held is None and self.start.resumes and not loop.timed
        if not (loop.is_done or is_saved):
            self.saver.settle()
            self.phases.begin(Phase.SAVE)  # each save has a deadline of its own
            self.save(loop, Goal.DISK, is_last=True)
            self.rewind_if_due(loop)
        self.saver.finish()
        world = self.mesh.axis("world")
        while not exports_have_ended(self.exports, world, is_stopped=is_stopped() or not loop.is_done):
            self.phases.begin(Phase.SAVE)  # each wait has the deadline of a save
        self.copies.leave()  # the last step is on the disk

    def abandon(self) -> None:
        """Give a save that is under way a while to end, behind an error that ends the run."""
        self.saver.abandon(PATIENCE_S)

    def end(self) -> None:
        """End the export that is under way, if there is one."""
        self.exports.end()

    def _enter(self) -> None:
        """On rank 0."""
        run = RunDirectory(self.lease.run)
        created = run.find_record().get("created", "no launch")
        try:
            folder_of(self.root).enter(self.lease, f"{run.id} of {created}")
        except OSError as error:
            raise explain(error, self.root, 0) from error

    def _begin_generation(self, step: int) -> None:
        self.keeper.generation = broadcast_object(partial(begin_generation, self.lease, step), self.mesh.axis("world"))

    def _wait_until_staged(self) -> None:
        with self.watchdog.waiting(), self.phases.within(Phase.SAVE):
            self.saver.wait_until_staged()

    def _end_save(self, step: int, is_committed: bool) -> None:
        """In the saver's thread."""
        self.watchdog.end_save(is_committed)
        self.exports.end_save(step, is_committed)


def rewind(loop: Loop, saver: Saver, lease: Lease) -> None:
    """Go back for `loop.rewind_due`. Collective. Raises NumericsError, on all ranks, after `train.max_rewinds`, and where no
    checkpoint is old enough."""
    due, spiked, world = loop.rewind_due, loop.state, loop.run.mesh.axis("world")
    root = checkpoints_of(lease.run)
    assert due is not None, "nothing to go back for"
    saver.settle()
    loop.run.optimizer.wait_for_readers()
    broadcast_object(partial(_retire, lease, root, due, spiked.rewinds, loop), world)
    try:
        state = restore(loop.run, root, lease=lease, since=loop.first_step and loop.first_step + 1)
    except BeforeStage as error:  # the next start begins with that checkpoint, in its own stage
        raise NumericsError(_explain(due, *_over_border(loop.first_step))) from error
    best = state.best_step
    # A later one may have taken its place.
    if best is not None and not broadcast_object(lambda: locate(root, best) is not None, world):
        state.best_step = state.best_validation_loss = None
    state.rewinds = spiked.rewinds + 1
    state.skipped_samples = leave_out(spiked.skipped_samples, state.samples, due.samples)
    broadcast_object(partial(_record, lease, root, state, due), world)
    loop.go_back_to(state)


def leave_out(skipped: Skipped, first: int, stop: int) -> list[list[int]]:
    """Add the samples at places [first, stop) of a run that has skipped `skipped` to these; both in numbers of the whole
    order."""
    low, high = index_samples(np.array([first, stop]), skipped)
    return add_skipped(skipped, int(low), int(high))


def _retire(lease: Lease, root: Place, due: RewindDue, done: int, loop: Loop) -> None:
    """On rank 0."""
    most, begun, oldest = loop.recipe.train.max_rewinds, loop.first_step, due.first_spike - MARGIN
    if done >= most:
        raise NumericsError(_explain(due, " a further time", f"train.max_rewinds={most}", "more train.max_rewinds"))
    if not has_whole(root, oldest):
        why = f"{root} has no checkpoint of step {oldest:,} or before, {MARGIN} steps before the first of them"
        raise NumericsError(_explain(due, "", why, "a larger checkpoint.keep"))
    if begun and not any(begun < step_of(each) <= oldest for each in list_checkpoints(root)):
        raise NumericsError(_explain(due, *_over_border(begun)))
    for path in retire_newer(root, lease, oldest):
        report(f"checkpoint of a step behind a rewind is now called {path}")


def _over_border(step: int) -> tuple[str, str, str]:
    return " over the border of a stage", f"step {step:,} ends the stage before", "a later border"


def _explain(due: RewindDue, how: str, why: str, way_out: str) -> str:
    """The message of a run that does not go back. how: it would have to; way_out: the change of the recipe that helps."""
    return (
        f"spikes persist since step {due.first_spike:,}, as seen at step {due.step:,}, and the run does not go back{how}:"
        f" {why}. Look at the losses and norms above and at the data of these steps. To go on: lower optim.lr in a new run,"
        f" train.on_spike=log or skip, or {way_out}"
    )


def _record(lease: Lease, root: Place, state: RunState, due: RewindDue) -> None:
    """On rank 0."""
    loaded = locate(root, state.step)
    assert loaded is not None, f"{root} has lost step {state.step}, which was just loaded"
    amend(loaded, lease, state.to_json())
    report(
        f"spikes persist since step {due.first_spike:,}: after step {due.step:,} the run goes back to step {state.step:,} and"
        f" leaves out the samples since, {due.samples - state.samples:,} (rewind {state.rewinds}; all that were left out:"
        f" {state.skipped_samples})"
    )
