"""Save: each rank writes the elements that are its own into one file; rank 0 commits. Behind training, in a thread of each rank.

    once, and when a layout has changed:
    every rank    claims (48 bytes an entry)                          -> rank 0
    rank 0        divides the claims; flags                           -> each rank
    every rank    offsets, names                                      -> rank 0

    each save:
    every rank    has my layout changed? (one integer)                -> all
    every rank    stages what it writes: from here on the tensors may change                          staging.py
    rank 0        makes the folder; its path                          -> every rank
    every rank    writes its file; root                               -> rank 0
    rank 0        writes the index and the manifest, renames; path    -> every rank

What several ranks own alike is written by one of them, the one with the least to write so far: replicas divide the checkpoint
among themselves. No rank but rank 0 hears of the others' tensors.

The ranks' threads agree over a group of their own, so nothing that training sends comes between. Saves go one after another, on
all ranks in the order in which their loops asked: a save that is due while one is under way waits for its end. So all ranks know
alike how the last one ended, without a word more. A rank that dies wakes the others' threads by its closed connections, and
their loops by the same; what was not committed is not there.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import partial
from typing import Any, TypeVar

import torch

from framework.checkpoint.blocks import BlockHashes
from framework.checkpoint.commit import Retention, begin, explain, finish, folder_of, give_up, locate, retain, unleased
from framework.checkpoint.divide import (
    owned_entries,
)
from framework.checkpoint.entry import Entry
from framework.checkpoint.folder import Fault, no_fault, report
from framework.checkpoint.index import BLOCK_BYTES, Manifest
from framework.checkpoint.pieces import INDEX, INDEX_BLOCK_BYTES, FileRecord, encode_index, file_name
from framework.checkpoint.place import Place
from framework.checkpoint.save_plan import IndexPlan, SavePlan, plan_save
from framework.checkpoint.staging import StagedFile, StagingMemory
from framework.checkpoint.storage import retry
from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, share_errors
from framework.comm.transfer import Arrival, Moment
from framework.errors import LeaseLost, MeshwrightError
from framework.lease import Lease

T = TypeVar("T")

CPU = torch.device("cpu")


class Goal(Flag):
    """Where a save puts what it has staged: into a checkpoint, into the nodes' memory (neighbors.py), or both."""

    DISK = auto()
    MEMORY = auto()


# Has the nodes hold what is staged, with rank 0's plan of the index, the step and the state; whether they do. Never raises what a
# save that goes on could ignore.
Hold = Callable[[StagedFile, IndexPlan | None, int, dict[str, Any]], bool]


@dataclass(eq=False)
class PendingSave:
    """A save that is under way on this rank.

    moment: when the entries had the values to be saved. is_staged: set when nobody needs the tensors any more, but for copies
    before `arrival`, or when the save has ended otherwise. is_last: no other comes after it. ended: the checkpoint's path, None
    where it was no goal; or its error.
    """

    step: int
    entries: list[Entry]
    state: dict[str, Any]
    moment: Moment
    is_staged: threading.Event = field(default_factory=threading.Event)
    is_last: bool = False
    goal: Goal = Goal.DISK
    arrival: Arrival = field(default_factory=Arrival)
    ended: "Future[Place | None]" = field(default_factory=Future)

    def release(self, arrival: Arrival) -> None:
        """The tensors may change behind `arrival`."""
        self.arrival = arrival
        self.is_staged.set()

    def wait_until_staged(self) -> None:
        """Return when this rank's next kernels may change the tensors."""
        self.is_staged.wait()
        self.arrival.wait()


class Saver:
    """The saves of a run under `root`, one at a time, each behind the loop: `start` returns at once.

    world: over which the ranks' threads agree; nobody else uses it meanwhile. retention: which checkpoints stay. memory:
    what bytes are staged in. is_async: whether `start` returns before the save has ended. max_failures: so many saves in a
    row that fail end the run. on_end: is told in the save's thread that one has ended: its step, and whether it was
    committed. fault: for tests. lease: of the run, which every rank checks before it writes; None for a folder that nobody
    launches. hold: keeps copies in the nodes' memory. stalled_s: how long the loop was held up so far, and of it disk_stalled_s
    by checkpoints. started: how many checkpoints were; longest_s: how long one took at most. failures: those that have failed;
    failures_in_a_row: the last ones.
    """

    def __init__(
        self,
        root: Place,
        world: Communicator,
        retention: Retention,
        memory: StagingMemory | None = None,
        is_async: bool = True,
        max_failures: int = 1,
        on_end: Callable[[int, bool], None] = lambda step, is_committed: None,
        fault: Fault = no_fault,
        lease: Lease | None = None,
        hold: Hold | None = None,
    ) -> None:
        self.stalled_s = self.disk_stalled_s = self.longest_s = 0.0
        self.started = 0
        self.failures = self.failures_in_a_row = 0
        self._root, self._world, self._retention, self._fault = root, world, retention, fault
        self._lease = lease or unleased(root)
        self._memory = memory or StagingMemory(CPU, max_bytes=0)
        self._is_async, self._max_failures, self._on_end = is_async, max_failures, on_end
        self._hold = hold
        self._plan: SavePlan | None = None
        self._pending: PendingSave | None = None
        self._has_said_wait = self._has_said_memory = False
        self._thread = ThreadPoolExecutor(1, "save")

    def start(
        self,
        step: int,
        entries: Iterable[Entry],
        state: dict[str, Any],
        device: torch.device = CPU,
        is_last: bool = False,
        goal: Goal = Goal.DISK,
    ) -> None:
        """Start to save what the entries hold now. Collective in the order of the ranks' calls, but nobody waits for others.

        Nothing of the entries may change before `wait_until_staged` returns. Waits for a save that is under way. Raises, on all
        ranks, the error of the last of `max_failures` saves in a row, and without is_async of this one if it is that. device: of
        the entries that are not on the host. is_last: the run ends with it.
        """
        started = time.monotonic()
        self._say_wait(step)
        self._conclude()
        self.started += Goal.DISK in goal
        pending = PendingSave(step, owned_entries(list(entries)), state, Moment(device), is_last=is_last, goal=goal)
        self._pending = pending
        pending.ended = self._thread.submit(self._save, pending)
        if not self._is_async:
            self._conclude()
        self._count_stall(started, goal)

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank: others may end theirs sooner or later."""
        return self._pending is not None and not self._pending.ended.done()

    def wait_until_staged(self) -> None:
        """Return when the tensors may change, if a save is under way."""
        started = time.monotonic()
        if self._pending is not None:
            self._pending.wait_until_staged()
            self._count_stall(started, self._pending.goal)

    def settle(self) -> None:
        """Wait for the save that is under way. Raises, on all ranks, its error if that ends the run."""
        started = time.monotonic()
        self._conclude()
        self._count_stall(started, Goal.DISK)

    def finish(self) -> None:
        """Wait for the last save. Raises its error, on all ranks."""
        self.settle()
        self._thread.shutdown()

    def abandon(self, patience_s: float) -> None:
        """Let a save that is under way come to its end, but for no longer than this: the run ends with an error of its own."""
        self._thread.shutdown(wait=False)
        if self._pending is not None:
            wait([self._pending.ended], patience_s)

    def _count_stall(self, started: float, goal: Goal) -> None:
        seconds = time.monotonic() - started
        self.stalled_s += seconds
        self.disk_stalled_s += seconds if Goal.DISK in goal else 0.0

    def _say_wait(self, step: int) -> None:
        pending = self._pending
        if pending is None or pending.ended.done() or self._has_said_wait or self._world.rank:
            return
        if Goal.DISK not in pending.goal:
            return
        self._has_said_wait = True
        report(
            f"the checkpoint of step {step:,} is due while that of step {pending.step:,} is still being written: training waits"
            " for it, and will wait each time (this is said once). Save less often, or to a faster disk"
        )

    def _say_memory(self, num_bytes: int) -> None:
        if self._is_async and not self._has_said_memory and not self._world.rank:
            self._has_said_memory = True
            report(
                f"this node has not the memory to stage {num_bytes:,} bytes of each rank at once, or states are on a disk:"
                " updates wait until a checkpoint is written (this is said once)"
            )

    def _conclude(self) -> None:
        """Wait for the save that is under way, and count how it ended."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.ended.result()
            if Goal.DISK in pending.goal:
                self.failures_in_a_row = 0
        except MeshwrightError as error:
            self.failures += 1
            self.failures_in_a_row += 1
            if pending.is_last or isinstance(error, LeaseLost) or self.failures_in_a_row >= self._max_failures:
                raise

    def _save(self, pending: PendingSave) -> Place | None:
        """In the thread."""
        began, path = time.monotonic(), None
        try:
            with pending.moment.copies():
                path = self._write(pending)
            return path
        except MeshwrightError as error:
            self._say_failure(pending, error)
            raise
        finally:
            pending.release(pending.arrival)
            pending.entries = []
            if Goal.DISK in pending.goal:
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self._on_end(pending.step, path is not None)

    def _say_failure(self, pending: PendingSave, error: MeshwrightError) -> None:
        in_a_row = self.failures_in_a_row + 1
        if isinstance(error, LeaseLost):
            return  # it ends the run
        if self._world.rank == 0 and in_a_row < self._max_failures and not pending.is_last:
            report(
                f"the checkpoint of step {pending.step:,} was not saved ({in_a_row} in a row, {self._max_failures} end the run);"
                f" training goes on, and the next save tries again: {error}"
            )

    def _write(self, pending: PendingSave) -> Place | None:
        plan = self._find_plan(pending.entries)
        self._fault("planned")
        chosen = [pending.entries[place] for place in plan.chosen]
        staged = StagedFile(chosen, self._memory, pending.moment, self._fault)
        arrival = staged.stage()
        if staged.is_whole:
            pending.release(arrival)
            self._fault("staged")
        else:
            self._say_memory(staged.num_bytes)
        # Memory first: it takes less time than a disk, and is there should the disk fail.
        if Goal.MEMORY in pending.goal and self._hold is not None:
            self._hold(staged, plan.index, pending.step, pending.state)
        return self._commit(pending, plan, staged) if Goal.DISK in pending.goal else None

    def _commit(self, pending: PendingSave, plan: SavePlan, staged: StagedFile) -> Place:
        """Write what is staged, and commit the checkpoint."""
        world, fault = self._world, self._fault
        root, lease = self._root, self._lease
        explained = partial(_explained, root, lease, plan.bytes_needed)
        folder, is_committed = broadcast_object(
            lambda: explained(lambda: begin(root, lease, pending.step, pending.state, plan.bytes_needed)), world
        )
        if is_committed:
            return folder
        fault("begun")
        try:
            path = folder / file_name(world.rank)

            def write() -> None:
                lease.check()
                write_file(path, staged, fault)

            share_errors(lambda: explained(lambda: retry(write, "write", path)), world)
            written = gather_object(FileRecord(staged.num_bytes, BLOCK_BYTES, staged.root or 0), world)
            fault("gathered")
            committed = broadcast_object(lambda: explained(lambda: self._finish(folder, pending, plan, written)), world)
        except MeshwrightError:
            if world.rank == 0:
                give_up(root, lease, folder)
            raise
        if world.rank == 0:
            retain(root, lease, self._retention, fault, pending.state.get("best_step"))
        return committed

    def _finish(self, folder: Place, pending: PendingSave, plan: SavePlan, written: Sequence[FileRecord]) -> Place:
        """Write the index and commit, on rank 0, when all ranks have written. Returns the checkpoint's folder."""
        assert plan.index is not None, "only rank 0 commits"
        index, lease = plan.index, self._lease

        def write() -> Manifest:
            lease.check()
            return write_index(folder, pending.step, pending.state, index, written)

        manifest = retry(write, "write", folder / INDEX)
        self._fault("indexed")
        return finish(self._root, lease, folder, manifest, self._fault)

    def _find_plan(self, entries: Sequence[Entry]) -> SavePlan:
        """The plan of the last save, where no rank's layout has changed since. Collective."""
        keys = [(entry.name, entry.layout, entry.data.dtype) for entry in entries]
        is_same = torch.tensor(int(self._plan is not None and keys == self._plan.keys))
        all_reduce(is_same, self._world, "min", label="has a layout changed?")
        if self._plan is None or not is_same:
            self._plan = plan_save(entries, self._world)
        return self._plan


def save_checkpoint(
    root: Place,
    step: int,
    entries: Iterable[Entry],
    state: dict[str, Any],
    world: Communicator,
    keep: int,
    fault: Fault = no_fault,
) -> Place:
    """Commit `step-N` under `root`; the newest `keep` stay, and that of `state["best_step"]`. Collective over `world`. Returns
    the new folder.

    The entries of all ranks together cover every tensor. `state` is JSON-able and equal on all ranks; rank 0's is kept.
    Needs host memory for two segments of 16 MiB; on rank 0 also some 250 bytes for each entry of each rank. Raises on *every*
    rank when one fails: CheckpointError where the user must act (no space, no permission), StorageError for what may pass.
    Former checkpoints are then intact, of the new one nothing is left. A step that is committed already, with the same state, is
    not written again.
    """
    saver = Saver(root, world, Retention(keep), is_async=False, fault=fault)
    entries = list(entries)
    devices = [entry.data.device for entry in entries if isinstance(entry.data, torch.Tensor)]
    saver.start(step, entries, state, next((device for device in devices if device.type != "cpu"), CPU))
    saver.finish()
    committed = broadcast_object(lambda: locate(root, step), world)
    assert committed is not None, f"{root} has no step {step}, which was committed"
    return committed


def write_file(path: Place, staged: StagedFile, fault: Fault = no_fault) -> None:
    """Write what is staged and the tree of its hashes; durable on return."""
    with folder_of(path.parent).create(path, staged.num_bytes) as file:
        for view in staged.views():
            file.write(view)
            fault("writing")
        file.sync()
    fault("written")


def write_index(
    folder: Place,
    step: int,
    state: dict[str, Any],
    plan: IndexPlan,
    written: Sequence[FileRecord],
    index_block_bytes: int = INDEX_BLOCK_BYTES,
) -> Manifest:
    """Write the index of what the ranks wrote; durable on return. Returns the manifest."""
    data = encode_index([(each.num_bytes, each.root) for each in written], plan.pieces)
    hashes = BlockHashes(index_block_bytes)
    hashes.add(memoryview(data))
    tree, root = hashes.finish()
    folder_of(folder.parent).write(folder / INDEX, data + tree)
    record = FileRecord(len(data), index_block_bytes, root)
    return Manifest(step, len(written), state, plan.records, record, written[0].block_bytes)


def _explained(root: Place, lease: Lease, bytes_needed: int, work: Callable[[], T]) -> T:
    """The result of `work`, its OSError in words."""
    try:
        return work()
    except OSError as error:
        if error.errno == errno.ENOENT:
            lease.check()  # the folder is gone, because another start has taken it away
        raise explain(error, root, bytes_needed) from error
