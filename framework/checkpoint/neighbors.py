"""Copies in neighbours' memory: the files of a step held by the nodes themselves, from which a restart resumes without a disk.

    every rank              its file, as a save stages it            -> this node's memory
    every rank              size and root of its file                -> rank 0 -> the ranks that keep it
    every rank              the same bytes                           -> its keepers: equal local ranks of the next nodes
    every keeper            hashes them, and compares with the sender's root
    rank 0                  index, manifest                          -> this node's memory, its keepers
    once all have all: each node gives the step its final name
    once all have done so: each node removes the step before

If a node has the final name, every node has had all files of the step; and while one node lacks the name, all still have
the step before. So a death at any point leaves a whole step on all surviving nodes. The files are those of a checkpoint:
load.py reads them, held.py finds them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from framework.checkpoint.blocks import BlockCache, BlockFile, BlockHashes, DamagedCheckpoint
from framework.checkpoint.folder import Fault, no_fault, report
from framework.checkpoint.index import (
    BLOCK_BYTES,
    INDEX,
    MANIFEST,
    FileRecord,
    Index,
    encode_manifest,
    file_name,
    read_manifest,
)
from framework.checkpoint.node_memory import HeldName, NodeMemory, make_file, map_file
from framework.checkpoint.save import write_file, write_index
from framework.checkpoint.save_plan import IndexPlan
from framework.checkpoint.staging import StagedFile, free_bytes
from framework.checkpoint.storage import sizes_in
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, scatter_object, share_errors
from framework.comm.p2p import pass_bytes
from framework.errors import CheckpointError, MeshwrightError

T = TypeVar("T")

# Names of the moments at which a copy can die, like `commit.SAVE_POINTS` for saves.
COPY_POINTS = (
    "copy begun",
    "copy writing",  # a segment of the rank's own file is in this node's memory
    "copy written",
    "copy announced",  # ranks know the sizes of what they will receive
    "copy passed",  # and have received it
    "copy gathered",
    "copy indexed",
    "copy complete",  # every node has its files, under the name of an unfinished step
    "copy named",
    "copy retired",
)
# From these points on every node has the new step under its name.
HELD_POINTS = COPY_POINTS[COPY_POINTS.index("copy named") :]
# The files that rank 0 sends beside its own.
HEAD = (INDEX, MANIFEST)


@dataclass(frozen=True)
class Neighbours:
    """The ranks that keep each rank's files. nodes: the node of each rank; copies: the number of other nodes that keep one."""

    nodes: tuple[str, ...]
    copies: int

    @cached_property
    def ranks_of(self) -> dict[str, list[int]]:
        """The ranks of each node; nodes in the order of their first ranks."""
        found: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return found

    @property
    def possible(self) -> int:
        """The number of copies that these nodes can have: a second one on the own node adds nothing."""
        return min(self.copies, len(self.ranks_of) - 1)

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first of its node, which acts for the node."""
        return self.ranks_of[self.nodes[rank]][0] == rank

    def keepers(self, rank: int) -> list[int]:
        """The ranks that keep this rank's files: on each of the next nodes the rank of equal local number, modulo their
        number."""
        own = self.ranks_of[self.nodes[rank]]
        return [ranks[own.index(rank) % len(ranks)] for ranks in self._next(rank, 1)]

    def kept(self, rank: int) -> list[int]:
        """The ranks whose files this rank keeps."""
        return [other for ranks in self._next(rank, -1) for other in ranks if rank in self.keepers(other)]

    def _next(self, rank: int, direction: int) -> Iterator[list[int]]:
        names = list(self.ranks_of)
        for distance in range(1, self.possible + 1):
            yield self.ranks_of[names[(names.index(self.nodes[rank]) + direction * distance) % len(names)]]


def meet_neighbours(node: str, copies: int, world: Communicator) -> Neighbours:
    """Gather the nodes of all ranks. Collective. node: this rank's."""
    gathered = gather_object(node, world)
    return Neighbours(broadcast_object(lambda: tuple(gathered), world), copies)


@dataclass(frozen=True)
class FileTransfer:
    """A file that rank `source` sends to the node of rank `target`. record: of its hash tree, if that is compared on arrival."""

    name: str
    num_bytes: int
    source: int
    target: int
    record: FileRecord | None = None


def pass_files(folder: Path, transfers: Sequence[FileTransfer], world: Communicator) -> dict[FileTransfer, Tensor]:
    """Send files of this rank's folder, and return the bytes of those that come into it. Collective.

    transfers: at least those from and to this rank; from one rank to another in an order on which both agree.
    """
    coming = [each for each in transfers if each.target == world.rank]
    # All memory is allocated before the first byte is sent: a rank without memory would leave the others waiting.
    arrived = share_errors(
        lambda: explained(folder, lambda: {each: make_file(folder / each.name, each.num_bytes) for each in coming}),
        world,
    )
    pass_bytes(
        [
            (map_file(folder / each.name, each.num_bytes), each.target)
            for each in transfers
            if each.source == world.rank
        ],
        [(data, each.source) for each, data in arrived.items()],
        world,
    )
    return arrived


def explained(folder: Path, work: Callable[[], T]) -> T:
    """The result of `work` in a folder of a node's memory, with an OSError explained."""
    try:
        return work()
    except OSError as error:
        raise CheckpointError(
            f"{error.strerror} in {folder}: lower checkpoint.neighbor_copies, or have that tmpfs made larger"
            " (mount -o remount,size=...)"
        ) from error


@dataclass(eq=False)
class CopyKeeper:
    """Keeps copies of the steps that a saver has staged, in the saver's thread and over its group."""

    memory: NodeMemory
    """This node's."""
    neighbours: Neighbours
    generation: str
    """The generation of the steps (held.py). A rewind sets a new one, while no save is under way."""
    world: Communicator
    fault: Fault = no_fault
    """For tests."""

    def hold(self, staged: StagedFile, index: IndexPlan | None, step: int, state: dict[str, Any]) -> bool:
        """Copy the step to all nodes, and remove the step before. Returns whether this succeeded. Collective. index: rank 0's.

        A copy that fails, for lack of memory or because bytes have changed on their way, is reported and does no harm: the step
        before stays, and the next copy is tried.
        """
        name = HeldName(step, self.generation)
        try:
            self._collect(staged, index, name, state)
            self._commit(name)
        except MeshwrightError as error:
            self._forget(name)
            if self.world.rank == 0:
                report(f"no copy of step {step:,} is held; training goes on, and the next copy is tried: {error}")
            return False
        return True

    def _forget(self, name: HeldName) -> None:
        """Free the memory of a copy that failed. A rank removes only files that it has made: others may still be writing
        theirs."""
        folder, rank = self.memory.unfinished(name), self.world.rank
        made = [file_name(each) for each in (rank, *self.neighbours.kept(rank))]
        for path in (folder / each for each in (*made, *HEAD)):
            path.unlink(missing_ok=True)

    def _collect(self, staged: StagedFile, index: IndexPlan | None, name: HeldName, state: dict[str, Any]) -> None:
        """Bring all files of the step into the nodes' folders for an unfinished step."""
        world, fault, folder = self.world, self.fault, self.memory.unfinished(name)
        # Asked on all ranks first: a rank without memory would leave the others waiting for its bytes.
        share_errors(lambda: self._begin(folder, staged.num_bytes), world)
        fault("copy begun")
        path = folder / file_name(world.rank)
        share_errors(
            lambda: explained(folder, lambda: write_file(path, staged, lambda point: fault(f"copy {point}"))), world
        )
        written = FileRecord(staged.num_bytes, BLOCK_BYTES, staged.root or 0)
        self._send(folder, [path.name], written)
        files = gather_object(written, world)
        fault("copy gathered")
        broadcast_object(lambda: explained(folder, lambda: _write_head(folder, name.step, state, index, files)), world)
        fault("copy indexed")
        self._send(folder, HEAD if world.rank == 0 else ())
        is_keeper = 0 in self.neighbours.kept(world.rank)
        share_errors(lambda: verify_head(folder) if is_keeper else None, world)
        fault("copy complete")

    def _commit(self, name: HeldName) -> None:
        """Give the step its final name on all nodes, and then remove the others. All nodes have all files by now."""
        acts = self.neighbours.is_first(self.world.rank)
        unfinished, final = self.memory.unfinished(name), self.memory.folder(name)
        share_errors(lambda: explained(final, lambda: unfinished.rename(final)) if acts else None, self.world)
        self.fault("copy named")
        # Before this no rank may remove the step before: a node may not have named the new one yet.
        share_errors(lambda: self.memory.clear(keep=name) if acts else None, self.world)
        self.fault("copy retired")

    def _begin(self, folder: Path, num_bytes: int) -> None:
        """Make the folder. CheckpointError if this node lacks the memory for the files that its ranks will keep."""
        ranks = len(self.neighbours.ranks_of[self.neighbours.nodes[self.world.rank]])
        needed, free = num_bytes * ranks * (1 + self.neighbours.possible), free_bytes()
        if free is not None and needed > free:
            raise CheckpointError(f"{needed:,} bytes of a node's memory are needed, {free:,} are free")
        self.memory.make(folder)

    def _send(self, folder: Path, names: Sequence[str], record: FileRecord | None = None) -> None:
        """Send files of this rank to their keepers, and receive those that it keeps. Collective. record: of the files' hash
        trees, None for index and manifest."""
        rank, world = self.world.rank, self.world
        sizes = {name: (folder / name).stat().st_size for name in names}
        keepers = self.neighbours.keepers(rank)
        own = [FileTransfer(name, sizes[name], rank, keeper, record) for keeper in keepers for name in names]
        gathered = gather_object(own, world)
        coming = scatter_object(lambda: _deal_to_targets(gathered), world)
        self.fault("copy announced")
        arrived = pass_files(folder, [*own, *coming], world)
        self.fault("copy passed")
        share_errors(lambda: _verify_received(arrived), world)


def _deal_to_targets(gathered: Sequence[Sequence[FileTransfer]]) -> list[list[FileTransfer]]:
    """For each rank what comes to it. gathered: what goes from each."""
    dealt: list[list[FileTransfer]] = [[] for _ in gathered]
    for each in chain.from_iterable(gathered):
        dealt[each.target].append(each)
    return dealt


def _write_head(
    folder: Path, step: int, state: dict[str, Any], index: IndexPlan | None, written: list[FileRecord]
) -> None:
    """Write index and manifest, on rank 0, to be sent."""
    assert index is not None, "only rank 0 knows of all ranks' entries"
    text = encode_manifest(write_index(folder, step, state, index, written))
    (folder / MANIFEST).write_text(text)


def verify_head(folder: Path) -> None:
    """DamagedCheckpoint unless index and manifest are those that rank 0 has written."""
    verify_file(Index(folder, read_manifest(folder), BlockCache(BLOCK_BYTES)).file)


def verify_file(file: BlockFile) -> None:
    """DamagedCheckpoint unless the file, which exists, is what was written."""
    # Its size first: a file that is short in memory stays short, so it is not retried as on a file system.
    if sizes_in(file.path.parent)(file.path.name) != file.size:
        raise DamagedCheckpoint(f"{file.path} has not the {file.size} bytes that were written")
    file.verify()


def _verify_received(arrived: Mapping[FileTransfer, Tensor]) -> None:
    """DamagedCheckpoint if a file with a hash tree is not what was staged on its sender."""
    for each, data in arrived.items():
        if each.record is None:
            continue
        hashes = BlockHashes(each.record.block_bytes)
        hashes.add(data[: each.record.num_bytes].numpy().data)
        tree, root = hashes.finish()
        if root != each.record.root or data[each.record.num_bytes :].numpy().tobytes() != tree:
            raise DamagedCheckpoint(f"{each.name}, as it came from rank {each.source}, is not what was staged there")
