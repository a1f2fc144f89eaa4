"""The folder that a run's checkpoints lie in: what is there, and how a checkpoint gets its name and loses it.

`Folder` is what commits, retention, rewinds and resumes ask for. It has two values: `LocalFolder`, of a file system with renames,
and `ObjectFolder` (object_folder.py), of an object store, which has none.
"""

import errno
import json
import os
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from framework.checkpoint.direct import DirectFile
from framework.checkpoint.index import MANIFEST
from framework.checkpoint.place import Place
from framework.checkpoint.storage import read, retry
from framework.errors import CheckpointError, LeaseLost, MeshwrightError
from framework.files import create_file, sync
from framework.lease import Lease, discard

Fault = Callable[[str], None]

# What the file system and the manifest may need beyond the tensors' bytes.
SPARE_BYTES = 1 << 20
# What a damaged checkpoint, and one behind a rewind, have at the end of their names.
BAD, REWOUND = ".bad", ".rewound"


def no_fault(point: str) -> None:
    """Nothing fails."""


class NewFile(Protocol):
    """A file that is written from first to last. What an error leaves of it nobody reads."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def write(self, view: memoryview) -> None:
        """All of the view."""

    def sync(self) -> None:
        """Durable on return; nothing is written after it."""


class Folder(ABC):
    """The folder `root`. note: the file that says which step was committed last, None for a folder of no run. key: of the recipe,
    which says where the folder is.

    Methods raise OSError where the store fails, LeaseLost where another start has the run. Nothing that they write is what a
    newer start reads: how far that holds is said at each implementation.
    """

    key: str

    def __init__(self, root: Place, note: Path | None) -> None:
        self.root, self.note = root, note

    @abstractmethod
    def list(self) -> Sequence[Place]:
        """The committed checkpoints in any order; whether they are whole is not asked."""

    @abstractmethod
    def list_damaged(self) -> Sequence[str]:
        """The names of what was set aside as damaged."""

    @abstractmethod
    def list_retired(self) -> Sequence[Place]:
        """What rewinds have left."""

    @abstractmethod
    def enter(self, lease: Lease, owner: str) -> None:
        """A start of the run `owner` begins: from here on no older one commits anything. Before checkpoints are looked for."""

    @abstractmethod
    def prepare(self, lease: Lease) -> None:
        """Make the folder, and remove what failed saves have left."""

    @abstractmethod
    def check_room(self, lease: Lease, bytes_needed: int) -> None:
        """Raises CheckpointError where a checkpoint of so many bytes has no room."""

    @abstractmethod
    def begin(self, lease: Lease, step: int) -> Place:
        """Where the files of a new checkpoint are to be written."""

    @abstractmethod
    def create(self, path: Place, num_bytes: int) -> NewFile:
        """A new file of about so many bytes, in the place of what a failed attempt has left."""

    @abstractmethod
    def write(self, path: Place, data: bytes) -> None:
        """Write a small file whole; durable on return."""

    @abstractmethod
    def commit(self, lease: Lease, unfinished: Place, step: int, manifest: str, fault: Fault) -> Place:
        """Write the manifest and give the checkpoint its name, which it has afterwards; durable on return. All other files of
        it are there and durable."""

    @abstractmethod
    def give_up(self, lease: Lease, unfinished: Place) -> None:
        """Remove what a failed save has left. Nothing is raised."""

    @abstractmethod
    def remove(self, lease: Lease, path: Place, fault: Fault) -> None:
        """Remove a checkpoint: its name first, so that a crash leaves no half one."""

    @abstractmethod
    def rename(self, lease: Lease, path: Place, suffix: str) -> Place:
        """Take a checkpoint its name, and keep the rest as evidence; returns where. Raises FileNotFoundError where it is gone."""

    @abstractmethod
    def discard(self, lease: Lease, retired: Place) -> None:
        """Remove what a rewind has left."""

    @abstractmethod
    def amend(self, lease: Lease, path: Place, manifest: str, fault: Fault) -> None:
        """Replace a checkpoint's manifest: it has the old one or the new one, whenever this is cut."""

    @abstractmethod
    def commands_to_start_over(self) -> str:
        """What a user types to have this folder empty."""

    def tidy(self, lease: Lease) -> None:  # noqa: B027 - most have nothing
        """A save has ended."""


class LocalFolder(Folder):
    """A folder of a file system: files are made in the workplace of the lease, and names change by renames out of it and into it,
    which the file system refuses to a start that was fenced. No older start changes a name or a byte."""

    key = "run.root"

    def __init__(self, root: Path) -> None:
        super().__init__(root, root.with_name(f"{root.name}.json"))
        self._root = root

    def list(self) -> Sequence[Path]:
        return [path for path in self._folders() if re.fullmatch(r"step-\d+", path.name)]

    def list_damaged(self) -> Sequence[str]:
        return [path.name for path in self._folders() if re.fullmatch(rf"step-\d+\{BAD}(\.\d+)?", path.name)]

    def list_retired(self) -> Sequence[Path]:
        return [path for path in self._folders() if REWOUND in path.name]

    def enter(self, lease: Lease, owner: str) -> None:
        """The lease has fenced all older starts already."""

    def prepare(self, lease: Lease) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        sync(self._root.parent)
        # Those of a version that had no workplaces as well.
        before_leases = (path for path in self._folders() if ".tmp." in path.name)
        for path in (*lease.workplace(self._root).iterdir(), *before_leases):
            with reported(f"an unfinished checkpoint cannot be removed, {path}"):
                shutil.rmtree(path)

    def check_room(self, lease: Lease, bytes_needed: int) -> None:
        if shutil.disk_usage(self._root).free < bytes_needed + SPARE_BYTES:
            lease.tidy(self._root)
            raise no_room(self._root, bytes_needed)

    def begin(self, lease: Lease, step: int) -> Path:
        unfinished = lease.workplace(self._root) / committed_name(self._root, step).name
        unfinished.mkdir()
        return unfinished

    def create(self, path: Place, num_bytes: int) -> NewFile:
        assert isinstance(path, Path), path
        # After a failed fsync nobody knows which of a file's pages are on the disk.
        path.unlink(missing_ok=True)
        return DirectFile(path)

    def write(self, path: Place, data: bytes) -> None:
        create_file(_local(path), data)

    def commit(self, lease: Lease, unfinished: Place, step: int, manifest: str, fault: Fault) -> Path:
        made, final = _local(unfinished), committed_name(self._root, step)
        retry(lambda: self.write_manifest(made, manifest), "write", made / MANIFEST)
        fault("manifest")
        retry(lambda: self.give_name(lease, made, final), "rename", made)
        fault("renamed")
        retry(lambda: sync(self._root), "sync", self._root)
        return final

    def write_manifest(self, unfinished: Path, manifest: str) -> None:
        """Durable on return, and with it the names of all files. Over what a failed attempt has left."""
        self.write(unfinished / MANIFEST, manifest.encode())
        sync(unfinished)

    def give_name(self, lease: Lease, unfinished: Path, final: Path) -> None:
        """rename(2) onto a folder that is not empty fails, so even a rival cannot be overwritten here."""
        lease.check()
        try:
            unfinished.rename(final)
        except FileNotFoundError:
            # The workplace was taken away: what has the final name then is not ours.
            lease.refuse_fenced(unfinished.parent)
            # A file server that did it and could not say so is asked again.
            if not (final / MANIFEST).exists():
                raise

    def give_up(self, lease: Lease, unfinished: Place) -> None:
        discard(_local(unfinished))
        self.tidy(lease)

    def remove(self, lease: Lease, path: Place, fault: Fault) -> None:
        gone = lease.withdraw(_local(path), path.name, self._root)
        fault("retiring")
        if gone is not None:
            shutil.rmtree(gone)
        fault("retained")

    def rename(self, lease: Lease, path: Place, suffix: str) -> Path:
        """By way of the workplace: once that was taken away, a name may be that of a newer start's checkpoint."""
        target = self._root / f"{path.name}{suffix}"
        number = 0
        while target.exists():
            number += 1
            target = self._root / f"{path.name}{suffix}.{number}"
        withdrawn = lease.withdraw(_local(path), target.name, self._root)
        if withdrawn is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        lease.publish(withdrawn, target)
        self.tidy(lease)
        sync(self._root)
        return target

    def discard(self, lease: Lease, retired: Place) -> None:
        lease.remove(_local(retired), self._root)

    def amend(self, lease: Lease, path: Place, manifest: str, fault: Fault) -> None:
        folder = _local(path)
        with lease.replacing(folder / MANIFEST, self._root) as made:
            self.write(made, manifest.encode())
            fault("amending")
        fault("amended")

    def commands_to_start_over(self) -> str:
        away = [f"mv {shlex.quote(str(self._root))} {shlex.quote(f'{self._root}.lost')}"] if self._root.exists() else []
        return " && ".join([*away, f"rm -f {shlex.quote(str(self.note))}"])

    def tidy(self, lease: Lease) -> None:
        lease.tidy(self._root)

    def _folders(self) -> Sequence[Path]:
        """Folders of checkpoints whole, damaged or unfinished; none where there is no `root`."""

        def scan() -> Sequence[Path]:
            with os.scandir(self._root) as entries:
                return [self._root / each.name for each in entries if each.name.startswith("step-") and each.is_dir()]

        try:
            return read(scan, self._root)
        except FileNotFoundError:
            return []


def committed_name(root: Path, step: int) -> Path:
    """`step-N` in `root`."""
    return root / f"step-{step:08d}"


def write_note(lease: Lease, note: Path, step: int) -> None:
    """Say beside the checkpoints which step was committed last; durable on return."""
    lease.write(note, json.dumps({"committed_step": step}).encode())


def no_room(root: Place, bytes_needed: int) -> CheckpointError:
    """The error of a disk that is too small for a checkpoint of `bytes_needed`."""
    free = "how many are free cannot be found out"
    with suppress(OSError):
        free = f"{shutil.disk_usage(root).free:,} are free" if isinstance(root, Path) else free
    return CheckpointError(
        f"no room for a checkpoint in {root}: it needs {bytes_needed + SPARE_BYTES:,} bytes, {free}."
        f" Former checkpoints are intact. Free space, lower checkpoint.keep, or move run.root to a larger disk"
    )


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Report errors of the file system in this block instead of raising them: a checkpoint is safe already. Not the loss of the
    lease, which ends this process."""
    try:
        yield
    except LeaseLost:
        raise
    except (OSError, MeshwrightError) as error:
        report(f"{what}: {error}")


def report(message: str) -> None:
    """Say what a user must hear even when all goes on."""
    print(message, file=sys.stderr, flush=True)


def _local(path: Place) -> Path:
    assert isinstance(path, Path), path
    return path
