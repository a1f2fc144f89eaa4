"""A run whose `run.root` is a URL: its files in an object store, and the working folder that its processes use meanwhile.

    s3://bucket/runs/RUN-ID/
        start-00000007-3fa9c2d1/    the files of the run, as its newest start, 7, has put them
            .start.json             that start's record: who it is, how often it was heard of, which files there are
            recipe.yaml ...         each put as a whole
        checkpoints/                object_folder.py

    WORK/s3/bucket/runs/RUN-ID/     the working folder: a run directory as any other (directory.py), and
        run.url                     where the run lies
        .folder                     the name of this folder, 3fa9c2d1, which no other has
        .start-7.json               the record of start 7 that was put last from here; lock.record-7 is held meanwhile

Processes of a run write into the working folder, with its locks and its lease. Who holds the lock puts what has changed,
every `BEAT_S` behind training; rank 0 does so once more before it commits a checkpoint. So the store has the lines of a step
before it has the checkpoint that makes it final; what it has beyond the newest checkpoint a resume drops, as it does on a
disk. One process puts files at a time, with lock.upload-7; beats do not wait for it, so a start with a slow upload, or with a
rank that hangs in one, is heard of.

**Fencing.** A start puts only below the name of its own epoch and folder, so a stale one overwrites nothing of a newer one.
It begins with a claim: it puts its record, without files, then lists. Where it sees another record of its epoch, or a higher
one, it takes its own away and refuses: of two starts at once at least the one that listed later sees the other. Nothing is
asked of a store but that an object is put as a whole, and is listed and read from then on. What a start reads is the newest
record that has files, which is put once all of them are there. So a crash leaves the former start's files or the new one's,
never a mix.

A start that another one has overtaken notices when it next puts, and takes the lease of its own folder away from its ranks:
they end as they do where another start took the run on the same disk. Whether the newest start lives is not asked of clocks:
its record changes with each beat, and who wants the run watches it for `HELD_S`.
"""

import fcntl
import json
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from framework.checkpoint.storage import (
    CHECKPOINTS,
    POINTER,
    ObjectPath,
    error_text,
    open_place,
    read,
    retry,
    storage_error,
)
from framework.errors import CheckpointError, LeaseLost, MeshwrightError, RunError
from framework.files import PRIVATE, write_file
from framework.lease import LEASE_FILE, Holder, Lease, take
from framework.recipe.place_rules import RUN_ROOT
from framework.train.faults import SAVE_FILE, STOP_FILE
from framework.train.ranks_file import RANKS_FILE

URL_FILE, FOLDER_FILE, RECORD = "run.url", ".folder", ".start.json"
START = re.compile(r"start-(\d+)-([0-9a-f]+)")
# What stays in the working folder: what has its own way to the store, is made again, or is of this machine's processes.
FOLDERS_HERE = (CHECKPOINTS, "exports", "export", "code", "wandb")
FILES_HERE = (URL_FILE, LEASE_FILE, RANKS_FILE, SAVE_FILE, STOP_FILE)

# A start is heard of so often, and thought dead once it was not for so long.
BEAT_S, HELD_S = 10.0, 35.0
# Of the time, uploads between checkpoints take at most so much.
UPLOAD_SHARE = 0.05

Files = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Start:
    """The record of a start. place: HOST:FOLDER. files: (bytes, mtime in ns) by name; None until all of them are there."""

    epoch: int
    folder: str
    holder: Holder
    place: str
    beats: int = 0
    has_ended: bool = False
    files: Files | None = None

    @property
    def name(self) -> str:
        return f"start-{self.epoch:08d}-{self.folder}"

    def describe(self) -> str:
        return f"{self.holder.describe()}, in {self.place}"

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def decode_start(data: bytes, path: object) -> Start:
    """The record at `path`. Raises CheckpointError where it is none, or names a file outside of the run."""
    try:
        values: dict[str, Any] = json.loads(data)
        files = values.pop("files")
        holder = Holder(**values.pop("holder"))
        found = (
            None if files is None else {str(name): (int(size), int(time_ns)) for name, (size, time_ns) in files.items()}
        )
        start = Start(holder=holder, files=found, **values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path} is no record of a start: {error}") from error
    for name in start.files or ():
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{path} names a file outside of the run: {name!r}")
    return start


def locate(root: ObjectPath, work: str | None) -> Path:
    """The folder of the working folders of the runs below a URL. work: run.work."""
    protocol, _, rest = root.url.partition("://")
    parts = (quote(part, safe=" +=@,") for part in rest.split("/") if part)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    base = Path(cache, "meshwright", "runs") if work is None else Path(work).expanduser().absolute()
    return Path(base, protocol, *(part.replace("..", "%2E%2E") for part in parts))


@dataclass(frozen=True)
class RemoteRun:
    """The run at `url`, and its working folder. Nothing is open or held by the object itself, and any process of the run may
    make one.

    Its methods raise StorageError, or OSError, where the store fails.
    """

    folder: Path
    url: ObjectPath

    @classmethod
    def of(cls, folder: Path) -> "RemoteRun | None":
        """That of a run directory, None for a run that lies on a disk."""
        pointer = folder / URL_FILE
        try:
            place = open_place(read(pointer.read_text, pointer).strip(), folder, RUN_ROOT)
        except FileNotFoundError:
            return None
        assert isinstance(place, ObjectPath), f"{pointer} has no URL"
        return cls(folder, place)

    @classmethod
    def make(cls, folder: Path, url: ObjectPath) -> "RemoteRun":
        """Make `folder` the working folder of the run at `url`, if it is not."""
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / FOLDER_FILE).exists():
            _write(folder / FOLDER_FILE, os.urandom(4).hex().encode())
        if not (folder / POINTER).exists() and not (folder / CHECKPOINTS).exists():
            _write(folder / POINTER, f"{url / CHECKPOINTS}\n".encode())
        _write(folder / URL_FILE, f"{url}\n".encode())
        return cls(folder, replace(url, run=folder))

    @property
    def folder_name(self) -> str:
        return read((self.folder / FOLDER_FILE).read_text, self.folder / FOLDER_FILE).strip()

    # --- who has the run

    def list_starts(self, above: int = 0) -> list[Start]:
        """The records of epochs above this one, oldest first."""
        names = sorted(name for name, epoch in self._epochs().items() if epoch > above)
        return [start for name in names if (start := self._read(name)) is not None]

    def find_free(self, sleep: Callable[[float], None] = time.sleep) -> int:
        """The newest epoch in the store, 0 for none. Raises RunError while its start lives; one of another folder that did
        not say that it ended is watched. That of this folder is over: who asks has the folder's lock."""
        starts, newest = self.list_starts(), max(self._epochs().values(), default=0)
        watched = [s for s in starts if s.epoch == newest and not s.has_ended and s.folder != self.folder_name]
        if watched:
            _say(f"{self.url}: is {watched[0].describe()} over? It has not said so; watching it for {HELD_S:.0f} s")
        until = time.monotonic() + HELD_S
        while watched and time.monotonic() < until:
            sleep(min(1.0, HELD_S / 10))
            now = {start.name: self._read(start.name) for start in watched}
            for start in watched:
                found = now[start.name]
                if found is not None and found.beats != start.beats and not found.has_ended:
                    raise RunError(
                        f"{self.url} is in use by {start.describe()}, which was heard of just now: wait for it, or stop it there"
                    )
            watched = [start for start in watched if (found := now[start.name]) is not None and not found.has_ended]
        for start in watched:
            _say(f"{self.url}: nothing was heard of {start.describe()} for {HELD_S:.0f} s; taken over")
        return newest

    def refuse_moved(self) -> None:
        """Raises RunError where the run has gone on in another folder: for a process that has read the recipe of this one."""
        newest = self._find_newest()
        if newest is not None and newest.folder != self.folder_name:
            raise RunError(
                f"{self.url} has gone on elsewhere since this job was submitted, as {newest.describe()}: submit it again"
            )

    def claim(self, lease: Lease, me: Holder, newest: int) -> None:
        """Begin a start of this epoch, which comes after that of epoch `newest`. Raises RunError where another one has begun
        since: what this one has read of the run may be older."""
        start = Start(lease.epoch, self.folder_name, me, f"{me.host}:{self.folder}")
        for names in (".start-*.json", "lock.upload-*", "lock.record-*"):
            for left in self.folder.glob(names):
                left.unlink(missing_ok=True)  # of former starts
        self._put(start)
        rivals = [each for each in self.list_starts(newest) if each.name != start.name]
        if rivals:
            self._withdraw(start)
            raise RunError(
                f"{self.url} was taken by {rivals[-1].describe()} at the same moment: this start ends, ask again"
            )

    def check(self, lease: Lease) -> None:
        """Raises LeaseLost where a newer start has the run; the lease of this folder is then lost to all processes here."""
        newer = self.list_starts(lease.epoch)
        if newer:
            take(self.folder, newer[-1].holder, above=newer[-1].epoch - 1).release()
        lease.check()

    # --- files

    def fetch(self, start: Start) -> None:
        """Make the files of this folder those of a start. For who has the folder's lock. Raises FileNotFoundError where a
        newer start has removed them."""
        files = start.files or {}
        found = self._scan()
        for name, (size, time_ns) in files.items():
            if found.get(name) != (size, time_ns):
                source = self.url / start.name / name
                data = read(source.read_bytes, source)
                # One that was put after its record was: it is whole, and newer than the record says.
                _write(self.folder / name, data, time_ns if len(data) == size else 0)
        for name in found.keys() - files.keys():
            (self.folder / name).unlink(missing_ok=True)

    def refresh(self) -> bool:
        """Fetch what the store has that this folder has not; whether the store has the run. For who has the folder's lock."""
        for _ in range(3):
            newest = self._find_newest()
            if newest is None or newest.folder == self.folder_name:
                return newest is not None
            with suppress(FileNotFoundError):
                self.fetch(newest)
                return True
        raise RunError(f"{self.url} changes hands just now: ask again")

    def _find_newest(self) -> Start | None:
        """The start whose files are those of the run."""
        return next((start for start in reversed(self.list_starts()) if start.files is not None), None)

    def push(self, lease: Lease, has_ended: bool = False) -> None:
        """Put what has changed, then the record. Any process of the start may; they wait for one another. Raises LeaseLost
        where a newer start has the run."""
        with self._locked(f"lock.upload-{lease.epoch}"):
            self.check(lease)
            with self._own(lease) as own:
                files = dict(own.files or {})
            found = self._scan()
            for name, status in found.items():
                if files.get(name) == status:
                    continue
                if (data := _read_start(self.folder / name, status[0])) is None:
                    continue  # gone since
                _put(self.url / own.name / name, data)
                files[name] = status
            for name in files.keys() - found.keys():
                del files[name]
            with self._own(lease) as own:
                self._put(replace(own, beats=own.beats + 1, has_ended=has_ended, files=files))
            if own.files is None:
                self._remove_older(own)

    @contextmanager
    def hold(self, lease: Lease, me: Holder, newest: int) -> Iterator[None]:
        """Have the run while this lasts: what changes of its files is put behind it, last when it ends. For who has the lock of
        the folder, a lease above `newest`, which `find_free` has told, and the files that the run had then."""
        self.claim(lease, me, newest)
        try:
            with _repeating(self._beat_on, lease), _repeating(self._push_on, lease):
                yield
        except BaseException:
            self._give_back(lease)
            raise
        self._push_last(lease)

    def _push_last(self, lease: Lease) -> None:
        with _repeating(self._beat_on, lease):
            self.push(lease, has_ended=True)

    def _beat_on(self, lease: Lease, ended: threading.Event) -> None:
        """In a thread of its own, so that it waits for no upload. What fails is tried again at the next beat."""
        while not ended.wait(BEAT_S):
            try:
                self.check(lease)
                with self._own(lease) as own:
                    self._put(replace(own, beats=own.beats + 1))
            except LeaseLost:
                return  # of which the ranks hear by the lease
            except (OSError, MeshwrightError):
                continue  # of which `_push_on` speaks

    def _push_on(self, lease: Lease, ended: threading.Event) -> None:
        """In a thread. What fails is said, and tried again at the next beat: it stops no step."""
        upload_at, has_failed = 0.0, False
        while not ended.wait(BEAT_S):
            began = time.monotonic()
            try:
                if began < upload_at or not self._has_files(lease):
                    continue
                self.push(lease)
                upload_at = began + (time.monotonic() - began) / UPLOAD_SHARE
                if has_failed:
                    _say(f"{self.url}: the run's files are put there again")
                has_failed = False
            except LeaseLost:
                return  # of which the ranks hear by the lease
            except (OSError, MeshwrightError) as error:
                if not has_failed:
                    _say(f"{self.url}: the run's files could not be put there; training goes on, tried again: {error}")
                has_failed = True

    def _has_files(self, lease: Lease) -> bool:
        with self._own(lease) as own:
            return own.files is not None

    def _give_back(self, lease: Lease) -> None:
        """The start ends by an error: put what there is. One that has put nothing leaves nothing."""
        try:
            with self._own(lease) as own:
                pass
            if own.files is None:
                self._withdraw(own)
            else:
                self._push_last(lease)
        except LeaseLost:
            return
        except (OSError, MeshwrightError) as error:
            _say(f"{self.url}: the last files of this start could not be put there; they are in {self.folder}: {error}")

    # --- the store and the folder

    @contextmanager
    def _own(self, lease: Lease) -> Iterator[Start]:
        """The record of this start, which no other process of it changes meanwhile. Lock and record are of its epoch: a former
        start may be frozen while it has its own, and would keep this one waiting, or replace its record when it thaws."""
        path = self._record_of(lease.epoch)
        with self._locked(f"lock.record-{lease.epoch}"):
            try:
                own = decode_start(path.read_bytes(), path)
            except FileNotFoundError as error:
                lease.check()
                raise LeaseLost(
                    f"{self.folder} was taken by another start: this process writes nothing more, and ends"
                ) from error
            yield own

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Alone among processes and threads that have this lock's name."""
        with open(self.folder / name, "a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _record_of(self, epoch: int) -> Path:
        """The record that the start of an epoch has put last from this folder."""
        return self.folder / f".start-{epoch}.json"

    def _put(self, start: Start) -> None:
        _put(self.url / start.name / RECORD, start.encode())
        _write(self._record_of(start.epoch), start.encode())

    def _read(self, name: str) -> Start | None:
        path = self.url / name / RECORD
        try:
            return decode_start(read(path.read_bytes, path), path)
        except FileNotFoundError:
            return None  # what a stale start has left of itself, or just removed

    def _epochs(self) -> dict[str, int]:
        try:
            names = read(self.url.list, self.url)
        except FileNotFoundError:
            return {}
        return {name: int(found[1]) for name in names if (found := START.fullmatch(name))}

    def _withdraw(self, start: Start) -> None:
        """Leave no trace of a start that has put nothing but its claim."""
        try:
            (self.url / start.name).remove_all()
        except OSError as error:
            _say(f"the claim of a start that ends cannot be removed, {self.url / start.name}: {error}")

    def _remove_older(self, own: Start) -> None:
        """What former starts have put is here as well, since the record of this one has files."""
        for name, epoch in self._epochs().items():
            if epoch < own.epoch:
                try:
                    (self.url / name).remove_all()
                except OSError as error:
                    _say(f"the files of an older start cannot be removed, {self.url / name}: {error}")

    def _scan(self) -> dict[str, tuple[int, int]]:
        """Size and time of what of this folder belongs into the store, by name."""
        found = {}
        for folder, folders, names in os.walk(self.folder):
            is_top = Path(folder) == self.folder
            hidden = FOLDERS_HERE if is_top else ()
            folders[:] = [name for name in folders if not name.startswith(".") and name not in hidden]
            for name in names:
                if (
                    (is_top and (name in FILES_HERE or name.startswith("lock")))
                    or name.startswith(".")
                    or name.endswith(".tmp")
                ):
                    continue
                path = Path(folder) / name
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        found[path.relative_to(self.folder).as_posix()] = (status.st_size, status.st_mtime_ns)
        if found and self._has_own_checkpoints():
            found.pop(POINTER, None)  # follows from where the run lies
        return found

    def _has_own_checkpoints(self) -> bool:
        with suppress(FileNotFoundError):
            return (self.folder / POINTER).read_text().strip() == str(self.url / CHECKPOINTS)
        return False


@contextmanager
def _repeating(work: Callable[[Lease, threading.Event], None], lease: Lease) -> Iterator[None]:
    """A thread that does `work` while this lasts, until the event is set."""
    ended = threading.Event()
    thread = threading.Thread(target=work, args=(lease, ended), name=work.__name__, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_start(path: Path, num_bytes: int) -> bytes | None:
    """So many bytes of a file to which lines may be added just now; None where it is gone."""
    try:
        with open(path, "rb") as file:
            return file.read(num_bytes)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, "read", path) from error


def _put(path: ObjectPath, data: bytes) -> None:
    """Raises RunError for what only the user can mend, else StorageError."""
    try:
        retry(lambda: path.write_bytes(data), "write", path)
    except OSError as error:
        raise RunError(
            f"{RUN_ROOT}: {path} cannot be written ({error_text(error)}): is the bucket there, and may you write there?"
        ) from error


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _write(path: Path, data: bytes, time_ns: int | None = None) -> None:
    """A file that is whole or not there, and that only the user reads: a recipe may have values of launch.environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data, PRIVATE)
    if time_ns is not None:
        os.utime(path, ns=(time_ns, time_ns))
