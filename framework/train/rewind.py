"""Rewind: where spikes persist, all ranks go back to a checkpoint from before them and leave out the data since.

    settle      the save that is under way comes to its end
    retire      rank 0 takes their names from the checkpoints that are newer than `first spike - MARGIN`      commit.py
    restore     all ranks load the newest that is left, as a resume does
    record      the samples from there to the step that completed the spikes join RunState.skipped_samples, in that checkpoint
    go on       at the step and the cursor of the checkpoint; the cursor's samples are now those behind the ones left out

The decision follows from sums that all ranks have read, and is in the checkpoint before a step is trained from it: a resume, on
whatever layout, continues the same run.
"""

from functools import partial

import numpy as np

from framework.checkpoint.commit import amend, has_whole, list_checkpoints, locate, retire_newer, step_of
from framework.checkpoint.folder import report
from framework.checkpoint.save import Saver
from framework.checkpoint.storage import checkpoints_of
from framework.comm.objects import broadcast_object
from framework.data.order import Skipped, add_skipped, index_samples
from framework.errors import NumericsError
from framework.lease import Lease
from framework.object_store import Place
from framework.train.loop import Loop, RewindDue
from framework.train.state import RunState, restore

# Steps between the checkpoint and the first spike, at least: the weights may have been hurt steps before a spike shows it. With
# so long a margin a run that spikes right behind a rewind goes back further.
MARGIN = 10


def rewind(loop: Loop, saver: Saver, lease: Lease) -> None:
    """Go back for `loop.rewind_due`. Collective. Raises NumericsError, on all ranks, after `train.max_rewinds`, and where no
    checkpoint is old enough."""
    due, spiked, world = loop.rewind_due, loop.state, loop.run.mesh.axis("world")
    root = checkpoints_of(lease.run)
    assert due is not None, "nothing to go back for"
    saver.settle()
    loop.run.optimizer.wait_for_readers()
    broadcast_object(partial(_retire, lease, root, due, spiked.rewinds, loop), world)
    state = restore(loop.run, root, lease=lease)
    if loop.first_step and state.step <= loop.first_step:
        # Newer ones are damaged. The next start begins with this one, in its own stage.
        raise NumericsError(_explain(due, *_over_border(loop.first_step)))
    best = state.best_step
    if best is not None and not broadcast_object(
        lambda: locate(root, best) is not None, world
    ):  # a later one had taken its place
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
