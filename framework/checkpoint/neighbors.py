"""Copies in neighbours' memory: files of a step held by the nodes themselves, from which a restart goes on without a disk.

    every rank              its file, as a save stages it            -> this node's memory
    every rank              the same bytes                           -> its neighbours: equal local ranks of the next nodes
    who receives            hashes them, and compares with the sender's root
    every rank              root                                     -> rank 0
    rank 0                  index, manifest                          -> this node's memory, its neighbours
    all have all: each node gives the step its final name
    all have done so: each node removes the step before

A node that has the final name says that every node has had all files of the step; and while one has it not yet, all still have
the step before. So a death at any point leaves a whole step, on all nodes that are left. The files are those of a checkpoint:
load.py reads them, held.py finds them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from framework.checkpoint.blocks import BlockCache, BlockFile, BlockHashes, DamagedCheckpoint
from framework.checkpoint.folder import Fault, no_fault, report
from framework.checkpoint.index import BLOCK_BYTES, MANIFEST, encode_manifest, open_index, read_manifest
from framework.checkpoint.node_memory import HeldName, NodeMemory, make_file, map_file
from framework.checkpoint.pieces import INDEX, FileRecord, file_name
from framework.checkpoint.save import write_file, write_index
from framework.checkpoint.save_plan import IndexPlan
from framework.checkpoint.staging import StagedFile, free_bytes
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, share_errors
from framework.comm.p2p import pass_bytes
from framework.errors import CheckpointError, MeshwrightError

T = TypeVar("T")

# Names of the moments at which copying can die, as `commit.SAVE_POINTS` of saves.
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
# Behind these every node has the new step under its name.
HELD_POINTS = COPY_POINTS[COPY_POINTS.index("copy named") :]
# What rank 0 passes on beside its own file.
HEAD = (INDEX, MANIFEST)
# Numbers that announce a file: its bytes, its bytes of data, and the root of its hashes.
ANNOUNCED = 3


@dataclass(frozen=True)
class Neighbours:
    """Which ranks keep which other ranks' files. nodes: the node of each rank; copies: on how many other nodes."""

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
        """Copies that these nodes can have: a node that keeps a second one of its own adds nothing."""
        return min(self.copies, len(self.ranks_of) - 1)

    def is_first(self, rank: int) -> bool:
        """Whether it is its node's first rank, which acts for the node."""
        return self.ranks_of[self.nodes[rank]][0] == rank

    def keepers(self, rank: int) -> list[int]:
        """Who keeps this rank's files: on each of the next nodes the rank of its local number, counted anew where a node has
        fewer."""
        own = self.ranks_of[self.nodes[rank]]
        return [ranks[own.index(rank) % len(ranks)] for ranks in self._next(rank, 1)]

    def kept(self, rank: int) -> list[int]:
        """Whose files this rank keeps."""
        return [other for ranks in self._next(rank, -1) for other in ranks if rank in self.keepers(other)]

    def _next(self, rank: int, direction: int) -> Iterator[list[int]]:
        names = list(self.ranks_of)
        for distance in range(1, self.possible + 1):
            yield self.ranks_of[names[(names.index(self.nodes[rank]) + direction * distance) % len(names)]]


def meet_neighbours(node: str, copies: int, world: Communicator) -> Neighbours:
    """All ranks' nodes, by this rank's. Collective."""
    gathered = gather_object(node, world)
    return Neighbours(broadcast_object(lambda: tuple(gathered), world), copies)


@dataclass(frozen=True)
class Announced:
    """A file that a rank is about to receive. num_bytes: of the whole file; data_bytes, root: of its data, 0 of index and
    manifest."""

    num_bytes: int
    data_bytes: int = 0
    root: int = 0


@dataclass(eq=False)
class CopyKeeper:
    """Keeps copies of the steps that a saver has staged, in the saver's thread and over its group.

    memory: this node's. generation: whose steps these are (lineage.py); a run that goes back to an older step begins a new one,
    while no save is under way. fault: for tests.
    """

    memory: NodeMemory
    neighbours: Neighbours
    generation: str
    world: Communicator
    fault: Fault = no_fault

    def hold(self, staged: StagedFile, index: IndexPlan | None, step: int, state: dict[str, Any]) -> bool:
        """Have all nodes hold the step, and no step before it. Collective. Whether they do.

        A copy that fails, for lack of memory or because its bytes have changed on their way, is said and costs nothing: the step
        before stays, and the next copy is tried. index: rank 0's.
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
        """Take back the memory of a copy that failed. A rank removes what it has made itself: others may still be at theirs."""
        folder, rank = self.memory.unfinished(name), self.world.rank
        made = [file_name(each) for each in (rank, *self.neighbours.kept(rank))]
        for path in (folder / each for each in (*made, *HEAD)):
            path.unlink(missing_ok=True)

    def _collect(self, staged: StagedFile, index: IndexPlan | None, name: HeldName, state: dict[str, Any]) -> None:
        """All files of the step, in the folders that nodes have for an unfinished one."""
        world, fault, folder = self.world, self.fault, self.memory.unfinished(name)
        share_errors(lambda: self._begin(folder, staged.num_bytes), world)
        fault("copy begun")
        path = folder / file_name(world.rank)
        share_errors(
            lambda: self._explained(lambda: write_file(path, staged, lambda point: fault(f"copy {point}"))), world
        )
        own = Announced(path.stat().st_size, staged.num_bytes, staged.root or 0)
        self._pass(folder, [own], lambda rank: [file_name(rank)])
        written = gather_object(FileRecord(staged.num_bytes, BLOCK_BYTES, own.root), world)
        fault("copy gathered")
        head = broadcast_object(
            lambda: self._explained(lambda: _write_head(folder, name.step, state, index, written)), world
        )
        fault("copy indexed")
        self._pass(folder, head if world.rank == 0 else [], lambda rank: HEAD if rank == 0 else [])
        is_keeper = 0 in self.neighbours.kept(world.rank)
        share_errors(lambda: verify_head(folder) if is_keeper else None, world)
        fault("copy complete")

    def _commit(self, name: HeldName) -> None:
        """The final name on all nodes, and then no other. All have all files: nobody comes here before."""
        acts = self.neighbours.is_first(self.world.rank)
        unfinished, final = self.memory.unfinished(name), self.memory.folder(name)
        share_errors(lambda: self._explained(lambda: unfinished.rename(final)) if acts else None, self.world)
        self.fault("copy named")
        # In front of this nobody may remove the step before: a node may not have named the new one yet.
        share_errors(lambda: self.memory.clear(keep=name) if acts else None, self.world)
        self.fault("copy retired")

    def _begin(self, folder: Path, num_bytes: int) -> None:
        """Make the folder. Raises CheckpointError where this node has not the memory for what its ranks are about to keep."""
        ranks = len(self.neighbours.ranks_of[self.neighbours.nodes[self.world.rank]])
        needed, free = num_bytes * ranks * (1 + self.neighbours.possible), free_bytes()
        if free is not None and needed > free:
            raise CheckpointError(f"{needed:,} bytes of a node's memory are needed, {free:,} are free")
        self.memory.make(folder)

    def _pass(self, folder: Path, own: Sequence[Announced], names_of: Callable[[int], Sequence[str]]) -> None:
        """Send this rank's files to those that keep them, and receive those that it keeps. names_of: the files of a rank."""
        rank, world = self.world.rank, self.world
        keepers, kept = self.neighbours.keepers(rank), self.neighbours.kept(rank)
        sizes = torch.tensor([[each.num_bytes, each.data_bytes, _signed(each.root)] for each in own], dtype=torch.int64)
        arriving = [(torch.zeros(ANNOUNCED * len(names_of(other)), dtype=torch.int64), other) for other in kept]
        pass_bytes(
            [(sizes.view(-1).view(torch.uint8), keeper) for keeper in keepers if own],
            [(place.view(torch.uint8), other) for place, other in arriving],
            world,
        )
        self.fault("copy announced")
        announced = {
            (name, other): Announced(*row)
            for place, other in arriving
            for name, row in zip(names_of(other), place.view(-1, ANNOUNCED).tolist(), strict=True)
        }
        files = share_errors(lambda: self._explained(lambda: _make_files(folder, announced)), world)
        mine = [map_file(folder / name, each.num_bytes) for name, each in zip(names_of(rank), own, strict=True)]
        pass_bytes(
            [(data, keeper) for keeper in keepers for data in mine],
            [(files[key], key[1]) for key in announced],
            world,
        )
        self.fault("copy passed")
        share_errors(lambda: _verify_received(files, announced), world)

    def _explained(self, work: Callable[[], T]) -> T:
        """The result of `work`, its OSError in words."""
        try:
            return work()
        except OSError as error:
            raise CheckpointError(
                f"{error.strerror} in {self.memory.path} of node {self.neighbours.nodes[self.world.rank]}: lower"
                " checkpoint.neighbor_copies, or have that tmpfs made larger (mount -o remount,size=...)"
            ) from error


def _write_head(
    folder: Path, step: int, state: dict[str, Any], index: IndexPlan | None, written: Sequence[FileRecord]
) -> list[Announced]:
    """Index and manifest, by rank 0, and their announcements."""
    assert index is not None, "only rank 0 knows of all ranks' entries"
    text = encode_manifest(write_index(folder, step, state, index, written))
    (folder / MANIFEST).write_text(text)
    return [Announced((folder / name).stat().st_size) for name in HEAD]


def verify_head(folder: Path) -> None:
    """Raise DamagedCheckpoint unless index and manifest are those that rank 0 has written."""
    # The index is the first of all files.
    verify_file(next(open_index(folder, read_manifest(folder), BlockCache(BLOCK_BYTES)).all_files()))


def verify_file(file: BlockFile) -> None:
    """Raise DamagedCheckpoint unless the file, which is there, is what was written."""
    # Its size first: what is short in memory stays short, and is not worth the attempts that a file system gets.
    if file.path.stat().st_size != file.size:
        raise DamagedCheckpoint(f"{file.path} has not the {file.size} bytes that were written")
    file.verify()


def _make_files(folder: Path, announced: Mapping[tuple[str, int], Announced]) -> dict[tuple[str, int], Tensor]:
    """The memory of files that are about to come, by name and sender."""
    return {key: make_file(folder / key[0], each.num_bytes) for key, each in announced.items()}


def _verify_received(files: Mapping[tuple[str, int], Tensor], announced: Mapping[tuple[str, int], Announced]) -> None:
    """Raise DamagedCheckpoint where a file with a tree of hashes is not what was staged on its sender."""
    for key, data in files.items():
        each = announced[key]
        if key[0] in HEAD:
            continue
        hashes = BlockHashes(BLOCK_BYTES)
        hashes.add(data[: each.data_bytes].numpy().data)
        tree, root = hashes.finish()
        if _signed(root) != each.root or data[each.data_bytes :].numpy().tobytes() != tree:
            raise DamagedCheckpoint(f"{key[0]}, as it came from rank {key[1]}, is not what was staged there")


def _signed(root: int) -> int:
    """The 64 bits of a root as torch has integers."""
    return root - (1 << 64) if root >> 63 else root
