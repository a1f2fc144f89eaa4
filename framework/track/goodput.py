"""Goodput: where the wall time of a run goes, over all of its starts. Pure: notes in, seconds out.

A start of the run's ranks leaves notes (`goodput_log.py` keeps them). Within a start, time is rank 0's monotonic clock: each note
has the seconds of each part so far. Wall clocks join one start to the next, and because machines disagree on them no interval
between starts is ever shorter than nothing:

    last note of A    A is gone    submitted    job starts    B begins
        |-- recovery ----|-- recovery --|-- queue --|-- recovery --|      A failed: B's start-up is recovery, too
        |-- close -------|-- off -------|-- queue --|-- start-up --|      A was asked to stop, or was done

What is not known is not there: without a job nobody queued, and a start that was killed with its launcher is gone at its last
note.

Steps that are trained again were lost: when B resumes at step c, all that A spent on steps beyond c in its loop becomes lost
work. Notes are not made at each step, so c may lie between two notes; steps between notes are taken to last alike.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from framework.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RESUME


class Part(StrEnum):
    """What a second of a run was for; in the order of tables and pictures."""

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
    """Kinds of notes. LAUNCH: a launcher began, which starts ranks once it has prepared what they need. GO: the loop goes on from
    a step, at first or after it went back. GONE: the ranks have ended. LAUNCH and GONE are by the launcher's clock."""

    LAUNCH = "launch"
    BEGIN = "begin"
    GO = "go"
    STEP = "step"
    END = "end"
    GONE = "gone"


# What a loop spends on the steps between two notes, and so loses with them.
OF_STEPS = (Part.STEP, Part.EXPOSED, Part.DATA_WAIT, Part.CHECKPOINT, Part.VALIDATION)
# Nobody holds a machine meanwhile.
UNPAID = (Part.QUEUE, Part.OFF)
# How a run ends that was asked to, or is done; whatever else ends it is a failure.
STOPPED = (EXIT_DONE, EXIT_RESUME, EXIT_INTERRUPTED)


@dataclass(frozen=True)
class Note:
    """One line of the record. start: number of the start, from 1. unix_s: wall clock; elapsed_s: since the start's process began,
    by its monotonic clock. step: steps done.

    parts: seconds of each part since the process began. step_s: how long a normal step takes, once that is known. ranks: of a
    BEGIN. submitted_s, started_s: wall clocks of its job, where it has one. gone_s, gone_code: when and how the start before it
    ended, where somebody else noted that. code: of an END or a GONE, the exit code.
    """

    event: Event
    start: int
    unix_s: float
    elapsed_s: float = 0.0
    step: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    step_s: float | None = None
    ranks: int = 1
    submitted_s: float | None = None
    started_s: float | None = None
    gone_s: float | None = None
    gone_code: int | None = None
    code: int | None = None


@dataclass
class Row:
    """A start, and what came before it since the last one. seconds: of each part."""

    ranks: int
    seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))

    def move(self, source: Part, target: Part, seconds: float) -> None:
        """The total stays what it is."""
        self.seconds[source] = max(0.0, self.seconds[source] - seconds)
        self.seconds[target] += seconds


@dataclass(frozen=True)
class Segment:
    """What the steps from `first` (exclusive) to `last` took, as a part of a row."""

    first: int
    last: int
    row: Row
    seconds: dict[Part, float]


@dataclass(frozen=True)
class Account:
    """Where the time went. seconds: of each part over the whole run; rank_seconds: the same times the ranks that were held.
    rows: of each start in order."""

    seconds: dict[Part, float]
    rank_seconds: dict[Part, float]
    rows: tuple[dict[Part, float], ...]

    @property
    def wall_s(self) -> float:
        """From the first submission, or else the first start, to the last that is known."""
        return sum(self.seconds.values())

    @property
    def on_s(self) -> float:
        """Without the time in which nobody ran."""
        return self.wall_s - self.seconds[Part.OFF]

    @property
    def shares(self) -> dict[Part, float]:
        """Of `on_s`, of each part but OFF."""
        return find_shares(self.seconds)

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of steps that count."""
        return self.shares[Part.STEP]


def find_shares(seconds: Mapping[Part, float]) -> dict[Part, float]:
    """Of all seconds but those of OFF; zeros in front of the first second."""
    on = {part: each for part, each in seconds.items() if part != Part.OFF}
    on_s = sum(on.values()) or 1.0
    return {part: each / on_s for part, each in on.items()}


class Accountant:
    """Adds notes up, each once, in the order in which they were made."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._steps: list[Segment] = []  # of steps that count, by their numbers
        self._last: Note | None = None
        self._seen_s = 0.0  # wall clock up to which time is accounted for
        self._parts: dict[Part, float] = dict.fromkeys(Part, 0.0)  # of the newest start so far
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
        """A note of a start that is not the newest is left out: its ranks run on after others have taken the run over."""
        if note.event is Event.BEGIN:
            if note.start > self.num_starts:
                self._begin(note)
        elif note.event is Event.LAUNCH:
            self._launched_s = note.unix_s - note.elapsed_s
        elif note.event is Event.GONE:
            self._leave(note.unix_s, note.code)
        elif note.start == self.num_starts:
            self._spend(note)

    def account(self) -> Account:
        rows = self._rows
        seconds = {part: sum(row.seconds[part] for row in rows) for part in Part}
        paid = {part: 0.0 if part in UNPAID else sum(row.ranks * row.seconds[part] for row in rows) for part in Part}
        return Account(seconds, paid, tuple(dict(row.seconds) for row in rows))

    def _begin(self, note: Note) -> None:
        """Join a start to the one before it, or to its submission."""
        if note.gone_s is not None:
            self._leave(note.gone_s, note.gone_code)
        row, begun_s = Row(note.ranks), note.unix_s - note.elapsed_s
        ready_s = next(each for each in (note.submitted_s, self._launched_s, begun_s) if each is not None)
        started_s = ready_s if note.started_s is None else note.started_s
        self._recovers = bool(self._rows) and self._code not in STOPPED
        if not self._rows:
            self._seen_s = min(ready_s, begun_s)
        idle = Part.RECOVERY if self._recovers else Part.OFF
        for until_s, part in ((ready_s, idle), (started_s, Part.QUEUE), (begun_s, self._of_start_up)):
            row.seconds[part] += self._pass(min(until_s, begun_s))
        self._rows.append(row)
        self._seen_s = begun_s  # another machine's clock may be behind: from here on it counts
        self._launched_s = None
        self._code, self._parts = None, dict.fromkeys(Part, 0.0)
        self._spend(note)

    @property
    def _of_start_up(self) -> Part:
        return Part.RECOVERY if self._recovers else Part.START_UP

    def _pass(self, until_s: float) -> float:
        """Seconds from what is accounted for to that moment, which is from now on; none if that is past."""
        seconds = max(0.0, until_s - self._seen_s)
        self._seen_s += seconds
        return seconds

    def _spend(self, note: Note) -> None:
        """The newest start has come so far."""
        row, steps = self._rows[-1], {}
        for part in Part:
            seconds = note.parts.get(part, 0.0) - self._parts[part]
            self._parts[part] += seconds
            row.seconds[self._of_start_up if part is Part.START_UP else part] += seconds
            if part in OF_STEPS:
                steps[part] = seconds
        if note.step is not None:
            if note.event is Event.GO:
                self._go(note.step, row)
            elif note.step >= self._done:
                self._steps.append(Segment(self._done, note.step, row, steps))
            self._done = note.step
        self._last, self._code, self._seen_s = note, note.code, note.unix_s
        self._step_s = note.step_s or self._step_s

    def _go(self, step: int, row: Row) -> None:
        """The loop goes on from there: steps beyond it were trained in vain; steps up to it that no note has seen were not."""
        while self._steps and self._steps[-1].last > step:
            self._lose(self._steps.pop(), step)
        if step > self._done and self._recovers and self._step_s is not None:
            unseen_s = min(row.seconds[Part.RECOVERY], self._step_s * (step - self._done))
            row.move(Part.RECOVERY, Part.STEP, unseen_s)
            self._steps.append(Segment(self._done, step, row, {Part.STEP: unseen_s}))

    def _lose(self, lost: Segment, step: int) -> None:
        """What came behind `step` becomes lost work, what came before it stays."""
        share = (lost.last - max(lost.first, step)) / (lost.last - lost.first) if lost.last > lost.first else 1.0
        for part, seconds in lost.seconds.items():
            lost.row.move(part, Part.LOST, share * seconds)
        if lost.first < step:
            kept = {part: (1.0 - share) * seconds for part, seconds in lost.seconds.items()}
            self._steps.append(Segment(lost.first, step, lost.row, kept))

    def _leave(self, unix_s: float, code: int | None) -> None:
        """The newest start has ended by then, as somebody else saw."""
        if self._rows:
            part = Part.CLOSE if code in STOPPED else Part.RECOVERY
            self._rows[-1].seconds[part] += self._pass(unix_s)
            self._code = code


def add_up(notes: Iterable[Note]) -> Account:
    """The account of all notes of a run."""
    accountant = Accountant()
    for note in notes:
        accountant.add(note)
    return accountant.account()
