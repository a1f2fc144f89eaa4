"""The progress of a rank, for the threads that watch it, and the deadlines of its phases and steps."""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from framework.lease import Lease
from framework.mesh.topology import Topology
from framework.monitor.phases import Current, Phase, Phases
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
    """A save that is under way, behind training perhaps."""

    step: int | None


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
