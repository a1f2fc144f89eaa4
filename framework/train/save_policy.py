"""When a run saves, and where: by steps, for an export, by rank 0's clock, on request, as the best so far, and at its end."""

import math
import time
from collections.abc import Mapping
from functools import partial

from framework.checkpoint.save import Goal, Saver, find_interval_s
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object
from framework.data.tasks import is_better_low
from framework.recipe.schema import Checkpoint
from framework.train.state import RunState
from framework.train.sums import Flags

# After so many skipped steps in a row nothing more is saved until an update is made: the weights are those of a checkpoint that
# exists, and one more would take the place of an older one, to which the run may have to go back.
SKIPPED_STEPS_UNSAVED = 3


class SavePolicy:
    """Decides about saves, on all ranks alike: from sums that all have read. num_steps: of the run. saver: it is asked what saves
    cost, and whether one is under way."""

    def __init__(self, rules: Checkpoint, num_steps: int, saver: Saver) -> None:
        self.rules, self.num_steps, self.saver = rules, num_steps, saver
        self._last_save_s = time.monotonic()  # of the last checkpoint
        self._last_step, self._copy_is_due = -2, False
        self._is_best = False

    def find_goal(self, state: RunState, flags: Flags) -> Goal:
        """Where to save the step now: nowhere, into a checkpoint, into the nodes' memory, or both."""
        every = self.rules.neighbor_every_steps
        self._copy_is_due |= every is not None and state.step % every == 0
        is_done = state.step == self.num_steps
        by_steps = any(
            each and state.step % each == 0 for each in (self.rules.every_steps, self.rules.export_every_steps)
        )
        is_due = (by_steps and is_worth_saving(state)) or flags.save or self._is_best or is_done
        disk = Goal.DISK if is_due else Goal(0)
        # The end needs no copy, and none waits for a save that is under way: training would wait with it.
        return disk | Goal.MEMORY if self._copy_is_due and not (is_done or self._is_saving(state, flags)) else disk

    def is_due_by_clock(self, state: RunState) -> bool:
        """Whether this rank's clock asks for a checkpoint."""
        return is_worth_saving(state) and time.monotonic() - self._last_save_s > self.find_interval_s()

    def find_interval_s(self) -> float:
        """Seconds between saves by the clock."""
        rules, saver = self.rules, self.saver
        if rules.mtbf_hours is not None:
            return find_interval_s(3600 * rules.mtbf_hours, saver.started, saver.disk_stalled_s, saver.longest_s)
        return math.inf if rules.every_minutes is None else 60 * rules.every_minutes

    def note_best(self, state: RunState, loss: float | None, scores: Mapping[str, float], world: Communicator) -> None:
        """With checkpoint.keep_best, save these weights if their validation loss is the lowest so far, or their score the best.
        Rank 0 decides, so that no rounding of a loss makes ranks disagree on a save, which is collective. loss, scores: found
        now."""
        by = self.rules.keep_best
        if isinstance(by, str):
            loss = None if by not in scores else scores[by] if is_better_low(by) else -scores[by]
        if by and loss is not None:
            former = state.best_validation_loss if state.best_by == str(by) else None
            self._is_best = broadcast_object(partial(is_best, loss, former), world)
            if self._is_best:
                state.best_step, state.best_validation_loss, state.best_by = state.step, loss, str(by)

    def end_save(self, step: int, goal: Goal) -> None:
        """A save of the step has begun: start the clock of `checkpoint.every_minutes` anew."""
        self._last_step = step
        if Goal.MEMORY in goal:
            self._copy_is_due = False
        if Goal.DISK in goal:
            self._last_save_s, self._is_best = time.monotonic(), False

    def go_back(self) -> None:
        """The run has gone back to an older step."""
        self._last_step, self._copy_is_due, self._is_best = -2, False, False

    def _is_saving(self, state: RunState, flags: Flags) -> bool:
        """Whether a save may be under way on any rank: the same answer on all."""
        # Flags are of the beginning of the step before, or of this one, so a save that has begun since is not in them.
        has_begun_since = self._last_step in (state.step - 1, state.step)
        return flags.is_saving or (has_begun_since and self.rules.mode == "async")


def is_worth_saving(state: RunState) -> bool:
    """Whether the weights may be others than those of the newest checkpoint."""
    return state.skipped_in_a_row < SKIPPED_STEPS_UNSAVED


def is_best(loss: float, former: float | None) -> bool:
    """Whether a validation loss is the lowest so far. NaN never is, nor does one in `former` keep others out."""
    return math.isfinite(loss) and (former is None or not former <= loss)
