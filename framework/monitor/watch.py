"""The watch of a rank: two threads beside training that find out when the run hangs, who is behind, and end this rank.

    watch    looks twice a second whether this rank's phase has passed its deadline. It asks nobody, so nothing can hold it up
    talk     every second puts this rank's line on the board, where rank 0 reads all of them into RUN/ranks.json. When a rank
             has sounded the alarm it answers with all that it knows, and one rank writes the verdict, with which all end

The board is in the store in which the ranks met. Who hosts it may be what hangs: then `talk` is held up as well, and after
VERDICT_S `watch` ends this rank with what it knows alone.
"""

import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from framework.comm.board import Board, dump_flight_records
from framework.comm.communicator import Operation
from framework.comm.connect import read_secret
from framework.errors import ConnectionFailed, HungError, LeaseLost
from framework.monitor.hang import (
    SAVES,
    TRAINING,
    Alarm,
    Answer,
    Lane,
    Line,
    Wait,
    describe_alone,
    write_report,
)
from framework.monitor.phases import Current, Phase
from framework.monitor.progress import Progress, Stopwatch
from framework.monitor.ranks_file import write_ranks
from framework.recipe.deadlines import Deadlines

LOOK_EVERY_S, BEAT_S = 0.5, 1.0
# Rank 0 reads the board at most this often, and less often where there are more than 512 lines on it.
READ_EVERY_S, READ_S_PER_RANK = 2.0, 1 / 256
# From the alarm on: so long rank 0 waits for answers; then another rank takes its place; then every rank ends by itself. All of
# it is within the ten seconds in which a hung run is to be over.
ANSWER_S, DEPUTY_S, VERDICT_S = 3.5, 5.5, 8.0
# A board that has not answered for so long is not waited for any more.
SILENT_S, SILENT_PATIENCE_S = 5.0, 2.0
# So long the one who wrote the verdict stays, as its process may host the store in which the others are to read it.
STAY_S = 0.6
STACK_FRAMES = 10
# In the run's folder: a folder for each library that carried collectives, with a file of each rank that could answer.
FLIGHT_RECORDS = "flight-recorder"


class Watch:
    """From enter to exit two threads watch this rank, and end it through `end` where the run hangs.

    progress: what the rank does. place: its rank and the number of ranks. coordinates: such as `pp0 dp1 cp0 tp0`. open_store: as
    `connect.open_store_beside`, whose result is this watch's alone. folder: the run's, for what rank 0 reads and flight records.
    """

    def __init__(
        self,
        progress: Progress,
        deadlines: Deadlines,
        place: tuple[int, int],
        coordinates: str,
        open_store: Callable[[], tuple[Any, str]],
        end: Callable[[HungError], None],
        folder: Path | None = None,
    ) -> None:
        self._progress, self._deadlines, self._coordinates = progress, deadlines, coordinates
        self._rank, self._world = place
        self._open_store, self._end, self._folder = open_store, end, folder
        self._main = threading.main_thread().ident or 0
        self._host = "who hosts the store of the ranks"
        self._lines: dict[int, Line | None] = {}  # the last that this rank has read
        self._heard_s = (
            self._alarmed_s
        ) = -1.0  # when the board answered last, when an alarm was heard; by the monotonic clock
        self._alarm: Alarm | None = None
        self._in_phase, self._in_save = Stopwatch(), Stopwatch()
        self._is_closed, self._is_silent, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("watch", self._watch), ("watch-talk", self._talk))
        ]

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed.set()
        self._threads[0].join()
        self.stop_talking()

    def stop_talking(self) -> None:
        """From here on ranks may end, and the store with one of them. This rank is still watched, and would end by itself."""
        self._is_silent.set()
        self._wake.set()
        self._threads[1].join(LOOK_EVERY_S)  # no longer: it may wait for a host that is gone

    def _watch(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            now_s = time.monotonic()
            if self._alarm is None and (alarm := self.judge(now_s)) is not None:
                self._hear(alarm)
                self._wake.set()
            if self._alarm is not None and self._is_alone(now_s):
                self._end(HungError(self._explain_alone(self._alarm, now_s)))

    def judge(self, now_s: float) -> Alarm | None:
        """Look at this rank: the alarm, if its phase or its save has passed the deadline."""
        current, save = self._progress.phases.current, self._progress.save
        seconds, saves_s = self._in_phase.look(current, now_s), self._in_save.look(save, now_s)
        deadline_s, key = self._progress.find_deadline(current, self._deadlines)
        if seconds > deadline_s:
            return Alarm(self._rank, TRAINING, current.phase, current.step, seconds, deadline_s, key)
        if save is not None and saves_s > self._deadlines.save:
            place = Phase.SAVE, save.step, saves_s, self._deadlines.save
            return Alarm(self._rank, SAVES, *place, "launch.save_deadline_s")
        return None

    def _hear(self, alarm: Alarm) -> None:
        if self._alarm is None:
            self._alarmed_s = time.monotonic()  # first: the other thread reads it where there is an alarm
            self._alarm = alarm

    def _is_alone(self, now_s: float) -> bool:
        """Whether no verdict is to be expected any more."""
        is_silent = now_s - self._heard_s > SILENT_S and now_s - self._alarmed_s > SILENT_PATIENCE_S
        return is_silent or now_s - self._alarmed_s > VERDICT_S

    def _talk(self) -> None:
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
                self._wake.wait(BEAT_S)

    def _read(self, board: Board) -> None:
        """Rank 0 reads all lines; the others rank 0's, to know where it was should it fall silent."""
        ranks = range(self._world if self._rank == 0 else 1)
        self._lines = dict(zip(ranks, map(_parse, board.read(ranks)), strict=True))
        self._progress.hosts.update({rank: line.host for rank, line in self._lines.items() if line is not None})
        if self._rank == 0 and self._folder is not None:
            # A file system that fails costs a look at the ranks, and nothing else; a lost lease ends the main thread.
            with suppress(OSError, LeaseLost):
                self._check_lease()
                write_ranks(self._folder, [line for line in self._lines.values() if line is not None])

    def _confer(self, board: Board, alarm: Alarm) -> None:
        """An alarm was sounded: answer, see to it that there is a verdict, and end with it."""
        self._hear(alarm)
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

    def _explain_alone(self, alarm: Alarm, now_s: float) -> str:
        silent_s = now_s - self._heard_s if self._heard_s >= 0 else None
        return describe_alone(alarm, self._host, silent_s, self._lines.get(0), self._answer())

    def _line(self) -> Line:
        current, now_s = self._progress.phases.current, time.monotonic()
        wait = self._find_wait(TRAINING, current)
        return Line(
            rank=self._rank,
            host=platform.node(),
            pid=os.getpid(),
            coordinates=self._coordinates,
            phase=current.phase,
            step=current.step,
            seconds=round(now_s - current.since_s, 1),
            wait=str(wait) if wait is not None else "",
            saves_s=round(self._in_save.seconds, 1) if self._progress.save is not None else None,
        )

    def _answer(self) -> Answer:
        line, current = self._line(), self._progress.phases.current
        lanes = {TRAINING: self._lane(TRAINING, self._main, current)}
        if self._progress.save is not None:
            idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith("save")]
            lanes[SAVES] = self._lane(SAVES, idents[0] if idents else None, current)
        return Answer(line, lanes)

    def _lane(self, name: str, thread: int | None, current: Current) -> Lane:
        started = {
            f"{each.name} {operation}": calls
            for each in self._progress.communicators.get(name, ())
            for operation, calls in dict(each.traffic.calls).items()
        }
        if name == TRAINING and current.phase != Phase.LIBRARIES:
            started["world connect"] = 1
        return Lane(self._find_wait(name, current), started, take_stack(thread))

    def _find_wait(self, name: str, current: Current) -> Wait | None:
        communicators = self._progress.communicators.get(name, ())
        if name == TRAINING and current.phase == Phase.CONNECT:
            return Wait("world", "connect", "", 1, tuple(range(self._world)))
        found = next((each.waits.current for each in communicators if each.waits.current is not None), None)
        return describe_wait(found) if found is not None else None

    def _check_lease(self) -> None:
        if self._progress.lease is not None:
            self._progress.lease.check()

    def _keep_flight_records(self) -> None:
        """The last collectives of this rank, as gloo and NCCL have seen them, for those who know how to read that."""
        if self._folder is None:
            return
        with suppress(OSError, LeaseLost):
            self._check_lease()
            for library, record in dump_flight_records().items():
                folder = self._folder / FLIGHT_RECORDS / library
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"rank-{self._rank}").write_bytes(record)


def describe_wait(operation: Operation) -> Wait:
    """The operation as a report tells of it."""
    axis, is_message = operation.axis, bool(operation.peers)
    ranks = operation.peers or axis.ranks
    return Wait(axis.name, operation.name, operation.label, operation.number, tuple(ranks), is_message)


def take_stack(thread: int | None) -> tuple[str, ...]:
    """Where a thread is, innermost first."""
    frame = sys._current_frames().get(thread or 0)
    stack = traceback.extract_stack(frame)[-STACK_FRAMES:] if frame is not None else []
    return tuple(f"{each.filename}:{each.lineno} in {each.name}" for each in reversed(stack))


def _parse(text: str | None) -> Line | None:
    return Line.from_json(text) if text is not None else None
