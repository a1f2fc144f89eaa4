"""Steps held in nodes' memory, found and loaded by the next start of a run.

    first rank of each node    names of the files that its node holds                  -> rank 0
    rank 0                     steps that are part of this run's past, newest first    -> every rank
    for each, until one is whole:
      a rank that has them     manifest and index, verified                            -> every node's memory
      every rank               verifies its share of the files that its node holds     -> rank 0
      rank 0                   does every file have a holder?                          -> every rank
    once the run is built:
      every rank               the files that have its entries                         -> rank 0
      rank 0                   the source of each file                                 -> every rank
      holders                  files                                                   -> nodes that lack them
      every rank               loads from its node's memory, every block verified once more

Any layout loads any other, because a node fetches all files that its ranks need. A file that was changed in one node's memory
is taken from another.

A held step counts only if this run has trained it, by its lineage:

    start a    steps 1 to 70; 50 is saved, 70 is held in the nodes' memory; they are lost
    start b    on other nodes, from 50: steps 51 to 60           a until 50, b
    start c    on the first nodes again, which hold a's 70       a's steps after 50 are not part of this run's past

Each start is a generation, and held steps have its name. Rank 0 writes the record, lineage.json in the run's folder, when a start
has loaded its step and before it trains. If the record is missing or cannot be read, no held step counts.
"""

import json
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint.blocks import BlockCache, DamagedCheckpoint
from framework.checkpoint.commit import FoundCheckpoints, find_newest, list_checkpoints, noted_step, step_of
from framework.checkpoint.folder import report
from framework.checkpoint.index import Index, Manifest, file_name, read_manifest
from framework.checkpoint.load import BUFFER_BYTES, Reader, refuse_poisoned
from framework.checkpoint.neighbors import (
    HEAD,
    FileTransfer,
    Neighbours,
    explained,
    pass_files,
    verify_file,
    verify_head,
)
from framework.checkpoint.node_memory import HeldName, NodeMemory
from framework.checkpoint.staging import Entry
from framework.checkpoint.storage import checkpoints_of
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, share_errors
from framework.errors import CheckpointError, StorageError
from framework.lease import Lease
from framework.object_store import Place, read, retry, storage_error

LINEAGE_FILE = "lineage.json"
# The most generations in a record: steps of starts before the last 32 are not held any more.
MOST_GENERATIONS = 32

Listing = dict[HeldName, frozenset[str]]


@dataclass(frozen=True)
class Generation:
    """A start of the run. first: the step that it began from; last: the last of its steps that the run kept, None while it is the
    newest."""

    name: str
    first: int
    last: int | None = None

    def has_trained(self, step: int) -> bool:
        """Whether a step of this generation is part of the run's past."""
        return self.first <= step and (self.last is None or step <= self.last)


@dataclass(frozen=True)
class RunLineage:
    """The generations that have trained the run's steps, oldest first. saved_step, noted_step: the step of the newest
    checkpoint, and that of the note beside the checkpoints (0: none), when the newest generation began."""

    generations: tuple[Generation, ...] = ()
    saved_step: int = 0
    noted_step: int = 0

    def has_trained(self, held: HeldName) -> bool:
        """Whether a held step is part of the run's past."""
        return any(each.name == held.generation and each.has_trained(held.step) for each in self.generations)

    def begin(self, step: int, name: str, saved_step: int, noted_step: int) -> "RunLineage":
        """The lineage after a new generation has begun from `step`."""
        before = [each for each in self.generations if each.first < step]
        before = [
            Generation(each.name, each.first, step if each.last is None else min(each.last, step)) for each in before
        ]
        return RunLineage((*before, Generation(name, step))[-MOST_GENERATIONS:], saved_step, noted_step)


def read_lineage(run_dir: Path) -> RunLineage:
    """The run's lineage; an empty one without a readable record. Raises StorageError if the file system fails."""
    try:
        record = json.loads(read((run_dir / LINEAGE_FILE).read_text, run_dir / LINEAGE_FILE))
        generations = tuple(Generation(**each) for each in record["generations"])
        return RunLineage(generations, record["saved_step"], record["noted_step"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return RunLineage()


def begin_generation(lease: Lease, step: int) -> str:
    """Record that a start begins from `step`, and return its name. On rank 0, once the step is loaded, in every start: also a run
    that keeps no copies may leave a branch of which nodes hold a step. Raises StorageError, LeaseLost."""
    name, checkpoints = secrets.token_hex(4), checkpoints_of(lease.run)
    lineage = read_lineage(lease.run).begin(step, name, newest_listed(checkpoints), noted_step(checkpoints) or 0)
    path = lease.run / LINEAGE_FILE
    try:
        retry(lambda: lease.write(path, json.dumps(asdict(lineage)).encode()), "write", path)
    except OSError as error:
        raise storage_error(error, "write", path) from error
    return name


def newest_listed(checkpoints: Place) -> int:
    """The step of the newest checkpoint by its name, whole or not; 0 without one."""
    listed = list_checkpoints(checkpoints)
    return step_of(listed[0]) if listed else 0


def was_rewound(lineage: RunLineage, checkpoints: Place) -> bool:
    """Whether a checkpoint that the run had is gone, for instance moved away by a user who wants to resume from an older one."""
    noted = noted_step(checkpoints) or 0
    # A step noted since then is of the newest generation; one noted before may have been damaged and set aside by it.
    had = noted if noted != lineage.noted_step else lineage.saved_step
    return newest_listed(checkpoints) < had


@dataclass(frozen=True)
class Offer:
    """A step that nodes may hold. heads: the ranks whose nodes have its index and manifest."""

    name: HeldName
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A step whose files are all in nodes' memory. holders: for each rank's file, the ranks that have seen it whole on their
    nodes."""

    name: HeldName
    manifest: Manifest
    holders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StartPoint:
    """The point from which a start continues: a held step, else a checkpoint, else the beginning."""

    held: Held | None
    found: FoundCheckpoints | None

    @property
    def resumes(self) -> bool:
        return self.step > 0

    @property
    def step(self) -> int:
        """The step; 0 at the beginning."""
        if self.held is not None:
            return self.held.name.step
        return 0 if self.found is None or self.found.newest is None else step_of(self.found.newest)


@dataclass(frozen=True, eq=False)
class HeldSteps:
    """The steps held by the nodes of a run. memory: this node's; world: all ranks. Its methods are collective, except `clear` and
    `leave`."""

    memory: NodeMemory
    neighbours: Neighbours
    world: Communicator

    @property
    def acts(self) -> bool:
        """Whether this rank acts for its node."""
        return self.neighbours.is_first(self.world.rank)

    def find_start(self, run_dir: Path, checkpoints: Place) -> StartPoint:
        """Choose the newest whole step, held or saved. Rank 0 decides for all.

        Of a held step and a checkpoint of the same step, the held one is taken, and no checkpoint is opened. Raises what
        `find_newest` raises if nodes hold nothing newer. Steps that are passed over are reported on stderr.
        """
        # Before any node lists: an older start that still runs must not change what is listed.
        share_errors(lambda: self.memory.enter() if self.acts else None, self.world)
        listings = gather_object(self.memory.list() if self.acts else {}, self.world)
        offers, found, error = broadcast_object(partial(_look, run_dir, checkpoints, listings), self.world)
        for offer in offers:
            held = self._take(offer)
            if held is not None:
                return StartPoint(held, None)
        if error is not None:
            raise error
        return StartPoint(None, found or broadcast_object(partial(find_newest, checkpoints), self.world))

    def load(self, held: Held, entries: Sequence[Entry], finite: Collection[str] = ()) -> dict[str, Any] | None:
        """Fill every entry's data, and return the step's state. None if it cannot be loaded, which is reported: data may then be
        partly filled, and no node holds the step any more.

        A node needs memory for the files that its ranks need and it does not hold, until all are loaded. finite: names of entries
        whose values must be finite.
        """
        try:
            state = self._load(held, entries)
            updated = [entry for entry in entries if entry.name in finite]
            share_errors(partial(refuse_poisoned, self.memory.folder(held.name), updated), self.world)
            return state
        except (CheckpointError, StorageError) as error:
            self._pass_over(held.name, str(error))
            if self.acts:
                self.memory.clear()  # else the next start would try this step again
            return None

    def clear(self, keep: HeldName | None = None) -> None:
        """Remove what this node holds, except one step. Called on all ranks."""
        if self.acts:
            self.memory.clear(keep)

    def leave(self) -> None:
        """Remove what this node holds, and its folders. Called on all ranks."""
        if self.acts:
            self.memory.leave()

    def _load(self, held: Held, entries: Sequence[Entry]) -> dict[str, Any]:
        world, folder = self.world, self.memory.folder(held.name)
        reader = share_errors(lambda: Reader(folder, manifest=held.manifest), world)
        needed = gather_object(share_errors(lambda: reader.files_of(entries), world), world)
        transfers = broadcast_object(partial(_plan_transfers, held, reader, self.neighbours.nodes, needed), world)
        try:
            pass_files(folder, transfers, world)
            # A barrier: a file may have come to another rank of this node.
            share_errors(lambda: None, world)
            share_errors(lambda: reader.fill(entries), world)
        finally:
            # Fetched files take memory that training needs, and a later start may have other ranks on this node.
            for each in transfers:
                if each.target == world.rank:
                    (folder / each.name).unlink(missing_ok=True)
        return held.manifest.state

    def _take(self, offer: Offer) -> Held | None:
        """The step with the holders of each file; None if a file has none."""
        world, folder = self.world, self.memory.folder(offer.name)
        head = self._find_head(offer)
        if head is None:
            return None
        try:
            share_errors(lambda: _keep_head(head, folder, self.memory) if self.acts else None, world)
        except CheckpointError as error:
            self._pass_over(offer.name, str(error))
            return None
        manifest = share_errors(lambda: read_manifest(folder), world)
        gathered = gather_object(_find_whole_files(folder, manifest, self.neighbours, world.rank), world)
        holders = broadcast_object(partial(_holders_of, gathered, manifest.world), world)
        lost = [file_name(number) for number, ranks in enumerate(holders) if not ranks]
        # A step counts only if every file has a holder: a partial one would mix values of two steps.
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            self._pass_over(offer.name, f"{lost[0]}{more} is whole on no node")
            return None
        return Held(offer.name, manifest, holders)

    def _find_head(self, offer: Offer) -> dict[str, bytes] | None:
        """Index and manifest, from the first node that has them whole; None if none has."""
        why = ""
        for source in offer.heads:
            try:
                return broadcast_object(partial(_read_head, self.memory.folder(offer.name)), self.world, source)
            except (CheckpointError, StorageError) as error:
                why = str(error)
        self._pass_over(offer.name, why)
        return None

    def _pass_over(self, name: HeldName, why: str) -> None:
        if self.world.rank == 0:
            report(f"passing over the copy of step {name.step:,} in the nodes' memory: {why}")


def _look(
    run_dir: Path, checkpoints: Place, listings: Sequence[Listing]
) -> tuple[tuple[Offer, ...], FoundCheckpoints | None, CheckpointError | None]:
    """On rank 0, (the held steps that may be taken, newest first; the checkpoints; the error if all of those are damaged).

    The checkpoints are not looked into, and None, if an offer is as new as the newest by its name. listings: of each rank.
    """
    offers = _find_offers(listings, run_dir, checkpoints)
    listed = newest_listed(checkpoints) if offers else 0
    as_new = tuple(each for each in offers if each.name.step >= listed)
    if as_new:
        return as_new, None, None
    try:
        found = find_newest(checkpoints)
    except CheckpointError as error:
        # A held step is no new beginning, so a run whose checkpoints are all damaged may resume from it.
        return offers, None, error
    saved = 0 if found.newest is None else step_of(found.newest)
    return tuple(each for each in offers if each.name.step >= saved), found, None


def _find_offers(listings: Sequence[Listing], run_dir: Path, checkpoints: Place) -> tuple[Offer, ...]:
    """The held steps that are part of this run's past, newest first; others are reported."""
    names = sorted({name for listing in listings for name in listing}, reverse=True)
    if not names:
        return ()
    lineage, offers = read_lineage(run_dir), []
    is_rewound = was_rewound(lineage, checkpoints)
    for name in names:
        heads = tuple(rank for rank, listing in enumerate(listings) if set(HEAD) <= listing.get(name, frozenset()))
        if not lineage.has_trained(name):
            why = "it is of a branch that this run has left"
        elif is_rewound:
            why = "a newer checkpoint than those there are was taken away, so the run is to go on from an older one"
        elif not heads:
            why = "its index is lost with the nodes that held it"
        else:
            offers.append(Offer(name, heads))
            continue
        report(f"passing over the copy of step {name.step:,} in the nodes' memory: {why}")
    return tuple(offers)


def _read_head(folder: Path) -> dict[str, bytes]:
    """The bytes of index and manifest, once verified."""
    verify_head(folder)
    return {name: (folder / name).read_bytes() for name in HEAD}


def _keep_head(head: Mapping[str, bytes], folder: Path, memory: NodeMemory) -> None:
    """Write index and manifest into this node's memory, in place of its own."""
    memory.make(folder)
    explained(folder, lambda: [(folder / name).write_bytes(data) for name, data in head.items()])


def _find_whole_files(folder: Path, manifest: Manifest, neighbours: Neighbours, rank: int) -> list[int]:
    """This rank's share of the files that its node holds whole, by the ranks that wrote them: the ranks of a node divide them."""
    here = neighbours.ranks_of[neighbours.nodes[rank]]
    index = Index(folder, manifest, BlockCache(BUFFER_BYTES))
    names = {file_name(number): number for number in range(manifest.world)}
    there = sorted(names[path.name] for path in folder.iterdir() if path.name in names)
    whole = []
    for number in there[here.index(rank) :: len(here)]:
        file = index.data_file(number)
        try:
            verify_file(file)
        except DamagedCheckpoint as damage:
            report(f"a copy in the memory of node {neighbours.nodes[rank]} is not used: {damage}")
            continue
        whole.append(number)
    return whole


def _holders_of(gathered: Sequence[Sequence[int]], num_files: int) -> tuple[tuple[int, ...], ...]:
    """The ranks that have seen each file whole. gathered: the files that each rank has seen."""
    holders: list[list[int]] = [[] for _ in range(num_files)]
    for rank, files in enumerate(gathered):
        for file in files:
            holders[file].append(rank)
    return tuple(map(tuple, holders))


def _plan_transfers(
    held: Held, reader: Reader, nodes: Sequence[str], needed: Sequence[set[int]]
) -> tuple[FileTransfer, ...]:
    """One transfer for every file that a node's ranks need and that is not whole there, from the holder that sends least. needed:
    files by rank."""
    sent, transfers = Counter[int](), []
    wanted = {(file, nodes[rank]): rank for rank, files in enumerate(needed) for file in files}
    for (file, node), target in sorted(wanted.items()):
        holders = held.holders[file]
        if node not in {nodes[holder] for holder in holders}:
            source = min(holders, key=lambda rank: (sent[rank], rank))
            sent[source] += 1
            transfers.append(FileTransfer(file_name(file), reader.file(file).size, source, target))
    return tuple(transfers)
