"""The observer of a rank that injects the faults of `meshwright inject` at their step, phase or point of a save.

A rank has one only where the recipe says `run.allow_faults=true`. Faults of a computation act through hooks of the model that are
there for one step. The rank reads RUN/faults.jsonl whenever it has changed, which each step asks of the file system: such a run
is for tests.
"""

import errno
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.faults.plan import PHASES, PLAN_FILE, Fault, count_injected, note_fault, read_plan
from framework.monitor.progress import Phase, RankObserver

if TYPE_CHECKING:  # a rank makes its injector before it loads libraries, which is a phase as well
    from torch.utils.hooks import RemovableHandle

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
SAVE_ERRORS = {"disk-full": errno.ENOSPC, "eio": errno.EIO}


class FaultInjector(RankObserver):
    """Injects the faults planned for one rank of a run. Used by the main thread, but for `reach`: by the thread that saves."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._stamp: tuple[int, int] | None = None
        self._faults: list[Fault] = []
        self._injected = count_injected(run_dir, rank)
        self._step = 0
        self._hooks: list[RemovableHandle] = []
        self._data_fails = False
        self._saves: deque[int] = deque()
        self._saved_step = 0
        self._fails_until_s: dict[str, float] = {}

    def begin_phase(self, phase: Phase) -> None:
        for fault in self._due(lambda fault: fault.phase is not None and PHASES[fault.phase] == phase, self._step):
            self._note(fault, phase=phase.value)
            send_signal(fault, os.getpid())

    def begin_step(self, step: int, run: Any) -> None:
        """End the faults of the step before; inject those of this one, or prepare them."""
        self._step = step
        while self._hooks:
            self._hooks.pop().remove()
        at_an_edge = lambda fault: fault.phase is None and fault.point is None and fault.kind not in SAVE_ERRORS  # noqa: E731
        for fault in self._due(at_an_edge, step):
            self._note(fault, step=step)
            self._act(fault, run)

    def begin_save(self, step: int) -> None:
        self._saves.append(step)

    def reach(self, point: str) -> None:
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

    def read_batch(self, cursor: int, samples: Any, microbatches: Any) -> None:
        if self._data_fails:
            self._data_fails = False
            raise OSError(errno.EIO, f"samples {samples[0]:,} to {samples[-1]:,} cannot be read (injected)")

    def _act(self, fault: Fault, run: Any) -> None:
        from framework.faults.harm import arm, flip_bit

        if fault.kind in SIGNALS:
            send_signal(fault, os.getpid())
        elif fault.kind == "flip":
            flip_bit(run)
        elif fault.kind == "data-error":
            self._data_fails = True
        else:
            self._hooks.append(arm(fault, run))

    def _due(self, concerns: Callable[[Fault], bool], step: int) -> list[Fault]:
        """This rank's faults that act at this moment."""
        self._read()
        return [
            fault
            for fault in self._faults
            if concerns(fault) and (fault.step or 0) <= step and self._injected[fault.id] < fault.times
        ]

    def _note(self, fault: Fault, **more: Any) -> None:
        self._injected[fault.id] += 1
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
    """Send a process the fault's signal. A process that stops for a while is continued by another one."""
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
