"""Trackers as mirrors of metrics.jsonl, each in a process of its own.

The observer in the training process starts `python -m framework.track.mirror TRACKER RUN_DIR` and never talks to a tracker: the
mirror reads `run_info.json` and follows `metrics.jsonl`. So a slow, hanging or raising tracker costs training nothing, the file
is the spool while the network is away, and a mirror that hangs at the end can be ended. Two pipes join them; before its end
the training process waits for neither:

    stdin   the training process writes its exit code; closed without one, it was killed
    stdout  lines for the user: where the run is, or why it is not there

Its arguments are the tracker, the run's folder and the epoch of its lease: a mirror of a start that has lost the lease is killed.

Each step is sent once: a start sends the records behind the newest step that the tracker has. Records that a former mirror could
not send come now.

A rewind (train/saves.py) takes steps back that a tracker has, and most trackers change no step that they were given. So the run
goes on as another curve, ID-rewound-1, which gets all records of metrics.jsonl from the first one on. The number follows from
`rewinds` of the newest record.
"""

import math
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from framework.errors import EXIT_DONE, EXIT_RESUME, LeaseLost
from framework.lease import Lease
from framework.recipe.plugins import import_plugins
from framework.start import python_words
from framework.track.jsonl import METRICS_FILE, decode, read_records, rewinds_of
from framework.track.report import Observer, RunInfo, StepReport, Tracker, load_run_info, name_curve
from framework.track.trackers import TRACKERS, first_line_of, say

POLL_S = 0.5
LEAST_ROOM_BYTES = 1 << 20
# The end of a run waits so long for all trackers; a mirror whose training process was killed ends itself after twice that.
CLOSE_TIMEOUT_S = 60.0
ALONE_S = 2 * CLOSE_TIMEOUT_S
# Groups of charts, and the objects of a record that they show.
GROUPS = MappingProxyType(
    {
        "loss": "source_losses",
        "validation_loss": "validation_losses",
        "preference": "preference",
        "eval": "scores",
        "stragglers": "stragglers",
        "goodput": "goodput",
    }
)
# Beyond so many ranks one chart per rank is unreadable: trackers get the slowest and the fastest, metrics.jsonl has all.
MAX_RANKS_CHARTED = 64
# Charts of the imbalance of experts: one of each group of layers.
MAX_LAYER_GROUPS = 8

_EXIT_SAID_WHY = 1
_EXIT_KILLED = 1


# Files of a run that trackers get, where there are any: at its beginning, at its end.
FIRST_FILES, LAST_FILES = ("recipe.yaml",), ("plan.html", "report.txt", "report.png", "goodput.png")


class Mirror(Observer):
    """Starts the mirror of a tracker, relays its lines, and ends it. Only `close` waits for it, and for `close_timeout_s`.

    beside: all mirrors of the run, which end at the same time.
    """

    def __init__(
        self,
        tracker: str,
        run_dir: Path,
        say: Callable[[str], None],
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        lease: Lease | None = None,
        beside: "Sequence[Mirror]" = (),
    ):
        self.tracker, self._run_dir, self._lease = tracker, run_dir, lease or Lease(run_dir)
        self._log = run_dir / f"{tracker}.log"
        self._say = say
        self._close_timeout_s, self._close_by_s = close_timeout_s, math.inf
        self._beside = beside
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    @property
    def name(self) -> str:
        return self.tracker

    def open(self, run: RunInfo) -> None:
        self._lease.check()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *python_words(__name__, self.name, str(self._run_dir), str(self._lease.epoch))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the training process, which then says how it ended
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def report(self, report: StepReport) -> None:
        """The mirror reads the report from metrics.jsonl, and notices after a rewind that it is another file; here its lines are
        passed on."""
        assert self._process is not None, "report before open"
        self._relay(self._process)

    def close(self, exit_code: int | None) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdout is not None
        for mirror in self._beside or (self,):  # all of them end while the first is waited for
            mirror.tell(exit_code)
        try:
            process.wait(max(0.0, self._close_by_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._has_ended = True
            late = f"not finished after {self._close_timeout_s:.0f} s, ended"
            self._say(f"{self.name}: {late}{TRACKERS[self.name].advise(self._run_dir)}")
        self._relay(process)
        process.stdout.close()

    def tell(self, exit_code: int | None) -> None:
        """Tell the mirror that the run ends; waits for nothing, and is repeated without effect."""
        if self._process is None or self._close_by_s < math.inf:
            return
        assert self._process.stdin is not None
        self._close_by_s = time.monotonic() + self._close_timeout_s
        with suppress(BrokenPipeError):  # the mirror has ended; why is relayed by `close`
            self._process.stdin.write(f"{EXIT_RESUME if exit_code is None else exit_code}\n".encode())
            self._process.stdin.close()

    def _relay(self, process: subprocess.Popen[bytes]) -> None:
        """Print the mirror's lines since the last call, and once that it died; never waits."""
        if self._has_ended:
            return
        assert process.stdout is not None
        exit_code = process.poll()
        said = process.stdout.read() or b""  # None: nothing there now
        for line in said.decode(errors="replace").splitlines():
            self._say(line)
        if exit_code is not None:
            self._has_ended = True
            if exit_code not in (EXIT_DONE, _EXIT_SAID_WHY):
                self._say(f"{self.name}: the mirror died ({exit_code}), training goes on; see {self._log}")


def mirror(tracker: str, run_dir: Path, said_by_parent: IO[str], lease: Lease) -> None:
    """Send every record of metrics.jsonl that the tracker does not have yet, until the training process ends. Raises LeaseLost
    once another start sends its own."""
    lease.check()
    info = load_run_info(run_dir)
    if tracker not in TRACKERS:
        import_plugins(info.config["plugins"])
    curve = MirroredRun(TRACKERS[tracker], info, run_dir)
    exit_code, folder, has_room = None, run_dir / tracker, True
    while exit_code is None:
        # Asked before reading, so that what was written before the end is read after it.
        exit_code = _read_exit_code(said_by_parent, POLL_S)
        curve.send(lease)
        # wandb silently drops records that it cannot write; it has another folder where it could not make this one.
        if has_room and folder.is_dir() and shutil.disk_usage(folder).free < LEAST_ROOM_BYTES:
            has_room = False
            say(f"{tracker}: no room at {folder}: what it shows may have gaps; {METRICS_FILE} has all")
    curve.finish(EXIT_DONE if exit_code in (EXIT_DONE, EXIT_RESUME) else exit_code)


class MirroredRun:
    """The curve that has the records of metrics.jsonl; after a rewind another one begins."""

    def __init__(self, kind: type[Tracker], info: RunInfo, run_dir: Path) -> None:
        self._kind, self._info, self._run_dir = kind, info, run_dir
        self._open(max(map(rewinds_of, read_records(run_dir / METRICS_FILE, last=1)), default=0))

    def send(self, lease: Lease) -> None:
        """Send every record that the tracker does not have yet. Raises LeaseLost once another start sends its own."""
        lease.check()
        while (rewinds := self._send_new()) is not None:
            self._tracker.close(EXIT_DONE, is_rewound=True)
            self._open(rewinds)
        self._tracker.look()

    def finish(self, exit_code: int) -> None:
        """Send the run's report, and end the curve."""
        self._save(LAST_FILES)
        self._tracker.close(exit_code)

    def _save(self, names: Sequence[str]) -> None:
        for file in (self._run_dir / name for name in names):
            if file.is_file():
                self._tracker.save(file)

    def _open(self, rewinds: int) -> None:
        self._rewinds = rewinds
        name = name_curve(self._info.run_id, rewinds)
        self._tracker = self._kind()
        self._sent = self._tracker.open(self._info, self._run_dir, name)
        self._save(FIRST_FILES)
        self._records = NewRecords(self._run_dir / METRICS_FILE)

    def _send_new(self) -> int | None:
        """Send new records. Returns the number of rewinds at a rewind that this curve does not have; None once all are
        sent."""
        for record in self._records.read():
            if rewinds_of(record) > self._rewinds:
                return rewinds_of(record)
            if record["step"] > self._sent:
                self._sent = record["step"]
                self._tracker.log(self._sent, chart_values(record))
        return None


def chart_values(record: dict[str, Any]) -> dict[str, float]:
    """A record as flat charts: metrics that were not measured are absent, axes and ranks are `traffic/dp/bytes`,
    `.../3`."""
    values = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "unix_s"}
    for group, name in GROUPS.items():
        values |= {f"{group}/{each}": value for each, value in (record.get(name) or {}).items()}
    for axis, counts in record.get("traffic", {}).items():
        values |= {f"traffic/{axis}/{what}": count for what, count in counts.items()}
    values |= _chart_imbalance(record.get("expert_imbalance") or {})
    if record.get("skipped_samples"):
        values["skipped_samples"] = sum(stop - first for first, stop in record["skipped_samples"])
    rates = record.get("tokens_per_s_per_rank", [])
    if 0 < len(rates) <= MAX_RANKS_CHARTED:
        values |= {f"tokens_per_s_per_rank/{rank}": rate for rank, rate in enumerate(rates)}
    elif rates:
        values |= {"tokens_per_s_per_rank/slowest": min(rates), "tokens_per_s_per_rank/fastest": max(rates)}
    return values


def _chart_imbalance(by_layer: dict[str, float]) -> dict[str, float]:
    """The largest imbalance of each group of neighbouring layers, by the names of its first and its last."""
    layers = list(by_layer)
    size = -(-len(layers) // MAX_LAYER_GROUPS) or 1
    groups = [layers[start : start + size] for start in range(0, len(layers), size)]
    names = [group[0] if len(group) == 1 else f"{group[0]}-{group[-1].rpartition('.')[2]}" for group in groups]
    return {
        f"expert_imbalance/{name}": max(by_layer[layer] for layer in group)
        for name, group in zip(names, groups, strict=True)
    }


class NewRecords:
    """Follows a metrics file, also where another one takes its place: the loop goes back, and records are cut off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")

    def read(self) -> Iterator[dict[str, Any]]:
        """The records written since the last call; of a file that is new all of them. A line that is still being written is
        left for the next call."""
        yield from self._read_lines()
        with suppress(FileNotFoundError):
            if self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
                self._file.close()
                self._file = self._path.open("rb")
                yield from self._read_lines()

    def _read_lines(self) -> Iterator[dict[str, Any]]:
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(start)
                return
            record = decode(line.decode("utf-8", errors="replace"))
            if record is not None:
                yield record


def _read_exit_code(said_by_parent: IO[str], timeout_s: float) -> int | None:
    """The training process's exit code; None while it lives."""
    if not select.select([said_by_parent], [], [], timeout_s)[0]:
        return None
    text = said_by_parent.readline().strip()
    return int(text) if text else _EXIT_KILLED


def _end_late(said_by_parent: IO[str]) -> None:
    """In a thread: end this mirror if it hangs behind the end of the training process, which can then end it no more."""
    select.select([said_by_parent], [], [])
    time.sleep(ALONE_S)
    print(f"the training process ended {ALONE_S:.0f} s ago: this mirror ends unfinished", file=sys.stderr, flush=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main(tracker: str, run_dir: Path, lease: Lease) -> int:
    """Run the mirror's process, which leads a group of its own. It ends when its stdin does, not by signals: a scheduler sends
    those to every process of a job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_late, args=(sys.stdin,), daemon=True).start()
    try:
        mirror(tracker, run_dir, sys.stdin, lease)
    except LeaseLost:
        # wandb's service, of this session, would end the run that another mirror goes on with.
        os.killpg(os.getpid(), signal.SIGKILL)
    except Exception as error:  # a tracker may raise anything; the user gets one line, the log file all of it
        traceback.print_exc()
        say(f"{tracker}: failed, training goes on: {first_line_of(error)}")
        return _EXIT_SAID_WHY
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Lease(Path(sys.argv[2]), int(sys.argv[3]))))
