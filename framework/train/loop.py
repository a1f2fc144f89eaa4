"""The loop: batch, step, report, and what falls due. All ranks decide alike, because they read the same summed votes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from framework.comm import ledger
from framework.comm.transfer import AsyncHostCopy
from framework.data.loader import Loader
from framework.errors import EXIT_DONE, EXIT_RESUME, NumericsError
from framework.optim.schedules import learning_rate
from framework.parallel.zero.exposed_communication import ExposedWait
from framework.recipe.derive import Derived
from framework.recipe.schema import Recipe
from framework.track.memory import peak_memory_bytes
from framework.track.report import StepReport
from framework.train.faults import StopRequest
from framework.train.state import RunState
from framework.train.step import Run, run_alone, train_step
from framework.train.validation import Validation

# A run that has skipped so many steps in a row has left the finite numbers for good.
SKIPPED_STEPS_LIMIT = 20


@dataclass(frozen=True)
class PendingStep:
    """A step that has been sent to the device and not yet read. Seconds are this rank's; votes are in `result`."""

    result: AsyncHostCopy
    step: int
    samples: int
    tokens: int
    lr: float
    seconds: float
    stalls: list[ExposedWait]
    traffic: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Services:
    """What the loop calls. `check`, `save` and `draw` are collective; `check` raises where replicas differ; `open_validation`
    begins a pass over the validation split; `report` does nothing but on rank 0; `mfu` turns tokens per second of the whole run
    into a share of the devices' peak, None where that is not known."""

    open_validation: Callable[[], Validation]
    check: Callable[[], None]
    save: Callable[[], None]
    draw: Callable[[], None]
    report: Callable[[StepReport], None]
    mfu: Callable[[float], float | None]
    stop: StopRequest


class Loop:
    """Trains from `state` to `train.steps`. Reports lag one step behind the device, so that nothing waits for it."""

    def __init__(self, run: Run, state: RunState, recipe: Recipe, derived: Derived, loader: Loader, services: Services):
        self.run, self.state, self.recipe, self.derived = run, state, recipe, derived
        self.loader, self.services = loader, services
        self._unread: PendingStep | None = None
        self._unsent: Callable[[float | None, float | None], None] | None = None
        self._validation: Validation | None = None
        self._skipped_in_a_row = 0
        self._last_save_s = time.monotonic()
        self._busy_s = self._wait_s = self._computed_s = self._span_s = 0.0
        self._stop = self._save_by_clock = False

    def train(self) -> int:
        """Returns the exit code: done, or saved and to be run again."""
        while self.state.step < self.recipe.train.steps and not self._stop:
            self._take_step()
            is_last = self.state.step == self.recipe.train.steps
            if self.recipe.track.debug_collectives:
                self.services.check()
            if self.state.step == self.recipe.track.timeline_step:
                self.services.draw()
            if self._is_due(self.recipe.train.validate_every_steps) or (
                is_last and self.recipe.train.validate_every_steps
            ):
                self._validation = self.services.open_validation()
                if is_last or self.recipe.pipeline.fill_bubbles == "none":
                    self._validate_alone()
            if self._is_due(self.recipe.checkpoint.every_steps) or self._save_by_clock or is_last:
                self._save()
        self._validate_alone()
        if self.state.step == self.recipe.train.steps:
            return EXIT_DONE
        self._save()
        return EXIT_RESUME

    def _take_step(self) -> None:
        """Send a step to the device, then read the one before: in the steady state that wait is the device's step time."""
        state, recipe = self.state, self.recipe
        started = time.perf_counter()
        before = ledger.snapshot(self.run.mesh)
        microbatches = self.loader.batch(state.samples)
        loaded = time.perf_counter()
        lr = learning_rate(state.step, recipe.optim.schedule, recipe.optim.lr, recipe.train.steps)
        result = AsyncHostCopy(train_step(self.run, microbatches, state.step, lr, self._votes(), self._validation))
        self._conclude_validation()
        state.step += 1
        state.samples += self.derived.sequences_per_step
        state.tokens += self.derived.tokens_per_step
        traffic = ledger.totals(ledger.difference(ledger.snapshot(self.run.mesh), before))
        self._wait_s, self._busy_s = loaded - started, time.perf_counter() - loaded
        self._computed_s = sum(each.end - each.start for each in self.run.timed)
        self._span_s = self.run.timed[-1].end - loaded
        self._read()
        seconds = time.perf_counter() - started
        self._unread = PendingStep(
            result, state.step, state.samples, state.tokens, lr, seconds, self.run.waits.take(), traffic
        )

    def _votes(self) -> list[float]:
        """[stop?, save now?] then seconds of the step before, each rank in its own place: busy, waiting for data, in actions of
        the pipeline, until the last of them had ended."""
        minutes = self.recipe.checkpoint.every_minutes
        due = minutes is not None and time.monotonic() - self._last_save_s > 60 * minutes
        votes = [float(self.services.stop.requested), float(due and self.run.mesh.rank == 0)]
        seconds = [0.0] * (4 * self.derived.world)
        first = 4 * self.run.mesh.rank
        seconds[first : first + 4] = self._busy_s, self._wait_s, self._computed_s, self._span_s
        return votes + seconds

    def _validate_alone(self) -> None:
        """Run what is left of a validation now, if one is under way."""
        if self._validation is not None:
            run_alone(self.run, self._validation)
            self._conclude_validation()

    def _conclude_validation(self) -> None:
        """Report a validation that has run, with the step whose weights it was of."""
        if self._validation is not None:
            loss = self._validation.mean(self.run.mesh)
            fills = self.recipe.pipeline.fill_bubbles != "none"
            free, self._validation = self._validation.free_fraction if fills else None, None
            self._conclude()
            self._send_report(loss, free)

    def _read(self) -> None:
        """Conclude the step that was sent last, and report it unless the validation of its weights is still to come."""
        self._conclude()
        if self._validation is None:
            self._send_report()

    def _conclude(self) -> None:
        taken, self._unread = self._unread, None
        if taken is None:
            return
        loss, norm, stop, save, *seconds = taken.result.values()
        self._stop, self._save_by_clock = self._stop or stop > 0, save > 0
        finite = abs(loss) + norm < float("inf")
        self._skipped_in_a_row = 0 if finite else self._skipped_in_a_row + 1
        self.state.skipped_steps += not finite
        self._unsent = partial(self._report, taken, loss, norm, seconds)
        if self._skipped_in_a_row >= SKIPPED_STEPS_LIMIT:
            self._send_report()
            raise NumericsError(
                f"loss or gradient was not finite in {SKIPPED_STEPS_LIMIT} steps in a row, the last one step {taken.step}: no "
                "update was made from them. Resume from an older checkpoint with a lower optim.lr or a longer "
                "optim.schedule.warmup_steps, or look at the data of these steps"
            )

    def _send_report(self, validation_loss: float | None = None, free_fraction: float | None = None) -> None:
        """Report the step that was concluded last, if that is still to be done."""
        report, self._unsent = self._unsent, None
        if report is not None:
            report(validation_loss, free_fraction)

    def _report(
        self,
        taken: PendingStep,
        loss: float,
        norm: float,
        seconds: list[float],
        validation_loss: float | None,
        free_fraction: float | None,
    ) -> None:
        every = self.recipe.track.every_steps
        if taken.step % every and validation_loss is None and taken.step != self.recipe.train.steps:
            return
        tokens_per_s = self.derived.tokens_per_step / taken.seconds
        tokens_of_rank = self.derived.tokens_per_step / self.derived.dp
        self.services.report(
            StepReport(
                step=taken.step,
                samples=taken.samples,
                tokens=taken.tokens,
                loss=loss,
                gradient_norm=norm,
                lr=taken.lr,
                step_s=taken.seconds,
                tokens_per_s=tokens_per_s,
                tokens_per_s_per_rank=tuple(tokens_of_rank / busy if busy else 0.0 for busy in seconds[0::4]),
                data_wait_s=max(seconds[1::4]),
                pipeline_bubble=_bubble(seconds[2::4], seconds[3::4]),
                exposed_communication_s=sum(stall.seconds for stall in taken.stalls),
                mfu=self.services.mfu(tokens_per_s),
                memory_bytes=peak_memory_bytes(self.run.mesh.device),
                traffic=taken.traffic,
                validation_loss=validation_loss,
                validation_free_fraction=free_fraction,
                skipped_steps=self.state.skipped_steps,
            )
        )

    def _is_due(self, every_steps: int | None) -> bool:
        return every_steps is not None and self.state.step % every_steps == 0

    def _save(self) -> None:
        self._read()
        self.services.save()
        self._last_save_s, self._save_by_clock = time.monotonic(), False


def _bubble(computed_s: list[float], spans_s: list[float]) -> float:
    """Share of the ranks' time, until the last of them is through with its actions, in which they computed nothing."""
    longest = max(spans_s)
    return 1.0 - sum(computed_s) / (len(spans_s) * longest) if longest else 0.0
