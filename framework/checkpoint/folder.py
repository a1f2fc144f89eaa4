"""A run's folder of checkpoints: its contents, and how a checkpoint gets its name and loses it.

Commits, retention, rewinds and resumes work on a `Folder` (commit.py): a `LocalFolder`, where names change by renames, or an
`ObjectFolder`. Their methods are alike; those of `LocalFolder` say what each does. They raise OSError if the storage fails, and
LeaseLost if another start has the run. What they write never replaces what a newer start reads.

An object store puts an object atomically and renames nothing:

    URL/RUN-ID/
        .epoch-7.json               the newest start's record: whose run this is, and what was committed before it
        step-00000100.7/            a checkpoint of the start of epoch 7
            rank-00000.bin ...      each put by its rank
            index.bin
            manifest.json           put last: *this is the commit*
            manifest.json.bad       in its place, if the checkpoint is damaged; .rewound if a rewind has left it

A prefix without a manifest is no checkpoint: an interrupted save leaves objects that nobody reads and the next save removes.

**Fencing.** A start that was taken for dead may wake up before any put. Its objects lie below a name with its own epoch, so
it overwrites none of a newer start's. And what it commits does not count: a checkpoint counts if the newest record, by its
epoch, lists it, or if it is of that epoch itself. Each start puts its record, with all that counted until then, after it has
taken the lease of the run and before it looks for checkpoints. So the store needs only to put an object atomically and to list
and read it from then on, which S3, GCS and Azure promise. A stale start can still do what follows a check of the lease directly:
remove a checkpoint that its own retention had chosen, or amend one for its own rewind.
"""

import errno
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from framework.checkpoint.index import MANIFEST
from framework.checkpoint.storage import KEY, DirectFile
from framework.errors import CheckpointError, LeaseLost, MeshwrightError
from framework.files import create_file, sync
from framework.lease import Lease, discard
from framework.object_store import ObjectPath, Place, Upload, read, retry

Fault = Callable[[str], None]

# Bytes that the file system and the manifest may need beyond the tensors.
SPARE_BYTES = 1 << 20
# Suffixes of the names of damaged checkpoints, and of those that a rewind has left.
BAD, REWOUND = ".bad", ".rewound"
RECORD = re.compile(r"\.epoch-(\d+)\.json")
STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")


def no_fault(point: str) -> None:
    """Inject no fault."""


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
        f" Checkpoints saved before are untouched. Free space, lower checkpoint.keep, or move run.root to a larger disk"
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


def _local(path: Place) -> Path:
    assert isinstance(path, Path), path
    return path


class ObjectFolder:
    """The folder of a run's checkpoints below a URL. Its methods do what those of `LocalFolder` do."""

    key = KEY

    def __init__(self, root: ObjectPath) -> None:
        self.root = root
        self.note: Path | None = None if root.run is None else root.run / "checkpoints.json"

    def list(self) -> Sequence[ObjectPath]:
        names = self._names()
        counts = self._find_counted(names)
        return [self.root / name for name in names if counts(name) and self._has(self.root / name, MANIFEST)]

    def list_damaged(self) -> Sequence[str]:
        return [name for name in self._steps() if self._has(self.root / name, MANIFEST + BAD)]

    def list_retired(self) -> Sequence[ObjectPath]:
        found = [self.root / name for name in self._steps()]
        return [path for path in found if self._has(path, MANIFEST + REWOUND) and not self._has(path, MANIFEST)]

    def enter(self, lease: Lease, owner: str) -> None:
        """Put the record of this start. CheckpointError if the folder is another run's."""
        epoch, record = self._newest_record(self._names())
        if record is not None and (record["run"] != owner or epoch > lease.epoch):
            lease.check()
            raise CheckpointError(
                f"{self.root} holds the checkpoints of another run, {record['run']} (start {epoch}); this one is {owner}. Choose"
                f" another run.id or {KEY}. If these are the same run, whose folder was lost: remove {self.root}/.epoch-*.json"
            )
        # Listed under the former record, so that checkpoints of starts that were fenced earlier stay uncounted.
        counted = sorted(path.name for path in self.list())
        text = json.dumps({"run": owner, "epoch": lease.epoch, "before": counted})
        path = self.root / f".epoch-{lease.epoch}.json"
        retry(lambda: path.write_bytes(text.encode()), "write", path)
        lease.check()
        # Only after the new record is there: without any record every checkpoint would count.
        for name in self._names():
            if (found := RECORD.fullmatch(name)) and int(found[1]) < lease.epoch:
                with reported(f"the record of an older start cannot be removed, {self.root / name}"):
                    (self.root / name).unlink()

    def prepare(self, lease: Lease) -> None:
        """Remove what failed saves have left: prefixes without a manifest, unless kept as evidence. Newer epochs are not
        touched, nor names without an epoch: a user may be copying a checkpoint there."""
        for name in self._steps():
            path, epoch = self.root / name, name.partition(".")[2]
            is_ours = epoch != "" and int(epoch) <= lease.epoch
            if is_ours and not any(each.startswith(MANIFEST) for each in read(path.list, path)):
                lease.check()
                with reported(f"an unfinished checkpoint cannot be removed, {path}"):
                    path.remove_all()

    def check_room(self, lease: Lease, bytes_needed: int) -> None:
        """A store has room, and would not say."""

    def begin(self, lease: Lease, step: int) -> ObjectPath:
        unfinished = self.root / f"step-{step:08d}.{lease.epoch}"
        # A former commit under this name is gone; a rewind or damage may have left some of it.
        lease.check()
        unfinished.remove_all()
        return unfinished

    def create(self, path: Place, num_bytes: int) -> Upload:
        return Upload(_remote(path), num_bytes)

    def write(self, path: Place, data: bytes) -> None:
        _remote(path).write_bytes(data)

    def commit(self, lease: Lease, unfinished: Place, step: int, manifest: str, fault: Fault) -> Place:
        path = unfinished / MANIFEST
        fault("manifest")

        def put() -> None:
            lease.check()
            self.write(path, manifest.encode())

        retry(put, "write", path)
        # A newer start may have listed the checkpoints before the put, and then this one does not count.
        retry(lease.check, "read the lease of", lease.run)
        fault("renamed")
        return unfinished

    def give_up(self, lease: Lease, unfinished: Place) -> None:
        with suppress(OSError, MeshwrightError):  # the next save removes what cannot be removed now
            lease.check()
            (unfinished / MANIFEST).unlink()  # first: it may be there, by a put whose answer was lost
            _remote(unfinished).remove_all()

    def remove(self, lease: Lease, path: Place, fault: Fault) -> None:
        lease.check()
        (path / MANIFEST).unlink()
        fault("retiring")
        _remote(path).remove_all()
        fault("retained")

    def rename(self, lease: Lease, path: Place, suffix: str) -> ObjectPath:
        """Give its manifest another name: then it is no checkpoint."""
        manifest, target = _remote(path) / MANIFEST, _remote(path) / f"{MANIFEST}{suffix}"
        if not manifest.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        # Copied before it is removed: a crash between the two leaves a checkpoint, and its evidence beside it.
        target.write_bytes(manifest.read_bytes())
        lease.check()
        manifest.unlink()
        return target

    def discard(self, lease: Lease, retired: Place) -> None:
        lease.check()
        _remote(retired).remove_all()

    def amend(self, lease: Lease, path: Place, manifest: str, fault: Fault) -> None:
        lease.check()
        fault("amending")
        self.write(path / MANIFEST, manifest.encode())
        fault("amended")

    def commands_to_start_over(self) -> str:
        return f"remove all below {self.root}, and {self.note}"

    def tidy(self, lease: Lease) -> None:
        pass

    def _names(self) -> Sequence[str]:
        return sorted(read(self.root.list, self.root))

    def _steps(self) -> Sequence[str]:
        return [name for name in self._names() if STEP.fullmatch(name)]

    def _has(self, path: ObjectPath, name: str) -> bool:
        return read((path / name).exists, path / name)

    def _find_counted(self, names: Sequence[str]) -> Callable[[str], bool]:
        """A function that tells whether the checkpoint of a name counts, if it has a manifest."""
        epoch, record = self._newest_record(names)
        before = set(record["before"]) if record is not None else set()

        def counts(name: str) -> bool:
            match = STEP.fullmatch(name)
            return match is not None and (
                record is None or match[2] is None or int(match[2]) == epoch or name in before
            )

        return counts

    def _newest_record(self, names: Sequence[str]) -> tuple[int, dict[str, Any] | None]:
        """The newest start's epoch and record; (0, None) if none was put."""
        epochs = sorted(int(match[1]) for name in names if (match := RECORD.fullmatch(name)))
        if not epochs:
            return 0, None
        path = self.root / f".epoch-{epochs[-1]}.json"
        try:
            return epochs[-1], json.loads(read(path.read_bytes, path))
        except FileNotFoundError:
            # Removed since it was listed, because there is a newer one now.
            return self._newest_record(self._names())
        except ValueError as error:
            raise CheckpointError(f"{path} is no record of a start: {error}") from error


def _remote(path: Place) -> ObjectPath:
    assert isinstance(path, ObjectPath), path
    return path
