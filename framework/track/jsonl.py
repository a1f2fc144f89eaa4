"""Files of JSON lines; and metrics.jsonl, one object per reported step, the source of truth of a run's curves.

Strict JSON. JSON has no NaN and no infinity, and a diverged loss must stay visible beside a metric that is not measured
(`null`): they are the strings "NaN", "Infinity" and "-Infinity", as in the Protocol Buffers JSON mapping; Python's
`float()` reads them back. `unix_s` is the wall clock when the step was reported.

Each line is given to the operating system at once, so a killed process loses nothing; only a failing machine may lose the last
lines, and one whose disk is full the lines that waited for room. On a resume at step k the records beyond k, of steps whose
weights are lost, are dropped: one record per step remains. Missing records up to k are reported, and filled in as far as the
checkpoint knows: loss and gradient norm of the last 130 steps.
"""

import errno
import json
import math
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import MISSING, Field, asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from framework.lease import Lease
from framework.track.report import Observer, RunInfo, StepReport

METRICS_FILE = "metrics.jsonl"
# Tokens of each expert by layer, of each report: {"step": 20, "expert_loads": {"layers.1": [31, 40, ...], ...}}.
LOADS_FILE = "expert_loads.jsonl"
# The most bytes of lines that wait while the disk is full, of perhaps 100,000 steps.
MOST_WAITING_BYTES = 64 << 20
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


class Lines:
    """A file to which objects are appended, those of a call by one write that the operating system has at once. A line that was
    torn, by a crash or a full disk, gets its end before the next."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - 1))
        self._is_torn = self._file.read(1) not in (b"", b"\n")

    def append(self, *values: Mapping[str, Any]) -> None:
        """Append objects of finite numbers. Raises OSError where the disk takes none of them."""
        lines = b"\n" * self._is_torn + b"".join(json.dumps(each, allow_nan=False).encode() + b"\n" for each in values)
        self._is_torn = True
        self._is_torn = self._file.write(lines) != len(lines)

    def sync(self) -> None:
        """Make the lines durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def append_line(path: Path, *values: Mapping[str, Any], is_durable: bool = False) -> None:
    """Append objects and close the file. is_durable: they outlive a failing machine."""
    with closing(Lines(path)) as lines:
        lines.append(*values)
        if is_durable:
            lines.sync()


def read_lines(path: Path, last: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a file, or of its `last` lines, in order; none where there is no file."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from filter(None, map(parse_line, file if last is None else deque(file, last)))


def parse_line(line: str) -> dict[str, Any] | None:
    """The object of a line; None of one that is torn or holds something else."""
    with suppress(json.JSONDecodeError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


class Jsonl(Observer):
    """Appends a record of each report to a file of the run. Rank 0 only: one writer per file.

    file, record_of: the file's name, and its record of a report; `unix_s` is added. lease: of the run. A start replaces the file
    before it adds to it, so the descriptor of a former start is of a file that is not read any more. known: [step, loss, gradient
    norm] of the last steps, as a checkpoint has them, with which lost lines are filled in. every_steps: of reports.

    Bytes that cannot be written (full disk) wait in memory and are written before the next record.
    """

    def __init__(
        self,
        run_dir: Path,
        now: Callable[[], float] = time.time,
        file: str = METRICS_FILE,
        record_of: Callable[[StepReport], dict[str, Any]] | None = None,
        lease: Lease | None = None,
        known: Sequence[Sequence[float]] | None = None,
        every_steps: int = 1,
    ):
        self._path, self._lease = run_dir / file, lease or Lease(run_dir)
        self._now, self._record_of = now, record_of or metrics_of
        self._known, self._every_steps = known, every_steps
        self._file: BinaryIO | None = None
        self._waiting = bytearray()

    def open(self, run: RunInfo) -> None:
        if self._known is None:
            truncate(self._path, run.start_step, self._lease)
        else:
            known = {int(step): (loss, norm) for step, loss, norm in self._known}
            restore_records(self._path, run, known, self._every_steps, self._lease, self._now())
        self._file = self._path.open("ab", buffering=0)

    def report(self, report: StepReport) -> None:
        line = json.dumps(encode({**self._record_of(report), "unix_s": self._now()}), allow_nan=False).encode() + b"\n"
        if len(self._waiting) + len(line) > MOST_WAITING_BYTES:
            raise OSError(errno.ENOSPC, "no room for so many lines in memory; this one is lost", str(self._path))
        self._waiting += line
        self._write()

    def rewind(self, step: int) -> None:
        """Drop the records behind `step`, as a resume does."""
        assert self._file is not None, "rewind before open"
        self._write()
        truncate(self._path, step, self._lease)
        former, self._file = self._file, self._path.open("ab", buffering=0)
        former.close()

    def close(self, exit_code: int | None) -> None:
        if self._file is not None:
            self._write()
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self) -> None:
        assert self._file is not None, "report before open"
        try:
            while self._waiting:
                del self._waiting[: self._file.write(self._waiting)]
        except OSError as error:
            kept = f"{error.strerror}; {self._waiting.count(10):,} lines wait in memory for room"
            raise OSError(error.errno, kept, str(self._path)) from error


def restore_records(
    path: Path,
    run: RunInfo,
    known: Mapping[int, tuple[float, float]],
    every_steps: int,
    lease: Lease,
    unix_s: float,
) -> None:
    """Truncate the file to the step from which a run goes on; report missing records up to there, and fill them in from the
    (loss, gradient norm) of `known` steps, with the mark `filled`."""
    truncate(path, run.start_step, lease)
    records = {record["step"]: record for record in read_records(path) if is_whole(record)}
    missing = find_missing(list(records), run.start_step, every_steps)
    if not missing:
        return
    filled = [step for step in missing if step in known]
    tokens = {0: 0} | {step: record["tokens"] for step, record in records.items()} | {run.start_step: run.start_tokens}
    records |= {step: _fill(step, _interpolate(tokens, step), *known[step], unix_s) for step in filled}
    lines = (json.dumps(encode(records[step]), allow_nan=False) + "\n" for step in sorted(records))
    lease.write(path, "".join(lines).encode())
    print(
        f"{path} lacks {len(missing):,} lines of steps {missing[0]:,} to {missing[-1]:,}, which a crash, a full disk or damage"
        f" has lost: loss and gradient norm of {len(filled):,} are filled in from the checkpoint. No weight depends on them",
        file=sys.stderr,
        flush=True,
    )


def find_missing(steps: Sequence[int], last_step: int, every_steps: int) -> list[int]:
    """The steps up to `last_step` that should have a record and have none. A gap like most others shows that reports came less
    often than now: nothing is missing there."""
    bounds = [0, *steps, last_step + 1]
    usual = Counter(later - step for step, later in pairwise([0, *steps])).most_common(1)
    longest = max(every_steps, usual[0][0] if usual else 1)
    gaps = [(step, later) for step, later in pairwise(bounds) if later - step > longest]
    return [step for first, stop in gaps for step in range(first + 1, stop) if step % every_steps == 0]


def _interpolate(tokens: Mapping[int, int], step: int) -> int:
    """Tokens at a step between those of the nearest steps that are known: exact within a stage of a run."""
    first, stop = max(each for each in tokens if each < step), min(each for each in tokens if each >= step)
    return tokens[first] + (tokens[stop] - tokens[first]) * (step - first) // (stop - first)


def _fill(step: int, tokens: int, loss: float, gradient_norm: float, unix_s: float) -> dict[str, Any]:
    """A record of a step of which only tokens, loss and gradient norm are known; other numbers are NaN."""
    required: dict[str, Any] = {each.name: math.nan for each in fields(StepReport) if _is_required(each)}
    known: dict[str, Any] = {"step": step, "loss": loss, "gradient_norm": gradient_norm, "tokens": tokens}
    report = StepReport(**{**required, **known, "tokens_per_s_per_rank": (), "mfu": None})
    return {**metrics_of(report), "unix_s": unix_s, "filled": True}


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def metrics_of(report: StepReport) -> dict[str, Any]:
    """The record of metrics.jsonl. The load of each expert, which would be nearly all of it, has a file of its own."""
    return {name: value for name, value in asdict(report).items() if name != "expert_loads"}


def is_whole(record: Mapping[str, Any]) -> bool:
    """Whether a record of metrics.jsonl has every metric that every step has: damage may leave a line JSON with another key."""
    return all(each.name in record for each in fields(StepReport) if _is_required(each))


def loads_of(report: StepReport) -> dict[str, Any]:
    """The record of expert_loads.jsonl."""
    return {"step": report.step, "expert_loads": report.expert_loads}


def read_records(path: Path, last: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, or of its `last` lines, non-finite numbers as floats; none where there is no file."""
    yield from filter(None, map(_restore, read_lines(path, last)))


def rewinds_of(record: Mapping[str, Any]) -> int:
    """Rewinds of the run up to a record."""
    return int(record.get("rewinds") or 0)


def truncate(path: Path, last_step: int, lease: Lease) -> None:
    """Drop the records of steps beyond `last_step` and lines that a crash tore; atomic, nothing is lost if interrupted."""
    newest = 0
    with lease.replacing(path) as made, made.open("w", encoding="utf-8") as kept:
        for record in read_records(path):
            if newest < record["step"] <= last_step:  # one record a step, whatever was written twice
                newest = record["step"]
                kept.write(json.dumps(encode(record), allow_nan=False) + "\n")
        kept.flush()
        os.fsync(kept.fileno())


def encode(value: Any) -> Any:
    """`value` with non-finite floats as strings, recursively."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    return value


def decode(line: str) -> dict[str, Any] | None:
    """A line as a record with floats restored; None if it is torn."""
    return _restore(parse_line(line))


def _restore(values: dict[str, Any] | None) -> dict[str, Any] | None:
    return _decode(values) if values is not None and "step" in values else None


def _decode(value: Any) -> Any:
    if isinstance(value, str) and value in _NON_FINITE:
        return float(value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value
