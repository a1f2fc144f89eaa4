"""Many runs, one a line, with the best of them marked: `meshwright status`, and the end of a sweep."""

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from framework.errors import MeshwrightError
from framework.launch.directory import RunDirectory
from framework.launch.request import find_jobs
from framework.launch.resume import saved_step
from framework.launch.slurm import WAITING_OR_RUNNING
from framework.recipe.compose import load_recipe
from framework.track.console import format_count
from framework.track.jsonl import METRICS_FILE, decode, read_records

WIDEST = 64  # of the last column, of words that the runs do not share
HEAD = ("run", "state", "step", "loss", "validation", "tokens/s", "differs in")


@dataclass(frozen=True)
class RunLine:
    """One run in numbers. loss: of its last step; validation: its lowest; None where nothing was measured."""

    id: str
    state: str
    steps: str
    loss: float | None
    validation: float | None
    tokens_per_s: float | None
    overrides: tuple[str, ...]

    @property
    def score(self) -> tuple[bool, float]:
        """Lower is better: a validation loss before a loss of training, which is of other data in each step."""
        loss = self.loss if self.validation is None else self.validation
        return self.validation is None, float("inf") if loss is None or loss != loss else loss


def describe_runs(runs: Sequence[RunDirectory], marks_best: bool) -> str:
    """A table of at least one run. marks_best: `*` is at the lowest validation loss, or at the lowest loss where no run has
    validated; for runs that train on the same text."""
    lines = [_read_line(run) for run in runs]
    best = min(lines, key=lambda line: line.score) if marks_best else None
    common = set.intersection(*(set(line.overrides) for line in lines))
    rows = [HEAD, *(_cells(line, line is best, common) for line in lines)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(line: RunLine, is_best: bool, common: set[str]) -> tuple[str, ...]:
    own = [word for word in line.overrides if word not in common and not word.startswith("run.id=")]
    numbers = [f"{value:.4f}" if value is not None else "-" for value in (line.loss, line.validation)]
    speed = format_count(line.tokens_per_s) if line.tokens_per_s is not None else "-"
    differs = " ".join(own)
    differs = differs if len(differs) <= WIDEST else differs[: WIDEST - 4] + " ..."
    return line.id + (" *" if is_best else ""), line.state, line.steps, *numbers, speed, differs


def _read_line(run: RunDirectory) -> RunLine:
    try:
        recipe = load_recipe(run.recipe)
    except MeshwrightError:
        return RunLine(run.id, "unreadable", "-", None, None, None, _overrides(run))
    step, loss, tokens_per_s, validation = read_curve_end(run.path / METRICS_FILE)
    steps = f"{step:,}/{recipe.train.steps:,}"
    return RunLine(run.id, _find_state(run, recipe.train.steps), steps, loss, validation, tokens_per_s, _overrides(run))


def read_curve_end(metrics: Path) -> tuple[int, float | None, float | None, float | None]:
    """(last step, its loss, its tokens/s, the lowest validation loss but NaN), without decoding what is in between."""
    if not metrics.is_file():
        return 0, None, None, None
    last, validations = None, []
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            last = line
            if '"validation_loss": null' not in line and (record := decode(line)):
                validations.append(record["validation_loss"])
    # A crash may have torn the last line; which one is then the last is worth a second reading.
    record = decode(last or "") or next(iter(deque(read_records(metrics), maxlen=1)), None)
    record = record or {"step": 0, "loss": None, "tokens_per_s": None}
    lowest = min(validations, key=lambda loss: (math.isnan(loss), loss), default=None)
    return record["step"], record["loss"], record["tokens_per_s"], lowest


def _find_state(run: RunDirectory, total: int) -> str:
    job = next((state for _, state in find_jobs(run) if state and state.state in WAITING_OR_RUNNING), None)
    if job is not None:
        return job.state.lower()
    if run.find_holder() is not None:
        return "running"
    with suppress(MeshwrightError):
        step = saved_step(run)
        return "done" if step >= total else f"ended at {step:,}" if step else "no checkpoint"
    return "damaged"


def _overrides(run: RunDirectory) -> tuple[str, ...]:
    with suppress(MeshwrightError, json.JSONDecodeError):
        return tuple(run.last_launch.get("overrides", ()))
    return ()


def describe_sweep(runs: Sequence[RunDirectory]) -> Iterator[str]:
    """The table of those of a sweep's runs that have begun, if one has."""
    begun = [run for run in runs if run.recipe.is_file()]
    if begun:
        yield f"\n{describe_runs(begun, marks_best=True)}"
        if len(begun) > 1:
            yield f"compare  meshwright diff {begun[0].path} {begun[1].path}"
