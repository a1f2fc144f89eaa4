"""Exports beside training (`checkpoint.export_every_steps`): the checkpoints of a run as folders that `from_pretrained` loads.

    save of step N is committed --> `meshwright export RUN --step N` in a process of its own --> RUN/exports/step-N

The folder is made in the workplace of the start and renamed. The process reads the checkpoint's files, unit after unit, so it
takes neither memory nor the interpreter from training: it has memory for one unit, one thread, and the lowest priority. Its
failures are reported and end nothing. Exports are made one after another. The checkpoint that one reads, or is to read next, is
kept until then. Where exports take longer than the time between them, the one that waits is left out, with a report.

An export that a stop or a crash has ended is made at the next start, if its checkpoint is still there.
"""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

from framework.checkpoint.commit import list_checkpoints, step_of
from framework.checkpoint.folder import committed_name, report
from framework.checkpoint.storage import checkpoints_of
from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.errors import MeshwrightError
from framework.lease import Lease
from framework.start import python_words, without_launchers

# The lowest priority.
NICE = 19
# Seconds between two collectives of ranks that wait for the last export.
WAIT_S = 5.0
# Seconds for a process to end after SIGTERM, and once more after SIGKILL.
END_S = 5.0
# Characters shown of a failed export's output: the end of a traceback.
SHOWN_CHARACTERS = 2000


class Exports:
    """Exports of a run, in one thread that waits for one process at a time. every_steps: None makes none."""

    def __init__(self, lease: Lease, every_steps: int | None) -> None:
        self._lease, self._every_steps = lease, every_steps
        self._root = lease.run / "exports"
        # Guards what follows: the loop's thread, the save's and this one meet here.
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._reading: int | None = None
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self._resume()

    def _resume(self) -> None:
        """Ask for the export that an earlier start has left undone. Only a rank that asks looks at the checkpoints."""
        if self._every_steps is None:
            return
        due = [step for step in map(step_of, list_checkpoints(checkpoints_of(self._lease.run))) if self._is_due(step)]
        undone = [step for step in due if not committed_name(self._root, step).exists()]
        if undone:
            self._ask_for(undone[0])  # the newest: of a run that is long past the others

    def reads(self, step: int) -> bool:
        """Whether the checkpoint of a step is still to be read. For retention, in the save's thread."""
        return step in (self._waiting, self._reading)

    def end_save(self, step: int, is_committed: bool) -> None:
        """Ask for the export of a step whose save was committed. Called in the save's thread; returns at once."""
        if is_committed and self._is_due(step):
            self._ask_for(step)

    def go_back_to(self, step: int) -> None:
        """Remove exports of later steps: the run has gone back to `step`."""
        with self._changed:
            if self._waiting is not None and self._waiting > step:
                self._waiting = None
            if self._reading is not None and self._reading > step and self._process is not None:
                self._process.kill()
                self._changed.wait_for(lambda: self._reading is None, END_S)
        for folder in self._root.glob("step-*") if self._every_steps is not None else ():
            if step_of(folder) > step:
                self._lease.remove(folder)

    def wait(self, timeout_s: float) -> bool:
        """Wait for all exports, at most so long; returns whether they have ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._reading is None, timeout_s)

    def end(self) -> None:
        """Begin no export any more, and end one that is under way, without its folder."""
        with self._changed:
            self._has_ended, self._waiting = True, None
            process = self._process
            self._changed.notify_all()
        if process is not None:
            process.terminate()
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive() and process is not None:
                process.kill()
                self._thread.join(END_S)  # no longer, whatever its file system does: the run has ended

    def _is_due(self, step: int) -> bool:
        return self._every_steps is not None and step % self._every_steps == 0

    def _ask_for(self, step: int) -> None:
        with self._changed:
            if self._waiting is not None:
                report(
                    f"the export of step {self._waiting:,} is left out: exports take longer than the time between them. Raise"
                    f" checkpoint.export_every_steps, or export it later: meshwright export {self._lease.run} --step"
                    f" {self._waiting} --to DIR, while its checkpoint is kept"
                )
            self._waiting = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="export", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        """Make one export after another, in the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._has_ended)
                if self._has_ended:
                    return
                assert self._waiting is not None
                self._reading, self._waiting = self._waiting, None
                step = self._reading
            try:
                self._export(step)
                report(f"exported step {step:,} to {committed_name(self._root, step)}")
            except (OSError, MeshwrightError, _NotExported) as error:
                if self._has_ended:
                    report(f"the export of step {step:,} was stopped with the run; the next start makes it")
                else:
                    report(
                        f"step {step:,} was not exported; training goes on, and the next start tries again if the checkpoint is"
                        f" kept: {error}"
                    )
            finally:
                with self._changed:
                    self._reading = self._process = None
                    self._changed.notify_all()

    def _export(self, step: int) -> None:
        """Raises what is wrong; then a former export of the step is as it was."""
        self._lease.check()
        self._root.mkdir(exist_ok=True)
        with self._lease.replacing(committed_name(self._root, step)) as made:
            self._run_process(make_command(self._lease.run, step, made))

    def _run_process(self, command: list[str]) -> None:
        with self._changed:
            if self._has_ended:
                raise _NotExported("the run has ended")
            process = self._process = subprocess.Popen(
                command,
                start_new_session=True,  # Ctrl-C is for the rank, which then ends this
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=_variables(),
            )
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        said, _ = process.communicate()
        if process.returncode:
            raise _NotExported(f"exit code {process.returncode}\n{said[-SHOWN_CHARACTERS:].rstrip()}")


def _variables() -> dict[str, str]:
    """Environment of the process, which is no rank and gets no GPU: a CUDA context would take memory from the ranks."""
    return {**without_launchers(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


class _NotExported(Exception):
    """The exporting process failed; the message says how."""


def make_command(run: Path, step: int, folder: Path) -> list[str]:
    """The command that exports one checkpoint."""
    return [sys.executable, *python_words("framework", "export", str(run), "--step", str(step), "--to", str(folder))]


def exports_have_ended(exports: Exports, world: Communicator, *, is_stopped: bool) -> bool:
    """Wait some seconds for the exports; returns whether they have ended. Collective over `world`, called again and again: ranks
    that waited in one collective for as long as an export may take would run into its timeout. is_stopped: do not wait."""
    left = torch.tensor(0.0 if is_stopped or exports.wait(WAIT_S) else 1.0)
    all_reduce(left, world, "max", label="exports")
    return not left
