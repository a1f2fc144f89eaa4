"""Exports beside training (`checkpoint.export_every_steps`): the checkpoints of a run as folders that `from_pretrained` loads.

    save of step N is committed --> `meshwright export RUN --step N` in a process of its own --> RUN/exports/step-N

Where exports lie, and how they appear as a whole, is in export_places.py. The process reads the checkpoint's files, unit after
unit, so training lends it neither its memory nor its interpreter: it has memory for one unit, one thread, and yields the
processor to whoever wants it. What it does wrong, or dies of, is said and ends nothing. Exports go one after another. The
checkpoint that one reads, or is to read next, is kept until then. Where they take longer than the time between them, the one
that waits is left out, which is said.

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
from framework.checkpoint.folder import report
from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.errors import MeshwrightError
from framework.launch.directory import RunDirectory
from framework.launch.export_places import find_exports
from framework.launch.launchers import without_launchers
from framework.lease import Lease
from framework.start import python_words

# The lowest priority that there is.
NICE = 19
# Ranks that wait for the last export tell one another so often that they are there.
WAIT_S = 5.0
# A process that is told to end gets so long, and so long again when it is killed.
END_S = 5.0
# What of its words is shown of an export that failed: the end of a traceback.
SHOWN_CHARACTERS = 2000


class Exports:
    """The exports of a run, in one thread that waits for one process at a time. every_steps: None: none are made."""

    def __init__(self, lease: Lease, every_steps: int | None) -> None:
        self._run, self._every_steps = RunDirectory(lease.run), every_steps
        self._place = find_exports(lease)
        # Guards what follows: the loop's thread, the save's and this one meet here.
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._reading: int | None = None
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self._resume()

    def _resume(self) -> None:
        """Ask for what an earlier start has left undone."""
        due = [step for step in map(step_of, list_checkpoints(self._run.checkpoints)) if self._is_due(step)]
        undone = [step for step in due if not self._place.has(step)]
        if undone:
            self._ask_for(undone[0])  # the newest: of a run that is long past the others

    def reads(self, step: int) -> bool:
        """Whether the checkpoint of a step is still to be read. For retention, in the save's thread."""
        return step in (self._waiting, self._reading)

    def end_save(self, step: int, is_committed: bool) -> None:
        """A save has ended. In the save's thread: returns at once."""
        if is_committed and self._is_due(step):
            self._ask_for(step)

    def go_back_to(self, step: int) -> None:
        """The run has gone back to `step`: exports of later ones are none of its own any more."""
        with self._changed:
            if self._waiting is not None and self._waiting > step:
                self._waiting = None
            if self._reading is not None and self._reading > step and self._process is not None:
                self._process.kill()
                self._changed.wait_for(lambda: self._reading is None, END_S)
        if self._every_steps is not None:
            self._place.remove_after(step)

    def wait(self, timeout_s: float) -> bool:
        """Whether all exports have ended, after waiting for so long at most."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._reading is None, timeout_s)

    def end(self) -> None:
        """No export begins any more, and one that is under way ends now, without its folder."""
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
                    f" checkpoint.export_every_steps, or export it later: meshwright export {self._run.path} --step"
                    f" {self._waiting} --to DIR, while its checkpoint is kept"
                )
            self._waiting = step
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="export", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        """In the thread."""
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
                report(f"exported step {step:,} to {self._place.name(step)}")
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
        """Raises what is wrong."""
        with self._place.making(step) as made:
            self._run_process(make_command(self._run.path, step, made))

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
    """Environment of the process, which is no rank, and needs no GPU: a context of CUDA would take memory from the ranks."""
    return {**without_launchers(os.environ), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


class _NotExported(Exception):
    """The process has ended otherwise than well; says how."""


def make_command(run: Path, step: int, folder: Path) -> list[str]:
    """The words that export one checkpoint."""
    return [sys.executable, *python_words("framework", "export", str(run), "--step", str(step), "--to", str(folder))]


def exports_have_ended(exports: Exports, world: Communicator, *, is_stopped: bool) -> bool:
    """Whether nobody waits for an export any more, after some seconds at most. Collective over `world`: ranks that waited in one
    collective for as long as an export may take would run into its timeout. is_stopped: do not wait, the run is to end now."""
    left = torch.tensor(0.0 if is_stopped or exports.wait(WAIT_S) else 1.0)
    all_reduce(left, world, "max", label="exports")
    return not left
