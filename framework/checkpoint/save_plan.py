"""Save plan: which rank writes what, settled by messages between ranks once and whenever a layout has changed.

Every rank claims what it owns, and rank 0 gives each claim to one of the ranks that make it. A claim is one record of CLAIM,
whatever the tensor: names and shapes stay on the ranks and are compared by their hashes, so that thousands of ranks' claims are
an array, sorted at once. The order of the messages: save.py.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import NoReturn

import numpy as np
import torch
import xxhash

from framework.checkpoint.index import CHUNK, FILE, EntryRecord, cell_of
from framework.checkpoint.staging import Entry, dtype_name, place_entries
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, scatter_object
from framework.errors import CheckpointError
from framework.mesh.layout import Layout

# An interval [start, stop) of a cell of an entry. entry: hash of its name; kind: of its shape, dtype and shards.
CLAIM = np.dtype(
    [
        ("entry", "<u8"),
        ("kind", "<u8"),
        ("numel", "<u8"),
        ("start", "<u8"),
        ("stop", "<u8"),
        ("cell", "<u4"),
        ("itemsize", "<u4"),
    ]
)

# Flags of a claim: its rank writes its elements, and also describes the entry for the manifest.
WRITES, DESCRIBES = 1, 2


class Disagreement(CheckpointError):
    """The error of ranks whose elements do not make whole entries. covered: hash of an entry's name -> the elements they own."""

    def __init__(self, covered: dict[int, int]) -> None:
        super().__init__(covered)
        self.covered = covered


@dataclass(frozen=True)
class Division:
    """The division of a checkpoint between ranks."""

    duties: list[np.ndarray]
    """For each rank the flags of its claims."""
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    """(hash of the name, first chunk, number of chunks) of each entry."""
    chunks: np.ndarray = field(default_factory=lambda: np.empty(0, CHUNK))
    """Records of the index. Their offsets are known only when the ranks have written."""
    claims: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """For each chunk the index of its claim among the claims of all ranks."""
    bytes_needed: int = 0
    disagreement: Disagreement | None = None

    def locate(self, offsets: Sequence[np.ndarray]) -> np.ndarray:
        """`chunks` with their offsets. offsets: for each rank those of the claims that it has written, in their order."""
        of_claim = np.zeros(sum(map(len, self.duties)), np.uint64)
        if len(of_claim):
            of_claim[np.concatenate(self.duties) > 0] = np.concatenate(offsets)
        self.chunks["offset"] = of_claim[self.claims]
        return self.chunks


@dataclass(frozen=True)
class Duty:
    """The message of rank 0 to a rank. flags: of each of its claims. bytes_needed: what all ranks write."""

    flags: np.ndarray
    bytes_needed: int


@dataclass(frozen=True)
class FilePlan:
    """The message of a rank about the file that it will write: the offset of each entry, and the entries that it describes."""

    offsets: list[int]
    described: dict[str, EntryRecord]


@dataclass(frozen=True)
class IndexPlan:
    """The chunks of all ranks' entries for the index, and the entries for the manifest; on rank 0 alone."""

    chunks: np.ndarray
    records: dict[str, EntryRecord]


@dataclass(frozen=True)
class SavePlan:
    """The plan of this rank's saves, valid until a layout changes."""

    keys: list[tuple[str, Layout, torch.dtype]]
    """(name, layout, dtype) of each of this rank's entries."""
    chosen: list[int]
    """The numbers of those that it writes."""
    bytes_needed: int
    """Sum over all ranks."""
    index: IndexPlan | None
    """Rank 0's."""


def plan_save(entries: Sequence[Entry], world: Communicator) -> SavePlan:
    """Divide the entries of all ranks among them. Collective. Raises CheckpointError, on all, if they are not whole."""
    division = divide(gather_object(pack_claims(entries), world))
    try:
        # Each rank learns of its own claims alone: the whole division would be sent to thousands of ranks.
        duty = scatter_object(partial(_duties, division), world)
    except Disagreement as found:
        _explain_disagreement(found, entries, world)
    files = gather_object(plan_file(entries, duty.flags), world)
    index = plan_index(division, files) if world.rank == 0 else None
    keys = [(entry.name, entry.layout, entry.data.dtype) for entry in entries]
    return SavePlan(keys, np.flatnonzero(duty.flags & WRITES).tolist(), duty.bytes_needed, index)


def plan_file(entries: Sequence[Entry], flags: np.ndarray) -> FilePlan:
    """The file of a rank, by the flags of its entries."""
    pairs = list(zip(entries, flags, strict=True))
    offsets, _ = place_entries([entry for entry, flag in pairs if flag & WRITES])
    return FilePlan(offsets, {entry.name: describe(entry) for entry, flag in pairs if flag & DESCRIBES})


def plan_index(division: Division, files: Sequence[FilePlan]) -> IndexPlan:
    """The index of the files of all ranks."""
    described = {name: record for each in files for name, record in each.described.items()}
    places = {entry: (first, count) for entry, first, count in division.entries}
    records = {}
    for name in sorted(described, key=_natural):
        first, count = places[hash_name(name)]
        records[name] = replace(described[name], first=first, count=count)
    return IndexPlan(division.locate([np.array(each.offsets, np.uint64) for each in files]), records)


def _duties(division: Division) -> list[Duty]:
    """Each rank's duty, on rank 0. Raises the disagreement if there is one."""
    if division.disagreement is not None:
        raise division.disagreement
    return [Duty(flags, division.bytes_needed) for flags in division.duties]


def _explain_disagreement(found: Disagreement, entries: Sequence[Entry], world: Communicator) -> NoReturn:
    """Raise on all ranks an error that names the entries: the ranks that have them tell rank 0. Collective."""
    wrong = {entry.name: describe(entry) for entry in entries if hash_name(entry.name) in found.covered}
    known = gather_object(wrong, world)
    broadcast_object(lambda: _raise_disagreement(found, known), world)
    raise found


def _raise_disagreement(found: Disagreement, known: Sequence[dict[str, EntryRecord]]) -> None:
    name = next(name for each in known for name in each)
    kinds = list(dict.fromkeys(each[name] for each in known if name in each))
    if len(kinds) > 1:
        same = (kinds[0].shape, kinds[0].dtype) == (kinds[1].shape, kinds[1].dtype)
        texts = [f"{kind.dtype}{list(kind.shape)}" + (f" cut by {kind.shards}" if same else "") for kind in kinds[:2]]
        raise CheckpointError(f"ranks disagree on {name}: {texts[0]} and {texts[1]}")
    [kind], covered = kinds, found.covered[hash_name(name)]
    what = f"{name} {kind.dtype}{list(kind.shape)}"
    if covered == prod(kind.shape):
        raise CheckpointError(f"ranks own some elements of {what} twice and others not at all")
    raise CheckpointError(f"the ranks own {covered} elements of {what}, not {prod(kind.shape)}")


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key that puts layer 10 behind layer 9."""
    return [(not each.isdigit(), int(each) if each.isdigit() else 0, each) for each in re.split(r"(\d+)", name)]


def owned_entries(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that a rank claims: those of which it owns something, and empty ones."""
    return [entry for entry in entries if entry.data.numel() or not prod(entry.layout.shape)]


def pack_claims(entries: Sequence[Entry]) -> np.ndarray:
    """A rank's claims: CLAIM records in the order of its entries."""
    claims = np.zeros(len(entries), CLAIM)
    for place, entry in enumerate(entries):
        start, stop = entry.layout.interval or (0, entry.layout.numel_local)
        kind = xxhash.xxh3_64_intdigest(repr(describe(entry)).encode())
        numel, cell = prod(entry.layout.shape), cell_of(entry.layout)
        claims[place] = (hash_name(entry.name), kind, numel, start, stop, cell, entry.data.dtype.itemsize)
    return claims


def hash_name(name: str) -> int:
    """The hash by which rank 0 knows an entry."""
    return xxhash.xxh3_64_intdigest(name.encode())


def describe(entry: Entry) -> EntryRecord:
    """The entry's shape, dtype and shards, equal on all ranks that own some of it. Only rank 0 knows its chunks in the index."""
    shards = tuple(replace(shard, axis="", index=0) for shard in entry.layout.shards)
    return EntryRecord(tuple(entry.layout.shape), dtype_name(entry.data.dtype), shards)


def divide(claims: Sequence[np.ndarray]) -> Division:
    """Assign each claim to one of the ranks that make it: large ones first, each to the rank with the least to write so far.

    claims: for each rank an array of CLAIM. If they do not make whole entries, the division holds only the disagreement.
    """
    duties = [np.zeros(len(each), np.uint8) for each in claims]
    if not any(map(len, claims)):
        return Division(duties)
    every = np.concatenate(claims)
    ranks = np.repeat(np.arange(len(claims), dtype=np.uint32), list(map(len, claims)))
    # Not by stop: claims of equal start and different stop overlap, so they are an error in any order.
    order = np.lexsort((every["start"], every["cell"], every["entry"]))
    every = every[order]
    firsts = np.flatnonzero(_differs(every, "entry", "cell", "start", "stop"))
    distinct = every[firsts]
    of_entries = np.flatnonzero(_differs(distinct, "entry"))
    disagreement = _find_disagreement(every, distinct, of_entries)
    if disagreement is not None:
        return Division(duties, disagreement=disagreement)
    chosen = _choose(distinct, firsts, ranks[order], len(claims))
    chunks = np.zeros(len(distinct), CHUNK)
    for name in ("cell", "start", "stop"):
        chunks[name] = distinct[name]
    chunks["file"] = ranks[order[chosen]]
    flags = np.zeros(len(every), np.uint8)
    flags[order[chosen]] = WRITES
    # One rank describes each entry, so that rank 0 receives every name once, not from all ranks.
    flags[order[chosen[of_entries]]] |= DESCRIBES
    counts = np.diff(of_entries, append=len(distinct))
    return Division(
        np.split(flags, np.cumsum(list(map(len, claims)))[:-1]),
        list(zip(distinct["entry"][of_entries].tolist(), of_entries.tolist(), counts.tolist(), strict=True)),
        chunks,
        order[chosen],
        int(_num_bytes(distinct).sum()) + chunks.nbytes + len(claims) * FILE.itemsize,
    )


def _choose(distinct: np.ndarray, firsts: np.ndarray, ranks: np.ndarray, world: int) -> np.ndarray:
    """For each distinct claim, the index among all sorted claims of the one whose rank writes it: [distinct] int64.

    firsts: where each distinct claim begins among the sorted ones; ranks: the rank of each sorted claim.
    """
    num_holders = np.diff(firsts, append=len(ranks))
    # Claims of one rank are settled: they are its load before anything is shared out.
    sizes, chosen = _num_bytes(distinct), firsts.copy()
    alone = num_holders == 1
    loads = np.bincount(ranks[firsts[alone]], weights=sizes[alone], minlength=world)
    shared = np.flatnonzero(~alone)
    # Largest first, so that the small ones even out the loads.
    for number in shared[np.argsort(-sizes[shared].astype(np.int64), kind="stable")]:
        holders = ranks[firsts[number] : firsts[number] + num_holders[number]]
        place = int(np.argmin(loads[holders]))
        chosen[number] += place
        loads[holders[place]] += sizes[number]
    return chosen


def _find_disagreement(every: np.ndarray, distinct: np.ndarray, of_entries: np.ndarray) -> Disagreement | None:
    """The entries that ranks describe differently, or of which they own some elements twice or not at all."""
    # Sums of whole entries: claims that cover an entry twice and leave a gap may still add up, so overlaps are found below.
    covered = np.add.reduceat(distinct["stop"] - distinct["start"], of_entries)
    wrong = set(distinct["entry"][of_entries[covered != distinct["numel"][of_entries]]].tolist())
    another_kind = ~_differs(every, "entry")
    another_kind[1:] &= every["kind"][1:] != every["kind"][:-1]
    overlaps = ~_differs(distinct, "entry", "cell")
    overlaps[1:] &= distinct["start"][1:] < distinct["stop"][:-1]
    wrong |= set(every["entry"][another_kind].tolist()) | set(distinct["entry"][overlaps].tolist())
    if not wrong:
        return None
    by_entry = dict(zip(distinct["entry"][of_entries].tolist(), covered.tolist(), strict=True))
    return Disagreement({entry: by_entry[entry] for entry in sorted(wrong)[:3]})


def _differs(records: np.ndarray, *names: str) -> np.ndarray:
    """Flags [records] bool: True for the first record, and for each that differs from the one before in one of these fields."""
    differs = np.zeros(len(records), bool)
    differs[0] = True
    for name in names:
        differs[1:] |= records[name][1:] != records[name][:-1]
    return differs


def _num_bytes(claims: np.ndarray) -> np.ndarray:
    return (claims["stop"] - claims["start"]) * claims["itemsize"]
