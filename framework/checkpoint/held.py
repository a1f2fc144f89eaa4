"""What nodes hold of a run, found again by its next start: which step is whole, who has which file, and how a rank gets it.

    first rank of each node    names of what its node holds                            -> rank 0
    rank 0                     which steps are of this run's past, newest first        -> every rank
    for each, until one is whole:
      who has them             manifest and index, verified                            -> every node's memory
      every rank               verifies its part of the files that its node holds      -> rank 0
      rank 0                   has every file one holder at least?                     -> every rank
    once the run is built:
      every rank               the files that have its entries                         -> rank 0
      rank 0                   which of them come from where                           -> every rank
      holders                  files                                                   -> nodes that lack them
      every rank               loads from its node's memory, every block verified once more

Any layout loads any other, because a node fetches whatever files its ranks ask for. A file that was changed in one node's memory
is taken from another.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint.blocks import BlockCache, DamagedCheckpoint
from framework.checkpoint.commit import FoundCheckpoints, find_newest, step_of
from framework.checkpoint.entry import Entry
from framework.checkpoint.folder import report
from framework.checkpoint.index import Manifest, open_index, read_manifest
from framework.checkpoint.lineage import newest_listed, read_lineage, was_rewound
from framework.checkpoint.load import BUFFER_BYTES, Reader, refuse_poisoned
from framework.checkpoint.neighbors import HEAD, Neighbours, verify_file, verify_head
from framework.checkpoint.node_memory import HeldName, NodeMemory, make_file, map_file
from framework.checkpoint.pieces import file_name
from framework.checkpoint.place import Place
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, share_errors
from framework.comm.p2p import pass_bytes
from framework.errors import CheckpointError, StorageError

Listing = dict[HeldName, frozenset[str]]


@dataclass(frozen=True)
class Offer:
    """A step that nodes seem to hold. heads: the ranks whose nodes have index and manifest."""

    name: HeldName
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Look:
    """What rank 0 makes of all nodes' names and of the disk's: offers, newest first; found: the checkpoints, None where they were
    not looked into because an offer is as new as the newest by its name, or because all are damaged (error)."""

    offers: tuple[Offer, ...]
    found: FoundCheckpoints | None = None
    error: CheckpointError | None = None


@dataclass(frozen=True)
class Held:
    """A step all of whose files lie in nodes' memory. holders: of each rank's file, the ranks on whose nodes it is whole."""

    name: HeldName
    manifest: Manifest
    holders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Start:
    """Where a start goes on from: from what nodes hold, else from a checkpoint, else from the beginning."""

    held: Held | None
    found: FoundCheckpoints | None

    @property
    def resumes(self) -> bool:
        return self.held is not None or (self.found is not None and self.found.newest is not None)


@dataclass(frozen=True)
class Transfer:
    """A file of the step that one rank sends to another's node."""

    file: int
    source: int
    target: int


@dataclass(frozen=True, eq=False)
class HeldSteps:
    """What the nodes of a run hold. memory: this node's; world: all ranks. Its methods are collective, but for `clear` and
    `leave`."""

    memory: NodeMemory
    neighbours: Neighbours
    world: Communicator

    @property
    def acts(self) -> bool:
        """Whether this rank acts for its node."""
        return self.neighbours.is_first(self.world.rank)

    def find_start(self, run_dir: Path, checkpoints: Place) -> Start:
        """Decide on rank 0 where all go on from: from the newest step that is whole.

        A step that nodes hold counts as much as a checkpoint; of equal steps it is taken, and then no checkpoint is opened.
        Raises what `find_newest` raises where nodes hold nothing newer. What is passed over is said on stderr.
        """
        share_errors(lambda: self.memory.enter() if self.acts else None, self.world)
        listings = gather_object(self.memory.list() if self.acts else {}, self.world)
        look = broadcast_object(partial(_look, run_dir, checkpoints, listings), self.world)
        for offer in look.offers:
            held = self._take(offer)
            if held is not None:
                return Start(held, None)
        if look.error is not None:
            raise look.error
        return Start(None, look.found or broadcast_object(partial(find_newest, checkpoints), self.world))

    def load(self, held: Held, entries: Sequence[Entry], finite: Collection[str] = ()) -> dict[str, Any] | None:
        """Fill every entry's data; returns the step's state. None where it cannot be loaded, which is said: data may then be
        partly filled, and nobody holds the step any more.

        A node needs memory for the files that its ranks ask for and it does not hold, until all are loaded. finite: names of
        entries whose values are; else the step is passed over.
        """
        try:
            state = self._load(held, entries)
            updated = [entry for entry in entries if entry.name in finite]
            share_errors(partial(refuse_poisoned, self.memory.folder(held.name), updated), self.world)
            return state
        except (CheckpointError, StorageError) as error:
            self._pass_over(held.name, str(error))
            if self.acts:
                self.memory.clear()
            return None

    def clear(self, keep: HeldName | None = None) -> None:
        """Have this node hold one step, or nothing. For all ranks."""
        if self.acts:
            self.memory.clear(keep)

    def leave(self) -> None:
        """Have this node hold nothing, and no folder either. For all ranks."""
        if self.acts:
            self.memory.leave()

    def _load(self, held: Held, entries: Sequence[Entry]) -> dict[str, Any]:
        world, folder = self.world, self.memory.folder(held.name)
        reader = share_errors(lambda: Reader(folder, manifest=held.manifest), world)
        needed = gather_object(share_errors(lambda: _files_of(reader, entries), world), world)
        transfers = broadcast_object(partial(_plan_transfers, held, self.neighbours.nodes, needed), world)
        fetched = {each.file: folder / file_name(each.file) for each in transfers if each.target == world.rank}
        sizes = share_errors(lambda: {each.file: reader.file(each.file).size for each in transfers}, world)
        try:
            share_errors(lambda: _make_places(fetched, sizes), world)
            own = [each for each in transfers if world.rank in (each.source, each.target)]
            places = [(map_file(folder / file_name(each.file), sizes[each.file]), each) for each in own]
            pass_bytes(
                [(place, each.target) for place, each in places if each.source == world.rank],
                [(place, each.source) for place, each in places if each.target == world.rank],
                world,
            )
            # A file may have come to another rank of this node.
            share_errors(lambda: None, world)
            share_errors(lambda: reader.fill(entries), world)
        finally:
            for path in fetched.values():
                path.unlink(missing_ok=True)
        return held.manifest.state

    def _take(self, offer: Offer) -> Held | None:
        """The step with the holders of each file, None where a file has none left."""
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
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            self._pass_over(offer.name, f"{lost[0]}{more} is whole on no node")
            return None
        return Held(offer.name, manifest, holders)

    def _find_head(self, offer: Offer) -> dict[str, bytes] | None:
        """Index and manifest, from the first node that has them whole."""
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


def _look(run_dir: Path, checkpoints: Place, listings: Sequence[Listing]) -> Look:
    """On rank 0: which held steps may be taken, and what the disk has where that must be known. listings: of each rank."""
    offers = _find_offers(listings, run_dir, checkpoints)
    listed = newest_listed(checkpoints) if offers else 0
    as_new = tuple(each for each in offers if each.name.step >= listed)
    if as_new:
        return Look(as_new)
    try:
        found = find_newest(checkpoints)
    except CheckpointError as error:
        # What nodes hold is no new beginning, so a run whose checkpoints are all damaged may go on from it.
        return Look(offers, error=error)
    saved = 0 if found.newest is None else step_of(found.newest)
    return Look(tuple(each for each in offers if each.name.step >= saved), found)


def _find_offers(listings: Sequence[Listing], run_dir: Path, checkpoints: Place) -> tuple[Offer, ...]:
    """The steps that nodes hold and that are of this run's past, newest first; the others are said."""
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
    """What an index and a manifest are that are seen to be whole."""
    verify_head(folder)
    return {name: (folder / name).read_bytes() for name in HEAD}


def _keep_head(head: Mapping[str, bytes], folder: Path, memory: NodeMemory) -> None:
    """Have this node hold them, in the place of what it may have of them."""
    memory.make(folder)
    try:
        for name, data in head.items():
            (folder / name).write_bytes(data)
    except OSError as error:
        raise CheckpointError(f"{error.strerror} in {folder}") from error


def _find_whole_files(folder: Path, manifest: Manifest, neighbours: Neighbours, rank: int) -> list[int]:
    """The ranks' files that this node holds whole, as far as this rank is to verify them: the ranks of a node divide them."""
    here = neighbours.ranks_of[neighbours.nodes[rank]]
    index = open_index(folder, manifest, BlockCache(BUFFER_BYTES))
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
    """The ranks that have seen each file whole. gathered: what each rank has seen."""
    holders: list[list[int]] = [[] for _ in range(num_files)]
    for rank, files in enumerate(gathered):
        for file in files:
            holders[file].append(rank)
    return tuple(map(tuple, holders))


def _files_of(reader: Reader, entries: Sequence[Entry]) -> set[int]:
    reader.check(entries)
    return reader.files_of(entries)


def _plan_transfers(held: Held, nodes: Sequence[str], needed: Sequence[set[int]]) -> tuple[Transfer, ...]:
    """Every file that a node's ranks need and that is not whole there, once, from the holder that sends least. needed: by each
    rank."""
    sent, transfers = Counter[int](), []
    wanted = {(file, nodes[rank]): rank for rank, files in enumerate(needed) for file in files}
    for (file, node), target in sorted(wanted.items()):
        holders = held.holders[file]
        if node not in {nodes[holder] for holder in holders}:
            source = min(holders, key=lambda rank: (sent[rank], rank))
            sent[source] += 1
            transfers.append(Transfer(file, source, target))
    return tuple(transfers)


def _make_places(fetched: Mapping[int, Path], sizes: Mapping[int, int]) -> None:
    """Memory for the files that come to this rank, by number."""
    try:
        for file, path in fetched.items():
            make_file(path, sizes[file])
    except OSError as error:
        raise CheckpointError(f"a node has no memory for what its ranks load: {error.strerror} at {path}") from error
