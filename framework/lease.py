"""The lease of a run directory: which start of a run may write into it, and what keeps all former starts out.

A lock says who holds a run, but not to a process that was frozen: its node is thought dead, a lock server has taken its lock
away, another start trains on, and then the process wakes up in the middle of a write. So each start raises the *epoch*:

    RUN/lease                   JSON: the epoch, and who took it; replaced as a whole
    RUN/.epoch-N/               workplace of epoch N: files are made here and renamed to their names
    RUN/checkpoints/.epoch-N/   the same for checkpoints

    take     mkdir RUN/.epoch-N, which one process alone can do; write `lease`; rename all older workplaces away
    check    read `lease`: is it still mine?
    publish  rename RUN/.epoch-N/x to RUN/x

The check makes a stale process end with a message. It is no fence, for a process may be frozen between it and the write. The
fence is the workplace: nobody but `take` makes it, and once it was renamed away, a rename out of it or into it fails. The file
system decides, in one operation, which came first; what was published before is seen by the newer epoch, which looks at the
run only after `take`. Lines are added to files that the newer epoch has replaced by then: a stale descriptor is of a file
without a name.

`lease` is opened by its name for each check, not asked for by `stat`: NFS promises to show at `open` what others have closed
before, while attributes may be old by a minute. No clock matters; `since` is for people.
"""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from framework.errors import LeaseLost
from framework.files import create_file, sync

LEASE_FILE = "lease"
WORKPLACE = ".epoch-"
# Folders of a run in which files are made to be renamed. Checkpoints have their own, since it may be a link to another disk, to
# which nothing can be renamed.
FOLDERS = (".", "checkpoints")
# Suffix of evidence: damaged checkpoints that a former epoch was renaming to this name stay.
EVIDENCE = ".bad"


@dataclass(frozen=True)
class Holder:
    """The process that took an epoch. job, restart, step: SLURM's, whose starts of one job are ordered by (restart, step)."""

    host: str
    pid: int
    since: str
    job: str = ""
    restart: int = 0
    step: int = 0

    def describe(self) -> str:
        """`process PID on HOST since WHEN (job 4, restart 1)`."""
        job = f" (job {self.job}, restart {self.restart})" if self.job else ""
        return f"process {self.pid} on {self.host} since {self.since}{job}"

    def is_older_start(self, other: "Holder") -> bool:
        """Whether SLURM has started `other` after this one, as the same job: it does so once it takes this one for ended."""
        return bool(self.job) and self.job == other.job and self._order < other._order

    @property
    def _order(self) -> tuple[int, int]:
        return self.restart, self.step


@dataclass(frozen=True)
class Lease:
    """The right of one start to write into `run`. epoch 0: a folder that nobody launches, such as a test's."""

    run: Path
    epoch: int = 0

    def check(self) -> None:
        """Raises LeaseLost where another start has taken the run since. Costs an open and a read of some 150 bytes."""
        epoch, holder = read_lease(self.run)
        if epoch != self.epoch:
            raise LeaseLost(self._explain(holder))

    def workplace(self, folder: Path | None = None) -> Path:
        """The folder in which files for `folder` (None: the run's own) are made before they are published. Raises LeaseLost."""
        self.check()
        path = self._place(folder or self.run)
        if self.epoch == 0:
            path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def replacing(self, path: Path, folder: Path | None = None) -> Iterator[Path]:
        """Make a file or a folder anew at the path that this yields; on exit it takes the place of `path`, which must be on the
        file system of `folder`, and the new name is durable. Raises LeaseLost; then `path` is as it was."""
        made = self.workplace(folder) / path.name
        discard(made)
        try:
            yield made
            if made.is_dir() and path.is_dir():
                self.remove(path, folder)
            self.publish(made, path)
            sync(path.parent)
        except BaseException as error:
            discard(made)
            if isinstance(error, FileNotFoundError):
                self.refuse_fenced(made.parent)
            raise
        finally:
            self.tidy(folder)

    def write(self, path: Path, content: bytes) -> None:
        """Write a file whole and durably, or leave what was there."""
        with self.replacing(path) as made:
            create_file(made, content)

    def publish(self, made: Path, path: Path) -> None:
        """Rename what was made in a workplace. Raises LeaseLost where the workplace was taken away."""
        try:
            made.replace(path)
        except FileNotFoundError:
            self.refuse_fenced(made.parent)
            raise

    def remove(self, path: Path, folder: Path | None = None) -> None:
        """Take a file or folder of the run away, if it is there. Raises LeaseLost; then it is as it was."""
        gone = self.withdraw(path, f"{path.name}.gone", folder)
        if gone is not None:
            discard(gone)
            self.tidy(folder)

    def withdraw(self, path: Path, name: str, folder: Path | None = None) -> Path | None:
        """Rename `path` into the workplace of `folder`, under `name`; its path there, None if it was gone. Raises LeaseLost."""
        place = self.workplace(folder)
        discard(place / name)
        try:
            return path.rename(place / name)
        except FileNotFoundError:
            self.refuse_fenced(place)
            return None

    def refuse_fenced(self, place: Path) -> None:
        """Raises LeaseLost where a workplace is no longer this epoch's."""
        self.check()
        if self.epoch and not place.is_dir():
            raise LeaseLost(self._explain(None))

    def tidy(self, folder: Path | None = None) -> None:
        """Remove the workplace of a folder without a lease."""
        if self.epoch == 0:
            with suppress(OSError):
                self._place(folder or self.run).rmdir()

    def release(self) -> None:
        """Remove the workplaces: nobody writes any more under this lease."""
        for name in FOLDERS if self.epoch else ():
            with suppress(OSError):  # a process that was killed has left something; the next start clears it
                self._place(self.run / name).rmdir()
                (self.run / name).rmdir()  # where there are no checkpoints; a run itself is never empty

    def _place(self, folder: Path) -> Path:
        return folder / f"{WORKPLACE}{self.epoch}"

    def _explain(self, holder: Holder | None) -> str:
        now = f"by {holder.describe()}" if holder else "by another process"
        return (
            f"{self.run} was taken over {now}: this process, of epoch {self.epoch}, was frozen or cut off and was held for dead."
            " It writes nothing more there and ends. The run goes on in the other one: start nothing again"
        )


def read_lease(run: Path) -> tuple[int, Holder | None]:
    """The epoch of a run and its holder; (0, None) where nobody ever took it, epoch -1 where the file cannot be understood."""
    try:
        with open(run / LEASE_FILE) as file:
            text = file.read()
    except FileNotFoundError:
        return 0, None
    try:
        values = json.loads(text)
        return values.pop("epoch"), Holder(**values)
    except (ValueError, TypeError, KeyError, AttributeError):
        return -1, None


def take(run: Path, holder: Holder) -> Lease:
    """Raise the epoch of a run, and fence all former ones. For the holder of the run's lock, as far as there are locks.

    When it returns, nobody of a former epoch can change a name in the run any more. Raises OSError where the file system fails.
    """
    for name in FOLDERS:
        refuse_lost_link(run / name)
        (run / name).mkdir(exist_ok=True)
    lease = _claim(run)
    text = json.dumps({"epoch": lease.epoch, **asdict(holder)}) + "\n"
    _write_lease(lease, text)
    for name in FOLDERS:
        _fence_older(run / name, lease)
    if read_lease(run)[0] != lease.epoch:  # of one who took a lower epoch at the same time, and can no more do so now
        _write_lease(lease, text)
    lease.check()
    return lease


def refuse_lost_link(folder: Path) -> None:
    """OSError where a folder of a run is a link to one that is not there: its disk is not mounted, which is no empty folder."""
    if folder.is_symlink() and not folder.is_dir():
        text = f"it is a link to {os.readlink(folder)}, which is not there: is its disk mounted?"
        raise OSError(errno.ESTALE, text, str(folder))


def discard(path: Path) -> None:
    """Remove a file or a folder of a workplace, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def _claim(run: Path) -> Lease:
    """Take an epoch above all former ones by making its workplaces: mkdir makes a folder once."""
    while True:
        epoch = 1 + max(0, read_lease(run)[0], *_epochs_of(run))
        try:
            (run / f"{WORKPLACE}{epoch}").mkdir()
        except FileExistsError:
            continue
        for name in FOLDERS[1:]:
            (run / name / f"{WORKPLACE}{epoch}").mkdir(exist_ok=True)
        return Lease(run, epoch)


def _epochs_of(folder: Path) -> list[int]:
    names = [re.fullmatch(re.escape(WORKPLACE) + r"(\d+)", name) for name in os.listdir(folder)]
    return [int(name[1]) for name in names if name]


def _write_lease(lease: Lease, text: str) -> None:
    made = lease.run / f"{WORKPLACE}{lease.epoch}" / LEASE_FILE
    create_file(made, text.encode())
    made.replace(lease.run / LEASE_FILE)
    sync(lease.run)


def _fence_older(folder: Path, lease: Lease) -> None:
    """Rename the workplaces of all former epochs away, then remove their content."""
    mine = folder / f"{WORKPLACE}{lease.epoch}"
    # All numbers below, and not only those that are listed: a network file system may list a folder as it was a while ago.
    former = {*_epochs_of(folder), *range(max(0, lease.epoch - 8), lease.epoch)}
    for epoch in (each for each in sorted(former) if each < lease.epoch):
        with suppress(FileNotFoundError):
            (folder / f"{WORKPLACE}{epoch}").rename(mine / f"was-{epoch}")
    for left in mine.glob("was-*"):
        for evidence in left.glob(f"*{EVIDENCE}*"):
            if not (folder / evidence.name).exists():
                evidence.rename(folder / evidence.name)
        discard(left)
