"""Goodput: where the wall time of a run goes, over all of its starts: from the notes in goodput.jsonl to seconds and a table.

A start of the run's ranks appends notes (`monitor/goodput.py`), which are never changed, not even on a resume. Within
a start, time is rank 0's monotonic clock: each note has the seconds of each part so far. Wall clocks join one start to the next,
and because machines disagree on them no interval between starts is ever shorter than nothing:

    last note of A    A is gone    submitted    job starts    B begins
        |-- recovery ----|-- recovery --|-- queue --|-- recovery --|      A failed: B's start-up is recovery, too
        |-- close -------|-- off -------|-- queue --|-- start-up --|      A was asked to stop, or was done

Without a job there is no queue, and a start that was killed with its launcher counts as gone at its last note.

Steps that are trained again were lost: when B resumes at step c, all that A spent on steps beyond c in its loop becomes lost
work. Notes are not made at each step, so c may lie between two notes; steps between notes are taken to last alike.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from framework.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RESUME
from framework.track.console import format_duration
from framework.track.jsonl import append_line, read_lines
from framework.track.report import RunInfo


class TimePart(StrEnum):
    """The parts into which a run's time is divided, in the order of tables and pictures."""

    STEP = "step"
    EXPOSED = "exposed_communication"
    DATA_WAIT = "data_wait"
    CHECKPOINT = "checkpoint_stall"
    VALIDATION = "validation"
    COMPILE = "compile"
    START_UP = "start_up"
    QUEUE = "queue"
    RECOVERY = "recovery"
    LOST = "lost_work"
    CLOSE = "close"
    OFF = "off"


class Event(StrEnum):
    """Kinds of notes. LAUNCH and GONE are by the launcher's clock."""

    LAUNCH = "launch"  # a launcher began, which starts ranks once it has prepared what they need
    BEGIN = "begin"  # the ranks began
    GO = "go"  # the loop goes on from a step, at first or after it went back
    STEP = "step"
    END = "end"
    GONE = "gone"  # the ranks have ended


GOODPUT_FILE = "goodput.jsonl"
# Parts that a loop spends on the steps between two notes, and so loses with them.
OF_STEPS = (TimePart.STEP, TimePart.EXPOSED, TimePart.DATA_WAIT, TimePart.CHECKPOINT, TimePart.VALIDATION)
# Parts in which no machine is held.
UNPAID = (TimePart.QUEUE, TimePart.OFF)
# The share of the time below which a part is not worth a word in a line.
LEAST_SHARE = 0.005
# Exit codes of a run that was asked to stop, or is done; every other one is a failure.
STOPPED = (EXIT_DONE, EXIT_RESUME, EXIT_INTERRUPTED)


@dataclass(frozen=True)
class Note:
    """One line of goodput.jsonl, without the fields that have their defaults."""

    event: Event
    start: int  # number of the start, from 1
    unix_s: float  # wall clock
    elapsed_s: float = 0.0  # since the start's process began, by its monotonic clock
    step: int | None = None  # steps done
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of each part since the process began
    step_s: float | None = None  # how long a normal step takes, once that is known
    ranks: int = 1  # of a BEGIN
    submitted_s: float | None = None  # wall clock of the job's submission, where there is a job
    started_s: float | None = None  # wall clock of the job's start
    gone_s: float | None = None  # wall clock of the end of the start before, where the job's script noted it
    gone_code: int | None = None  # exit code of the start before
    code: int | None = None  # exit code, of an END or a GONE


NOTE_DEFAULTS = MappingProxyType({each.name: each.default for each in fields(Note)})


@dataclass
class StartTimes:
    """Seconds of each part of a start, and of the time between it and the start before."""

    ranks: int
    seconds: dict[TimePart, float] = field(default_factory=lambda: dict.fromkeys(TimePart, 0.0))

    def move(self, source: TimePart, target: TimePart, seconds: float) -> None:
        """Count seconds of `source` as `target`."""
        self.seconds[source] = max(0.0, self.seconds[source] - seconds)
        self.seconds[target] += seconds


@dataclass(frozen=True)
class Segment:
    """The seconds that the steps from `first` (exclusive) to `last` took, a part of their start's."""

    first: int
    last: int
    row: StartTimes
    seconds: dict[TimePart, float]


@dataclass(frozen=True)
class Account:
    """The account of a run. seconds: of each part over the whole run; rank_seconds: the same times the ranks that were held.
    rows: seconds by part of each start, in order. code: with which the newest start has ended; None: it runs, or was killed."""

    seconds: dict[TimePart, float]
    rank_seconds: dict[TimePart, float]
    rows: tuple[dict[TimePart, float], ...]
    code: int | None = None

    @property
    def wall_s(self) -> float:
        """From the first submission, or else the first start, to the last that is known."""
        return sum(self.seconds.values())

    @property
    def on_s(self) -> float:
        """`wall_s` without the time in which the run did not run."""
        return self.wall_s - self.seconds[TimePart.OFF]

    @property
    def shares(self) -> dict[TimePart, float]:
        """Shares of `on_s`, of each part but OFF."""
        return find_shares(self.seconds)

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of steps that were not lost."""
        return self.shares[TimePart.STEP]


def find_shares(seconds: Mapping[TimePart, float]) -> dict[TimePart, float]:
    """Shares of all seconds but those of OFF; zeros before the first second."""
    on = {part: each for part, each in seconds.items() if part != TimePart.OFF}
    on_s = sum(on.values()) or 1.0
    return {part: each / on_s for part, each in on.items()}


class Accountant:
    """Adds up the notes of a run, each once, in the order in which they were made."""

    def __init__(self) -> None:
        self._rows: list[StartTimes] = []
        self._steps: list[Segment] = []  # of steps that count, by their numbers
        self._last: Note | None = None
        self._seen_s = 0.0  # wall clock up to which time is accounted for
        self._parts: dict[TimePart, float] = dict.fromkeys(TimePart, 0.0)  # of the newest start so far
        self._done = 0  # steps
        self._code: int | None = None  # with which the newest start ended; None: it runs, or was killed
        self._recovers = False  # the newest start follows a failure
        self._step_s: float | None = None  # how long a normal step takes
        self._launched_s: float | None = None  # when the launcher of the next start began

    @property
    def num_starts(self) -> int:
        """Number of the newest start."""
        return self._last.start if self._last else 0

    def add(self, note: Note) -> None:
        """Add a note, unless its start is not the newest: its ranks run on after others have taken the run over."""
        if note.event is Event.BEGIN:
            if note.start > self.num_starts:
                self._begin(note)
        elif note.event is Event.LAUNCH:
            self._launched_s = note.unix_s - note.elapsed_s
        elif note.event is Event.GONE:
            if self._rows and self._launched_s is not None:  # of ranks that ended before they began
                self._rows[-1].seconds[self._of_gap] += self._pass(min(self._launched_s, note.unix_s))
            self._launched_s = None
            self._leave(note.unix_s, note.code)
        elif self._rows and note.start == self.num_starts:
            self._spend(note)

    def account(self) -> Account:
        rows = self._rows
        seconds = {part: sum(row.seconds[part] for row in rows) for part in TimePart}
        paid = {
            part: 0.0 if part in UNPAID else sum(row.ranks * row.seconds[part] for row in rows) for part in TimePart
        }
        return Account(seconds, paid, tuple(dict(row.seconds) for row in rows), self._code)

    def _begin(self, note: Note) -> None:
        """Join a start to the one before it, or to its submission."""
        if note.gone_s is not None:
            self._leave(note.gone_s, note.gone_code)
        row, begun_s = StartTimes(note.ranks), note.unix_s - note.elapsed_s
        ready_s = next(each for each in (note.submitted_s, self._launched_s, begun_s) if each is not None)
        started_s = ready_s if note.started_s is None else note.started_s
        self._recovers = bool(self._rows) and self._code not in STOPPED
        if not self._rows:
            self._seen_s = min(ready_s, begun_s)
        for until_s, part in ((ready_s, self._of_gap), (started_s, TimePart.QUEUE), (begun_s, self._of_start_up)):
            row.seconds[part] += self._pass(min(until_s, begun_s))
        self._rows.append(row)
        self._launched_s = None
        self._code, self._parts = None, dict.fromkeys(TimePart, 0.0)
        self._spend(note)
        # Another machine's clock may be behind: from here on it counts. Start-up is told by a GO, or by a death before it.
        self._seen_s = begun_s

    @property
    def _of_gap(self) -> TimePart:
        """The part of the time from the newest start to the next launch."""
        return TimePart.RECOVERY if self._rows and self._code not in STOPPED else TimePart.OFF

    @property
    def _of_start_up(self) -> TimePart:
        return TimePart.RECOVERY if self._recovers else TimePart.START_UP

    def _pass(self, until_s: float) -> float:
        """Advance the time that is accounted for to `until_s`; the seconds in between, none if that is past."""
        seconds = max(0.0, until_s - self._seen_s)
        self._seen_s += seconds
        return seconds

    def _spend(self, note: Note) -> None:
        """Count what the newest start has spent since its last note."""
        row, steps = self._rows[-1], {}
        for part in TimePart:
            seconds = note.parts.get(part, 0.0) - self._parts[part]
            self._parts[part] += seconds
            row.seconds[self._of_start_up if part is TimePart.START_UP else part] += seconds
            if part in OF_STEPS:
                steps[part] = seconds
        if note.step is not None:
            if note.event is Event.GO:
                self._go(note.step, row)
                self._done = note.step
            elif note.step >= self._done:  # else the END of a start that has not come to its loop
                self._steps.append(Segment(self._done, note.step, row, steps))
                self._done = note.step
        self._last, self._code, self._seen_s = note, note.code, note.unix_s
        self._step_s = note.step_s or self._step_s

    def _go(self, step: int, row: StartTimes) -> None:
        """Count steps beyond the one from which the loop goes on as lost; steps up to it that no note has seen as trained."""
        while self._steps and self._steps[-1].last > step:
            self._lose(self._steps.pop(), step)
        if step > self._done and self._recovers and self._step_s is not None:
            unseen_s = min(row.seconds[TimePart.RECOVERY], self._step_s * (step - self._done))
            row.move(TimePart.RECOVERY, TimePart.STEP, unseen_s)
            self._steps.append(Segment(self._done, step, row, {TimePart.STEP: unseen_s}))

    def _lose(self, lost: Segment, step: int) -> None:
        """Count what came behind `step` as lost work."""
        share = (lost.last - max(lost.first, step)) / (lost.last - lost.first) if lost.last > lost.first else 1.0
        for part, seconds in lost.seconds.items():
            lost.row.move(part, TimePart.LOST, share * seconds)
        if lost.first < step:
            kept = {part: (1.0 - share) * seconds for part, seconds in lost.seconds.items()}
            self._steps.append(Segment(lost.first, step, lost.row, kept))

    def _leave(self, unix_s: float, code: int | None) -> None:
        """End the newest start at a time that its launcher or its job noted."""
        if self._rows:
            part = TimePart.CLOSE if code in STOPPED else TimePart.RECOVERY
            self._rows[-1].seconds[part] += self._pass(unix_s)
            self._code = code


def add_up(notes: Iterable[Note]) -> Account:
    """The account of all notes of a run."""
    accountant = Accountant()
    for note in notes:
        accountant.add(note)
    return accountant.account()


def read_notes(path: Path) -> Iterator[Note]:
    """The notes of a file in order, without lines that are torn or no notes; none where there is no file."""
    return filter(None, map(_decode, read_lines(path)))


def read_account(run_dir: Path) -> Account | None:
    """The account of a run up to its last note; None where no start has noted anything."""
    account = add_up(read_notes(run_dir / GOODPUT_FILE))
    return account if account.rows else None


def append_note(path: Path, note: Note) -> None:
    """Append one note and close the file."""
    append_line(path, encode(note))


def encode(note: Note) -> dict[str, Any]:
    """The note as a line has it."""
    return {name: value for name, value in vars(note).items() if value != NOTE_DEFAULTS[name] and value != {}}


def _decode(values: dict[str, Any]) -> Note | None:
    known = {name: value for name, value in values.items() if name in NOTE_DEFAULTS}
    event, parts = known.pop("event", None), known.pop("parts", {})
    if event not in list(Event) or not {"start", "unix_s"} <= known.keys() or not isinstance(parts, dict):
        return None
    if not all(isinstance(each, (int, float)) for each in (*known.values(), *parts.values())):
        return None
    return Note(Event(event), **known, parts=parts)


def price_of(run: RunInfo) -> float | None:
    """The price of a rank for an hour, if the recipe has it."""
    price: float | None = run.config.get("launch", {}).get("price_per_gpu_hour")
    return price


def describe_goodput(account: Account, price: float | None, is_gpu: bool) -> Iterator[str]:
    """A table of share, time, hours times ranks and cost by part; parts without time are left out."""
    starts = f"{len(account.rows)} start{'s' * (len(account.rows) != 1)}"
    yield f"goodput: {account.ettr:.1%} of {format_duration(account.on_s)} were steps that count, {starts}"
    unit = "GPU hours" if is_gpu else "rank hours"
    yield f"  {'':<22}{'share':>7}{'time':>11}{unit:>12}" + ("" if price is None else f"{'cost':>11}")
    shares: dict[TimePart, float | None] = {**account.shares, TimePart.OFF: None}
    for part in TimePart:
        if account.seconds[part] > 0:
            paid_s = None if part in UNPAID else account.rank_seconds[part]
            yield _row(name_of(part), shares[part], account.seconds[part], paid_s, price)
    yield _row("all", 1.0, account.on_s, sum(account.rank_seconds.values()), price)


def _row(name: str, share: float | None, seconds: float, paid_s: float | None, price: float | None) -> str:
    paid = "-" if paid_s is None else f"{paid_s / 3600:,.3g}"
    cost = "" if price is None else f"{'-' if paid_s is None else f'{paid_s / 3600 * price:.2f}':>11}"
    return f"  {name:<22}{'-' if share is None else f'{share:.1%}':>7}{format_duration(seconds):>11}{paid:>12}{cost}"


def summarize_goodput(account: Account, price: float | None, is_gpu: bool) -> str:
    """The account in a line: the largest parts, the time, and the cost."""
    shares = sorted(account.shares.items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"{name_of(part)} {share:.1%}" for part, share in shares if share >= LEAST_SHARE)
    hours = sum(account.rank_seconds.values()) / 3600
    cost = "" if price is None else f", cost {hours * price:.2f}"
    return f"{shown} of {format_duration(account.on_s)}; {hours:,.3g} {'GPU' if is_gpu else 'rank'} hours{cost}"


def name_of(part: TimePart) -> str:
    """The name of a part in tables."""
    return {TimePart.START_UP: "start-up", TimePart.COMPILE: "warm-up"}.get(part, part.replace("_", " "))
