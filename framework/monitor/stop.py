"""Requests to stop and to save: a signal, or a file in the run's folder, sets a flag that the loop polls between steps.

The watchdog hears signals through the file descriptor that C writes to, also while the main thread waits inside a library.
"""

import os
import select
import signal
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType, TracebackType

from framework.errors import HungError

# SIGINT: Ctrl-C. SIGTERM: schedulers, launchers and preemption. SIGUSR1: a job's time limit is near. SIGHUP: the terminal
# has gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

# In the run's folder, made by `meshwright save` and `stop`; slurm/job.sh knows the second one's name, too.
SAVE_FILE, STOP_FILE = "request-save", "request-stop"

STOPPING = "stopping after this step and saving; Ctrl-C again stops at once"


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
