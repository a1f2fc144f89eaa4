"""metrics.jsonl: one JSON object per reported step, the source of truth of a run's curves.

Strict JSON. JSON has no NaN and no infinity, and a diverged loss must stay visible beside a metric that is not measured
(`null`): they are the strings "NaN", "Infinity" and "-Infinity", as in the Protocol Buffers JSON mapping; Python's
`float()` reads them back. `unix_s` is the wall clock when the step was reported.

Each line is flushed to the operating system, so a killed process loses nothing; only a failing machine may lose the last
lines. On a resume at step k the records beyond k, of steps whose weights are lost, are dropped: one record per step remains.
"""

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from framework.lease import Lease
from framework.track.report import RunInfo, StepReport

METRICS_FILE = "metrics.jsonl"
# Tokens of each expert by layer, of each report: {"step": 20, "expert_loads": {"layers.1": [31, 40, ...], ...}}.
LOADS_FILE = "expert_loads.jsonl"
_NON_FINITE = ("NaN", "Infinity", "-Infinity")


class Jsonl:
    """Appends a record of each report to a file of the run. Rank 0 only: one writer per file.

    file, record_of: the file's name, and what it has of a report; `unix_s` is added. lease: of the run. A start replaces the file
    before it adds to it, so the descriptor of a former start is of a file that nobody reads any more.
    """

    def __init__(
        self,
        run_dir: Path,
        now: Callable[[], float] = time.time,
        file: str = METRICS_FILE,
        record_of: Callable[[StepReport], dict[str, Any]] | None = None,
        lease: Lease | None = None,
    ):
        self._path, self._lease = run_dir / file, lease or Lease(run_dir)
        self._now, self._record_of = now, record_of or metrics_of
        self._file: TextIO | None = None
        self._is_torn = False

    def open(self, run: RunInfo) -> None:
        truncate(self._path, run.start_step, self._lease)
        self._file = self._path.open("a", encoding="utf-8")

    def report(self, report: StepReport) -> None:
        assert self._file is not None, "report before open"
        line = json.dumps(encode({**self._record_of(report), "unix_s": self._now()}), allow_nan=False)
        # A write that failed half-way (full disk) must not spoil the record that follows it.
        separator, self._is_torn = ("\n" if self._is_torn else ""), True
        self._file.write(f"{separator}{line}\n")
        self._file.flush()
        self._is_torn = False

    def rewind(self, step: int) -> None:
        """As a resume at that step."""
        assert self._file is not None, "rewind before open"
        truncate(self._path, step, self._lease)
        former, self._file = self._file, self._path.open("a", encoding="utf-8")
        former.close()
        self._is_torn = False

    def close(self, exit_code: int) -> None:
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()


def metrics_of(report: StepReport) -> dict[str, Any]:
    """The record of metrics.jsonl, in which the load of each expert would be nearly all."""
    return {name: value for name, value in asdict(report).items() if name != "expert_loads"}


def loads_of(report: StepReport) -> dict[str, Any]:
    """The record of expert_loads.jsonl."""
    return {"step": report.step, "expert_loads": report.expert_loads}


def read_last_records(path: Path, count: int) -> list[dict[str, Any]]:
    """The last records of such a file, at most `count`, without those that a crash tore; none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        return [record for line in deque(lines, count) if (record := decode(line)) is not None]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file in order, non-finite numbers as floats; lines that a crash tore are left out."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            record = decode(line)
            if record is not None:
                yield record


def truncate(path: Path, last_step: int, lease: Lease) -> None:
    """Drop the records of steps beyond `last_step` and lines that a crash tore; atomic, nothing is lost if interrupted."""
    records = read_records(path) if path.exists() else ()
    with lease.replacing(path) as made, made.open("w", encoding="utf-8") as kept:
        for record in records:
            if record["step"] <= last_step:
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
    """One line as a record with floats restored; None if it is torn."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return _decode_value(record) if isinstance(record, dict) and "step" in record else None


def _decode_value(value: Any) -> Any:
    if isinstance(value, str) and value in _NON_FINITE:
        return float(value)
    if isinstance(value, dict):
        return {key: _decode_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode_value(item) for item in value]
    return value
