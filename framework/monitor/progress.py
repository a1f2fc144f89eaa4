"""The state of a rank that its threads share: its phases, steps and saves, which others watch, with the deadlines of phases and
steps; and requests to stop and to save, on which it acts.

A signal, or a file in the run's folder, sets a flag that the loop polls between steps. The watchdog hears signals through the
file descriptor that C writes to, also while the main thread waits inside a library.
"""

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from tqdm import tqdm

from framework.errors import HungError
from framework.lease import Lease
from framework.mesh.topology import Topology
from framework.recipe.machines import FLOOR_S, Deadlines

if TYPE_CHECKING:
    from framework.comm.communicator import Communicator

# The number of last steps from which the pace is measured.
RECENT_STEPS = 50
# The first steps compile, load libraries and connect, and on a GPU the host runs ahead of them: until so many are measured
# their times say little of the next.
FIRST_STEPS = 3
# `auto`: a step may take so many times the median of the last ones and so many times their median deviation; and so many times
# the longest of them, for a run of which each 40th step does more.
MEDIANS, DEVIATIONS, LONGEST = 10.0, 30.0, 2.0
# A step is first said to take long after such times, whichever is longer, then after each doubling.
LONG_S, LONG_STEPS = 60.0, 10.0
# A look at a watch counts for no more than this: whatever lies between two looks, such as the sleep of a laptop, a stopped
# process or a machine too busy to run a thread, was time in which the rank could not work either.
LOOK_S = 2.0
# SIGINT: Ctrl-C. SIGTERM: schedulers, launchers and preemption. SIGUSR1: a job's time limit is near. SIGHUP: the terminal
# has gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# In the run's folder, made by `meshwright save` and `stop`; slurm/job.sh knows the second one's name, too.
SAVE_FILE, STOP_FILE = "request-save", "request-stop"
STOPPING = "stopping after this step and saving; Ctrl-C again stops at once"


class Phase(StrEnum):
    """The phases of a rank, in the order in which a run comes to them."""

    LIBRARIES = "load libraries"
    CONNECT = "connect ranks"
    OPEN_DATA = "open data"
    BUILD = "build model"
    RESTORE = "load checkpoint"
    DATA = "wait for data"
    STEP = "step"
    VALIDATE = "validate"
    SAVE = "save"
    CLOSE = "close"


START_UP = (Phase.LIBRARIES, Phase.CONNECT, Phase.OPEN_DATA, Phase.BUILD, Phase.RESTORE)


@dataclass(frozen=True)
class Current:
    """The phase under way, its step (None before the first), and its begin by `time.monotonic`."""

    phase: Phase
    step: int | None
    since_s: float


class RankObserver:
    """The events of a rank to which code outside of training may react, as faults.py does. This class ignores them all."""

    def begin_phase(self, phase: Phase) -> None:
        """A phase begins."""

    def begin_step(self, step: int, run: Any) -> None:
        """A step is about to begin. run: the `TrainingRun` of the rank."""

    def begin_save(self, step: int) -> None:
        """A save of the step is about to start. The points of the saves are then reached in the order of their starts."""

    def reach(self, point: str) -> None:
        """A save has come to a point, in the thread that saves. May raise OSError, as the disk may."""

    def read_batch(self, cursor: int, samples: Any, microbatches: Any) -> None:
        """The loader hands out the batch at `cursor`. samples: [n] int64, their numbers. May raise OSError, as the disk may."""


class Phases:
    """The phases of one rank. The main thread changes them, any thread reads them.

    observer: of all events of the rank. on_begin: called with each phase that begins.
    """

    def __init__(
        self, observer: RankObserver | None = None, on_begin: Callable[[Phase], None] = lambda phase: None
    ) -> None:
        self.observer = observer or RankObserver()
        # Seconds of each phase so far, without phases within it and the one under way; with it they add up to the time since
        # this object was made.
        self.seconds = dict.fromkeys(Phase, 0.0)
        self._on_begin = on_begin
        self._current = Current(Phase.LIBRARIES, None, time.monotonic())
        self._announce(Phase.LIBRARIES)

    @property
    def current(self) -> Current:
        """One value, replaced as a whole: no reader sees half a change."""
        return self._current

    def so_far(self) -> dict[Phase, float]:
        """Seconds of each phase with the one under way: they add up to the time since this object was made."""
        current = self._current
        return {**self.seconds, current.phase: self.seconds[current.phase] + time.monotonic() - current.since_s}

    def begin(self, phase: Phase, step: int | None = None) -> None:
        """Begin `phase` and end the one under way."""
        now = time.monotonic()
        self.seconds[self._current.phase] += now - self._current.since_s
        self._current = Current(phase, self._current.step if step is None else step, now)
        self._announce(phase)

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Interrupt the phase under way by `phase`, from enter to exit."""
        outer = self._current
        self.begin(phase)
        try:
            yield
        finally:
            self.begin(outer.phase)

    def _announce(self, phase: Phase) -> None:
        self._on_begin(phase)
        self.observer.begin_phase(phase)


class StepPace:
    """The seconds of the last steps. The main thread adds, any thread reads."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float) -> None:
        """A step has ended."""
        self._recent.append(seconds)

    @property
    def is_known(self) -> bool:
        """Whether enough steps are measured."""
        return len(self._recent) >= FIRST_STEPS

    @property
    def longest_s(self) -> float:
        """The longest of the last steps; 0 before the first."""
        return max(list(self._recent), default=0.0)

    def find_deadline(self, deadlines: Deadlines) -> float:
        """The deadline of a step, in seconds."""
        if not self.is_known:
            return deadlines.first_steps
        if deadlines.step is not None:
            return deadlines.step
        recent = list(self._recent)  # a copy: the main thread may add meanwhile
        middle = median(recent)
        deviation = median(abs(each - middle) for each in recent)
        measured = max(MEDIANS * middle + DEVIATIONS * deviation, LONGEST * max(recent))
        return min(max(FLOOR_S, measured), deadlines.most)


class Stopwatch:
    """The time for which a value has been the same object, without time in which it was not looked at. seconds: of the last
    look."""

    def __init__(self) -> None:
        self._value: object = None
        self._looked_s = self.seconds = 0.0

    def look(self, value: object, now_s: float) -> float:
        """Look at `value`. Returns the seconds for which it was seen so far. now_s: of a clock that does not go back."""
        if value is not self._value:
            self._value, self.seconds = value, 0.0
        else:
            self.seconds += min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        return self.seconds


@dataclass(eq=False)
class Save:
    """A save that is under way, behind training perhaps. answers: whether it began after a request to save."""

    step: int | None
    answers: bool = False


@dataclass(eq=False)
class Progress:
    """The state of one rank. The main thread writes, but for `saves`, from which the saves' thread takes; any thread reads."""

    phases: Phases = field(default_factory=Phases)
    pace: StepPace = field(default_factory=StepPace)
    is_timed: bool = False  # a step is under way whose length is judged by the former ones
    saves: deque[Save] = field(default_factory=deque)  # under way, the oldest first
    # Communicators of the thread of that name (`hang.TRAINING`, `SAVES`), once they are connected.
    communicators: "dict[str, tuple[Communicator, ...]]" = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)  # by rank
    lease: Lease | None = None  # of the run, once that is known: a start that has lost it writes no more

    @property
    def save(self) -> Save | None:
        """The save that is being written."""
        saves = list(self.saves)
        return saves[0] if saves else None

    def find_deadline(self, current: Current, deadlines: Deadlines) -> tuple[float, str]:
        """The deadline of the phase in seconds, and the recipe's key that sets it."""
        if current.phase == Phase.SAVE:
            return deadlines.save, "launch.save_deadline_s"
        if current.phase == Phase.VALIDATE:
            return deadlines.validate, "launch.validate_deadline_s"
        if current.phase == Phase.STEP and not self.is_timed:  # with a validation in it, or none has begun
            longer_s = self.pace.find_deadline(deadlines) + deadlines.validate
            return min(longer_s, deadlines.most), "launch.validate_deadline_s"
        if current.phase in (Phase.STEP, Phase.DATA):
            first = "" if self.pace.is_known else f"; the first {FIRST_STEPS} steps may take longer"
            return self.pace.find_deadline(deadlines), f"launch.step_deadline_s{first}"
        return deadlines.start, "launch.start_deadline_s"


def name_coordinates(topology: Topology, rank: int) -> str:
    """The coordinates of a rank, as `pp0 dp1 cp0 tp0`."""
    return " ".join(f"{axis}{topology.index(axis, rank)}" for axis in ("pp", "dp", "cp", "tp"))


class StopRequest:
    """Flags that stop signals set, from enter to exit; afterwards the signals do what they did before.

    requested: whether to stop. wants_save: whether to save a checkpoint and train on. A second SIGINT ends the process at once,
    with nothing saved. Enter it in the main thread, where Python delivers signals. One rank's flag says nothing of the others':
    the loop sums the flags over the world.
    """

    def __init__(self) -> None:
        self.requested = self.wants_save = False
        self._interrupts = 0
        self._former: dict[signal.Signals, object] = {}
        self._former_wakeup = -1
        self._heard, self._written = -1, -1

    def __enter__(self) -> "StopRequest":
        self._heard, self._written = os.pipe()
        os.set_blocking(self._written, False)
        self._former_wakeup = signal.set_wakeup_fd(self._written, warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._on_signal) for number in heard_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._former_wakeup)
        os.close(self._heard)
        os.close(self._written)

    def listen(self, timeout_s: float) -> bool:
        """Whether a stop signal comes within the time. For a thread: the main thread, which runs the handlers, may be held up."""
        if not select.select([self._heard], [], [], timeout_s)[0]:
            return False
        return any(number in STOP_SIGNALS for number in os.read(self._heard, 64))

    def wake(self) -> None:
        """Make `listen` return at once."""
        os.write(self._written, b"\0")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts == 1:
            say_from_handler(STOPPING)
        if self._interrupts > 1:
            # No unwinding: it could wait for other ranks. A save that is cut here leaves the former checkpoints intact.
            say_from_handler("stopped at once; the run resumes from its newest checkpoint")
            os._exit(128 + signal.SIGINT)


def heard_signals() -> Iterator[signal.Signals]:
    """The stop signals, without SIGHUP where `nohup` ignores it: the run is to outlive its terminal."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            yield number


def end_process(error: HungError) -> None:
    """Print the error and end the process without Python's teardown, which would wait for the main thread."""
    say_from_handler(str(error))
    os._exit(error.exit_code)


def say_from_handler(text: str) -> None:
    """Write a line to stderr, past Python's streams: a handler may have interrupted a write to them."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class PhaseBar:
    """A progress bar over `phases` on `stream` (default: standard error), which any other phase takes away.

    Libraries take seconds to load, and a silent terminal looks like a hang.

    Silent without phases, as on all ranks but one, and where the stream is no terminal.
    """

    def __init__(self, phases: Sequence[Phase] = (), stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self._phases = tuple(phases)
        self._bar = tqdm(
            total=len(phases),
            leave=False,
            file=stream,
            bar_format="{desc:<16} |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}]",
            disable=not (phases and stream.isatty()),
        )

    def begin(self, phase: Phase) -> None:
        """Show `phase`; those before it are done."""
        if phase not in self._phases:
            self.close()
        elif not self._bar.disable:
            self._bar.set_description_str(phase, refresh=False)
            self._bar.n = self._phases.index(phase)
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar off the terminal. May be called twice."""
        self._bar.close()
