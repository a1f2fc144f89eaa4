"""goodput.jsonl: the notes of a run's starts, one JSON object a line, appended and never changed.

Unlike metrics.jsonl it is not cut back on a resume: what was trained in vain is what it is for. A process that is killed writes
nothing more, so the record is complete up to its last note, and `goodput.py` infers the rest when the next start begins.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from framework.lease import Lease
from framework.track.goodput import Account, Accountant, Event, Note, Part, find_shares

GOODPUT_FILE = "goodput.jsonl"
_DEFAULTS = {each.name: each.default for each in fields(Note)}


@dataclass(frozen=True)
class Job:
    """What a start knows of its job and of the start before it, as wall clocks; None where there is no such thing."""

    submitted_s: float | None = None
    started_s: float | None = None
    gone_s: float | None = None
    gone_code: int | None = None


class GoodputLog:
    """The record of a run as its newest start writes it. One writer: rank 0. ranks: of this start. lease: of the run, once that
    is known: a start that was held for dead adds nothing."""

    def __init__(self, run_dir: Path, ranks: int, now: Callable[[], float] = time.time) -> None:
        self._path, self._ranks, self._now = run_dir / GOODPUT_FILE, ranks, now
        self._accountant = Accountant()
        self._file: Lines | None = None
        self._start = 0
        self.lease: Lease | None = None
        self._noted: tuple[dict[Part, float], dict[Part, float]] = {}, {}  # of the run, of this start

    def begin(self, elapsed_s: float, job: Job) -> None:
        """A start begins; its process is `elapsed_s` old."""
        for note in read_notes(self._path):
            self._accountant.add(note)
        self._start = self._accountant.num_starts + 1
        about = {name: value for name, value in vars(job).items() if value is not None}
        self._add(Note(Event.BEGIN, self._start, self._now(), elapsed_s, ranks=self._ranks, **about))

    def note(
        self,
        event: Event,
        parts: dict[Part, float],
        step: int | None = None,
        step_s: float | None = None,
        code: int | None = None,
    ) -> None:
        """What this start has spent so far, by part."""
        rounded = {str(part): round(seconds, 6) for part, seconds in parts.items() if seconds}
        self._add(Note(event, self._start, self._now(), sum(parts.values()), step, rounded, step_s, code=code))
        self._noted = self._accountant.account().seconds, dict(parts)

    def shares(self, parts: dict[Part, float]) -> dict[Part, float]:
        """Of the run's time up to now, where `parts` is what this start has spent so far. Adds no note."""
        run, noted = self._noted
        since = {part: parts.get(part, 0.0) - noted.get(part, 0.0) for part in Part}
        return find_shares({part: run.get(part, 0.0) + since[part] for part in Part})

    def _add(self, note: Note) -> None:
        """Counted also where it cannot be written: a full disk spoils the file, not what this process says of itself."""
        if self.lease is not None:
            self.lease.check()
        self._accountant.add(note)
        self._file = self._file or Lines(self._path)
        self._file.append(note)


class Lines:
    """A file to which notes are appended, each by one write that the operating system has at once: a killed process loses
    nothing. A line that was torn, by a crash or a full disk, gets its end before the next."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - 1))
        self._is_torn = self._file.read(1) not in (b"", b"\n")

    def append(self, note: Note) -> None:
        values = {name: value for name, value in vars(note).items() if value != _DEFAULTS[name] and value != {}}
        line = f"{json.dumps(values, allow_nan=False)}\n".encode()
        separator, self._is_torn = b"\n" * self._is_torn, True
        written = self._file.write(separator + line)
        self._is_torn = written != len(separator + line)

    def close(self) -> None:
        self._file.close()


def append_note(path: Path, note: Note) -> None:
    """One note of a process that has no more to say."""
    with closing(Lines(path)) as lines:
        lines.append(note)


def note_launch(run_dir: Path, age_s: float) -> None:
    """Of a launcher: it is so old and about to start the ranks."""
    append_note(run_dir / GOODPUT_FILE, Note(Event.LAUNCH, 0, time.time(), age_s))


def note_gone(run_dir: Path, code: int) -> None:
    """Of a launcher: its ranks have ended."""
    append_note(run_dir / GOODPUT_FILE, Note(Event.GONE, 0, time.time(), code=code))


def read_notes(path: Path) -> Iterator[Note]:
    """The notes of a record in order, without lines that a crash tore or that are not ours; none where there is no record."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            note = _decode(line)
            if note is not None:
                yield note


def read_account(run_dir: Path) -> Account | None:
    """Of a run up to its last note; None where nothing was noted."""
    accountant = Accountant()
    for note in read_notes(run_dir / GOODPUT_FILE):
        accountant.add(note)
    return accountant.account() if accountant.num_starts else None


def _decode(line: str) -> Note | None:
    try:
        values: Any = json.loads(line)
    except json.JSONDecodeError:
        return None
    if not isinstance(values, dict) or values.get("event") not in list(Event):
        return None
    if not isinstance(values.get("start"), int) or not isinstance(values.get("unix_s"), (int, float)):
        return None
    known = {name: value for name, value in values.items() if name in _DEFAULTS}
    return Note(**{**known, "event": Event(known["event"])})
