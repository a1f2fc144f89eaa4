"""Requests to stop: a signal sets a flag that the loop polls, so that a step is never cut in the middle."""

import os
import signal
from contextlib import suppress
from types import FrameType, TracebackType

# SIGINT: Ctrl-C. SIGTERM: schedulers, launchers and preemption. SIGUSR1: a job's time limit is near.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

STOPPING = "stopping after this step and saving; Ctrl-C again stops at once"


class StopRequest:
    """From enter to exit the stop signals only set `requested`; afterwards they do what they did before.

    A second SIGINT ends the process at once, with nothing saved: the user's way out. Enter it in the main thread, where
    Python delivers signals. One rank's flag says nothing of the others': the loop sums the flags over the world.
    """

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        self._former = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGINT and self._interrupts == 1:
            say_from_handler(STOPPING)
        if self._interrupts > 1:
            # No unwinding: it could wait for other ranks. A save that is cut here leaves the former checkpoints intact.
            say_from_handler("stopped at once; the run resumes from its newest checkpoint")
            os._exit(128 + signal.SIGINT)


def say_from_handler(text: str) -> None:
    """A line on stderr, past Python's streams: a handler may have interrupted a write to them."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
