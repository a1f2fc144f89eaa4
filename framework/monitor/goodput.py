"""The goodput of a rank: divides its seconds into parts, from its phases, its saves and its waits. Rank 0 notes them in
goodput.jsonl, from which `track/goodput.py` makes the account of the run."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from framework.lease import Lease
from framework.monitor.progress import Phase, Phases
from framework.track.goodput import (
    GOODPUT_FILE,
    Accountant,
    Event,
    Note,
    TimePart,
    append_note,
    encode,
    find_shares,
    read_notes,
)
from framework.track.jsonl import Lines
from framework.track.report import Observers

# Steps that compile, allocate and connect, and those behind them whose median is a normal step.
FIRST_STEPS, NORMAL_STEPS = 3, 3
# At least so long between two notes, and a thousandth of the time so far up to this: a month leaves some 90,000 lines.
NOTE_S, LONGEST_NOTE_S = 0.2, 30.0

# Runs a call and lets none of its failures through, under a name: `Observers.contain`.
Contain = Callable[[str, Callable[[], None]], object]


class Meter:
    """Divides the time since a rank's process began into parts, which add up to it.

    `seconds` changes where the loop says so, and none of what it has for steps ever shrinks. Time that no phase claims is of
    start-up before the loop, of steps in it, of closing behind it. step_s: of a normal step, once that is known.
    """

    def __init__(self, phases: Phases, stalled_s: Callable[[], float] = lambda: 0.0) -> None:
        self.seconds: dict[TimePart, float] = {}
        self.step_s: float | None = None
        self._phases = phases
        self._first: list[float] = []
        self._exposed_s = 0.0  # that no step has had room for
        self.begin(stalled_s)

    def begin(self, stalled_s: Callable[[], float]) -> None:
        """Count up to now as start-up, also of phases that restore: what is more of these a loop spends when it goes back."""
        self._restored_s = self._phases.so_far()[Phase.RESTORE] - self.seconds.get(TimePart.RECOVERY, 0.0)
        before_s = self.seconds.get(TimePart.CHECKPOINT, 0.0)
        self._stalled_s = lambda: before_s + stalled_s()
        self.mark(TimePart.START_UP)

    def mark(self, other: TimePart) -> float:
        """Count up to now; `other` gets the seconds that no phase claims. Returns those."""
        spent = self._phases.so_far()
        self.seconds |= {
            TimePart.DATA_WAIT: spent[Phase.DATA],
            TimePart.VALIDATION: spent[Phase.VALIDATE],
            TimePart.RECOVERY: spent[Phase.RESTORE] - self._restored_s,
        }
        rest_s = max(0.0, sum(spent.values()) - sum(self.seconds.values()))
        # Not the phase's time: a save that starts first reads the step under way, which is that step's.
        stall_s = min(rest_s, max(0.0, self._stalled_s() - self.seconds.get(TimePart.CHECKPOINT, 0.0)))
        for part, seconds in ((TimePart.CHECKPOINT, stall_s), (other, rest_s - stall_s)):
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        return rest_s - stall_s

    def end_step(self, exposed_s: float) -> None:
        """A step is over. exposed_s: exposed communication of a step that has been read; it is part of a step's seconds."""
        seconds = self.mark(TimePart.STEP)
        if len(self._first) < FIRST_STEPS + NORMAL_STEPS:
            self._first.append(seconds)
            self._find_compile(seconds)
            return
        self._exposed_s += exposed_s
        hidden = min(self._exposed_s, seconds)
        self._exposed_s -= hidden
        self._move(TimePart.STEP, TimePart.EXPOSED, hidden)

    def _find_compile(self, seconds: float) -> None:
        """The first steps count as compilation until a normal step is known, then what they took beyond one."""
        if len(self._first) <= FIRST_STEPS:
            self._move(TimePart.STEP, TimePart.COMPILE, seconds)
        if len(self._first) == FIRST_STEPS + NORMAL_STEPS:
            self.step_s = median(self._first[FIRST_STEPS:])
            normal = sum(min(each, self.step_s) for each in self._first[:FIRST_STEPS])
            self._move(TimePart.COMPILE, TimePart.STEP, normal)

    def _move(self, source: TimePart, target: TimePart, seconds: float) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] = self.seconds.get(target, 0.0) + seconds


@dataclass(frozen=True)
class Job:
    """Wall clocks of a start's job and of the end of the start before it; None where there is no such thing."""

    submitted_s: float | None = None
    started_s: float | None = None
    gone_s: float | None = None
    gone_code: int | None = None


class GoodputLog:
    """Appends the notes of a start to goodput.jsonl, on rank 0. ranks: of this start. lease: of the run, once that is known: a
    start that has lost it adds nothing."""

    def __init__(self, run_dir: Path, ranks: int, now: Callable[[], float] = time.time) -> None:
        self._path, self._ranks, self._now = run_dir / GOODPUT_FILE, ranks, now
        self._accountant = Accountant()
        self._file: Lines | None = None
        self._start = 0
        self.lease: Lease | None = None
        self._noted: tuple[dict[TimePart, float], dict[TimePart, float]] = {}, {}  # of the run, of this start

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
        parts: dict[TimePart, float],
        step: int | None = None,
        step_s: float | None = None,
        code: int | None = None,
    ) -> None:
        """Note the seconds that this start has spent so far, by part."""
        rounded = {str(part): round(seconds, 6) for part, seconds in parts.items() if seconds}
        self._add(Note(event, self._start, self._now(), sum(parts.values()), step, rounded, step_s, code=code))
        self._noted = self._accountant.account().seconds, dict(parts)

    def shares(self, parts: dict[TimePart, float]) -> dict[TimePart, float]:
        """Shares of the run's time up to now, where `parts` is what this start has spent so far. Adds no note."""
        run, noted = self._noted
        since = {part: parts.get(part, 0.0) - noted.get(part, 0.0) for part in TimePart}
        return find_shares({part: run.get(part, 0.0) + since[part] for part in TimePart})

    def _add(self, note: Note) -> None:
        """Count a note and write it. A full disk spoils the file, not the shares that this process reports."""
        if self.lease is not None:
            self.lease.check()
        self._accountant.add(note)
        self._file = self._file or Lines(self._path)
        self._file.append(encode(note))


def note_launch(run_dir: Path, age_s: float) -> None:
    """Note that a launcher, `age_s` old, is about to start the ranks."""
    append_note(run_dir / GOODPUT_FILE, Note(Event.LAUNCH, 0, time.time(), age_s))


def note_gone(run_dir: Path, code: int) -> None:
    """Note that the ranks of a launcher have ended."""
    append_note(run_dir / GOODPUT_FILE, Note(Event.GONE, 0, time.time(), code=code))


class Goodput:
    """The meter of a rank, and on rank 0 the run's record. Nothing of it can stop the run: contain takes what fails."""

    def __init__(
        self,
        phases: Phases,
        log: GoodputLog | None = None,
        contain: Contain = lambda name, call: call(),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._phases, self._log, self._contain, self._now = phases, log, contain, now
        self._meter = Meter(phases)
        self._step = 0
        self._began_s = self._noted_s = now()

    def hold(self, lease: Lease) -> None:
        """From now on write only as long as this start has the run. Raises LeaseLost, then, with the next note."""
        if self._log is not None:
            self._log.lease = lease

    def begin_loop(self, step: int, stalled_s: Callable[[], float]) -> None:
        """Start-up is over, of the run or of a stage; the loop goes on from `step`. stalled_s: how long saves have held it up so
        far."""
        self._meter.begin(stalled_s)
        self._step = step
        self._note(Event.GO)

    def end_step(self, step: int, exposed_s: float) -> None:
        """Step `step` has been sent. exposed_s: exposed communication of those that were read meanwhile."""
        if step <= self._step:  # the loop went back
            self._note(Event.STEP)
            self._step = step - 1
            self._note(Event.GO)
        self._meter.end_step(exposed_s)
        self._step = step
        since_s = self._now() - self._noted_s
        if since_s >= min(max(NOTE_S, (self._now() - self._began_s) / 1000), LONGEST_NOTE_S):
            self._note(Event.STEP)

    def shares(self) -> dict[str, float]:
        """Shares of the run's time so far, over all starts; empty on ranks that keep no record."""
        if self._log is None:
            return {}
        return {str(part): share for part, share in self._log.shares(self._meter.seconds).items()}

    def begin_close(self) -> None:
        """The loop is over."""
        self._meter.mark(TimePart.STEP)

    def end(self, code: int) -> None:
        """This rank ends with that exit code, or is about to."""
        self._meter.mark(TimePart.CLOSE)
        self._note(Event.END, code)

    def _note(self, event: Event, code: int | None = None) -> None:
        self._noted_s = self._now()
        if self._log is not None:
            meter = self._meter
            self._contain("goodput", partial(self._log.note, event, meter.seconds, self._step, meter.step_s, code))


def open_goodput(place: tuple[int, int], run_dir: Path, phases: Phases, lease: Lease | None, job: Job) -> Goodput:
    """The goodput of a rank; rank 0 keeps the run's record. Before ranks connect: a start that never does has spent time as well.

    place: this rank and the number of ranks. lease: of the run, on rank 0.
    """
    rank, world = place
    if rank != 0:
        return Goodput(phases)
    log, contain = GoodputLog(run_dir, world), Observers().contain
    log.lease = lease
    contain("goodput", lambda: log.begin(sum(phases.so_far().values()), job))
    return Goodput(phases, log, contain)


def find_age_s() -> float:
    """Seconds since this process began, by the kernel; 0 where there is no /proc."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not (stat.is_file() and uptime.is_file()):
        return 0.0
    started_ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return max(0.0, float(uptime.read_text().split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK"))
