"""Node memory: files that outlive a node's ranks, in a tmpfs folder for each run and node, private to the user.

    /dev/shm/meshwright-UID/RUN-HASH/NODE/BIRTH/epoch-7/
        step-00000070-GENERATION/        files as in a checkpoint's folder: of this node's ranks, and copies
        step-00000080-GENERATION.tmp/    a step that is being copied

HASH separates runs of one name in two places, BIRTH runs that followed one another in one place: a run folder may be removed and
begun anew, and steps of the former run are another run's, whatever their epoch. NODE is in the path because the nodes of a
cluster on one machine share its memory. Everything is lost with the node's power, and removed when the run has ended.

The epoch is that of the start's lease (lease.py), and it fences as the lease's workplaces do: a start changes files only below
the folder of its epoch, and the next start renames that to its own before it looks. A start that was frozen, taken for dead,
and wakes up finds none of the names that it knew.
"""

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from framework.checkpoint.folder import report
from framework.errors import CheckpointError
from framework.plan.check import MEMORY

# Prefix of the name of a start's folder, before its epoch.
EPOCH = "epoch-"
# The birth of a run without one, such as a test's.
NO_BIRTH = "0"


@dataclass(frozen=True, order=True)
class HeldName:
    """The name of a step that nodes hold. generation: the start of the run that has trained it (held.py)."""

    step: int
    generation: str

    def __str__(self) -> str:
        return f"step-{self.step:08d}-{self.generation}"


@dataclass(frozen=True)
class NodeMemory:
    """A run's folder in the memory of this node. Nothing is created before `make`."""

    path: Path
    epoch: int = 0
    """Epoch of the start's lease; 0 without a launcher."""
    birth: str = NO_BIRTH
    """Unique among the runs at one path. Births sort in the order of time."""

    @property
    def top(self) -> Path:
        """The user's folder, which no other user may have made."""
        return self.path.parent.parent

    @property
    def home(self) -> Path:
        """The folder of all starts of this run."""
        return self.path / self.birth

    @property
    def place(self) -> Path:
        """The folder of this start, below which it changes files."""
        return self.home / f"{EPOCH}{self.epoch}"

    def folder(self, name: HeldName) -> Path:
        """The folder of a step's files."""
        return self.place / str(name)

    def unfinished(self, name: HeldName) -> Path:
        """The folder of a step's files until all nodes have theirs."""
        return self.place / f"{name}.tmp"

    def enter(self) -> None:
        """Take over the files of the last start, and remove those of older starts and of older runs at this path. Once, on one
        rank of the node, before any rank looks."""
        former = self._former_epochs()
        if former and not self.place.exists():
            with suppress(FileNotFoundError):  # a newer start was faster; this one finds nothing
                (self.home / f"{EPOCH}{former[-1]}").rename(self.place)
        self._remove_former()

    def make(self, folder: Path) -> None:
        """Make a folder. CheckpointError if the user's folder is another user's, or there is no tmpfs."""
        try:
            self.top.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                raise CheckpointError(f"{self.top} was made by another user: nothing is kept there. Have it removed")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot keep copies in this node's memory: {error.strerror} at {folder}. A tmpfs at {MEMORY} that this user may"
                " write to holds them; or checkpoint.neighbor_copies=0"
            ) from error

    def list(self) -> dict[HeldName, frozenset[str]]:
        """The names of the files of each step that this node holds. Files of another user are ignored."""
        if not self._is_ours():
            return {}
        found = {name: self.folder(name) for name in map(_parse, _names(self.place)) if name is not None}
        return {name: frozenset(_names(folder)) for name, folder in found.items()}

    def clear(self, keep: HeldName | None = None) -> None:
        """Remove all steps but one."""
        for each in _names(self.place) if self._is_ours() else ():
            if keep is None or each != str(keep):
                _remove(self.place / each)

    def leave(self) -> None:
        """Remove everything that this start and former ones hold here."""
        self.clear()
        self._remove_former()
        # Not the user's folder: another run of the user may be about to make its own in there.
        for folder in (self.place, self.home, self.path, self.path.parent) if self._is_ours() else ():
            with suppress(OSError):  # not empty: other nodes or a newer start have files there
                folder.rmdir()

    def _former_epochs(self) -> Sequence[int]:
        names = _names(self.home) if self._is_ours() else ()
        epochs = sorted(int(match[1]) for name in names if (match := re.fullmatch(EPOCH + r"(\d+)", name)))
        return [epoch for epoch in epochs if epoch < self.epoch]

    def _remove_former(self) -> None:
        for epoch in self._former_epochs():
            _remove(self.home / f"{EPOCH}{epoch}")
        # Not those of a later birth: then this is a frozen start of a removed run, which has woken up.
        for birth in _names(self.path) if self._is_ours() else ():
            if birth < self.birth:
                _remove(self.path / birth)

    def _is_ours(self) -> bool:
        """Whether the user's folder exists, and no other user can have written into it."""
        try:
            status = self.top.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def memory_of(run_dir: Path, node: str, memory: Path = MEMORY, epoch: int = 0, birth: str = NO_BIRTH) -> NodeMemory:
    """The memory of a node for a start of a run. memory: a tmpfs; epoch: of the start's lease; birth: of the run."""
    return NodeMemory(run_memory(run_dir, memory) / re.sub(r"[^\w.-]", "_", node), epoch, birth)


def run_memory(run_dir: Path, memory: Path = MEMORY) -> Path:
    """The folder of a run, on any node: a function of the run's path, which is the same on all nodes. slurm/job.sh knows it
    too."""
    place = run_dir.absolute()
    return memory / f"meshwright-{os.getuid()}" / f"{place.name}-{hashlib.sha256(str(place).encode()).hexdigest()[:8]}"


def map_file(path: Path, num_bytes: int) -> Tensor:
    """The bytes of an existing file of this size, uint8 [num_bytes]: its memory, not a copy."""
    if not num_bytes:  # an empty file cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)


def make_file(path: Path, num_bytes: int) -> Tensor:
    """Allocate a new file and map it: uint8 [num_bytes]. OSError if the node lacks the memory: a write into a mapped file without
    memory would kill the process."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        if num_bytes:
            os.posix_fallocate(descriptor, 0, num_bytes)
    finally:
        os.close(descriptor)
    return map_file(path, num_bytes)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        report(f"cannot remove {folder}, which takes this node's memory")


def _names(folder: Path) -> Iterator[str]:
    try:
        yield from sorted(os.listdir(folder))
    except OSError:  # it does not exist
        return


def _parse(name: str) -> HeldName | None:
    match = re.fullmatch(r"step-(\d+)-(\w+)", name)
    return HeldName(int(match[1]), match[2]) if match else None
