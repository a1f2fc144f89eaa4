"""Lineage: which of a run's starts have trained the steps that it goes on from.

    start a    steps 1 to 70; 50 is saved, 70 is held in the nodes' memory; they are lost
    start b    on other nodes, from 50: steps 51 to 60           a until 50, b
    start c    on the first nodes again, which hold a's 70       a's steps behind 50 are no past of this run

Each start is a generation, and what nodes hold has its name. Rank 0 writes the record when a start knows where it goes on from,
and before it trains: lineage.json in the run's folder. A record that is missing or cannot be read says that nothing held counts.
"""

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from framework.checkpoint.commit import list_checkpoints, noted_step, step_of
from framework.checkpoint.node_memory import HeldName
from framework.checkpoint.place import Place, checkpoints_of
from framework.checkpoint.storage import read, retry, storage_error
from framework.lease import Lease

RECORD = "lineage.json"
# Generations of which nothing newer has come: more starts than that in a row without a step are no lineage that matters.
MOST_GENERATIONS = 32


@dataclass(frozen=True)
class Generation:
    """A start of the run. first: the step that it began from; last: beyond which its steps were left, None while it is the
    newest."""

    name: str
    first: int
    last: int | None = None

    def has_trained(self, step: int) -> bool:
        """Whether a step of it, if there is one, is of the run's past."""
        return self.first <= step and (self.last is None or step <= self.last)


@dataclass(frozen=True)
class Lineage:
    """The generations that the run's steps are of, oldest first. saved_step, noted_step: the newest checkpoint's and that of the
    note beside the checkpoints (0: none), when the newest generation began."""

    generations: tuple[Generation, ...] = ()
    saved_step: int = 0
    noted_step: int = 0

    def has_trained(self, held: HeldName) -> bool:
        """Whether a held step is of the run's past."""
        return any(each.name == held.generation and each.has_trained(held.step) for each in self.generations)

    def begin(self, step: int, name: str, saved_step: int, noted_step: int) -> "Lineage":
        """The lineage once a new generation goes on from `step`."""
        before = [each for each in self.generations if each.first < step]
        before = [
            Generation(each.name, each.first, step if each.last is None else min(each.last, step)) for each in before
        ]
        return Lineage((*before, Generation(name, step))[-MOST_GENERATIONS:], saved_step, noted_step)


def read_lineage(run_dir: Path) -> Lineage:
    """The run's lineage; an empty one where there is no record of it. Raises StorageError when the file system fails."""
    try:
        record = json.loads(read((run_dir / RECORD).read_text, run_dir / RECORD))
        generations = tuple(Generation(**each) for each in record["generations"])
        return Lineage(generations, record["saved_step"], record["noted_step"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return Lineage()


def begin_generation(lease: Lease, step: int) -> str:
    """Record that a start goes on from `step`; returns its name. For rank 0, once the step is loaded. In every start, also of a
    run that keeps no copies: it may leave a branch of which nodes hold a step. Raises StorageError,
    LeaseLost."""
    name, checkpoints = secrets.token_hex(4), checkpoints_of(lease.run)
    lineage = read_lineage(lease.run).begin(step, name, newest_listed(checkpoints), noted_step(checkpoints) or 0)
    path = lease.run / RECORD
    try:
        retry(lambda: lease.write(path, json.dumps(asdict(lineage)).encode()), "write", path)
    except OSError as error:
        raise storage_error(error, "write", path) from error
    return name


def newest_listed(checkpoints: Place) -> int:
    """The step of the newest checkpoint by its name, 0 without one. It is not looked into."""
    listed = list_checkpoints(checkpoints)
    return step_of(listed[0]) if listed else 0


def was_rewound(lineage: Lineage, checkpoints: Place) -> bool:
    """Whether a checkpoint that the run had is gone, such as moved away by a user who wants to go on from an older one."""
    noted = noted_step(checkpoints) or 0
    # One that was noted since then is of the newest generation; what was noted before, may have been damaged and set aside by it.
    had = noted if noted != lineage.noted_step else lineage.saved_step
    return newest_listed(checkpoints) < had
