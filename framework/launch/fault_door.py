"""The door in a rank through which `meshwright inject` comes: faults that act on a stated step, phase or point of a save.

It is there only where the recipe says `run.allow_faults=true`. What a step computes is reached by hooks of the model, which are
there for that step only; a save by its `fault`, the data by what hears of each batch. A rank reads RUN/faults.jsonl whenever it
has changed, which each step asks of the file system: such a run is for tests.
"""

import errno
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.launch.fault_plan import PHASES, PLAN_FILE, Fault, count_suffered, note_fault, read_plan
from framework.monitor.phases import Phase

if TYPE_CHECKING:  # a rank opens its door before it loads libraries, which is a phase as well
    import numpy as np
    from torch.utils.hooks import RemovableHandle

    from framework.data.pack import Microbatch
    from framework.train.step import Run

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
SAVE_ERRORS = {"disk-full": errno.ENOSPC, "eio": errno.EIO}


class FaultDoor:
    """The faults of one rank of a run. Of the main thread, but for `reach`, which is called in the thread that saves."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._stamp: tuple[int, int] | None = None
        self._faults: list[Fault] = []
        self._suffered = count_suffered(run_dir, rank)
        self._step = 0
        self._hooks: list[RemovableHandle] = []
        self._data_fails = False
        self._saves: deque[int] = deque()
        self._saved_step = 0
        self._fails_until_s: dict[str, float] = {}

    def hear_phases(self, also: Callable[[Phase], None]) -> Callable[[Phase], None]:
        """For `Phases`: what tells `also` and this door of each phase that begins."""

        def begin(phase: Phase) -> None:
            also(phase)
            self.begin_phase(phase)

        return begin

    def begin_phase(self, phase: Phase) -> None:
        """A phase of this rank begins."""
        for fault in self._due(lambda fault: fault.phase is not None and PHASES[fault.phase] == phase, self._step):
            self._note(fault, phase=phase.value)
            send_signal(fault, os.getpid())

    def begin_step(self, step: int, run: "Run") -> None:
        """The step is about to begin: faults of the step before are over, those of this one act or are prepared."""
        self._step = step
        while self._hooks:
            self._hooks.pop().remove()
        at_an_edge = lambda fault: fault.phase is None and fault.point is None and fault.kind not in SAVE_ERRORS  # noqa: E731
        for fault in self._due(at_an_edge, step):
            self._note(fault, step=step)
            self._act(fault, run)

    def begin_save(self, step: int) -> None:
        """A save of the step is about to start; its points are `reach`ed from now on, after those of the one before."""
        self._saves.append(step)

    def reach(self, point: str) -> None:
        """A save has come to a point, in the thread that saves. Raises OSError where the disk is to fail."""
        if point == "planned":
            self._saved_step = self._saves.popleft()
        for fault in self._due(lambda fault: fault.point == point, self._saved_step):
            self._note(fault, point=point, step=self._saved_step)
            send_signal(fault, os.getpid())
        if point != "writing":
            return
        for fault in self._due(lambda fault: fault.kind in SAVE_ERRORS and fault.point is None, self._saved_step):
            self._note(fault, point=point, step=self._saved_step)
            lasts_s = 0.0 if fault.kind == "disk-full" else 1.0 if fault.seconds is None else fault.seconds
            self._fails_until_s[fault.kind] = time.monotonic() + lasts_s
            raise OSError(SAVE_ERRORS[fault.kind], f"{os.strerror(SAVE_ERRORS[fault.kind])} (injected)")
        if time.monotonic() < self._fails_until_s.get("eio", 0.0):
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (injected)")

    def hear_batch(self, cursor: int, samples: "np.ndarray", microbatches: "Sequence[Microbatch]") -> None:
        """The loader hands a step's samples out. Raises OSError where they are to be unreadable."""
        if self._data_fails:
            self._data_fails = False
            raise OSError(errno.EIO, f"samples {samples[0]:,} to {samples[-1]:,} cannot be read (injected)")

    def _act(self, fault: Fault, run: "Run") -> None:
        from framework.launch.fault_harm import arm, flip_bit

        if fault.kind in SIGNALS:
            send_signal(fault, os.getpid())
        elif fault.kind == "flip":
            flip_bit(run)
        elif fault.kind == "data-error":
            self._data_fails = True
        else:
            self._hooks.append(arm(fault, run))

    def _due(self, concerns: Callable[[Fault], bool], step: int) -> list[Fault]:
        """This rank's faults that act at this moment, of which each is then suffered once more."""
        self._read()
        return [
            fault
            for fault in self._faults
            if concerns(fault) and (fault.step or 0) <= step and self._suffered[fault.id] < fault.times
        ]

    def _note(self, fault: Fault, **more: Any) -> None:
        self._suffered[fault.id] += 1
        note_fault(self._run_dir, fault, self._rank, **more)

    def _read(self) -> None:
        try:
            found = os.stat(self._run_dir / PLAN_FILE)
        except FileNotFoundError:
            return
        stamp = found.st_mtime_ns, found.st_size
        if stamp != self._stamp:
            self._stamp = stamp
            self._faults = [fault for fault in read_plan(self._run_dir) if fault.rank == self._rank]


def send_signal(fault: Fault, pid: int) -> None:
    """Do to a process what the fault says. One that stops for a while is continued by a process of its own."""
    if fault.kind == "stop" and fault.seconds is not None:
        words = ["sh", "-c", f"sleep {fault.seconds}; kill -CONT {pid}"]
        subprocess.Popen(
            words,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    os.kill(pid, SIGNALS[fault.kind])
