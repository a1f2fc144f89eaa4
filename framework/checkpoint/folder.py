"""A run's folder of checkpoints on a file system: its contents, and how a checkpoint gets its name and loses it.

Commits, retention, rewinds and resumes work on a `Folder` (commit.py): a `LocalFolder`, where names change by renames, or an
`ObjectFolder` of an object store, which has none (object_folder.py). Their methods are alike; those of `LocalFolder` say what
each does. They raise OSError if the storage fails, and LeaseLost if another start has the run. What they write never replaces
what a newer start reads.
"""

import errno
import fcntl
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from framework.checkpoint.index import MANIFEST
from framework.errors import CheckpointError, LeaseLost, MeshwrightError
from framework.files import create_file, sync
from framework.lease import Lease, discard
from framework.object_store import Place, read, retry

Fault = Callable[[str], None]

# Bytes that the file system and the manifest may need beyond the tensors.
SPARE_BYTES = 1 << 20
# Suffixes of the names of damaged checkpoints, and of those that a rewind has left.
BAD, REWOUND = ".bad", ".rewound"

# Memory, place and size of a direct write must be multiples of a page, which no disk's blocks exceed.
ALIGNMENT = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS
# Errors of a file system that does not support the flag or a direct write, or of memory that a driver has mapped.
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.EFAULT)


def no_fault(point: str) -> None:
    """Inject no fault."""


class LocalFolder:
    """The folder `root` of a file system. Files are made in the workplace of the lease, and names change by renames out of it and
    into it, which fail for a start that was fenced: no older start changes a name or a byte.

    key: the recipe's key for the place. note: the file that says which step was committed last, None for a folder of no run.
    """

    key = "run.root"

    def __init__(self, root: Path) -> None:
        self.root = root
        self.note: Path | None = root.with_name(f"{root.name}.json")

    def list(self) -> Sequence[Path]:
        """The committed checkpoints in any order, whole or not."""
        return [path for path in self._folders() if re.fullmatch(r"step-\d+", path.name)]

    def list_damaged(self) -> Sequence[str]:
        """The names of checkpoints that were set aside as damaged."""
        return [path.name for path in self._folders() if re.fullmatch(rf"step-\d+\{BAD}(\.\d+)?", path.name)]

    def list_retired(self) -> Sequence[Path]:
        """The checkpoints that rewinds have left."""
        return [path for path in self._folders() if REWOUND in path.name]

    def enter(self, lease: Lease, owner: str) -> None:
        """Begin a start of the run `owner`, before checkpoints are looked for: no older start commits anything from here on."""
        # The lease has fenced all older starts already.

    def prepare(self, lease: Lease) -> None:
        """Make the folder, and remove what failed saves have left."""
        self.root.mkdir(parents=True, exist_ok=True)
        sync(self.root.parent)
        for path in lease.workplace(self.root).iterdir():
            with reported(f"an unfinished checkpoint cannot be removed, {path}"):
                shutil.rmtree(path)

    def check_room(self, lease: Lease, bytes_needed: int) -> None:
        """CheckpointError if there is no room for a checkpoint of `bytes_needed`."""
        if shutil.disk_usage(self.root).free < bytes_needed + SPARE_BYTES:
            lease.tidy(self.root)
            raise no_room(self.root, bytes_needed)

    def begin(self, lease: Lease, step: int) -> Path:
        """Make the folder into which the files of a new checkpoint are written."""
        unfinished = lease.workplace(self.root) / committed_name(self.root, step).name
        unfinished.mkdir()
        return unfinished

    def create(self, path: Place, num_bytes: int) -> "DirectFile":
        """Create a file of about `num_bytes`, in place of one that a failed attempt has left."""
        # After a failed fsync nobody knows which of a file's pages are on the disk.
        _local(path).unlink(missing_ok=True)
        return DirectFile(_local(path))

    def write(self, path: Place, data: bytes) -> None:
        """Write a small file whole; durable on return."""
        create_file(_local(path), data)

    def commit(self, lease: Lease, unfinished: Place, step: int, manifest: str, fault: Fault) -> Path:
        """Write the manifest and give the checkpoint its final name; durable on return. All its other files are durable
        already."""
        made, final = _local(unfinished), committed_name(self.root, step)
        retry(lambda: self.write_manifest(made, manifest), "write", made / MANIFEST)
        fault("manifest")
        retry(lambda: self.give_name(lease, made, final), "rename", made)
        fault("renamed")
        retry(lambda: sync(self.root), "sync", self.root)
        return final

    def write_manifest(self, unfinished: Path, manifest: str) -> None:
        """Write the manifest, over that of a failed attempt. It and the names of all files are durable on return."""
        self.write(unfinished / MANIFEST, manifest.encode())
        sync(unfinished)

    def give_name(self, lease: Lease, unfinished: Path, final: Path) -> None:
        """Rename a checkpoint to its final name. rename(2) onto a folder that is not empty fails, so no rival's is
        overwritten."""
        lease.check()
        try:
            unfinished.rename(final)
        except FileNotFoundError:
            # If a newer start has taken the workplace away, a checkpoint with the final name is not ours.
            lease.refuse_fenced(unfinished.parent)
            # A file server may have renamed it and failed to answer; then this is the second attempt.
            if not (final / MANIFEST).exists():
                raise

    def give_up(self, lease: Lease, unfinished: Place) -> None:
        """Remove what a failed save has left. Raises nothing."""
        discard(_local(unfinished))
        self.tidy(lease)

    def remove(self, lease: Lease, path: Place, fault: Fault) -> None:
        """Remove a checkpoint: its name first, so that a crash leaves no half one."""
        gone = lease.withdraw(_local(path), path.name, self.root)
        fault("retiring")
        if gone is not None:
            shutil.rmtree(gone)
        fault("retained")

    def rename(self, lease: Lease, path: Place, suffix: str) -> Path:
        """Take its name from a checkpoint and keep the rest as evidence; returns where. FileNotFoundError if it is gone."""
        target = self.root / f"{path.name}{suffix}"
        number = 0
        while target.exists():
            number += 1
            target = self.root / f"{path.name}{suffix}.{number}"
        # Through the workplace: once a newer start has taken that away, the name may be one of its own checkpoints.
        withdrawn = lease.withdraw(_local(path), target.name, self.root)
        if withdrawn is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        lease.publish(withdrawn, target)
        self.tidy(lease)
        sync(self.root)
        return target

    def discard(self, lease: Lease, retired: Place) -> None:
        """Remove a checkpoint that a rewind has left."""
        lease.remove(_local(retired), self.root)

    def amend(self, lease: Lease, path: Place, manifest: str, fault: Fault) -> None:
        """Replace a checkpoint's manifest atomically."""
        with lease.replacing(_local(path) / MANIFEST, self.root) as made:
            self.write(made, manifest.encode())
            fault("amending")
        fault("amended")

    def commands_to_start_over(self) -> str:
        """The shell commands that empty this folder."""
        away = [f"mv {shlex.quote(str(self.root))} {shlex.quote(f'{self.root}.lost')}"] if self.root.exists() else []
        return " && ".join([*away, f"rm -f {shlex.quote(str(self.note))}"])

    def tidy(self, lease: Lease) -> None:
        """Clean up at the end of a save."""
        lease.tidy(self.root)

    def _folders(self) -> Sequence[Path]:
        """Folders of whole, damaged and retired checkpoints; none if there is no `root`."""

        def scan() -> Sequence[Path]:
            with os.scandir(self.root) as entries:
                return [self.root / each.name for each in entries if each.name.startswith("step-") and each.is_dir()]

        try:
            return read(scan, self.root)
        except FileNotFoundError:
            return []


def committed_name(root: Path, step: int) -> Path:
    """The path of the committed checkpoint of a step, `step-N` in `root`."""
    return root / f"step-{step:08d}"


def write_note(lease: Lease, note: Path, step: int) -> None:
    """Note beside the checkpoints which step was committed last; durable on return."""
    lease.write(note, json.dumps({"committed_step": step}).encode())


def no_room(root: Place, bytes_needed: int) -> CheckpointError:
    """The error for a disk that is too small for a checkpoint of `bytes_needed`."""
    free = "how many are free cannot be found out"
    with suppress(OSError):
        free = f"{shutil.disk_usage(root).free:,} are free" if isinstance(root, Path) else free
    return CheckpointError(
        f"no room for a checkpoint in {root}: it needs {bytes_needed + SPARE_BYTES:,} bytes, {free}."
        f" Former checkpoints are intact. Free space, lower checkpoint.keep, or move run.root to a larger disk"
    )


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Report errors of the storage in this block instead of raising them, where a checkpoint is safe already. The loss of the
    lease is raised: it ends this process."""
    try:
        yield
    except LeaseLost:
        raise
    except (OSError, MeshwrightError) as error:
        report(f"{what}: {error}")


def report(message: str) -> None:
    """Print a message to stderr that a user must see although the run goes on."""
    print(message, file=sys.stderr, flush=True)


def _local(path: Place) -> Path:
    assert isinstance(path, Path), path
    return path


class DirectFile:
    """A new file, written from first to last past the system's page cache, straight from the memory where its bytes are staged.

    A checkpoint is written once and read after a failure, if ever. Through the page cache the kernel would copy all of it, in
    time that training wants (0.7 s of CPU for 512 MiB on one machine, 0.02 s without), drop what the cache held, and then hold
    the writer up while it writes pages back (20 s for 0.7 s there, on a busy machine). O_DIRECT says nothing about durability:
    that is `sync`'s, as for any file.

    Writes are direct while the file system supports it and memory, place and size are multiples of ALIGNMENT, and go through the
    page cache from there on. Raises FileExistsError if the file exists.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._place = 0
        self.is_direct = False
        self._choose(is_direct=bool(O_DIRECT))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def write(self, view: memoryview) -> None:
        """Write all of the view."""
        while view:
            count = len(view)
            if self.is_direct:
                count -= count % ALIGNMENT
                if not count or self._place % ALIGNMENT or address(view) % ALIGNMENT:
                    self._choose(is_direct=False)
                    continue
            written = self._write(view[:count])
            self._place += written
            view = view[written:]

    def sync(self) -> None:
        """Make what was written durable."""
        os.fsync(self._descriptor)

    def _write(self, view: memoryview) -> int:
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            # Some file systems accept the flag and refuse the write.
            if error.errno not in REFUSALS or not self.is_direct:
                raise
            self._choose(is_direct=False)
            return 0

    def _choose(self, *, is_direct: bool) -> None:
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags | O_DIRECT if is_direct else flags & ~O_DIRECT)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            is_direct = False
        self.is_direct = is_direct


def address(view: memoryview) -> int:
    """The address of a contiguous view's bytes."""
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
