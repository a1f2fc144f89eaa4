"""The run directory: one folder per run with all that it leaves behind, and one process at a time that may launch it.

Besides the paths of `RunDirectory` a run has in its folder:

    lock            held by the launching process, in a job by rank 0; its text names the holder
    lock.ranks      held by every rank, so that a launch notices ranks which outlived their launcher
    lease           the epoch of the run, which every start raises, and who took it: framework/lease.py
    .epoch-N/       where the start of epoch N makes files before they get their names; also in checkpoints/
    request-save, request-stop  written by `meshwright save` and `stop`, read by rank 0
    lineage.json    the starts that trained the steps which the run goes on from; copies of other starts are not used
    checkpoints.json  the step that was committed last: a run that has saved never starts over by itself
    run.json        {"xxh3": HASH OF ALL ELSE, "id": ..., "created": ..., "birth": ..., "launches": [...],
                    "recipe": {KEY: VALUE}, "tokenizer": HASH}: the run's birth, its launches with the software of each, and what
                    a launch has written into the folder (identity.py)
    ...             files of observers: metrics, report, curves

Training reads only the birth of run.json and the values that are compared, so a run with a damaged record may go on: the next
launch makes it anew. The launches before are lost then, which is printed.
"""

import fcntl
import json
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

import xxhash

from framework.checkpoint.storage import CHECKPOINTS, checkpoints_of
from framework.errors import LeaseLost, RunError, RunInUse
from framework.files import PRIVATE, try_lock, write_file
from framework.launch.places import explain_errors
from framework.lease import Holder, Lease, read_lease, take
from framework.monitor.progress import SAVE_FILE, STOP_FILE
from framework.object_store import Place
from framework.recipe.schema import Run

# The key of run.json's hash of all else.
SEAL = "xxh3"
# SLURM says that the holder has ended, and its lock is still held: after this time the run is taken from it.
TAKE_OVER_AFTER_S = 10.0
# Time for ranks that are about to end, before SLURM is asked about them.
PATIENCE_S = 2.0


class HolderState(Enum):
    """Whether the current holder of a run still lives, as far as the next one can tell."""

    OVER = "over"
    LIVES = "lives"
    UNKNOWN = "unknown"


Judge = Callable[[Holder, Holder], HolderState]


def describe_self(job: str = "", restart: int = 0, step: int = 0) -> Holder:
    """This process as the holder of a lease."""
    return Holder(socket.gethostname(), os.getpid(), now(), job, restart, step)


class RunDirectory:
    """Paths of one run. Nothing is opened or held by the object itself."""

    def __init__(self, path: Path) -> None:
        self.path, self.id = path, path.name
        self.recipe = path / "recipe.yaml"  # which every rank, resume and requeue reads
        self.record = path / "run.json"  # the run's id, birth and launches
        self.exports = path / "exports"  # folders step-N that from_pretrained loads, of checkpoint.export_every_steps
        self.tokenizer = path / "tokenizer"  # the one that made the tokens; an export gets a copy
        self.pretrained = path / "pretrained"  # the config and small files of model.weights, which an export gets
        self.log = path / "log"  # one error file per failed rank and launch
        self.error = path / "error.txt"  # of the newest launch on this machine, if it has failed
        self.job_log = path / "job.log"  # output of a submitted run's jobs, one after another
        self.script = path / "slurm" / "job.sh"  # that sbatch got
        self.history = path / "slurm" / "history"  # a line for each start and end of a job's ranks, by the script
        self.jobs = path / "slurm" / "jobs"  # the ids of the newest submission's jobs, a chain
        self.code = path / "code"  # the package as it was submitted, which every start imports

    @property
    def checkpoints(self) -> Place:
        """Folders step-N: here, behind a link, or in the object store that `checkpoints.url` names."""
        return checkpoints_of(self.path)

    @property
    def keys(self) -> Run:
        """The keys of the recipe that name this run."""
        return Run(root=str(self.path.parent), id=self.id)

    @property
    def members(self) -> list[str]:
        """The ids of the runs of a sweep, which lie beside its folder; none for a run."""
        return list(self.last_launch.get("runs", []))

    @property
    def has_trained(self) -> bool:
        """Whether a rank has left a step or a checkpoint. A run that has not may begin anew under another recipe."""
        metrics = self.path / "metrics.jsonl"
        has_saved = any((self.path / CHECKPOINTS).glob("step-*")) or (self.path / "checkpoints.json").exists()
        return has_saved or (metrics.exists() and metrics.stat().st_size > 0)

    @classmethod
    def create(cls, root: Path, run_id: str | None, name: str) -> "RunDirectory":
        """A directory for a new run: `root/run_id`, or the first free `root/name-NNN` after the last one taken.

        Safe against others who do the same at the same time. Raises RunError where it cannot be made or is not ours.
        """
        with explain_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            run = cls(_claim_next(root, name) if run_id is None else root / run_id)
            if run_id is not None:
                run.path.mkdir(exist_ok=True)
                if any(run.path.iterdir()) and not run.record.exists():
                    raise RunError(f"{run.path} is not empty and not a run: choose another run.id or run.root")
            if not run.record.exists():
                write_record(run.record, first_record(run.id))
        return run

    @staticmethod
    def next_id(root: Path, name: str) -> str:
        """The id that `create` would give a run without one, if nobody else takes it first."""
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        taken = [int(m[1]) for each in names if (m := re.fullmatch(re.escape(name) + r"-(\d+)", each))]
        return f"{name}-{1 + max(taken, default=0):03d}"

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """An existing run. Raises RunError, with the runs beside it, when there is none at `path`."""
        run = cls(path)
        if not run.recipe.is_file():
            where = path if path.is_dir() and not run.record.exists() else path.parent
            beside = ", ".join(each.id for each in list_runs(where)) or "none"
            raise RunError(f"{path} is not a run (it has no recipe.yaml). Runs there: {beside}")
        return run

    # --- who has the run

    @contextmanager
    def lock(self, refuse: Callable[[], object] = lambda: None) -> Iterator[Lease]:
        """Hold the run against every other launcher, and take its lease. Released when the process ends, however it ends.
        Requests of the meantime (`request-stop`) are removed with it.

        refuse: raises what speaks against the start, under the lock and before the epoch is raised: a new epoch would end a
        start that runs. It may do what comes before a lease.
        Raises RunError while another process holds the run, or while ranks of a launcher that died still run.
        """
        me = describe_self()
        with ExitStack() as stack:
            with explain_errors(self.path):
                self._lock_at_once(stack, me)
                former = self._find_requests()  # for a launcher that was killed; later ones are for this start
            refuse()
            with explain_errors(self.path):
                lease = self._take(stack, me)
                self._forget(lease, former)
                stack.callback(lambda: self._forget(lease, self._find_requests()))
            held = stack.pop_all()
        with held:
            yield lease

    @contextmanager
    def hold(self, within_s: float, me: Holder, began_at: int, judge: Judge) -> Iterator[Lease]:
        """Lock and lease of rank 0 of a job, taken once an earlier start's ranks have let go of the lock.

        me: this start. began_at: the epoch that the run had when this process began. judge: asked about the holder of the lease
        while the lock is not free. A holder that is over loses the run after `TAKE_OVER_AFTER_S`: a frozen process keeps its
        lock on its own node, and NFSv3 keeps that of a lost node until it boots; the lease keeps it from writing if it wakes
        up. For one that lives nobody waits: RunError. Raises RunInUse when nobody lets go within `within_s` seconds, LeaseLost
        where another start has taken the run since this process began: what this process has read is older.
        """
        asked_s = time.monotonic()
        with explain_errors(self.path), ExitStack() as stack:
            while (file := self._try_lock(stack)) is None:
                self._refuse_overtaken(me, began_at)
                waited_s, holder = time.monotonic() - asked_s, read_lease(self.path)[1]
                state = HolderState.UNKNOWN if holder is None or waited_s < PATIENCE_S else judge(holder, me)
                if holder and state is HolderState.OVER and waited_s > TAKE_OVER_AFTER_S:
                    file = self._replace_lock(stack, holder)
                    break
                if state is HolderState.LIVES:
                    raise RunError(f"{self.path} is in use by {self._read_lock()}: this job is one too many, and ends")
                if waited_s > within_s:
                    raise RunInUse(f"{self.path} is still in use by {self._read_lock()}.{self._if_dead()}")
                time.sleep(0.2 if waited_s < PATIENCE_S else 1.0)
            self._refuse_overtaken(me, began_at)
            _name_holder(file, me)
            lease = self._take(stack, me)
            held = stack.pop_all()
        with held:
            yield lease

    @contextmanager
    def attend(self) -> Iterator[None]:
        """Hold `lock.ranks`, as each rank does while it runs; any number of ranks at once."""
        with explain_errors(self.path):
            file = open(self.path / "lock.ranks", "a+")  # noqa: SIM115
            fcntl.flock(file, fcntl.LOCK_SH)
        with file:
            yield

    def find_holder(self) -> str | None:
        """The holder of the lock, `process PID on HOST since WHEN`; None if nobody has it."""
        path = self.path / "lock"
        if not path.is_file():
            return None
        with open(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip()
        return None

    def _find_requests(self) -> frozenset[tuple[Path, int]]:
        """Files of requests to the run, and when each was written last, in ns."""
        found = []
        for path in (self.path / SAVE_FILE, self.path / STOP_FILE):
            with suppress(FileNotFoundError):
                found.append((path, path.stat().st_mtime_ns))
        return frozenset(found)

    def _forget(self, lease: Lease, asked: frozenset[tuple[Path, int]]) -> None:
        """Remove requests, unless they were written again since: `meshwright stop` waits for that. After a lost lease they are
        for others."""
        with suppress(LeaseLost):
            for path, _ in asked & self._find_requests():
                lease.remove(path)

    def _try_lock(self, stack: ExitStack) -> TextIO | None:
        """The file `lock`, locked; None while another process has it."""
        file = open(self.path / "lock", "a+")  # noqa: SIM115
        # A start that takes a run over replaces the file: the one locked here may have lost its name meanwhile.
        if try_lock(file) and _is_at(file, self.path / "lock"):
            return stack.enter_context(file)
        file.close()
        return None

    def _replace_lock(self, stack: ExitStack, holder: Holder) -> TextIO:
        """A new file `lock`, locked, in the place of that of a holder which is over: its lock is then on a file without a
        name. Only one start of a job may do this at a time, and SLURM runs one."""
        print(
            f"{self.path}: its holder, {holder.describe()}, has not let go of it though it is over; taken over",
            file=sys.stderr,
            flush=True,
        )
        made = self.path / f"lock.{os.getpid()}"
        file = stack.enter_context(open(made, "a+"))  # noqa: SIM115
        assert try_lock(file), f"{made} is new"
        made.replace(self.path / "lock")
        return file

    def _lock_at_once(self, stack: ExitStack, me: Holder) -> None:
        """Have the lock until the stack ends. Raises RunError where others have the run."""
        file = self._try_lock(stack)
        if file is None:
            raise RunError(f"{self.path} is in use by {self._read_lock()}: wait for it, or stop it.{self._if_dead()}")
        with open(self.path / "lock.ranks", "a+") as ranks:
            if not try_lock(ranks):
                raise RunError(
                    f"{self.path} is in use by ranks whose launching process is gone: they save and end by"
                    f" themselves; try again in a while.{self._if_dead()}"
                )
        _name_holder(file, me)

    def _take(self, stack: ExitStack, me: Holder) -> Lease:
        """The lease, for the process that has the lock; given back on exit."""
        lease = take(self.path, me)
        stack.callback(lease.release)
        return lease

    def _refuse_overtaken(self, me: Holder, began_at: int) -> None:
        epoch, holder = read_lease(self.path)
        if holder is not None and (epoch != began_at or me.is_older_start(holder)):
            raise LeaseLost(
                f"{self.path} was taken by {holder.describe()} since this process began, which was frozen or cut off, or is one"
                " too many. It has written nothing, and ends"
            )

    def _read_lock(self) -> str:
        with suppress(OSError):
            return (self.path / "lock").read_text().strip() or "another process"
        return "another process"

    def _if_dead(self) -> str:
        """Advice on the lock of a process that is gone, which a server of locks may keep."""
        files = " ".join(shlex.quote(str(self.path / name)) for name in ("lock", "lock.ranks"))
        return (
            f" Should it be dead and its lock have stayed: rm -f {files}; if it lives after all it writes nothing more"
        )

    # --- run.json

    @property
    def last_launch(self) -> dict[str, Any]:
        """The newest launch of run.json; nothing where there is none. RunError where the record is damaged."""
        launches = self.read_record()["launches"] if self.record.is_file() else []
        return launches[-1] if launches else {}

    def read_record(self) -> dict[str, Any]:
        """The content of run.json. RunError where it was cut or changed."""
        with explain_errors(self.path):
            return _read_record(self.record)

    def find_record(self) -> dict[str, Any]:
        """The content of run.json; nothing where it is gone or damaged, for callers that can do without."""
        with explain_errors(self.path), suppress(FileNotFoundError, RunError):
            return _read_record(self.record)
        return {}

    def note_launch(
        self,
        overrides: list[str],
        changes: dict[str, Any],
        lease: Lease | None = None,
        recipe: Mapping[str, Any] | None = None,
        tokenizer: str | None = None,
        **more: Any,
    ) -> None:
        """Add a launch to run.json: the overrides, the keys that they changed, and `more` of it, such as the job's id.
        lease: None for a run of a sweep, whose job may have begun: ranks do not write this file. recipe, tokenizer: the run's
        (identity.py), None where they stay."""
        record = self.find_record()
        if not record:
            print(f"{self.record} was gone or damaged, and is made anew without earlier launches", file=sys.stderr)
            record = first_record(self.id)
        launch = {"time": now(), "host": socket.gethostname(), "overrides": overrides, "changes": changes, **more}
        record["launches"].append(launch)
        record |= {name: value for name, value in (("recipe", recipe), ("tokenizer", tokenizer)) if value is not None}
        with explain_errors(self.path), lease.replacing(self.record) if lease else nullcontext(self.record) as made:
            write_record(made, record)


def list_runs(root: Path) -> list[RunDirectory]:
    """The runs in a folder that have a recipe, by name."""
    return [RunDirectory(path.parent) for path in sorted(root.glob("*/recipe.yaml"))]


def find_run(name: str) -> Path:
    """The run directory that a user names: a folder, or a run's id in the default folder of runs."""
    folder = Path(name)
    return folder if folder.exists() or len(folder.parts) > 1 else Path(Run().root) / name


def _claim_next(root: Path, name: str) -> Path:
    while True:
        path = root / RunDirectory.next_id(root, name)
        with suppress(FileExistsError):
            path.mkdir()
            return path


def _name_holder(file: TextIO, me: Holder) -> None:
    """Write the holder's name into the lock."""
    file.truncate(0)
    file.write(me.describe())
    file.flush()


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def first_record(run_id: str) -> dict[str, Any]:
    """The record of a run that nobody has launched. birth: a name that no run before it has had and that sorts behind theirs:
    nanoseconds of the clock, and chance."""
    birth = f"{time.time_ns():016x}-{os.urandom(4).hex()}"
    return {"id": run_id, "created": now(), "birth": birth, "launches": []}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write run.json. Its hash shows a changed value as surely as a cut file."""
    text = json.dumps({SEAL: _hash(record), **record}, indent=2)
    write_file(path, f"{text}\n".encode(), PRIVATE)


def _read_record(path: Path) -> dict[str, Any]:
    """The values of run.json. RunError where they are not as they were written; those of an earlier version have no hash."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        seal = values.pop(SEAL, None)
        is_whole = isinstance(values["launches"], list) and seal in (None, _hash(values))
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise RunError(
            f"{path} was cut or changed after it was written: who has launched the run, and its jobs, cannot be read. A resume on"
            " this machine makes it anew. Else see that no job of the run waits or runs, and remove the file"
        )
    return values


def now() -> str:
    """The time as people read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _hash(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
