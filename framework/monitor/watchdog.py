"""The watchdog of a rank: ends it, through `end`, where the run hangs, and names the ranks that are behind. It has two deadlines.

    of the phase    how long a step, a save or a start may last (recipe/machines.py). The rank that passes it sounds an alarm,
                    all ranks answer with what they know, one writes the verdict, and all end with it
    of a stop       how long the step under way may go on once the rank is asked to stop. The rank then ends with what it knows

Two threads beside training:

    watch    looks twice a second at this rank, at stop signals and at requests in the run's folder. It waits for no other
rank, so nothing can hold it up: while the main thread waits inside a library Python runs no signal handler and polls nothing
    talk     every second puts this rank's line on the board, where rank 0 reads all lines into RUN/ranks.json, and looks for
             an alarm. The board is in the store in which the ranks met. The rank that hosts it may be what hangs: then `talk`
             is held up, and after VERDICT_S `watch` ends this rank with what it knows alone
"""

import os
import platform
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from framework.comm.connect import read_secret
from framework.comm.objects import Board
from framework.errors import ConnectionFailed, HungError, LeaseLost
from framework.lease import Lease
from framework.monitor.hang import (
    SAVES,
    TRAINING,
    Alarm,
    Answer,
    RankStatus,
    ThreadStatus,
    Wait,
    describe_alone,
    describe_wait,
    find_recent,
    write_ranks,
    write_report,
)
from framework.monitor.progress import (
    LONG_S,
    LONG_STEPS,
    SAVE_FILE,
    STOP_FILE,
    Current,
    Phase,
    Progress,
    Save,
    StopRequest,
    Stopwatch,
    end_process,
)
from framework.recipe.machines import Deadlines
from framework.torch_private import dump_flight_records
from framework.track.jsonl import append_line
from framework.track.report import HANGS_FILE

LOOK_EVERY_S, BEAT_S = 0.5, 1.0
# Rank 0 reads the board at most this often, and less often where there are more than 512 lines on it.
READ_EVERY_S, READ_S_PER_RANK = 2.0, 1 / 256
# From the alarm on: so long rank 0 waits for answers; then another rank takes its place; then every rank ends by itself. All of
# it is within the ten seconds in which a hung run is to be over.
ANSWER_S, DEPUTY_S, VERDICT_S = 3.5, 5.5, 8.0
# A board that has not answered for so long is not waited for any more.
SILENT_S, SILENT_PATIENCE_S = 5.0, 2.0
# The author of the verdict stays for so long, as its process may host the store in which the others are to read it.
STAY_S = 0.6
STACK_FRAMES = 10
# In the run's folder: a folder for each library that carried collectives, with a file of each rank that could answer.
FLIGHT_RECORDS = "flight-recorder"
# Asked to stop, a step is given so long from then on, or three times the longest of the last ones, before it is taken for hung.
PATIENCE_S, PATIENCE_STEPS = 8.0, 3.0
# The same while too few steps are measured to say how long one takes.
FIRST_STEPS_PATIENCE_S = 120.0


class Watchdog:
    """From enter to exit threads watch this rank and end it through `end` where it hangs.

    progress: the rank's own record of what it does. deadlines: of phases; None: none. place: (rank, number of ranks).
    coordinates: such as `pp0 dp1 cp0 tp0`. open_store: opens the ranks' store for this watchdog alone, and names its host, as
    `connect.open_store_beside`; None: this rank talks to no other. folder: the run's, for flight records and, on rank 0, for
    requests and `ranks.json`. say: prints a line for people, on rank 0.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        deadlines: Deadlines | None = None,
        place: tuple[int, int] = (0, 1),
        coordinates: str = "",
        open_store: Callable[[], tuple[Any, str]] | None = None,
        end: Callable[[HungError], None] = end_process,
        folder: Path | None = None,
        say: Callable[[str], None] | None = None,
        patience_s: float = PATIENCE_S,
        first_patience_s: float = FIRST_STEPS_PATIENCE_S,
    ) -> None:
        self.progress, self.requests = progress or Progress(), StopRequest()
        self._deadlines, self._coordinates = deadlines, coordinates
        self._rank, self._world = place
        self._open_store, self._end, self._folder, self._say = open_store, end, folder, say
        self._patience_s, self._first_patience_s = patience_s, first_patience_s
        self._main = threading.main_thread().ident or 0
        # Requests to stop and to save.
        self._hears, self._listening = False, threading.Lock()
        self._asked_s: float | None = None  # since when the rank is asked to stop, by the monotonic clock
        self._under_way: tuple[int, float] | None = None  # the step and when it began
        self._said_s = 0.0  # how long the step under way had lasted when that was last said
        # The other ranks.
        self._host = "the host of the ranks' store"
        self._lines: dict[int, RankStatus | None] = {}  # the last that this rank has read
        # When the board answered last and when an alarm was heard, by the monotonic clock.
        self._heard_s = self._alarmed_s = -1.0
        self._alarm: Alarm | None = None
        self._in_phase, self._in_save = Stopwatch(), Stopwatch()
        self._is_closed, self._is_silent = threading.Event(), threading.Event()
        self._wake_watch, self._wake_talk = threading.Event(), threading.Event()
        self._watching = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._talking = threading.Thread(target=self._talk, name="watch-talk", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._watching.start()
        self._talking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._wake_watch.set()
        self._watching.join()
        self.stop_talking()

    def stop_talking(self) -> None:
        """Leave the board: from here on ranks may end, and the store with one of them. This rank is still watched alone."""
        self._is_silent.set()
        self._wake_talk.set()
        self._talking.join(LOOK_EVERY_S)  # no longer: it may wait for a host that is gone

    @contextmanager
    def hear(self, requests: StopRequest) -> Iterator[None]:
        """From enter to exit, take stop signals and, on rank 0, requests in the run's folder; a step that hangs behind one ends
        the rank."""
        self.requests, self._hears = requests, True
        self._wake_watch.set()
        try:
            yield
        finally:
            self._hears = False
            requests.wake()
            with self._listening:  # until the thread listens no more: the pipe of the signals is closed next
                pass

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

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within a step, around what may take long and is no hang."""
        under_way, self._under_way = self._under_way, None
        try:
            yield
        finally:
            if under_way is not None:
                self._under_way = under_way[0], time.monotonic()

    def begin_save(self) -> None:
        """A save begins, which answers a request that is there. A request that comes from now on asks for a later step."""
        # In this order, for the thread that looks for requests.
        self.progress.saves.append(Save(self.progress.phases.current.step, self.requests.wants_save))
        self.requests.wants_save = False

    def end_save(self, is_committed: bool) -> None:
        """A save has ended, in any thread. A request stays where its save failed, so that the next step saves once more."""
        save = self.progress.saves[0]
        if save.answers and is_committed and self._folder is not None:
            lease = self.progress.lease or Lease(self._folder)
            # A request that stays is answered once more, here or by the next holder of the lease; the save was good.
            with suppress(OSError, LeaseLost):
                lease.remove(lease.run / SAVE_FILE)
        self.progress.saves.popleft()

    def say(self, text: str) -> None:
        """Print a line for people, on rank 0."""
        # The log's file system fails, or its reader is gone: neither the watch nor the run ends.
        with suppress(OSError):
            if self._say is not None:
                self._say(text)

    def find_requests(self) -> bool:
        """Read requests from the run's folder, on rank 0. Returns whether one is to stop."""
        is_stop = False
        if self._folder is not None and self._rank == 0:
            # A file system that fails for a moment, such as by ESTALE, is asked again at the next look.
            with suppress(OSError):
                is_stop = (self._folder / STOP_FILE).exists()
                # In this order: the file goes before the answer counts as given.
                is_answered = any(each.answers for each in tuple(self.progress.saves))
                if not is_answered and (self._folder / SAVE_FILE).exists():
                    self.requests.wants_save = True
        self.requests.requested |= is_stop
        return is_stop

    def judge(self, now_s: float) -> Alarm | None:
        """Look at this rank: the alarm, if its phase or its save has passed the deadline."""
        if self._deadlines is None:
            return None
        current, save = self.progress.phases.current, self.progress.save
        seconds, saves_s = self._in_phase.look(current, now_s), self._in_save.look(save, now_s)
        deadline_s, key = self.progress.find_deadline(current, self._deadlines)
        if seconds > deadline_s:
            return Alarm(self._rank, TRAINING, current.phase, current.step, seconds, deadline_s, key)
        if save is not None and saves_s > self._deadlines.save:
            place = Phase.SAVE, save.step, saves_s, self._deadlines.save
            return Alarm(self._rank, SAVES, *place, "launch.save_deadline_s")
        return None

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            is_asked, now_s = self._listen(LOOK_EVERY_S), time.monotonic()
            if is_asked and self._asked_s is None:
                self._asked_s = now_s
            self._judge_step(now_s)
            if self._alarm is None and (alarm := self.judge(now_s)) is not None:
                self._hear_alarm(alarm)
                self._wake_talk.set()
            if self._alarm is not None and self._is_alone(now_s):
                self._end(HungError(self._explain_alone(self._alarm, now_s)))

    def _listen(self, timeout_s: float) -> bool:
        """Wait. Returns whether the rank is asked to stop."""
        with self._listening:
            if self._hears:
                return self.requests.listen(timeout_s) or self.find_requests()
        self._wake_watch.wait(timeout_s)
        self._wake_watch.clear()
        return False

    def _judge_step(self, now_s: float) -> None:
        """End the rank if it is asked to stop and its step hangs; say if the step merely takes long."""
        under_way, longest_s = self._under_way, self.progress.pace.longest_s
        if under_way is None:
            self._said_s = 0.0
            return
        number, started_s = under_way
        seconds = now_s - started_s
        # From the request on: a healthy rank may be late in its step, or wait for rank 0, which alone draws and deletes.
        is_asked = self._asked_s is not None and self._hears
        if is_asked and now_s - max(self._asked_s or 0.0, started_s) > self._find_patience(longest_s):
            self._end(HungError(self._explain_step(number, seconds, longest_s)))
        # The first step may compile, load libraries and connect: nothing says how long it should take.
        elif self._say and longest_s and seconds > max(LONG_S, LONG_STEPS * longest_s, 2 * self._said_s):
            self._said_s = seconds
            self.say(
                f"step {number:,} takes {seconds:.0f} s so far, the longest of the last ones took {longest_s:.3g} s"
            )

    def _find_patience(self, longest_s: float) -> float:
        least_s = self._patience_s if self.progress.pace.is_known else self._first_patience_s
        return max(least_s, PATIENCE_STEPS * longest_s)

    def _explain_step(self, number: int, seconds: float, longest_s: float) -> str:
        before = f", where the longest of the last ones took {longest_s:.3g} s" if longest_s else ""
        places = "".join(f"\n  {each}" for each in take_stack(self._main))
        return (
            f"asked to stop, this rank was in step {number:,} for {seconds:.0f} s{before}: it hangs, and ends without saving."
            f" It was at{places}"
        )

    def _hear_alarm(self, alarm: Alarm) -> None:
        if self._alarm is None:
            self._alarmed_s = time.monotonic()  # first: the other thread reads it where there is an alarm
            self._alarm = alarm

    def _is_alone(self, now_s: float) -> bool:
        """Whether this rank expects no verdict any more."""
        is_silent = now_s - self._heard_s > SILENT_S and now_s - self._alarmed_s > SILENT_PATIENCE_S
        return is_silent or now_s - self._alarmed_s > VERDICT_S

    def _talk(self) -> None:
        if self._open_store is None:
            return
        # Where the host of the store ends, so do the ranks, by other ways than this; where it only stops, nothing is raised.
        # Where there is none, `connect` says it.
        with suppress(RuntimeError, ConnectionFailed):
            store, self._host = self._open_store()
            board, read_s = Board(store, self._rank, self._world, read_secret()), -1.0
            while not self._is_silent.is_set():
                board.write(self._line().to_json())
                alarm = board.find_alarm()
                self._heard_s = time.monotonic()
                if alarm is not None:
                    self._confer(board, Alarm.from_json(alarm))
                    return
                if self._alarm is not None:
                    board.sound_alarm(self._alarm.to_json())
                    continue
                if self._heard_s - read_s > max(READ_EVERY_S, READ_S_PER_RANK * self._world):
                    read_s = self._heard_s
                    self._read(board)
                self._wake_talk.wait(BEAT_S)

    def _read(self, board: Board) -> None:
        """Read the lines of all ranks, on rank 0; on the others rank 0's, to know where it was should it fall silent."""
        ranks = range(self._world if self._rank == 0 else 1)
        self._lines = dict(zip(ranks, map(_parse, board.read(ranks)), strict=True))
        self.progress.hosts.update({rank: line.host for rank, line in self._lines.items() if line is not None})
        if self._rank == 0 and self._folder is not None:
            # A file system that fails costs a look at the ranks, and nothing else; a lost lease ends the main thread.
            with suppress(OSError, LeaseLost):
                self._check_lease()
                write_ranks(self._folder, [line for line in self._lines.values() if line is not None])

    def _confer(self, board: Board, alarm: Alarm) -> None:
        """Answer an alarm, see to it that there is a verdict, and end with it."""
        self._hear_alarm(alarm)
        board.answer(self._answer().to_json())
        self._keep_flight_records()
        began_s, is_claimed = time.monotonic(), False
        while (verdict := board.find_verdict()) is None:
            self._heard_s = time.monotonic()
            waited_s = self._heard_s - began_s
            is_due = waited_s > (ANSWER_S if self._rank == 0 else DEPUTY_S)
            if not is_claimed and (is_due or (self._rank == 0 and board.is_answered())):
                is_claimed = True
                if board.claim():
                    board.conclude(self._write_verdict(board, alarm))
                    verdict = board.find_verdict()
                    self._keep_verdict(verdict)
                    time.sleep(STAY_S)
                    break
            time.sleep(LOOK_EVERY_S / 4)
        self._end(HungError(verdict or "the run hangs"))

    def _write_verdict(self, board: Board, alarm: Alarm) -> str:
        texts = board.read_answers()
        answers = {rank: Answer.from_json(text) if text is not None else None for rank, text in enumerate(texts)}
        silent = [rank for rank, answer in answers.items() if answer is None]
        lines = dict(zip(silent, map(_parse, board.read(silent)), strict=True))
        return write_report(alarm, answers, lines)

    def _keep_verdict(self, verdict: str | None) -> None:
        """Add the verdict to those of the run, in the thread that may be held up by a file system: `_watch` ends the rank."""
        if self._folder is not None and verdict:
            with suppress(OSError, LeaseLost):
                self._check_lease()
                append_line(self._folder / HANGS_FILE, {"unix_s": time.time(), "text": verdict})

    def _explain_alone(self, alarm: Alarm, now_s: float) -> str:
        silent_s = now_s - self._heard_s if self._heard_s >= 0 else None
        return describe_alone(alarm, self._host, silent_s, self._lines.get(0), self._answer())

    def _line(self) -> RankStatus:
        current, now_s = self.progress.phases.current, time.monotonic()
        wait = self._find_wait(TRAINING, current)
        return RankStatus(
            rank=self._rank,
            host=platform.node(),
            pid=os.getpid(),
            coordinates=self._coordinates,
            phase=current.phase,
            step=current.step,
            seconds=round(now_s - current.since_s, 1),
            wait=str(wait) if wait is not None else "",
            saves_s=round(self._in_save.seconds, 1) if self.progress.save is not None else None,
        )

    def _answer(self) -> Answer:
        line, current = self._line(), self.progress.phases.current
        lanes = {TRAINING: self._lane(TRAINING, self._main, current)}
        if self.progress.save is not None:
            idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith("save")]
            lanes[SAVES] = self._lane(SAVES, idents[0] if idents else None, current)
        return Answer(line, lanes)

    def _lane(self, name: str, thread: int | None, current: Current) -> ThreadStatus:
        communicators = self.progress.communicators.get(name, ())
        started = {
            f"{each.name} {operation}": calls
            for each in communicators
            for operation, calls in dict(each.traffic.calls).items()
        }
        if name == TRAINING and current.phase != Phase.LIBRARIES:
            started["world connect"] = 1
        wait, stack = self._find_wait(name, current), take_stack(thread)
        if not communicators:
            return ThreadStatus(wait, started, stack)
        waits = communicators[0].waits  # the same of all
        ahead = waits.find_place().ahead
        count = Counter(f"{each.axis.name} {each.name}" for each in ahead)
        following = str(describe_wait(ahead[0])) if ahead else ""
        return ThreadStatus(wait, started, stack, dict(count), following, find_recent(list(waits.recent), ahead))

    def _find_wait(self, name: str, current: Current) -> Wait | None:
        if name == TRAINING and current.phase == Phase.CONNECT:
            return Wait("world", "connect", "", 1, tuple(range(self._world)))
        for each in self.progress.communicators.get(name, ())[:1]:  # one that waits is known to all
            if (found := each.waits.find_place().waits_in) is not None:
                return describe_wait(found)
        return None

    def _check_lease(self) -> None:
        if self.progress.lease is not None:
            self.progress.lease.check()

    def _keep_flight_records(self) -> None:
        """Write the last collectives of this rank, as gloo and NCCL recorded them, into the run's folder."""
        if self._folder is None:
            return
        with suppress(OSError, LeaseLost):
            self._check_lease()
            for library, record in dump_flight_records().items():
                folder = self._folder / FLIGHT_RECORDS / library
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"rank-{self._rank}").write_bytes(record)


def take_stack(thread: int | None) -> tuple[str, ...]:
    """The stack of a thread, innermost frame first."""
    frame = sys._current_frames().get(thread or 0)
    stack = traceback.extract_stack(frame)[-STACK_FRAMES:] if frame is not None else []
    return tuple(f"{each.filename}:{each.lineno} in {each.name}" for each in reversed(stack))


def _parse(text: str | None) -> RankStatus | None:
    return RankStatus.from_json(text) if text is not None else None
