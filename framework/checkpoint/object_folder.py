"""A run's folder of checkpoints in an object store, which puts an object atomically and renames nothing.

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from framework.checkpoint.folder import BAD, REWOUND, Fault, reported
from framework.checkpoint.index import MANIFEST
from framework.checkpoint.storage import KEY
from framework.errors import CheckpointError, MeshwrightError
from framework.lease import Lease
from framework.object_store import ObjectPath, Place, Upload, read, retry

RECORD = re.compile(r"\.epoch-(\d+)\.json")
STEP = re.compile(r"step-(\d+)(?:\.(\d+))?")


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
