"""The run directory: one folder per run with all that it leaves behind, and one process at a time that may launch it.

runs/quickstart-001/
    recipe.yaml     what every rank, every resume and every requeue reads
    run.json        the run's id, and each launch: when, where, with which overrides, what they changed
    tokenizer/      the one that made the tokens; an export gets a copy
    lock            held by the launching process; its text names the holder
    lock.ranks      held by every rank, so that a launch notices ranks which outlived their launcher
    checkpoints/    step-N folders
    request-save, request-stop  what `meshwright save` and `stop` ask of a run that runs
    lineage.json    which starts have trained the steps that the run goes on from; what nodes hold of others is not theirs
    checkpoints.json  the step that was committed last: a run that has saved never starts over by itself
    log/            one error file per failed rank and launch
    job.log         of a submitted run: what its jobs and ranks say, one after another
    slurm/          job.sh, which is what sbatch got; history, a line for each start and end of the ranks
    code/           the package as it was submitted, which every start imports
    ...             and what observers write: metrics, report, curves
"""

import errno
import fcntl
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from framework.checkpoint.storage import LASTING, storage_error
from framework.errors import RunError, RunInUse
from framework.train.faults import SAVE_FILE, STOP_FILE

# A file system without file locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run. Nothing is opened or held by the object itself."""

    path: Path

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def script(self) -> Path:
        return self.path / "slurm" / "job.sh"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def job_log(self) -> Path:
        return self.path / "job.log"

    @property
    def record(self) -> Path:
        return self.path / "run.json"

    @property
    def has_trained(self) -> bool:
        """Whether a rank has left a step or a checkpoint: what has not may be begun anew under another recipe."""
        metrics = self.path / "metrics.jsonl"
        traces = (self.checkpoints, self.checkpoints.with_name("checkpoints.json"))
        return any(path.exists() for path in traces) or (metrics.exists() and metrics.stat().st_size > 0)

    @classmethod
    def create(cls, root: Path, run_id: str | None, name: str) -> "RunDirectory":
        """A directory for a new run: `root/run_id`, or the first free `root/name-NNN` after the last one taken.

        Safe against others who do the same at the same time. Raises RunError where it cannot be made or is not ours.
        """
        with explain_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            run = cls(_claim_next(root, name)) if run_id is None else cls(root / run_id)
            if run_id is not None:
                run.path.mkdir(exist_ok=True)
                if any(run.path.iterdir()) and not run.record.exists():
                    raise RunError(f"{run.path} is not empty and not a run: choose another run.id or run.root")
            if not run.record.exists():
                _write_json(run.record, {"id": run.id, "created": _now(), "launches": []})
        return run

    @staticmethod
    def next_id(root: Path, name: str) -> str:
        """The id that `create` would give a run without one, if nobody else takes it first."""
        return f"{name}-{_next_number(root, name):03d}"

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """An existing run. Raises RunError, with the runs beside it, when there is none at `path`."""
        run = cls(path)
        if not run.recipe.is_file():
            where = path if path.is_dir() and not run.record.exists() else path.parent
            beside = sorted(each.parent.name for each in where.glob("*/recipe.yaml"))
            raise RunError(f"{path} is not a run (it has no recipe.yaml). Runs there: {', '.join(beside) or 'none'}")
        return run

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run against every other launcher. Released when the process ends, however it ends. What is asked of the run
        meanwhile (`request-stop`) is forgotten with it.

        Raises RunError while another process holds it, or while ranks of a launcher that died still run.
        """
        with explain_errors(self.path), ExitStack() as stack:
            file = stack.enter_context(open(self.path / "lock", "a+"))
            if not _try_lock(file):
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise RunError(f"{self.path} is in use by {holder}: wait for it, or stop it")
            with open(self.path / "lock.ranks", "a+") as ranks:
                if not _try_lock(ranks):
                    raise RunError(
                        f"{self.path} is in use by ranks whose launching process is gone: they save and end by"
                        f" themselves; try again in a while"
                    )
            _name_holder(file)
            self.forget_requests()  # of a launcher that was killed
            stack.callback(self.forget_requests)
            held = stack.pop_all()
        with held:
            yield

    @contextmanager
    def hold(self, within_s: float) -> Iterator[None]:
        """What rank 0 of a job holds: the lock, taken once an earlier start's ranks have let go of it.

        Raises RunInUse when they have not within `within_s` seconds.
        """
        deadline = time.monotonic() + within_s
        with explain_errors(self.path), ExitStack() as stack:
            file = stack.enter_context(open(self.path / "lock", "a+"))
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise RunInUse(f"{self.path} is still in use by {file.read().strip() or 'another process'}")
                time.sleep(0.2)
            _name_holder(file)
            held = stack.pop_all()
        with held:
            yield

    @contextmanager
    def attend(self) -> Iterator[None]:
        """What a rank holds while it runs; any number of ranks at once."""
        with explain_errors(self.path):
            file = open(self.path / "lock.ranks", "a+")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_SH)
        with file:
            yield

    def find_holder(self) -> str | None:
        """Who holds the run, `process PID on HOST since WHEN`; None if nobody does."""
        path = self.path / "lock"
        if not path.is_file():
            return None
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip()
        return None

    def forget_requests(self) -> None:
        """Take away what was asked of the run: `meshwright stop` waits for that."""
        for name in (SAVE_FILE, STOP_FILE):
            (self.path / name).unlink(missing_ok=True)

    def read_record(self) -> dict[str, Any]:
        """The content of run.json."""
        with explain_errors(self.path):
            return json.loads(self.record.read_text())

    def note_launch(self, overrides: list[str], changes: dict[str, Any], **more: Any) -> None:
        """Add a launch to run.json: the overrides, the keys that they changed, and `more` of it, such as the job's id."""
        record = self.read_record()
        launch = {"time": _now(), "host": socket.gethostname(), "overrides": overrides, "changes": changes, **more}
        record["launches"].append(launch)
        with explain_errors(self.path):
            _write_json(self.record, record)


def refuse_unwritable(root: Path) -> None:
    """Raises RunError where no run can be made below `root`. It tries, for what permissions say does not hold on every file
    system, and leaves nothing: data is prepared first, which may take hours."""
    made = [each for each in (root.absolute(), *root.absolute().parents) if not each.exists()]
    place = made[-1].parent if made else root.absolute()
    if not place.is_dir():
        raise RunError(f"run.root={root}: {place} is no folder. Set run.root to a folder of yours")
    with explain_errors(root):
        try:
            root.mkdir(parents=True, exist_ok=True)
            Path(tempfile.mkdtemp(prefix=".try-", dir=root)).rmdir()
        finally:
            for each in made:
                with suppress(OSError):  # another launcher may have made a run there meanwhile
                    each.rmdir()


@contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """What the file system says against writing at `path`: a RunError where only the user can mend it, else a StorageError, for
    a job that an EIO or a stale handle has ended is to be started again."""
    try:
        yield
    except OSError as error:
        place = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(
                f"no room at {place} ({error.strerror}): free space, or set run.root to a larger disk"
            ) from error
        if error.errno in LASTING or error.errno in NO_LOCKS:
            raise RunError(f"cannot write at {place} ({error.strerror}): set run.root to a folder of yours") from error
        raise storage_error(error, "use", Path(place)) from error


def _claim_next(root: Path, name: str) -> Path:
    for number in count(_next_number(root, name)):
        path = root / f"{name}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("count() does not end")


def _next_number(root: Path, name: str) -> int:
    paths = root.iterdir() if root.is_dir() else ()
    return 1 + max(
        (int(m[1]) for path in paths if (m := re.fullmatch(re.escape(name) + r"-(\d+)", path.name))), default=0
    )


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name_holder(file: TextIO) -> None:
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {_now()}")
    file.flush()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_private(path, json.dumps(value, indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Write a file that is whole or not there, and that only the user reads: it may have values of launch.environment."""
    partial = path.with_suffix(".tmp")
    partial.unlink(missing_ok=True)  # of a process that was killed; a file keeps the mode that it was made with
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    os.replace(partial, path)
