"""Save: each rank writes the elements that it owns into one file, and rank 0 commits; in a thread of each rank, behind training.

    once, and when a layout has changed (save_plan.py):
    every rank    claims (48 bytes an entry)                          -> rank 0
    rank 0        divides the claims; flags                           -> each rank
    every rank    names                                               -> rank 0

    each save:
    every rank    has my layout changed? (one integer)                -> all
    every rank    stages what it writes: from here on the tensors may change                          staging.py
    rank 0        makes the folder; its path                          -> every rank
    every rank    writes its file; root                               -> rank 0
    rank 0        writes the index and the manifest, renames; path    -> every rank

Elements that several ranks own are written by the one of them with the least to write so far: replicas divide the checkpoint
among themselves. Only rank 0 learns of other ranks' tensors.

The ranks' threads communicate over a group of their own, so their messages cannot mix with training's. Saves run one after
another, on all ranks in the order in which their loops ask: a save that is due during another waits for its end. So all ranks
know how the last one ended, without a further message. If a rank dies, its closed connections wake the others' threads and
loops; a checkpoint that was not committed does not exist.

How often to save: too seldom loses work at a failure, too often loses time to saving. Daly (2006, "A higher order estimate of the
optimum checkpoint interval for restart dumps", equation 37), whose first term is Young's (1974):

    T = sqrt(2 cost MTBF) (1 + sqrt(cost / (2 MTBF)) / 3 + cost / (18 MTBF)) - cost      if cost < 2 MTBF, else T = MTBF

cost: seconds of training that a save takes. For a save behind training that is how long it stalls the loop, not how long it
takes.
"""

import errno
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from enum import Flag, auto
from functools import partial
from math import sqrt
from typing import Any, TypeVar

import torch

from framework.checkpoint.blocks import BlockHashes
from framework.checkpoint.commit import Retention, begin, explain, finish, folder_of, retain, unleased
from framework.checkpoint.folder import Fault, no_fault, report
from framework.checkpoint.index import (
    BLOCK_BYTES,
    INDEX,
    INDEX_BLOCK_BYTES,
    FileRecord,
    Manifest,
    encode_index,
    file_name,
)
from framework.checkpoint.save_plan import IndexPlan, SavePlan, owned_entries, plan_save
from framework.checkpoint.staging import Entry, StagedFile, StagingMemory
from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, share_errors
from framework.comm.transfer import Arrival, Moment
from framework.errors import LeaseLost, MeshwrightError
from framework.lease import Lease
from framework.object_store import Place, retry

T = TypeVar("T")

CPU = torch.device("cpu")

# The cost of a save until one has been measured.
ASSUMED_COST_S = 1.0
# A save also takes cores, network and disk from others, so at most one in this many seconds is spent saving.
SPARED = 4.0


def find_interval_s(mtbf_s: float, num_saves: int, stalled_s: float, longest_s: float) -> float:
    """Seconds from the beginning of one save to that of the next. stalled_s: how long `num_saves` have stalled training so far;
    longest_s: how long the longest took."""
    cost_s = stalled_s / num_saves if num_saves else ASSUMED_COST_S
    return max(daly_interval_s(cost_s, mtbf_s), SPARED * longest_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The interval that loses the least time, by Daly."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - cost_s


class Goal(Flag):
    """The destination of a save: a checkpoint, the nodes' memory (neighbors.py), or both."""

    DISK = auto()
    MEMORY = auto()


# Makes the nodes hold what is staged, given rank 0's plan of the index, the step and the state; returns whether they do. Raises
# no error that a save could ignore.
Hold = Callable[[StagedFile, IndexPlan | None, int, dict[str, Any]], bool]


@dataclass(eq=False)
class PendingSave:
    """A save that is under way on this rank."""

    step: int
    entries: list[Entry]
    state: dict[str, Any]
    moment: Moment
    """When the entries had the values to be saved."""
    is_staged: threading.Event = field(default_factory=threading.Event)
    """Set when only copies before `arrival` still need the tensors, or when the save has ended."""
    is_last: bool = False
    """Whether the run ends with it."""
    goal: Goal = Goal.DISK
    arrival: Arrival | None = None
    ended: "Future[Place | None]" = field(default_factory=Future)
    """The checkpoint's path, None for a save to memory alone; or the error."""

    def release(self, arrival: Arrival | None) -> None:
        """Allow the tensors to change after `arrival`."""
        self.arrival = arrival
        self.is_staged.set()

    def wait_until_staged(self) -> None:
        """Return when this rank's next kernels may change the tensors."""
        self.is_staged.wait()
        if self.arrival is not None:
            self.arrival.wait()


class Saver:
    """The saves of a run under `root`, one at a time, each behind the loop: `start` returns at once.

    stalled_s: how long saves have stalled the loop so far; disk_stalled_s: of it, checkpoints. started: number of checkpoints;
    longest_s: the longest time one took. failures, failures_in_a_row: number of saves that failed, in all and lately.
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
        """world: the group of the ranks' threads, used for nothing else. memory: staging memory. is_async: whether `start`
        returns before the save has ended. max_failures: this many failed saves in a row end the run. on_end: called in the
        save's thread when one has ended, with its step and whether it was committed. fault: for tests. lease: of the run,
        checked by every rank before it writes; None for a run without a launcher. hold: keeps copies in the nodes' memory."""
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
        self._has_reported_wait = self._has_reported_memory = False
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
        """Start to save the entries' current values. Collective in the order of the ranks' calls, but no rank waits for another.

        No entry may change before `wait_until_staged` returns. Waits for a save that is under way. Raises, on all ranks, the
        error of the last of `max_failures` saves in a row (of this one as well, without is_async). device: of the entries that
        are not on the host. is_last: whether the run ends with it.
        """
        started = time.monotonic()
        # One save at a time: their messages share a group, and staging memory is that of one save.
        self._report_wait(step)
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
        """Whether a save is under way on this rank. Other ranks may end theirs sooner or later."""
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
        """Wait at most `patience_s` for a save that is under way, when another error ends the run."""
        self._thread.shutdown(wait=False)
        if self._pending is not None:
            wait([self._pending.ended], patience_s)

    def _count_stall(self, started: float, goal: Goal) -> None:
        seconds = time.monotonic() - started
        self.stalled_s += seconds
        self.disk_stalled_s += seconds if Goal.DISK in goal else 0.0

    def _report_wait(self, step: int) -> None:
        pending = self._pending
        if pending is None or pending.ended.done() or self._has_reported_wait or self._world.rank:
            return
        if Goal.DISK not in pending.goal:
            return
        self._has_reported_wait = True
        report(
            f"the checkpoint of step {step:,} is due while that of step {pending.step:,} is still being written: training waits"
            " for it, and will wait each time (this is said once). Save less often, or to a faster disk"
        )

    def _report_memory(self, num_bytes: int) -> None:
        if self._is_async and not self._has_reported_memory and not self._world.rank:
            self._has_reported_memory = True
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
        """Save, in the thread."""
        began, path = time.monotonic(), None
        try:
            # Copies run on a stream of their own, behind the kernels that made the values.
            with pending.moment.copies():
                path = self._write(pending)
            return path
        except MeshwrightError as error:
            self._report_failure(pending, error)
            raise
        finally:
            # Also after an error: the loop waits for this, and the tensors are referenced until here.
            pending.release(pending.arrival)
            pending.entries = []
            if Goal.DISK in pending.goal:
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self._on_end(pending.step, path is not None)

    def _report_failure(self, pending: PendingSave, error: MeshwrightError) -> None:
        in_a_row = self.failures_in_a_row + 1
        ends_run = isinstance(error, LeaseLost) or pending.is_last
        if self._world.rank == 0 and not ends_run and in_a_row < self._max_failures:
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
            self._report_memory(staged.num_bytes)
        # Memory first: it takes less time than a disk, and is useful if the disk fails.
        if Goal.MEMORY in pending.goal and self._hold is not None:
            self._hold(staged, plan.index, pending.step, pending.state)
        return self._commit(pending, plan, staged) if Goal.DISK in pending.goal else None

    def _commit(self, pending: PendingSave, plan: SavePlan, staged: StagedFile) -> Place:
        """Write the staged file, and commit the checkpoint."""
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

            # Every rank learns of a failure here: else rank 0 would wait for a rank that has given up.
            share_errors(lambda: explained(lambda: retry(write, "write", path)), world)
            written = gather_object(FileRecord(staged.num_bytes, BLOCK_BYTES, staged.root or 0), world)
            fault("gathered")
            committed = broadcast_object(lambda: explained(lambda: self._finish(folder, pending, plan, written)), world)
        except MeshwrightError:
            # share_errors and the broadcasts raise on all ranks alike, so no rank is still writing into the folder.
            if world.rank == 0:
                folder_of(root).give_up(lease, folder)
            raise
        if world.rank == 0:
            retain(root, lease, self._retention, fault, pending.state.get("best_step"))
        return committed

    def _finish(self, folder: Place, pending: PendingSave, plan: SavePlan, written: Sequence[FileRecord]) -> Place:
        """Write the index and commit, on rank 0, once all ranks have written. Returns the checkpoint's folder."""
        assert plan.index is not None, "only rank 0 commits"
        index, lease = plan.index, self._lease

        def write() -> Manifest:
            lease.check()
            return write_index(folder, pending.step, pending.state, index, written)

        manifest = retry(write, "write", folder / INDEX)
        self._fault("indexed")
        return finish(self._root, lease, folder, manifest, self._fault)

    def _find_plan(self, entries: Sequence[Entry]) -> SavePlan:
        """The plan of the last save, unless a rank's layout has changed since. Collective."""
        keys = [(entry.name, entry.layout, entry.data.dtype) for entry in entries]
        # A plan holds for all ranks or for none, and no rank knows another's layouts.
        is_same = torch.tensor(int(self._plan is not None and keys == self._plan.keys))
        all_reduce(is_same, self._world, "min", label="has a layout changed?")
        if self._plan is None or not is_same:
            self._plan = plan_save(entries, self._world)
        return self._plan


def write_file(path: Place, staged: StagedFile, fault: Fault = no_fault) -> None:
    """Write the staged bytes and the tree of their hashes; durable on return."""
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
    """Write the index of the ranks' files, durable on return, and return the manifest."""
    data = encode_index(written, plan.chunks)
    hashes = BlockHashes(index_block_bytes)
    hashes.add(memoryview(data))
    tree, root = hashes.finish()
    folder_of(folder.parent).write(folder / INDEX, data + tree)
    record = FileRecord(len(data), index_block_bytes, root)
    return Manifest(step, len(written), state, plan.records, record, written[0].block_bytes)


def _explained(root: Place, lease: Lease, bytes_needed: int, work: Callable[[], T]) -> T:
    """The result of `work`, with an OSError explained."""
    try:
        return work()
    except OSError as error:
        if error.errno == errno.ENOENT:
            lease.check()  # the folder may be gone because another start has taken it away
        raise explain(error, root, bytes_needed) from error
