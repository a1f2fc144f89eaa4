"""The training loop: batch, step, report; and when it saves: by steps, for an export, by rank 0's clock, on request, as the best
so far, and at its end. All ranks decide alike, because they read the same sums.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from framework.checkpoint.save import Goal, Saver, find_interval_s
from framework.comm.communicator import Communicator, read_traffic, subtract_traffic, sum_traffic
from framework.comm.objects import broadcast_object
from framework.comm.transfer import AsyncHostCopy
from framework.data.growing import LOOK_EVERY_S
from framework.data.loader import Loader
from framework.data.tasks import OF_AVERAGE, is_better_low
from framework.errors import NumericsError
from framework.monitor.progress import Phase
from framework.monitor.watchdog import Watchdog
from framework.optim.groups import learning_rate
from framework.optim.optimizers import FIRST_MOMENT, average_squares
from framework.parallel.pipeline.simulate import Timed
from framework.parallel.zero.replicas import Hashed
from framework.plan.plan import Plan
from framework.recipe.schema import Checkpoint
from framework.train.replicas import check_replicas
from framework.train.reports import PendingStep, Reporter, StepTimes
from framework.train.state import RunState
from framework.train.step import TrainingRun, refuse_overflow, run_alone, train_step, validate_average
from framework.train.sums import NO_LIMITS, Flags, StepValues
from framework.train.validation import NO_EVALUATION, NOT_VALIDATED, Evaluation, Validated, Validation

# A run that has skipped so many steps in a row does not recover by itself.
SKIPPED_STEPS_LIMIT = 20
# After so many skipped steps in a row nothing more is saved until an update is made: the weights are those of a checkpoint that
# exists, and one more would take the place of an older one, to which the run may have to go back.
SKIPPED_STEPS_UNSAVED = 3


@dataclass(frozen=True)
class RewindDue:
    """Spikes have persisted. first_spike: the step of the first of them. step: the step that completed them. samples: the cursor
    after it, from which the run goes on."""

    first_spike: int
    step: int
    samples: int


class SavePolicy:
    """Decides when a run saves, and where. num_steps: of the run. saver: it is asked what saves
    cost, and whether one is under way."""

    def __init__(self, rules: Checkpoint, num_steps: int, saver: Saver) -> None:
        self.rules, self.num_steps, self.saver = rules, num_steps, saver
        self._last_save_s = time.monotonic()  # of the last checkpoint
        self._last_step, self._copy_is_due = -2, False
        self._is_best = False
        # The best before the one whose save is not known to have ended well: its step, its loss, and what chose it.
        self._former_best: tuple[int | None, float | None, str] | None = None

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
            if broadcast_object(partial(is_best, loss, former), world):
                self.settle_best(state)  # the save of this one would wait as well
                self._is_best = True
                self._former_best = state.best_step, state.best_validation_loss, state.best_by
                state.best_step, state.best_validation_loss, state.best_by = state.step, loss, str(by)

    def settle_best(self, state: RunState) -> None:
        """Wait for the save of the best weights, if one has begun; where it has failed the best before them, of which there is a
        checkpoint, is the best again. All ranks know alike how a save has ended."""
        if self._former_best is not None and not self._is_best:
            self.saver.settle()
            if self.saver.failures_in_a_row:
                state.best_step, state.best_validation_loss, state.best_by = self._former_best
            self._former_best = None

    def end_save(self, step: int, goal: Goal) -> None:
        """A save of the step has begun: start the clock of `checkpoint.every_minutes` anew."""
        self._last_step = step
        if Goal.MEMORY in goal:
            self._copy_is_due = False
        if Goal.DISK in goal:
            self._last_save_s, self._is_best = time.monotonic(), False

    def go_back(self) -> None:
        """The run has gone back to an older step."""
        self._last_step, self._copy_is_due, self._is_best, self._former_best = -2, False, False, None

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


class Loop:
    """Trains from `state` to `train.steps`. Reading lags one step behind the device, so that nothing waits for it.

    On every rank: all of them do the same in the same order, and all methods are collective.
    first_step: behind which its stage begins. timed: the actions of this rank in its last step. rewind_due: whether the run is to
    go back (`saves.rewind`), which is known once the step is read that completes the spikes.
    """

    def __init__(
        self,
        run: TrainingRun,
        state: RunState,
        plan: Plan,
        loader: Loader,
        policy: SavePolicy,
        reporter: Reporter,
        watchdog: Watchdog,
        first_step: int = 0,
        evaluation: Evaluation = NO_EVALUATION,
    ):
        self.run, self.state, self.recipe = run, state, plan.recipe
        self.first_step = first_step
        self.timed: tuple[Timed, ...] = ()
        self.clock = time.perf_counter  # of `timed`
        self.rewind_due: RewindDue | None = None
        self.policy, self.evaluation = policy, evaluation
        self._loader, self._reporter, self._watchdog = loader, reporter, watchdog
        self._phases, self._goodput = watchdog.progress.phases, reporter.goodput
        self._derived = plan.derived
        self._unread: PendingStep | None = None
        self._unreported: tuple[PendingStep, StepValues] | None = None
        self._validation: Validation | None = None
        self._of_average = NOT_VALIDATED
        self._flags = Flags()
        self._is_growing = plan.recipe.data.mode == "stream"  # the same on all ranks
        self._exposed_s = 0.0  # of steps that were concluded since goodput heard of it
        self._hashed: Sequence[Hashed] = ()
        self._compared_step = -1

    def steps(self) -> Iterator[int]:
        """Send one step after another to the device and yield its number, until `train.steps` or until any rank is asked to stop.
        Ends with what is left of a validation, and the last step's report. Raises NumericsError after too many steps in a row
        that were not finite.
        """
        self._goodput.begin_loop(self.state.step, lambda: self.policy.saver.stalled_s)
        while self.state.step < self.recipe.train.steps and not self._flags.stop:
            started = time.perf_counter()
            if not self._has_tokens():
                break
            # The duration of a step that also validates is not known beforehand.
            self._phases.begin(Phase.STEP, self.state.step + 1)
            with self._watchdog.step(self.state.step + 1) if self._validation is None else nullcontext():
                self._take_step(self._own_flags(), started)
            self._goodput.end_step(self.state.step, self._exposed_s)
            self._exposed_s = 0.0
            yield self.state.step
        self.end_validation()
        self._read()
        self._goodput.begin_close()

    def _has_tokens(self) -> bool:
        """Wait until rank 0 has read the next step's tokens, where they are made beside the run. False where it is asked to stop
        before."""
        while self._is_growing and not self._flags.stop:
            with self._phases.within(Phase.DATA), self._watchdog.waiting():
                is_read, is_asked, self._is_growing = broadcast_object(self._look, self.run.mesh.axis("world"))
            if is_read:
                break
            self._read()  # also what other ranks have asked for
            self._flags = replace(self._flags, stop=self._flags.stop or is_asked)
        return not self._flags.stop

    def _look(self) -> tuple[bool, bool, bool]:
        """Whether the next step's tokens are read, this rank is asked to stop, and later steps may have to be waited for."""
        is_read = self._loader.is_read(self.state.samples, LOOK_EVERY_S)
        return is_read, self._watchdog.requests.requested, self._loader.is_growing

    @property
    def is_done(self) -> bool:
        """Whether the step was the run's last."""
        return self.state.step == self.recipe.train.steps

    def find_goal(self) -> Goal:
        """Where to save the step now: nowhere, into a checkpoint, into the nodes' memory, or both."""
        return self.policy.find_goal(self.state, self._flags)

    def go_back_to(self, state: RunState) -> None:
        """Go on from an older state, with which the run has been filled, and forget all that came after it."""
        self.state, self.rewind_due = state, None
        self._unread = self._unreported = self._validation = None
        self._of_average = NOT_VALIDATED
        self.policy.go_back()
        self._flags = Flags(stop=self._flags.stop)
        self._compared_step, self._hashed = -1, ()
        self._loader.skip(state.skipped_samples)
        self.run.exposed_communication.take()
        self._reporter.observers.rewind(state.step)

    def begin_validation(self, validation: Validation) -> None:
        """Validate the weights of this moment: in the bubbles of the next step, or in `end_validation` if that comes first."""
        self._validation = validation

    def validate_average(self, validation: Validation) -> None:
        """Validate the average of the weights now, and score it; it is reported with the validation of the weights."""
        with self._phases.within(Phase.VALIDATE):
            mean = validate_average(self.run, validation).mean
            loss = mean if validation.has_losses else None
            self.run.mesh.waits.check_ended("a validation")
            self._of_average = Validated(scores=self._judge(validation, OF_AVERAGE), average=loss)

    def end_validation(self) -> None:
        """Run what is left of a validation now, if one is under way."""
        if self._validation is not None:
            with self._phases.within(Phase.VALIDATE):
                run_alone(self.run, self._validation)
                self.run.mesh.waits.check_ended("a validation")
                self._report_validation()

    def compare_replicas(self, is_saved: bool) -> None:
        """Raise DriftError on all ranks if replicas differ after the last step and a comparison is due: by steps, and before each
        save, so that no unequal values are saved. is_saved: the step is saved next."""
        is_due = is_saved and self.recipe.train.divergence_check_steps is not None
        if (is_due or self._is_compared(self.state.step)) and self._compared_step != self.state.step:
            self._compared_step = self.state.step
            check_replicas(self.run, self.state.step, self._hashed)

    def begin_save(self) -> None:
        """Read the step that was sent last, so that `state` is complete."""
        self._read()
        self.state.num_updates = self.run.optimizer.num_updates
        self.state.loss_scale, self.state.clean_steps = self.run.loss_scale.read()

    def end_save(self, goal: Goal) -> None:
        """The save has begun."""
        self.policy.end_save(self.state.step, goal)
        if Goal.DISK in goal:
            self._flags = Flags(stop=self._flags.stop)

    def _own_flags(self) -> Flags:
        """The flags of this rank for the next step."""
        requests = self._watchdog.requests
        is_due = self.run.mesh.rank == 0 and self.policy.is_due_by_clock(self.state)
        return Flags(requests.requested, is_due or requests.wants_save, self.policy.saver.is_busy)

    def _take_step(self, flags: Flags, started: float) -> None:
        """Send a step to the device, then read the one before: in the steady state that wait is the device's step time. started:
        when it was to be read."""
        state, recipe = self.state, self.recipe
        before = [read_traffic(self.run.mesh.axes, between_nodes) for between_nodes in (False, True)]
        is_growing = self._loader.is_growing  # a slow tokenizer is no hang
        with self._phases.within(Phase.DATA), self._watchdog.waiting() if is_growing else nullcontext():
            microbatches = self._loader.batch(state.samples)
        loaded, waited_before = time.perf_counter(), self.run.mesh.waits.seconds
        lr = learning_rate(state.step, recipe.optim.schedule, recipe.optim.lr, recipe.train.steps)
        is_reported = self._is_reported(state.step + 1)
        limits = state.spikes.limits(state.step + 1) if self._skips_spikes else NO_LIMITS
        result = train_step(
            self.run,
            microbatches,
            state.step,
            lr,
            flags,
            self._validation,
            is_reported,
            limits,
            self._is_compared(state.step + 1),
            self.clock,
        )
        self._hashed = result.hashed
        sums = result.copy_to_host()
        loads = AsyncHostCopy(result.loads.flatten()) if is_reported and result.loads is not None else None
        squared_moment: AsyncHostCopy | None = None
        if is_reported and recipe.track.noise_scale:
            squared_moment = AsyncHostCopy(self.run.optimizer.squared_norm(FIRST_MOMENT, self.run.mesh.device)[None])
        self._report_validation()
        state.step += 1
        state.samples += self._derived.sequences_per_step
        state.tokens += self._derived.tokens_per_step
        after = [read_traffic(self.run.mesh.axes, between_nodes) for between_nodes in (False, True)]
        traffic = sum_traffic(*map(subtract_traffic, after, before))
        self.timed = result.timed
        busy_s, waited_s = time.perf_counter() - loaded, self.run.mesh.waits.seconds - waited_before
        times = StepTimes(
            busy_s=busy_s,
            data_wait_s=loaded - started,
            computed_s=sum(each.end - each.start for each in result.timed),
            span_s=result.timed[-1].end - loaded,
            waited_s=waited_s,
            own_s=busy_s - waited_s,
        )
        waits = self.run.mesh.waits.ended
        self._read()
        seconds, exposed = time.perf_counter() - started, self.run.exposed_communication.take()
        reached = state.step, state.samples, state.tokens
        self._unread = PendingStep(
            sums, *reached, lr, limits, seconds, times, exposed, waits, traffic, loads, squared_moment
        )

    def _report_validation(self) -> None:
        """Report a validation that has run, with the step whose weights it used."""
        if self._validation is not None:
            mesh = self.run.mesh
            loss = self._validation.means(mesh) if self._validation.has_losses else None
            of_average, self._of_average = self._of_average, NOT_VALIDATED
            scores = {**self._judge(self._validation), **of_average.scores}
            fills = self.recipe.pipeline.fill_bubbles != "none"
            free, self._validation = self._validation.free_fraction if fills else None, None
            self.policy.note_best(self.state, None if loss is None else loss.mean, scores, mesh.axis("world"))
            self._conclude()
            self._report(Validated(loss, free, scores, of_average.average))

    def _judge(self, validation: Validation, of: str = "") -> dict[str, float]:
        return self.evaluation.judge(validation, self.run.mesh, of) if validation.has_documents else {}

    def _read(self) -> None:
        """Conclude the step that was sent last, and report it unless the validation of its weights is still to come."""
        self._conclude()
        if self._validation is None:
            self._report()

    def _conclude(self) -> None:
        pending, self._unread = self._unread, None
        if pending is None:
            return
        values = StepValues.unpack(pending.sums.values())
        if not values.is_finite:
            refuse_overflow(self.run, self.recipe.parallel.expert_padding, pending.step)
        if not self._skips_spikes:  # no update depends on them, so they are found while the next step is under way
            pending = replace(pending, limits=self.state.spikes.limits(pending.step))
        # The device has passed them, as it has the sums.
        self._exposed_s += sum(each.seconds for each in pending.exposed)
        self._flags = replace(values.flags, stop=self._flags.stop or values.flags.stop)
        is_skipped = self._note_spike(pending, values) or not values.is_finite
        self.state.skipped_in_a_row = self.state.skipped_in_a_row + 1 if is_skipped else 0
        self.state.skipped_steps += is_skipped
        if not is_skipped:
            optim, state = self.recipe.optim, self.state
            norm = min(values.gradient_norm, math.inf if optim.clip_norm is None else optim.clip_norm)
            state.squared_norms = average_squares(state.squared_norms, norm, optim.betas[0], state.num_updates)
            state.num_updates += 1
        self._unreported = pending, values
        if self.state.skipped_in_a_row >= SKIPPED_STEPS_LIMIT:
            self._report()
            raise NumericsError(explain_skipped(pending.step, self.state.skipped_in_a_row, self._skips_spikes))

    @property
    def _skips_spikes(self) -> bool:
        return self.recipe.train.on_spike != "log"

    def _note_spike(self, pending: PendingStep, values: StepValues) -> bool:
        """Add a step to the spike detector. Returns whether it was skipped as a spike: the device has compared the same
        numbers."""
        spikes = self.state.spikes
        limits = pending.limits
        is_spike = spikes.add(pending.step, values.loss, values.gradient_norm, limits)
        if is_spike and self.run.mesh.rank == 0:
            made = "no update was made" if self._skips_spikes else "train.on_spike=log: the update was made"
            print(
                f"step {pending.step:,} is a spike: loss {values.loss:.4g} (limit {limits.loss:.4g}), gradient norm"
                f" {values.gradient_norm:.4g} (limit {limits.gradient_norm:.4g}); {made}",
                file=sys.stderr,
                flush=True,
            )
        # The first time counts: whether the step behind it is read as well before the run goes back depends on when it saves.
        if self.recipe.train.on_spike == "rewind" and spikes.first_persistent and self.rewind_due is None:
            self.rewind_due = RewindDue(spikes.first_persistent, pending.step, pending.samples)
        return is_spike and self._skips_spikes

    def _report(self, validated: Validated = NOT_VALIDATED) -> None:
        """Report the step that was concluded last, if that is due and still to be done."""
        unreported, self._unreported = self._unreported, None
        if unreported is not None and self._is_reported(unreported[0].step):
            self._reporter.report(*unreported, self.state, validated)

    def _is_reported(self, step: int) -> bool:
        """Whether the step is reported. Known before it, so that the step itself finds what only reports need."""
        every = self.recipe.track.every_steps
        is_watched = self.is_validated(step) or self.evaluation.is_due(step)
        return step % every == 0 or is_watched or step == self.recipe.train.steps

    def _is_compared(self, step: int) -> bool:
        every = self.recipe.train.divergence_check_steps
        return self.recipe.track.debug_collectives or (every is not None and step % every == 0)

    def is_validated(self, step: int) -> bool:
        """Whether the step's weights are to be validated."""
        every = self.recipe.train.validate_every_steps
        return every is not None and (step % every == 0 or step == self.recipe.train.steps)


def explain_skipped(step: int, count: int, skips_spikes: bool) -> str:
    """The message of a run that ends because its last `count` steps, up to `step`, made no update."""
    spiked, made = ", or far above the steps before (train.on_spike)," if skips_spikes else "", step - count
    go_back = (
        f", and every checkpoint since step {made:,} has the weights of that step. To go back further, on these or other nodes:"
        f" move the checkpoints of step {made:,} and later out of their folder, and resume. If it ends so again, look"
        if made
        else ". Look"
    )
    return (
        f"loss or gradient was not finite{spiked} in {count} steps in a row, the last one step {step:,}: no update was made from"
        f" them{go_back} at the data of these steps, or lower optim.lr or lengthen optim.schedule.warmup_steps in a new run"
    )
