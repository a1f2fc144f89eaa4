"""The phases of a rank: which is under way, and how long each has lasted so far. Read by the watchdog, `status` and goodput."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TextIO

from tqdm import tqdm


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
    """The events of a rank to which code outside of training may react, as faults/ does. This class ignores them all."""

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
    def within(self, phase: Phase, step: int | None = None) -> Iterator[None]:
        """Interrupt the phase under way by `phase`, from enter to exit."""
        outer = self._current
        self.begin(phase, step)
        try:
            yield
        finally:
            self.begin(outer.phase)

    def _announce(self, phase: Phase) -> None:
        self._on_begin(phase)
        self.observer.begin_phase(phase)


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
