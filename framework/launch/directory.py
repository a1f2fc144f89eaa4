"""The run directory: one folder per run with all that it leaves behind, and one process at a time that may launch it.

runs/quickstart-001/
    recipe.yaml     what every rank, every resume and every requeue reads
    run.json        the run's id and birth, which no other run at this path has, and each launch: when, where, with which
                    overrides, what they changed
    tokenizer/      the one that made the tokens; an export gets a copy
    pretrained/     of model.weights: the config, and small files that an export gets
    lock            held by the launching process, in a job by rank 0; its text names the holder
    lock.ranks      held by every rank, so that a launch notices ranks which outlived their launcher
    lease           the epoch of the run, which every start raises, and who took it: framework/lease.py
    .epoch-N/       where the start of epoch N makes files before they get their names; also in checkpoints/
    checkpoints/    step-N folders; a link, where checkpoint.root names another folder
    checkpoints.url  in its place: where an object store has them, as checkpoint.root says
    exports/        step-N folders that from_pretrained loads, of checkpoint.export_every_steps: export_places.py
    request-save, request-stop  what `meshwright save` and `stop` ask of a run that runs
    lineage.json    which starts have trained the steps that the run goes on from; what nodes hold of others is not theirs
    checkpoints.json  the step that was committed last: a run that has saved never starts over by itself
    log/            one error file per failed rank and launch
    job.log         of a submitted run: what its jobs and ranks say, one after another
    slurm/          job.sh, which is what sbatch got; history, a line for each start and end of the ranks;
                    jobs, the ids of the newest submission: a chain
    code/           the package as it was submitted, which every start imports
    ...             and what observers write: metrics, report, curves

Where run.root is a URL this is the working folder of the run, and remote.py says what else is in it.
"""

import fcntl
import os
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from framework.checkpoint.storage import CHECKPOINTS, POINTER, ObjectPath, Place, checkpoints_of, open_place, read
from framework.errors import LeaseLost, RunError, RunInUse
from framework.files import PRIVATE, write_file
from framework.launch.places import explain_errors
from framework.launch.record import begin_anew, first_record, now, read_record, write_record
from framework.launch.remote import RemoteRun, locate
from framework.lease import Holder, Lease, read_lease, take
from framework.recipe.schema import Run
from framework.train.faults import SAVE_FILE, STOP_FILE

# A holder that is over, by the word of SLURM, may take so long to let go of its lock before it loses the run.
TAKE_OVER_AFTER_S = 10.0
# Ranks that end just now have so long before anybody asks who they are.
PATIENCE_S = 2.0


class Verdict(Enum):
    """What is known of the holder of a run by who wants it next."""

    OVER = "over"
    LIVES = "lives"
    UNKNOWN = "unknown"


Judge = Callable[[Holder, Holder], Verdict]


def describe_self(job: str = "", restart: int = 0, step: int = 0) -> Holder:
    """This process as the holder of a lease."""
    return Holder(socket.gethostname(), os.getpid(), now(), job, restart, step)


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
    def checkpoints(self) -> Place:
        return checkpoints_of(self.path)

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def pretrained(self) -> Path:
        return self.path / "pretrained"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def script(self) -> Path:
        return self.path / "slurm" / "job.sh"

    @property
    def jobs(self) -> Path:
        return self.path / "slurm" / "jobs"

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
    def keys(self) -> Run:
        """The keys of the recipe that name this run."""
        remote = RemoteRun.of(self.path)
        if remote is None:
            return Run(root=str(self.path.parent), id=self.id)
        root, folder = remote.url.parent, self.path.absolute().parent
        depth = len(locate(root, "/").parts) - 1
        return Run(
            root=str(root), work=None if folder == locate(root, None) else str(folder.parents[depth - 1]), id=self.id
        )

    @property
    def members(self) -> list[str]:
        """The ids of the runs of a sweep, which lie beside its folder; none for a run."""
        launches = self.read_record()["launches"] if self.record.is_file() else []
        return list(launches[-1].get("runs", [])) if launches else []

    @property
    def has_trained(self) -> bool:
        """Whether a rank has left a step or a checkpoint: what has not may be begun anew under another recipe."""
        metrics = self.path / "metrics.jsonl"
        has_saved = any((self.path / CHECKPOINTS).glob("step-*")) or (self.path / "checkpoints.json").exists()
        return has_saved or (metrics.exists() and metrics.stat().st_size > 0)

    @classmethod
    def create(cls, root: Path, run_id: str | None, name: str, url: ObjectPath | None = None) -> "RunDirectory":
        """A directory for a new run: `root/run_id`, or the first free `root/name-NNN` after the last one taken. url: that of the
        runs for which `root` has the working folders.

        Safe against others who do the same at the same time. Raises RunError where it cannot be made or is not ours.
        """
        with explain_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            run = cls(_claim_next(root, name, url)) if run_id is None else cls(root / run_id)
            if run_id is not None:
                run.path.mkdir(exist_ok=True)
                if any(run.path.iterdir()) and not run.record.exists():
                    raise RunError(f"{run.path} is not empty and not a run: choose another run.id or run.root")
            if not run.record.exists():
                write_record(run.record, first_record(run.id))
            if url is not None:
                RemoteRun.make(run.path, url / run.id)
        return run

    @staticmethod
    def next_id(root: Path, name: str, url: ObjectPath | None = None) -> str:
        """The id that `create` would give a run without one, if nobody else takes it first."""
        return f"{name}-{_next_number(root, name, url):03d}"

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
    def lock(self, refuse: Callable[[], object] = lambda: None) -> Iterator[Lease]:
        """Hold the run against every other launcher, and take its lease. Released when the process ends, however it ends. What is
        asked of the run meanwhile (`request-stop`) is forgotten with it.

        refuse: raises what speaks against that, under the lock and before the epoch is raised: that would end a start which runs.
        It may do what comes before a lease. A run in a store has the newest files then.
        Raises RunError while another process holds it, or while ranks of a launcher that died still run.
        """
        me, remote = describe_self(), RemoteRun.of(self.path)
        with ExitStack() as stack:
            with explain_errors(self.path):
                self._lock_at_once(stack, me)
                # Of a launcher that was killed. What is asked from here on is asked of this one.
                former = self._find_requests()
                newest = 0 if remote is None else remote.find_free()
                if remote is not None:
                    remote.refresh()
            refuse()
            with explain_errors(self.path):
                lease = self._take(stack, me, remote, newest)
                self._forget(lease, former)
                stack.callback(lambda: self._forget(lease, self._find_requests()))
            held = stack.pop_all()
        with held:
            yield lease

    @contextmanager
    def hold(self, within_s: float, me: Holder, began_at: int, judge: Judge) -> Iterator[Lease]:
        """What rank 0 of a job holds: the lock and the lease, taken once an earlier start's ranks have let go of the lock.

        me: this start. began_at: the epoch that the run had when this process began. judge: of the holder of the lease, while the
        lock is not free. One that is over loses the run after `TAKE_OVER_AFTER_S`: a frozen process keeps its lock on its own
        node, and NFSv3 keeps that of a lost node until it boots; the lease keeps it from writing if it wakes up. One that lives
        is not waited for: RunError. Raises RunInUse when nobody lets go within `within_s` seconds, LeaseLost where another start
        has taken the run since this process began, RunError where the run has gone on in another working folder: what this
        process has read is older.
        """
        asked_s = time.monotonic()
        with explain_errors(self.path), ExitStack() as stack:
            while (file := self._try_lock(stack)) is None:
                self._refuse_overtaken(me, began_at)
                waited_s, holder = time.monotonic() - asked_s, read_lease(self.path)[1]
                verdict = Verdict.UNKNOWN if holder is None or waited_s < PATIENCE_S else judge(holder, me)
                if holder and verdict is Verdict.OVER and waited_s > TAKE_OVER_AFTER_S:
                    file = self._replace_lock(stack, holder)
                    break
                if verdict is Verdict.LIVES:
                    raise RunError(f"{self.path} is in use by {self._read_lock()}: this job is one too many, and ends")
                if waited_s > within_s:
                    raise RunInUse(f"{self.path} is still in use by {self._read_lock()}.{self._if_dead()}")
                time.sleep(0.2 if waited_s < PATIENCE_S else 1.0)
            self._refuse_overtaken(me, began_at)
            _name_holder(file, me)
            remote = RemoteRun.of(self.path)
            newest = 0 if remote is None else remote.find_free()
            if remote is not None:
                remote.refuse_moved()
            lease = self._take(stack, me, remote, newest)
            self.upload(lease)
            held = stack.pop_all()
        with held:
            yield lease

    def upload(self, lease: Lease) -> None:
        """Put the run's files into its store, if it has one: before ranks train under this lease, all must be there."""
        if (remote := RemoteRun.of(self.path)) is not None:
            remote.push(lease)

    def refresh(self) -> None:
        """Fetch what the run's store has and this folder has not. Nothing is fetched while the run is held here."""
        if (remote := RemoteRun.of(self.path)) is None:
            return
        with explain_errors(self.path), ExitStack() as stack:
            if (file := self._try_lock(stack)) is not None:
                _name_holder(file, describe_self())
                remote.refresh()

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

    def _find_requests(self) -> frozenset[tuple[Path, int]]:
        """What is asked of the run now: files, and when each was asked for last, in ns."""
        found = []
        for path in (self.path / SAVE_FILE, self.path / STOP_FILE):
            with suppress(FileNotFoundError):
                found.append((path, path.stat().st_mtime_ns))
        return frozenset(found)

    def _forget(self, lease: Lease, asked: frozenset[tuple[Path, int]]) -> None:
        """Take away what was asked of the run, and was not asked again since: `meshwright stop` waits for that. Who has lost the
        lease leaves it to others."""
        with suppress(LeaseLost):
            for path, _ in asked & self._find_requests():
                lease.remove(path)

    def read_record(self) -> dict[str, Any]:
        """The content of run.json. RunError where it was cut or changed."""
        with explain_errors(self.path):
            return read_record(self.record)

    def find_record(self) -> dict[str, Any]:
        """The content of run.json; nothing where it is gone or damaged, for those who can do without."""
        with explain_errors(self.path), suppress(FileNotFoundError, RunError):
            return read_record(self.record)
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
        lease: None for a run of a sweep, whose job may have begun: ranks do not write this file. recipe, tokenizer: of the run
        (identity.py), None where they stay."""
        record = self.find_record() or begin_anew(self.record)
        launch = {"time": now(), "host": socket.gethostname(), "overrides": overrides, "changes": changes, **more}
        record["launches"].append(launch)
        record |= {name: value for name, value in (("recipe", recipe), ("tokenizer", tokenizer)) if value is not None}
        with explain_errors(self.path), lease.replacing(self.record) if lease else nullcontext(self.record) as made:
            write_record(made, record)

    def _try_lock(self, stack: ExitStack) -> TextIO | None:
        """The file `lock`, locked; None while another process has it."""
        file = open(self.path / "lock", "a+")  # noqa: SIM115
        # Who takes a run over replaces the file: what was locked meanwhile may be the one that has lost its name.
        if _flock(file) and _is_at(file, self.path / "lock"):
            return stack.enter_context(file)
        file.close()
        return None

    def _replace_lock(self, stack: ExitStack, holder: Holder) -> TextIO:
        """A new file `lock`, locked, in the place of that of a holder which is over: its lock is then one of a file without a
        name. Only one start of a job may do this at a time, and SLURM runs one."""
        print(
            f"{self.path}: its holder, {holder.describe()}, has not let go of it though it is over; taken over",
            file=sys.stderr,
            flush=True,
        )
        made = self.path / f"lock.{os.getpid()}"
        file = stack.enter_context(open(made, "a+"))  # noqa: SIM115
        assert _flock(file), f"{made} is new"
        made.replace(self.path / "lock")
        return file

    def _lock_at_once(self, stack: ExitStack, me: Holder) -> None:
        """Have the lock until the stack ends. Raises RunError where others have the run."""
        file = self._try_lock(stack)
        if file is None:
            raise RunError(f"{self.path} is in use by {self._read_lock()}: wait for it, or stop it.{self._if_dead()}")
        with open(self.path / "lock.ranks", "a+") as ranks:
            if not _flock(ranks):
                raise RunError(
                    f"{self.path} is in use by ranks whose launching process is gone: they save and end by"
                    f" themselves; try again in a while.{self._if_dead()}"
                )
        _name_holder(file, me)

    def _take(self, stack: ExitStack, me: Holder, remote: RemoteRun | None, newest: int) -> Lease:
        """The lease for who has the lock; given back on exit. Of a run in a store the claim there as well, behind `newest`."""
        lease = take(self.path, me, above=newest)
        stack.callback(lease.release)
        if remote is not None:
            stack.enter_context(remote.hold(lease, me, newest))
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
        """What to do about the lock of a process that is gone, which a server of locks may keep."""
        files = " ".join(shlex.quote(str(self.path / name)) for name in ("lock", "lock.ranks"))
        return (
            f" Should it be dead and its lock have stayed: rm -f {files}; if it lives after all it writes nothing more"
        )


def place_checkpoints(run: RunDirectory, root: str | None) -> None:
    """Note in a new run's folder where its checkpoints lie, as checkpoint.root says: a link to a folder, or a file with a URL.
    Before anybody takes its lease, which has a workplace there. Raises RunError where it has checkpoints elsewhere."""
    link, pointer = run.path / CHECKPOINTS, run.path / POINTER
    if run.has_trained:
        return
    remote = RemoteRun.of(run.path)
    place = None if root is None else open_place(root)
    with explain_errors(link):
        pointer.unlink(missing_ok=True)
        if link.is_symlink():
            link.unlink()
        if place is None and remote is not None:
            write_file(pointer, f"{remote.url / CHECKPOINTS}\n".encode(), PRIVATE)
        elif isinstance(place, ObjectPath):
            write_file(pointer, f"{place / run.id}\n".encode(), PRIVATE)
        elif place is not None:
            target = place.expanduser().absolute() / run.id
            target.mkdir(parents=True, exist_ok=True)
            if link.is_dir():
                link.rmdir()
            link.symlink_to(target)


def _claim_next(root: Path, name: str, url: ObjectPath | None) -> Path:
    for number in count(_next_number(root, name, url)):
        path = root / f"{name}-{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("count() does not end")


def _next_number(root: Path, name: str, url: ObjectPath | None) -> int:
    names = [path.name for path in root.iterdir()] if root.is_dir() else []
    names += [] if url is None else read(url.list, url)
    return 1 + max((int(m[1]) for each in names if (m := re.fullmatch(re.escape(name) + r"-(\d+)", each))), default=0)


def _name_holder(file: TextIO, me: Holder) -> None:
    """Write into the lock who has it."""
    file.truncate(0)
    file.write(me.describe())
    file.flush()


def _flock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: TextIO, path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
