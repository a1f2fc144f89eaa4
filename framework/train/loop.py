"""The loop: batch, step, report. All ranks decide alike, because they read the same sums."""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch

from framework.checkpoint.save import Goal, Saver, find_interval_s
from framework.comm import ledger
from framework.comm.algorithms import ExposedWait
from framework.comm.objects import broadcast_object, gather_numbers
from framework.comm.transfer import AsyncHostCopy
from framework.data.loader import Loader
from framework.errors import NumericsError
from framework.model.mixtures import read_loads
from framework.monitor.goodput import Goodput
from framework.monitor.phases import Phase, Phases
from framework.monitor.progress import name_coordinates
from framework.monitor.stop import StepWatch, StopRequest
from framework.monitor.stragglers import WINDOW, Stragglers
from framework.optim.groups import learning_rate
from framework.parallel.pipeline.simulate import Timed
from framework.parallel.zero.replicas import Hashed
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.track.flops import mfu
from framework.track.memory import peak_memory_bytes
from framework.track.observers import Observers
from framework.track.report import RunInfo, StepReport
from framework.train.replicas import check_replicas
from framework.train.spikes import NO_LIMITS, SpikeLimits
from framework.train.state import RunState
from framework.train.step import Run, run_alone, train_step
from framework.train.sums import Flags, StepValues
from framework.train.validation import Validation, ValidationLoss

# A run that has skipped so many steps in a row comes back by itself no more.
SKIPPED_STEPS_LIMIT = 20
# After so many nothing more is saved until a step is made: the weights are those of a checkpoint that there is, and each one more
# would take the place of an older one, which the run may have to go back to.
SKIPPED_STEPS_UNSAVED = 3


class RankTimes(NamedTuple):
    """One rank's seconds of a step, by its host's clock. busy: without waiting for data. computed: in actions of the pipeline.
    span: from the first microbatch at hand to the end of the last action. waited: for other ranks. own: for nobody."""

    busy_s: float
    data_wait_s: float
    computed_s: float
    span_s: float
    waited_s: float
    own_s: float


@dataclass(frozen=True)
class PendingStep:
    """A step that has been sent to the device and not yet read. samples, tokens: after it. limits: above which it is a spike.
    seconds, times: this rank's. loads: of experts, flat."""

    sums: AsyncHostCopy
    step: int
    samples: int
    tokens: int
    lr: float
    limits: SpikeLimits
    seconds: float
    times: RankTimes
    waits: list[ExposedWait]
    traffic: dict[str, dict[str, int]]
    loads: AsyncHostCopy | None


@dataclass(frozen=True)
class RewindDue:
    """Spikes have persisted. first_spike: the step of the first of them; step: that which completed them; samples: the cursor
    after it, from which the run goes on."""

    first_spike: int
    step: int
    samples: int


class Loop:
    """Trains from `state` to `train.steps`. Reading lags one step behind the device, so that nothing waits for it.

    On every rank; whatever it does it does on all of them in the same order. `observers` hear of rank 0's reports only.
    timed: what this rank did in its last step. phases: hears of each step, and of waits for data. goodput: of steps that end.
    rewind_due: whether the run is to go back (`rewind.py`), which is known once the step is read that completes the spikes.
    """

    def __init__(
        self,
        run: Run,
        state: RunState,
        recipe: Recipe,
        loader: Loader,
        observers: Observers,
        info: RunInfo,
        saver: Saver,
        phases: Phases,
        goodput: Goodput | None = None,
    ):
        self.run, self.state, self.recipe, self.derived = run, state, recipe, derive(recipe)
        self.timed: tuple[Timed, ...] = ()
        self.rewind_due: RewindDue | None = None
        self._loader, self._observers, self._info, self._saver = loader, observers, info, saver
        self._phases = phases
        self._goodput = goodput or Goodput(phases)
        self._exposed_s = 0.0  # of steps that were concluded since goodput heard of it
        self._reported_stall_s = 0.0
        self._unread: PendingStep | None = None
        self._unreported: tuple[PendingStep, StepValues] | None = None
        self._validation: Validation | None = None
        self._is_best = False
        self._last_save_s = time.monotonic()
        self._last_save_step, self._copy_is_due = -2, False
        self._flags = Flags()
        topology = run.mesh.topology
        stages = [topology.index("pp", rank) for rank in range(topology.world)]
        # Ranks with other stages have other work.
        self._stragglers = Stragglers(
            [[rank for rank, stage in enumerate(stages) if stage == number] for number in range(topology.pp)]
        )
        self._hosts: Mapping[int, str] = {}
        self._say: Callable[[str], None] = print
        self._hashed: Sequence[Hashed] = ()
        self._compared_step = -1

    def steps(self, stop: StopRequest, watch: StepWatch) -> Iterator[int]:
        """Send one step after another to the device and yield its number, until `train.steps` or until any rank's `stop` asks.
        Ends with what is left of a validation. Collective, as all of the methods are. watch: is told of each step.

        NumericsError after too many steps in a row that were not finite.
        """
        self._hosts, self._say = watch.progress.hosts, watch.tell
        self._goodput.begin_loop(self.state.step, lambda: self._saver.stalled_s)
        while self.state.step < self.recipe.train.steps and not self._flags.stop:
            # How long a step takes that also validates nobody knows beforehand.
            self._phases.begin(Phase.STEP, self.state.step + 1)
            with watch.step(self.state.step + 1) if self._validation is None else nullcontext():
                self._take_step(self._own_flags(stop))
            self._goodput.end_step(self.state.step, self._exposed_s)
            self._exposed_s = 0.0
            yield self.state.step
        self.end_validation()
        self._goodput.begin_close()

    @property
    def is_done(self) -> bool:
        """Whether the step was the run's last."""
        return self.state.step == self.recipe.train.steps

    def must_validate(self) -> bool:
        """Whether the weights are to be validated now."""
        return self._is_validated(self.state.step)

    def must_save(self) -> bool:
        """Whether a checkpoint is due: by steps, for an export, by rank 0's clock, asked for, as the best so far, or because the
        run is done."""
        rules = self.recipe.checkpoint
        is_due = any(every and self.state.step % every == 0 for every in (rules.every_steps, rules.export_every_steps))
        return (is_due and self._is_worth_saving) or self._flags.save or self._is_best or self.is_done

    def find_goal(self) -> Goal:
        """Where to save the step now: nowhere, into a checkpoint, into the nodes' memory, or both."""
        every = self.recipe.checkpoint.neighbor_every_steps
        self._copy_is_due |= every is not None and self.state.step % every == 0
        disk = Goal.DISK if self.must_save() else Goal(0)
        # Its end needs no copy, and none waits for a save that is under way: training would wait with it.
        return disk | Goal.MEMORY if self._copy_is_due and not (self.is_done or self._is_saving()) else disk

    def go_back_to(self, state: RunState) -> None:
        """Go on from an older state, which the run has been filled with: of what came after it nothing counts any more."""
        self.state, self.rewind_due = state, None
        self._unread = self._unreported = self._validation = None
        self._is_best = False
        self._flags = Flags(stop=self._flags.stop)
        self._compared_step, self._hashed = -1, ()
        self._last_save_step, self._copy_is_due = -2, False
        self._loader.skip(state.skipped_samples)
        self.run.exposed_communication.take()
        self._observers.rewind(state.step)

    def begin_validation(self, validation: Validation) -> None:
        """Validate the weights of this moment: in the bubbles of the next step, or in `end_validation` if that comes first."""
        self._validation = validation

    def end_validation(self) -> None:
        """Run what is left of a validation now, if one is under way."""
        if self._validation is not None:
            with self._phases.within(Phase.VALIDATE):
                run_alone(self.run, self._validation)
                self.run.mesh.waits.check_ended("a validation")
                self._report_validation()

    def compare_replicas(self, is_saved: bool) -> None:
        """Raise DriftError, on all ranks, where they differ in what they hold alike after the last step and a comparison is due:
        by steps, and before each save, so that what was not equal is not saved. is_saved: the step is saved next."""
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
        """The save has begun: start the clock of `checkpoint.every_minutes` anew."""
        self._last_save_step = self.state.step
        if Goal.MEMORY in goal:
            self._copy_is_due = False
        if Goal.DISK in goal:
            self._last_save_s = time.monotonic()
            self._flags, self._is_best = Flags(stop=self._flags.stop), False

    def _is_saving(self) -> bool:
        """Whether a save may be under way on any rank: the same answer on all."""
        # Flags are of the beginning of the step before, or of this one, so what has begun since is not in them.
        began_since = self._last_save_step in (self.state.step - 1, self.state.step)
        return self._flags.is_saving or (began_since and self.recipe.checkpoint.mode == "async")

    def _take_step(self, flags: Flags) -> None:
        """Send a step to the device, then read the one before: in the steady state that wait is the device's step time."""
        state, recipe = self.state, self.recipe
        started = time.perf_counter()
        before = ledger.snapshot(self.run.mesh)
        with self._phases.within(Phase.DATA):
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
        )
        self._hashed = result.hashed
        sums = result.copy_to_host()
        loads = AsyncHostCopy(result.loads.flatten()) if is_reported and result.loads is not None else None
        self._report_validation()
        state.step += 1
        state.samples += self.derived.sequences_per_step
        state.tokens += self.derived.tokens_per_step
        traffic = ledger.totals(ledger.difference(ledger.snapshot(self.run.mesh), before))
        self.timed = result.timed
        busy_s, waited_s = time.perf_counter() - loaded, self.run.mesh.waits.seconds - waited_before
        times = RankTimes(
            busy_s=busy_s,
            data_wait_s=loaded - started,
            computed_s=sum(each.end - each.start for each in result.timed),
            span_s=result.timed[-1].end - loaded,
            waited_s=waited_s,
            own_s=busy_s - waited_s,
        )
        self._read()
        seconds, waits = time.perf_counter() - started, self.run.exposed_communication.take()
        self._unread = PendingStep(
            sums, state.step, state.samples, state.tokens, lr, limits, seconds, times, waits, traffic, loads
        )

    def _own_flags(self, stop: StopRequest) -> Flags:
        is_due = self._is_worth_saving and time.monotonic() - self._last_save_s > self._find_interval_s()
        save = (is_due and self.run.mesh.rank == 0) or stop.wants_save
        return Flags(stop.requested, save, self._saver.is_busy)

    def _find_interval_s(self) -> float:
        """Seconds between saves by the clock."""
        rules, saver = self.recipe.checkpoint, self._saver
        if rules.mtbf_hours is not None:
            return find_interval_s(3600 * rules.mtbf_hours, saver.started, saver.disk_stalled_s, saver.longest_s)
        return math.inf if rules.every_minutes is None else 60 * rules.every_minutes

    def _report_validation(self) -> None:
        """Report a validation that has run, with the step whose weights it was of."""
        if self._validation is not None:
            loss = self._validation.means(self.run.mesh)
            fills = self.recipe.pipeline.fill_bubbles != "none"
            free, self._validation = self._validation.free_fraction if fills else None, None
            self._note_best(loss.mean)
            self._conclude()
            self._report(loss, free)

    def _note_best(self, loss: float) -> None:
        """With checkpoint.keep_best: whether these weights are the best so far. Rank 0 decides, so that no rounding of a loss
        makes ranks disagree on a save, which is collective."""
        if self.recipe.checkpoint.keep_best:
            former = self.state.best_validation_loss
            self._is_best = broadcast_object(partial(is_best, loss, former), self.run.mesh.axis("world"))
            if self._is_best:
                self.state.best_step, self.state.best_validation_loss = self.state.step, loss

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
        if not self._skips_spikes:  # no update depends on them, so they are found while the next step is under way
            pending = replace(pending, limits=self.state.spikes.limits(pending.step))
        self._exposed_s += sum(each.seconds for each in pending.waits)  # the device has passed them, as it has the sums
        self._flags = replace(values.flags, stop=self._flags.stop or values.flags.stop)
        is_skipped = self._note_spike(pending, values) or not values.is_finite
        self.state.skipped_in_a_row = self.state.skipped_in_a_row + 1 if is_skipped else 0
        self.state.skipped_steps += is_skipped
        self._unreported = pending, values
        if self.state.skipped_in_a_row >= SKIPPED_STEPS_LIMIT:
            self._report()
            raise NumericsError(explain_skipped(pending.step, self.state.skipped_in_a_row, self._skips_spikes))

    @property
    def _is_worth_saving(self) -> bool:
        """Whether the weights may be others than those of the newest checkpoint."""
        return self.state.skipped_in_a_row < SKIPPED_STEPS_UNSAVED

    @property
    def _skips_spikes(self) -> bool:
        return self.recipe.train.on_spike != "log"

    def _note_spike(self, pending: PendingStep, values: StepValues) -> bool:
        """Add a step to what the detector knows. Whether it was a spike, and was skipped for that: the device has compared the
        same numbers."""
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

    def _report(self, validation_loss: ValidationLoss | None = None, free_fraction: float | None = None) -> None:
        """Report the step that was concluded last, if that is due and still to be done.

        Only now are the ranks' times gathered, to rank 0, by the hosts: they have just read the sums of one all-reduce, so they
        are here at about the same time, while the device has the next step to do. In the sums of every step these would be four
        numbers for each rank.
        """
        unreported, self._unreported = self._unreported, None
        if unreported is None:
            return
        if self._is_reported(unreported[0].step):
            own = find_device_times(unreported[0], self.run.mesh.device)
            gathered = gather_numbers(own, self.run.mesh.axis("world"))
            times = [RankTimes(*each) for each in gathered]
            if times:  # on rank 0
                self._find_stragglers(unreported[0], times)
                self._observers.report(self._describe(*unreported, times, validation_loss, free_fraction))

    def _is_reported(self, step: int) -> bool:
        """Whether the step is reported: known before it, so that what only reports need is found in the step itself."""
        every = self.recipe.track.every_steps
        return step % every == 0 or self._is_validated(step) or step == self.recipe.train.steps

    def _is_compared(self, step: int) -> bool:
        every = self.recipe.train.divergence_check_steps
        return self.recipe.track.debug_collectives or (every is not None and step % every == 0)

    def _is_validated(self, step: int) -> bool:
        """Whether the step's weights are to be validated."""
        every = self.recipe.train.validate_every_steps
        return every is not None and (step % every == 0 or step == self.recipe.train.steps)

    def _describe(
        self,
        pending: PendingStep,
        values: StepValues,
        times: Sequence[RankTimes],
        validation_loss: ValidationLoss | None,
        free_fraction: float | None,
    ) -> StepReport:
        tokens_per_s = self.derived.tokens_per_step / pending.seconds
        return StepReport(
            step=pending.step,
            samples=pending.samples,
            tokens=pending.tokens,
            loss=values.loss,
            gradient_norm=values.gradient_norm,
            lr=pending.lr,
            step_s=pending.seconds,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_rank=tuple(self.derived.tokens_of_rank / each.busy_s for each in times),
            data_wait_s=max(each.data_wait_s for each in times),
            pipeline_bubble=find_bubble(times),
            exposed_communication_s=sum(each.seconds for each in pending.waits),
            mfu=mfu(tokens_per_s, self._info.flops_per_token or 0.0, self._info.world, self._info.peak_flops),
            memory_bytes=peak_memory_bytes(self.run.mesh.device),
            traffic=pending.traffic,
            validation_loss=None if validation_loss is None else validation_loss.mean,
            validation_losses=self._name_losses(validation_loss),
            validation_free_fraction=free_fraction,
            skipped_steps=self.state.skipped_steps,
            spikes=self.state.spikes.count,
            loss_limit=pending.limits.loss if pending.limits.are_known else None,
            gradient_norm_limit=pending.limits.gradient_norm if pending.limits.are_known else None,
            rewinds=self.state.rewinds,
            skipped_samples=tuple((first, stop) for first, stop in self.state.skipped_samples),
            loss_scale=values.loss_scale if self.recipe.precision.compute == "fp16" else None,
            save_stall_s=self._take_stall(),
            failed_saves=self._saver.failures,
            stragglers={f"{rank} {phase}": excess_s for (rank, phase), excess_s in self._stragglers.slow.items()},
            goodput=self._goodput.shares(),
            **self._describe_experts(pending),
        )

    def _find_stragglers(self, pending: PendingStep, times: Sequence[RankTimes]) -> None:
        """Say which ranks have become slow, or are so no longer."""
        data, own, waited = ([getattr(each, name) for each in times] for name in ("data_wait_s", "own_s", "waited_s"))
        for found in self._stragglers.add(pending.seconds, data, own, waited):
            host = self._hosts.get(found.rank, "")
            who = f"rank {found.rank} [{name_coordinates(self.run.mesh.topology, found.rank)}]{host and f' on {host}'}"
            if found.is_slow:
                self._say(
                    f"{who} is slow in {found.phase}: {found.excess_s * 1e3:.0f} ms a step longer than {self._stragglers.others},"
                    f" {found.fraction:.0%} of a step (median of the last reported steps, at most {WINDOW})"
                )
            else:
                self._say(f"{who} is no longer slow in {found.phase}")

    def _take_stall(self) -> float:
        """Seconds that saves have held the loop up since this was last asked."""
        former, self._reported_stall_s = self._reported_stall_s, self._saver.stalled_s
        return self._reported_stall_s - former

    def _describe_experts(self, pending: PendingStep) -> dict[str, Any]:
        """What routers did, by the names of the report; nothing for a dense model."""
        if pending.loads is None:
            return {}
        loads = read_loads(self.run.load.mixtures, pending.loads.values())
        imbalance = {layer: load.imbalance for layer, load in loads.items()}
        entropies = [load.entropy for load in loads.values() if load.entropy is not None]
        return {
            "expert_imbalance": imbalance,
            "expert_imbalance_max": max(imbalance.values()),
            "expert_imbalance_mean": fmean(imbalance.values()),
            "router_entropy": fmean(entropies) if entropies else None,
            "dropped_tokens": sum(load.dropped for load in loads.values()),
            "expert_loads": {layer: load.tokens for layer, load in loads.items()},
        }

    def _name_losses(self, found: ValidationLoss | None) -> dict[str, float]:
        """By source, where there are several."""
        names = self._info.sources
        if found is None or len(names) < 2:
            return {}
        return {name: loss for name, loss in zip(names, found.by_source, strict=True) if loss is not None}


def find_device_times(pending: PendingStep, device: torch.device) -> RankTimes:
    """The rank's times, of which `waited` and `own` are the device's where that is a GPU, as its host only launches. Not run on a
    GPU. Its events have passed when the step's sums are read."""
    if device.type != "cuda":
        return pending.times
    waited_s = sum(each.seconds for each in pending.waits)
    return pending.times._replace(waited_s=waited_s, own_s=pending.seconds - pending.times.data_wait_s - waited_s)


def find_bubble(times: Sequence[RankTimes]) -> float:
    """Share of the ranks' time, until the last of them has ended its actions, in which they computed nothing."""
    longest = max(each.span_s for each in times)
    return 1.0 - sum(each.computed_s for each in times) / (len(times) * longest) if longest else 0.0


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


def is_best(loss: float, former: float | None) -> bool:
    """Whether a validation loss is the lowest so far. NaN never is, nor does one in `former` keep others out."""
    return math.isfinite(loss) and (former is None or not former <= loss)
