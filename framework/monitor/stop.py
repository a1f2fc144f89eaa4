"""Requests to stop and to save: a signal, or a file in the run's folder, sets a flag that the loop polls, so that a step is
never cut in the middle.

A step that does not end polls nothing, and while the main thread waits inside a library Python runs no handler. So a thread
watches the steps: it hears signals through the file descriptor that C writes to, and ends a rank whose step hangs.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

from framework.errors import HungError, LeaseLost
from framework.lease import Lease
from framework.monitor.progress import Progress, Save

# SIGINT: Ctrl-C. SIGTERM: schedulers, launchers and preemption. SIGUSR1: a job's time limit is near. SIGHUP: the terminal
# has gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)

# Asked to stop, a step is given so long from then on, or three times the longest of the last ones, before it is taken for hung.
PATIENCE_S, PATIENCE_STEPS = 8.0, 3.0
# The same while too few steps are measured to say how long one takes.
FIRST_STEPS_PATIENCE_S = 120.0
# How often requests are looked for in the run's folder, by rank 0 alone.
POLL_S = 0.5
# A step is first said to take long after such times, whichever is longer, then after each doubling.
LONG_S, LONG_STEPS = 60.0, 10.0

# In the run's folder, made by `meshwright save` and `stop`; slurm/job.sh knows the second one's name, too.
SAVE_FILE, STOP_FILE = "request-save", "request-stop"

STOPPING = "stopping after this step and saving; Ctrl-C again stops at once"


class StopRequest:
    """From enter to exit the stop signals only set `requested`; afterwards they do what they did before. wants_save: a checkpoint
    is asked for, and training goes on.

    A second SIGINT ends the process at once, with nothing saved: the user's way out. Enter it in the main thread, where
    Python delivers signals. One rank's flag says nothing of the others': the loop sums the flags over the world.
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
        """Whether a stop signal comes within the time. For a thread: it hears what comes while the main thread, which runs the
        handlers, is held up in a library."""
        if not select.select([self._heard], [], [], timeout_s)[0]:
            return False
        return any(number in STOP_SIGNALS for number in os.read(self._heard, 64))

    def wake(self) -> None:
        """Have `listen` return at once."""
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
    """The stop signals, without SIGHUP where `nohup` has had it ignored: the run is to outlive its terminal."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            yield number


def end_process(error: HungError) -> None:
    """Say the error and end, past Python's teardown, which would wait for the main thread."""
    say_from_handler(str(error))
    os._exit(error.exit_code)


class StepWatch:
    """From enter to exit a thread ends this rank, through `end`, when it is asked to stop and the step under way hangs. One that
    hangs unasked `watch.Watch` finds.

    patience_s: how long a step may go on after the request, at least; first_patience_s: the same until three are measured.
    progress: is told of steps and saves.

    say: hears of steps that take long, None on ranks that stay silent. folder: the run's, where the thread looks for requests,
    None on ranks that do not; lease: of that run. What is not in `step`, such as a save, is not judged.
    """

    def __init__(
        self,
        stop: StopRequest,
        end: Callable[[HungError], None] = end_process,
        say: Callable[[str], None] | None = None,
        folder: Path | None = None,
        patience_s: float = PATIENCE_S,
        first_patience_s: float = FIRST_STEPS_PATIENCE_S,
        lease: Lease | None = None,
        progress: Progress | None = None,
    ):
        self._stop, self._end, self._say, self._folder = stop, end, say, folder
        self._lease = lease or (Lease(folder) if folder is not None else None)
        self._patience_s, self._first_patience_s = patience_s, first_patience_s
        self._main = threading.main_thread().ident
        self._under_way: tuple[int, float] | None = None  # the step and when it began
        self.progress = progress or Progress()
        self._answers_request = False  # the save that is under way
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="step-watch", daemon=True)

    def __enter__(self) -> "StepWatch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._stop.wake()  # else every run would end half a second later
        self._thread.join()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around all that a step may wait in."""
        started = time.monotonic()
        self._under_way = number, started
        self.progress.is_timed = True
        try:
            yield
        finally:
            self._under_way = None
            self.progress.is_timed = False
        self.progress.pace.add(time.monotonic() - started)

    def _watch(self) -> None:
        asked: float | None = None
        said_s = 0.0
        while not self._is_closed.is_set():
            if (self._stop.listen(POLL_S) or self._look()) and asked is None:
                asked = time.monotonic()
            under_way, longest = self._under_way, self.progress.pace.longest_s
            if under_way is None:
                said_s = 0.0
                continue
            number, started = under_way
            seconds = time.monotonic() - started
            # From the request on: a healthy rank may be late in its step, or wait for rank 0, which alone draws and deletes.
            if asked is not None and time.monotonic() - max(asked, started) > self._find_patience(longest):
                self._end(HungError(self._explain(number, seconds, longest)))
            # The first step may compile, load libraries and connect: nothing says how long it should take.
            elif self._say and longest and seconds > max(LONG_S, LONG_STEPS * longest, 2 * said_s):
                said_s = seconds
                self.tell(
                    f"step {number:,} takes {seconds:.0f} s so far, the longest of the last ones took {longest:.3g} s"
                )

    def _find_patience(self, longest: float) -> float:
        least_s = self._patience_s if self.progress.pace.is_known else self._first_patience_s
        return max(least_s, PATIENCE_STEPS * longest)

    def _look(self) -> bool:
        """Take requests from the run's folder over; whether one is to stop."""
        is_stop = False
        if self._folder is not None:
            with suppress(
                OSError
            ):  # a file system that fails for a moment, such as by ESTALE, is asked again at the next poll
                is_stop = (self._folder / STOP_FILE).exists()
                # In this order: the file goes before the answer counts as given.
                self._stop.wants_save |= not self._answers_request and (self._folder / SAVE_FILE).exists()
        self._stop.requested |= is_stop
        return is_stop

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within a step, around what may take long and is no hang."""
        under_way, self._under_way = self._under_way, None
        try:
            yield
        finally:
            if under_way is not None:
                self._under_way = under_way[0], time.monotonic()

    def tell(self, text: str) -> None:
        """A line for people, from rank 0."""
        with suppress(OSError):  # the log's file system fails, or nobody reads: neither the watch nor the run ends
            if self._say is not None:
                self._say(text)

    def begin_save(self) -> None:
        """A save begins, which answers a request that is there. One that comes from now on asks for a later step."""
        self.progress.saves.append(Save(self.progress.phases.current.step))
        self._answers_request = self._stop.wants_save
        self._stop.wants_save = False

    def end_save(self, is_committed: bool) -> None:
        """It has ended. A request stays where it failed, so that the next step saves once more. For any thread."""
        self.progress.saves.popleft()
        if self._answers_request and is_committed and self._lease is not None:
            # What stays is heard and answered once more, here or by who has the lease now; the save was good.
            with suppress(OSError, LeaseLost):
                self._lease.remove(self._lease.run / SAVE_FILE)
        self._answers_request = False

    def _explain(self, number: int, seconds: float, longest: float) -> str:
        before = f", where the longest of the last ones took {longest:.3g} s" if longest else ""
        frame = sys._current_frames().get(self._main or 0)
        stack = traceback.extract_stack(frame)[-4:] if frame else []
        places = "".join(f"\n  {each.filename}:{each.lineno} in {each.name}" for each in reversed(stack))
        return (
            f"asked to stop, this rank was in step {number:,} for {seconds:.0f} s{before}: it hangs, and ends without saving."
            f" It was at{places}"
        )


def say_from_handler(text: str) -> None:
    """A line on stderr, past Python's streams: a handler may have interrupted a write to them."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
