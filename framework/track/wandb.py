"""wandb as a mirror of metrics.jsonl, in a process of its own.

The observer in the training process starts `python -m framework.track.wandb RUN_DIR` and never talks to wandb: the mirror
reads `run_info.json` and follows `metrics.jsonl`. So a slow, hanging or raising wandb costs training nothing, the file is
the spool while the network is away, and a mirror that hangs at the end can be ended. Two pipes join them; before its end the
training process waits for neither:

    stdin   the training process writes its exit code; closed without one, it was killed
    stdout  lines for the user: where the run is, or why it is not there

Its arguments are the run's folder and the epoch of its lease: the mirror of a start that has lost the lease is killed.

One run is one wandb run: its id is the run's id, a resume continues it. Charts are drawn against our `step`, and each step is
sent once: a start sends the records behind the newest step that wandb has. Records of steps that are trained again after a
failure stay as they were sent, and records that a former mirror could not send come now. metrics.jsonl is right about both.

A rewind (train/rewind.py) takes steps back that wandb has, and wandb changes no step that it was given. So the run goes on as
another wandb run, ID-rewound-1, which gets all records of metrics.jsonl from the first one on. The former wandb run gets the tag
`rewound`. The number follows from `rewinds` of the newest record.
"""

import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from framework.errors import EXIT_DONE, EXIT_RESUME, LeaseLost
from framework.lease import Lease
from framework.start import python_words
from framework.track.jsonl import METRICS_FILE, decode, read_records
from framework.track.lines import parse_line
from framework.track.report import Observer, RunInfo, StepReport, load_run_info

LOG_FILE = "wandb.log"
INIT_TIMEOUT_S = 30.0
POLL_S = 0.5
LEAST_ROOM_BYTES = 1 << 20
# The time for which the end of a run waits for wandb; a mirror whose training process was killed ends itself after twice that.
CLOSE_TIMEOUT_S = 60.0
ALONE_S = 2 * CLOSE_TIMEOUT_S
# Beyond so many ranks one chart per rank is unreadable: wandb gets the slowest and the fastest, metrics.jsonl has all.
MAX_RANKS_CHARTED = 64
# The tag of a wandb run whose last steps the run has taken back, and a part of the name of the next one.
TAG_OF_REWOUND = "rewound"
# Charts of the imbalance of experts: one of each group of layers.
MAX_LAYER_GROUPS = 8

_EXIT_SAID_WHY = 1
_EXIT_KILLED = 1


class WandbObserver(Observer):
    """Starts the mirror, relays its lines, and ends it. Only `close` waits for wandb, and for `close_timeout_s`."""

    def __init__(
        self,
        run_dir: Path,
        say: Callable[[str], None],
        close_timeout_s: float = CLOSE_TIMEOUT_S,
        lease: Lease | None = None,
    ):
        self._run_dir, self._lease = run_dir, lease or Lease(run_dir)
        self._say = say
        self._close_timeout_s = close_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def open(self, run: RunInfo) -> None:
        self._lease.check()
        with (self._run_dir / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *python_words(__name__, str(self._run_dir), str(self._lease.epoch))],
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
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{EXIT_RESUME if exit_code is None else exit_code}\n".encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # the mirror has ended; why is relayed below
        try:
            process.wait(self._close_timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._has_ended = True
            late = f"not finished after {self._close_timeout_s:.0f} s, ended"
            self._say(f"wandb: {late}; upload later with: {write_sync(self._run_dir)}")
        self._relay(process)
        process.stdout.close()

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
                self._say(f"wandb: the mirror died ({exit_code}), training goes on; see {self._run_dir / LOG_FILE}")


def mirror(run_dir: Path, said_by_parent: IO[str], lease: Lease) -> None:
    """Send every record of metrics.jsonl that wandb does not have yet until the training process ends. Raises LeaseLost once
    another start sends its own."""
    lease.check()
    curve = MirroredRun(load_run_info(run_dir), run_dir)
    exit_code = None
    has_room = True
    while exit_code is None:
        # Asked before reading, so that what was written before the end is read after it.
        exit_code = _read_exit_code(said_by_parent, POLL_S)
        curve.send(lease)
        # wandb silently drops records that it cannot write.
        if has_room and not _has_room(run_dir / "wandb"):
            has_room = False
            _say(f"wandb: no room at {run_dir / 'wandb'}: what it shows may have gaps; {METRICS_FILE} has all")
    curve.finish(EXIT_DONE if exit_code in (EXIT_DONE, EXIT_RESUME) else exit_code)


class MirroredRun:
    """The wandb run that has the records of metrics.jsonl; after a rewind another one begins."""

    def __init__(self, info: RunInfo, run_dir: Path) -> None:
        self._info, self._run_dir = info, run_dir
        self._open(max(map(_rewinds_of, read_records(run_dir / METRICS_FILE, last=1)), default=0))

    def send(self, lease: Lease) -> None:
        """Send every record that wandb does not have yet. Raises LeaseLost once another start sends its own."""
        lease.check()
        while (rewinds := self._send_new()) is not None:
            self._run.tags = (*(self._run.tags or ()), TAG_OF_REWOUND)
            self.finish(EXIT_DONE)
            self._open(rewinds)

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)

    def _open(self, rewinds: int) -> None:
        self._rewinds = rewinds
        name = f"{self._info.run_id}-{TAG_OF_REWOUND}-{rewinds}" if rewinds else self._info.run_id
        segments = sorted(self._run_dir.glob(f"wandb/*run-*-{name}/*.wandb"), key=lambda path: path.stat().st_mtime)
        self._run = _start(self._info, self._run_dir, name)
        self._sent = self._run.step - 1 if self._run.url else _find_written(segments, self._info.start_step)
        self._records = NewRecords(self._run_dir / METRICS_FILE)

    def _send_new(self) -> int | None:
        """Send new records. Returns the number of rewinds at a rewind that this wandb run does not have; None once all are
        sent."""
        for record in self._records.read():
            if _rewinds_of(record) > self._rewinds:
                return _rewinds_of(record)
            if record["step"] > self._sent:
                self._sent = record["step"]
                self._run.log(chart_values(record), step=self._sent, commit=True)
        return None


def _rewinds_of(record: dict[str, Any]) -> int:
    return int(record.get("rewinds") or 0)


def _has_room(folder: Path) -> bool:
    """Whether wandb can write there; it has another folder where it could not make this one."""
    return not folder.is_dir() or shutil.disk_usage(folder).free >= LEAST_ROOM_BYTES


def _find_written(segments: list[Path], otherwise: int) -> int:
    """The newest step in wandb's files, each of a former start; `otherwise` where wandb cannot read them. The records given to a
    mirror tell less: the last ones of a killed mirror are in no file."""
    for segment in reversed(segments):
        newest = _read_segment(segment)
        if newest is None:
            return otherwise
        if newest:
            return newest
    return 0


def _read_segment(segment: Path) -> int | None:
    """The newest step in a file, by wandb's own reader; 0 without any, None where it cannot be read."""
    command = [sys.executable, *python_words("wandb", "leet", "inspect", "--json", str(segment.parent))]
    newest = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        for line in reader.stdout:
            found = parse_line(line) or {}  # nothing: a record that was torn
            newest = max(newest, found.get("history", {}).get("step", {}).get("num", 0))
    return None if reader.returncode else newest


def write_sync(run_dir: Path) -> str:
    """The command that uploads all segments of a run: each start has one, wandb uploads those of one run in their order."""
    return f"wandb sync {shlex.quote(str((run_dir / 'wandb').absolute()))}/*run-*"


def chart_values(record: dict[str, Any]) -> dict[str, float]:
    """A record as wandb's flat charts: metrics that were not measured are absent, axes and ranks are `traffic/dp/bytes`,
    `.../3`."""
    values = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "unix_s"}
    values |= {f"preference/{name}": mean for name, mean in (record.get("preference") or {}).items()}
    values |= {f"validation_loss/{name}": loss for name, loss in (record.get("validation_losses") or {}).items()}
    values |= {f"eval/{name}": score for name, score in (record.get("scores") or {}).items()}
    for axis, counts in record.get("traffic", {}).items():
        values |= {f"traffic/{axis}/{what}": count for what, count in counts.items()}
    values |= {f"stragglers/{name}": seconds for name, seconds in (record.get("stragglers") or {}).items()}
    values |= {f"goodput/{part}": share for part, share in (record.get("goodput") or {}).items()}
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


def _start(info: RunInfo, run_dir: Path, name: str) -> Any:
    """The wandb run `name`, online where that is asked for and possible, else offline: nothing is lost either way."""
    import wandb

    wanted = info.config["track"]["wandb"]
    arguments = {
        "id": name,
        "name": name,
        "project": wanted["project"],
        "entity": wanted.get("entity"),
        "group": wanted["group"],
        "tags": wanted["tags"],
        "dir": str(run_dir),
        "config": {**info.config, **describe_derived(info)},
        "allow_val_change": True,  # a resume may state more steps
        "resume": "allow",
        "settings": wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            console="off",
            silent=True,
            x_stats_pid=os.getppid(),  # system metrics of the training process, not of the mirror
        ),
    }
    mode, why = wanted["mode"], ""
    run = None
    try:
        if mode == "auto":
            mode = "online" if _has_key(wandb) else "offline"
        run = wandb.init(mode=mode, **arguments)
    except wandb.errors.Error as error:
        if mode == "offline":
            raise
        traceback.print_exc()
        why = f"not reachable ({_in_a_line(error)}), "
        wandb.teardown()  # else the id is still in use by the run that did not start
        run = wandb.init(mode="offline", **arguments)
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    _say(f"wandb: {why}{run.url or f'offline; upload with: {write_sync(run_dir)}'}")
    return run


def describe_derived(info: RunInfo) -> dict[str, Any]:
    """Numbers derived from the recipe, by which runs are grouped and filtered."""
    sizes = {"world": info.world, "accumulation": info.accumulation, "tokens_per_step": info.tokens_per_step}
    own = {"world": info.world, "device": info.device, "num_parameters": info.num_parameters}
    return {**own, "derived": {**info.degrees, **sizes}}


def _has_key(wandb: Any) -> bool:
    """Whether there is an API key where wandb looks for one (its environment variable, netrc, its settings)."""
    try:
        return bool(wandb.login(verify=False))
    except wandb.errors.UsageError:  # no key, and stdin is no terminal to ask for one
        return False


def _say(line: str) -> None:
    """Print a line to the training process, which may be gone: its records are sent all the same."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _in_a_line(error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


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


def main(run_dir: Path, lease: Lease) -> int:
    """Run the mirror's process, which leads a group of its own. It ends when its stdin does, not by signals: a scheduler sends
    those to every process of a job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_late, args=(sys.stdin,), daemon=True).start()
    try:
        mirror(run_dir, sys.stdin, lease)
    except LeaseLost:
        # wandb's service, of this session, would end the run that another mirror goes on with.
        os.killpg(os.getpid(), signal.SIGKILL)
    except Exception as error:  # wandb may raise anything; the user gets one line, the log file all of it
        traceback.print_exc()
        _say(f"wandb: failed, training goes on: {_in_a_line(error)}")
        return _EXIT_SAID_WHY
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Lease(Path(sys.argv[1]), int(sys.argv[2]))))
