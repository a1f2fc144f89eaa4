"""Where exports beside training lie: in the run's folder, or below its URL.

    RUN/exports/step-00000100/          made in the workplace of the start, and renamed
    URL/exports/step-00000100.7/        of the start of epoch 7: its files, each put as a whole, config.json last

In a store a folder without config.json is no export: whoever put it was ended, and the next start puts it. A name has the
epoch of its start, so one that was held for dead, and thaws, mixes nothing into what a newer one has put, and it removes
nothing of a newer one's.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from framework.checkpoint.commit import step_of
from framework.checkpoint.folder import committed_name, reported
from framework.checkpoint.object_folder import Upload
from framework.checkpoint.storage import ObjectPath, Place, read, retry
from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.launch.remote import RemoteRun
from framework.lease import Lease, discard

# Of an export in a store: what is put when all else is there, and without which `from_pretrained` loads nothing.
LAST = "config.json"
READ_BYTES = 16 << 20
STEP = re.compile(r"step-(\d+)\.(\d+)")


class ExportFolder:
    """The exports of a run that lies on a disk."""

    def __init__(self, lease: Lease) -> None:
        self._root, self._lease = RunDirectory(lease.run).exports, lease

    def name(self, step: int) -> Place:
        """Where the export of a step lies, once it is there."""
        return committed_name(self._root, step)

    def has(self, step: int) -> bool:
        return committed_name(self._root, step).exists()

    @contextmanager
    def making(self, step: int) -> Iterator[Path]:
        """Make the export at the path that this yields; on exit it has its name. Raises LeaseLost; then, and after an error, what
        had the name is as it was."""
        self._lease.check()
        self._root.mkdir(exist_ok=True)
        with self._lease.replacing(committed_name(self._root, step)) as made:
            yield made

    def remove_after(self, step: int) -> None:
        """Remove the exports of later steps."""
        for folder in self._root.glob("step-*"):
            if step_of(folder) > step:
                self._lease.remove(folder)


class ExportObjects:
    """The exports of a run that lies in an object store. Its methods raise StorageError, or OSError, where the store fails."""

    def __init__(self, lease: Lease, root: ObjectPath) -> None:
        self._root, self._lease = root, lease
        # The step that the run went back to while an export was made.
        self._cut: int | None = None

    def name(self, step: int) -> ObjectPath:
        """Where this start puts the export of a step."""
        return self._root / f"step-{step:08d}.{self._lease.epoch}"

    def has(self, step: int) -> bool:
        return any(found == step and self._is_whole(path) for path, found, _ in self._list())

    @contextmanager
    def making(self, step: int) -> Iterator[Path]:
        """As `ExportFolder.making`: what is made here is then put into the store, and is here no more."""
        made, self._cut = self._lease.workplace() / f"export-{step:08d}", None
        discard(made)
        try:
            yield made
            self._put(made, step)
        except FileNotFoundError:
            self._lease.refuse_fenced(made.parent)
            raise
        finally:
            discard(made)
            self._lease.tidy()

    def remove_after(self, step: int) -> None:
        """Remove the exports of later steps, but for those of newer starts; one that is being put stays unfinished."""
        self._cut = step
        with reported(f"exports of later steps than {step:,} cannot be removed from {self._root}"):
            for path, found, epoch in self._list():
                if found > step and epoch <= self._lease.epoch:
                    self._lease.check()
                    (path / LAST).unlink()
                    path.remove_all()

    def _put(self, made: Path, step: int) -> None:
        target = self.name(step)
        names = [path.relative_to(made).as_posix() for path in sorted(made.rglob("*")) if path.is_file()]
        self._lease.check()
        target.remove_all()  # what was put of it before
        for name in sorted(names, key=lambda name: name == LAST):
            self._lease.check()
            if self._cut is not None and step > self._cut:
                raise RunError(f"the run went back to step {self._cut:,} meanwhile")
            retry(partial(put_file, made / name, target / name), "write", target / name)

    def _list(self) -> list[tuple[ObjectPath, int, int]]:
        """What has the name of an export: (where, step, epoch)."""
        names = {name: STEP.fullmatch(name) for name in read(self._root.list, self._root)}
        return [(self._root / name, int(found[1]), int(found[2])) for name, found in names.items() if found]

    def _is_whole(self, path: ObjectPath) -> bool:
        return read((path / LAST).exists, path)


def find_exports(lease: Lease) -> ExportFolder | ExportObjects:
    """Where the exports of the run of a lease lie."""
    remote = RemoteRun.of(lease.run)
    return ExportFolder(lease) if remote is None else ExportObjects(lease, remote.url / "exports")


def put_file(path: Path, target: ObjectPath) -> None:
    """Put a file as an object, which appears as a whole. Memory for a part of it."""
    with open(path, "rb") as source, Upload(target, path.stat().st_size) as upload:
        while data := source.read(READ_BYTES):
            upload.write(memoryview(data))
        upload.sync()
