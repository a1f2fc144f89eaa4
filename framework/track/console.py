"""The run on the terminal: a progress bar where there is a terminal, one plain line per report in a log; the same fields
in the same order in both, of which a bar has as many as fit. Ends with a summary block."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from tqdm import tqdm

from framework.errors import EXIT_DONE, EXIT_RESUME
from framework.track.report import Observer, RunInfo, StepReport

_BAR = "{percentage:3.0f}%|{bar:8}| {n_fmt}/{total_fmt} | {desc}"
_COLUMNS = 80  # of a terminal that does not tell its width


class Console(Observer):
    """Writes to one stream, standard error by default."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic):
        self._stream = stream or sys.stderr
        self._now = now
        self._bar: tqdm | None = None
        self._run: RunInfo | None = None
        self._first: tuple[int, float] | None = None  # step and clock of the first report: later steps are all warm
        self._last: StepReport | None = None
        self._last_validation: StepReport | None = None
        self._last_scores: dict[str, float] = {}

    def open(self, run: RunInfo) -> None:
        self._run = run
        for line in (_headline(run), *run.nodes):
            self.say(line)
        if self._stream.isatty():
            self._bar = tqdm(
                total=run.total_steps,
                initial=run.start_step,
                file=self._stream,
                bar_format=_BAR,
            )

    def report(self, report: StepReport) -> None:
        assert self._run is not None, "report before open"
        self._first = self._first or (report.step, self._now())
        self._last = report
        if report.validation_loss is not None:
            self._last_validation = report
        self._last_scores = report.scores or self._last_scores
        fields = format_fields(report, self._remaining_s(report))
        if self._bar is not None:
            total = self._run.total_steps
            room = _count_columns(self._stream) - len(f"100%|12345678| {report.step}/{total} | ") - 1
            self._bar.set_description_str(_fit(fields, room), refresh=False)
            self._bar.update(report.step - self._bar.n)
            self._bar.refresh()
        else:
            self.say(" | ".join([f"step {report.step}/{self._run.total_steps}", *fields]))

    def say(self, line: str) -> None:
        """Print a line of text without tearing the progress bar."""
        tqdm.write(line, file=self._stream)
        self._stream.flush()

    def rewind(self, step: int) -> None:
        """Measure the pace anew."""
        self._first = None

    def close(self, exit_code: int | None) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._run is not None and exit_code is not None:
            self.say(_summary(self._run, self._last, self._last_validation, self._last_scores, exit_code))

    def _remaining_s(self, report: StepReport) -> float:
        """The time left at the mean pace since the first report, which includes validation and saving; at first the step's
        pace."""
        assert self._run is not None
        assert self._first is not None
        first_step, first_s = self._first
        steps_timed = report.step - first_step
        pace_s = (self._now() - first_s) / steps_timed if steps_timed else report.step_s
        return pace_s * (self._run.total_steps - report.step)


def format_fields(report: StepReport, remaining_s: float) -> list[str]:
    """The fields of a line, the most important ones first. MFU is absent where the device has no stated peak, validation loss
    where none was measured."""
    fields = [
        f"loss {report.loss:.4f}",
        f"{format_count(report.tokens_per_s)} tokens/s",
        f"eta {format_duration(remaining_s)}",
    ]
    if report.validation_loss is not None:
        free = report.validation_free_fraction
        fields.append(
            f"validation {report.validation_loss:.4f}" + ("" if free is None else f" ({free:.0%} in bubbles)")
        )
    if report.average_validation_loss is not None:
        fields.append(f"of the average {report.average_validation_loss:.4f}")
    tasks: dict[str, str] = {}
    for name, score in report.scores.items():
        tasks.setdefault(name.rpartition("/")[0], f"{name} {score:.4g}")
    fields += tasks.values()  # the first score of each
    if "reward_accuracy" in report.preference:
        fields.append(f"accuracy {report.preference['reward_accuracy']:.1%}")
    if report.mfu is not None:
        fields.append(f"mfu {report.mfu:.1%}")
    return [
        *fields,
        f"grad {report.gradient_norm:.3g}",
        *([] if report.loss_scale is None else [f"scale {report.loss_scale:g}"]),
        f"lr {report.lr:.2e}",
        f"wait {report.data_wait_s / report.step_s if report.step_s else 0:.1%}",
    ]


def _fit(fields: Sequence[str], room: int) -> str:
    """The first fields, as many whole ones as fit into `room` columns."""
    text = ""
    for field in fields:
        longer = f"{text} | {field}" if text else field
        if len(longer) > room:
            break
        text = longer
    return text


def _count_columns(stream: TextIO) -> int:
    """The terminal's columns, read for each report: a window may change its size."""
    with suppress(OSError):
        return os.get_terminal_size(stream.fileno()).columns or _COLUMNS
    return _COLUMNS


def format_count(count: float) -> str:
    """Format a number with three digits and a decimal prefix: 12.3k, 4.56M."""
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{suffix}"
    return f"{count:.3g}"


def format_duration(seconds: float) -> str:
    """Format a duration: 1:02:03, or 02:03 under an hour."""
    return tqdm.format_interval(round(seconds))


def _headline(run: RunInfo) -> str:
    degrees = " ".join(f"{axis}={size}" for axis, size in run.degrees.items() if size > 1)
    where = f"{run.world} rank{'s' * (run.world > 1)}" + (f" ({degrees})" if degrees else "") + f" on {run.device}"
    start = f", going on after step {run.start_step}" if run.start_step else ""
    size = f"{run.model}, {format_count(run.num_parameters)} parameters"
    return f"run {run.run_id}: {size}, {run.total_steps} steps of {format_count(run.tokens_per_step)} tokens, {where}{start}"


def _summary(
    run: RunInfo, last: StepReport | None, validated: StepReport | None, scores: Mapping[str, float], exit_code: int
) -> str:
    endings = {EXIT_DONE: "done", EXIT_RESUME: "stopped and saved"}
    ending = endings.get(exit_code, f"rank 0 ended with exit code {exit_code}")
    if last is None:
        return f"{ending}: run {run.run_id}, no step reported"
    what = "step" if exit_code == EXIT_DONE else "reported up to step"  # a stop need not be at a step that is reported
    lines = [
        f"{ending}: run {run.run_id}, {what} {last.step} of {run.total_steps}, {format_count(last.tokens)} tokens",
        f"  loss             {last.loss:.4f}",
    ]
    if validated is not None:
        entropy = f"  (unigram entropy {run.unigram_entropy:.4f})" if run.unigram_entropy is not None else ""
        lines.append(f"  validation loss  {validated.validation_loss:.4f}{entropy}")
        lines += [f"    of {name:<12} {loss:.4f}" for name, loss in validated.validation_losses.items()]
    lines += [f"  {name:<22} {score:.4g}" for name, score in scores.items()]
    lines.append(f"  throughput       {format_count(last.tokens_per_s)} tokens/s")
    if last.mfu is not None:
        lines.append(f"  mfu              {last.mfu:.1%}")
    commands = run.next_commands(exit_code == EXIT_DONE, is_saved=exit_code in endings)
    if run.config.get("launch", {}).get("kind") == "local":  # whose launcher says it last, also where ranks could not
        commands.pop("resume", None)
    lines += [f"  {what:<15}  {command}" for what, command in commands.items()]
    return "\n".join(lines)
