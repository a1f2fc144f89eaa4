"""wandb as a mirror of metrics.jsonl, in a process of its own.

The observer in the training process starts `python -m framework.track.wandb RUN_DIR` and never talks to wandb: the mirror
reads `run_info.json` and follows `metrics.jsonl`. So a slow, hanging or raising wandb costs training nothing, the file is
the spool for however long the network is away, and a mirror that hangs at the end can be ended. Two pipes join them:

    stdin   the training process writes its exit code; closed without one, it was killed
    stdout  lines for the user: where the run is, or why it is not there

One run is one wandb run: its id is the run's id, a resume continues it. Charts are drawn against our `step`.
"""

import os
import select
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

from framework.errors import EXIT_DONE, EXIT_RESUME
from framework.track.jsonl import METRICS_FILE, decode
from framework.track.report import RunInfo, StepReport, load_run_info

LOG_FILE = "wandb.log"
INIT_TIMEOUT_S = 30.0
POLL_S = 0.5
# Beyond so many ranks one chart per rank is unreadable: wandb gets the slowest and the fastest, metrics.jsonl has all.
MAX_RANKS_CHARTED = 64
# Charts of the imbalance of experts: one of each group of layers.
MAX_LAYER_GROUPS = 8

_EXIT_SAID_WHY = 1
_EXIT_KILLED = 1


class WandbObserver:
    """Starts the mirror, relays what it says, and ends it. Only `close` waits for wandb, and for `close_timeout_s`."""

    def __init__(self, run_dir: Path, say: Callable[[str], None], close_timeout_s: float = 60.0):
        self._run_dir = run_dir
        self._say = say
        self._close_timeout_s = close_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def open(self, run: RunInfo) -> None:
        with (self._run_dir / LOG_FILE).open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "framework.track.wandb", str(self._run_dir)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the training process, which then says how it ended
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def report(self, report: StepReport) -> None:
        """The mirror reads the report from metrics.jsonl; here its lines are passed on."""
        assert self._process is not None, "report before open"
        self._relay(self._process)

    def rewind(self, step: int) -> None:
        """The mirror notices that metrics.jsonl is another file."""

    def close(self, exit_code: int) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(f"{exit_code}\n".encode())
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
        """Pass on what the mirror has said since the last call, and once that it died; never waits."""
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


def mirror(run_dir: Path, said_by_parent: IO[str]) -> None:
    """Send every record of metrics.jsonl after the run's `start_step` to wandb until the training process ends."""
    info = load_run_info(run_dir)
    run = _start(info, run_dir)
    next_step = run.step
    exit_code = None
    with closing(Follower(run_dir / METRICS_FILE)) as metrics:
        while exit_code is None:
            # Asked before reading, so that what was written before the end is read after it.
            exit_code = _read_exit_code(said_by_parent, POLL_S)
            for record in metrics.new_records():
                if record["step"] > info.start_step:
                    # wandb drops values for a step before its own newest, which it may have from steps that were lost.
                    next_step = max(next_step, record["step"])
                    run.log(chart_values(record), step=next_step, commit=True)
                    next_step += 1
    run.finish(exit_code=EXIT_DONE if exit_code in (EXIT_DONE, EXIT_RESUME) else exit_code)


def write_sync(run_dir: Path) -> str:
    """The command that uploads all segments of a run: each start has one, wandb uploads those of one run in their order."""
    return f"wandb sync {shlex.quote(str((run_dir / 'wandb').absolute()))}/*run-*"


def chart_values(record: dict[str, Any]) -> dict[str, float]:
    """One record as wandb's flat charts: what is not measured is absent, axes and ranks are `traffic/dp/bytes`, `.../3`."""
    values = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "unix_s"}
    values |= {f"validation_loss/{name}": loss for name, loss in (record.get("validation_losses") or {}).items()}
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


def _start(info: RunInfo, run_dir: Path) -> Any:
    """The wandb run, online where that is asked for and possible, else offline: nothing is lost either way."""
    import wandb

    wanted = info.config["track"]["wandb"]
    arguments = {
        "id": info.run_id,
        "name": info.run_id,
        "project": wanted["project"],
        "group": wanted["group"],
        "tags": wanted["tags"],
        "dir": str(run_dir),
        "config": {**info.config, "world": info.world, "device": info.device, "num_parameters": info.num_parameters},
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


def _has_key(wandb: Any) -> bool:
    """Is there an API key where wandb looks for one (its environment variable, netrc, its settings)?"""
    try:
        return bool(wandb.login(verify=False))
    except wandb.errors.UsageError:  # no key, and stdin is no terminal to ask for one
        return False


def _say(line: str) -> None:
    """One line to the training process; it may be gone, which is no reason to lose what it has written."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def _in_a_line(error: Exception) -> str:
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


class Follower:
    """Reads metrics.jsonl as it grows, also past a rewind, which puts a shorter file in its place."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("rb")
        self._newest_s = 0.0  # of the records so far, by their clock

    def new_records(self) -> Iterator[dict[str, Any]]:
        """The records written since the last call."""
        yield from self._read(known_s=0.0)
        if os.stat(self._path).st_ino != os.fstat(self._file.fileno()).st_ino:
            self.close()
            self._file = self._path.open("rb")
            yield from self._read(known_s=self._newest_s)

    def close(self) -> None:
        self._file.close()

    def _read(self, known_s: float) -> Iterator[dict[str, Any]]:
        for record in _new_records(self._file):
            if record["unix_s"] > known_s:
                self._newest_s = record["unix_s"]
                yield record


def _new_records(metrics: IO[bytes]) -> Iterator[dict[str, Any]]:
    """The records written since the last call; a line that is still being written is left for the next."""
    while True:
        start = metrics.tell()
        line = metrics.readline()
        if not line.endswith(b"\n"):
            metrics.seek(start)
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


def main(run_dir: Path) -> int:
    """The mirror's process. Ends when its stdin does, not by signals: a scheduler sends those to every process of a job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        mirror(run_dir, sys.stdin)
    except Exception as error:  # wandb may raise anything; the user gets one line, the log file all of it
        traceback.print_exc()
        _say(f"wandb: failed, training goes on: {_in_a_line(error)}")
        return _EXIT_SAID_WHY
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
