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

import numpy as np
import torch
import xxhash

from framework.checkpoint.index import ALIGNMENT, CHUNK, FILE, EntryRecord, cell_of
from framework.checkpoint.staging import Entry, dtype_name
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, scatter_object, share_errors
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

    flags: list[np.ndarray]
    """For each rank the flags of its claims."""
    entries: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Hash of an entry's name -> (its first chunk, their number)."""
    chunks: np.ndarray = field(default_factory=lambda: np.empty(0, CHUNK))
    """Records of the index."""
    bytes_needed: int = 0
    """All that is written."""


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
    claims = gather_object(pack_claims(entries), world)
    try:
        division = share_errors(lambda: divide(claims), world)
    except Disagreement as found:
        # Rank 0 knows entries by their hashes: the ranks that have these tell it more.
        wrong = {entry.name: describe(entry) for entry in entries if hash_name(entry.name) in found.covered}
        known = gather_object(wrong, world)
        raise broadcast_object(partial(explain_disagreement, found, known), world) from found
    # Each rank learns of its own claims alone: the whole division would be sent to thousands of ranks.
    flags, bytes_needed = scatter_object(lambda: [(each, division.bytes_needed) for each in division.flags], world)
    described = gather_object(describe_chosen(entries, flags), world)
    index = plan_index(division, described) if world.rank == 0 else None
    keys = [(entry.name, entry.layout, entry.data.dtype) for entry in entries]
    return SavePlan(keys, np.flatnonzero(flags & WRITES).tolist(), bytes_needed, index)


def describe_chosen(entries: Sequence[Entry], flags: np.ndarray) -> dict[str, EntryRecord]:
    """The entries that a rank describes for the manifest."""
    return {entry.name: describe(entry) for entry, flag in zip(entries, flags, strict=True) if flag & DESCRIBES}


def plan_index(division: Division, described: Sequence[dict[str, EntryRecord]]) -> IndexPlan:
    """The index of the files of all ranks. described: by each rank."""
    found = {name: record for each in described for name, record in each.items()}
    records = {}
    for name in sorted(found, key=_natural):
        first, count = division.entries[hash_name(name)]
        records[name] = replace(found[name], first=first, count=count)
    return IndexPlan(division.chunks, records)


def explain_disagreement(found: Disagreement, known: Sequence[dict[str, EntryRecord]]) -> CheckpointError:
    """The error that names the first of the entries. known: those that each rank has."""
    name = next(name for each in known for name in each)
    kinds = list(dict.fromkeys(each[name] for each in known if name in each))
    if len(kinds) > 1:
        same = (kinds[0].shape, kinds[0].dtype) == (kinds[1].shape, kinds[1].dtype)
        texts = [f"{kind.dtype}{list(kind.shape)}" + (f" cut by {kind.shards}" if same else "") for kind in kinds[:2]]
        return CheckpointError(f"ranks disagree on {name}: {texts[0]} and {texts[1]}")
    [kind], covered = kinds, found.covered[hash_name(name)]
    what = f"{name} {kind.dtype}{list(kind.shape)}"
    if covered == prod(kind.shape):
        return CheckpointError(f"ranks own some elements of {what} twice and others not at all")
    return CheckpointError(f"the ranks own {covered} elements of {what}, not {prod(kind.shape)}")


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

    claims: for each rank an array of CLAIM. Raises Disagreement if they do not make whole entries.
    """
    sizes = list(map(len, claims))
    if not any(sizes):
        return Division([np.zeros(0, np.uint8)] * len(claims))
    unsorted, ranks = np.concatenate(claims), np.repeat(np.arange(len(claims), dtype=np.uint32), sizes)
    # Not by stop: claims of equal start and different stop overlap, so they are an error in any order.
    order = np.lexsort((unsorted["start"], unsorted["cell"], unsorted["entry"]))
    every = unsorted[order]
    firsts = np.flatnonzero(_differs(every, "entry", "cell", "start", "stop"))
    distinct = every[firsts]
    of_entries = np.flatnonzero(_differs(distinct, "entry"))
    _refuse_disagreement(every, distinct, of_entries)
    chosen = order[_choose(distinct, firsts, ranks[order], len(claims))]
    flags = np.zeros(len(every), np.uint8)
    flags[chosen] = WRITES
    # One rank describes each entry, so that rank 0 receives every name once, not from all ranks.
    flags[chosen[of_entries]] |= DESCRIBES
    chunks = np.zeros(len(distinct), CHUNK)
    for name in ("cell", "start", "stop"):
        chunks[name] = distinct[name]
    chunks["file"] = ranks[chosen]
    chunks["offset"] = _place(unsorted, flags, ranks, sizes)[chosen]
    places = zip(of_entries.tolist(), np.diff(of_entries, append=len(distinct)).tolist(), strict=True)
    return Division(
        np.split(flags, np.cumsum(sizes)[:-1]),
        dict(zip(distinct["entry"][of_entries].tolist(), places, strict=True)),
        chunks,
        int(_num_bytes(distinct).sum()) + chunks.nbytes + len(claims) * FILE.itemsize,
    )


def _place(claims: np.ndarray, flags: np.ndarray, ranks: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """The byte of its rank's file at which each claim begins if it is written: [claims] uint64. Each file has what its rank
    writes one after another in the rank's order, as `StagedFile` does. sizes: number of claims of each rank."""
    padded = (_num_bytes(claims) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT * (flags > 0)
    starts = np.cumsum(padded) - padded
    return starts - starts[np.cumsum([0, *sizes[:-1]])[ranks]]


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


def _refuse_disagreement(every: np.ndarray, distinct: np.ndarray, of_entries: np.ndarray) -> None:
    """Raise Disagreement for entries that ranks describe differently, or of which they own some elements twice or not at all."""
    # Sums of whole entries: claims that cover an entry twice and leave a gap may still add up, so overlaps are found below.
    covered = np.add.reduceat(distinct["stop"] - distinct["start"], of_entries)
    wrong = set(distinct["entry"][of_entries[covered != distinct["numel"][of_entries]]].tolist())
    another_kind = ~_differs(every, "entry")
    another_kind[1:] &= every["kind"][1:] != every["kind"][:-1]
    overlaps = ~_differs(distinct, "entry", "cell")
    overlaps[1:] &= distinct["start"][1:] < distinct["stop"][:-1]
    wrong |= set(every["entry"][another_kind].tolist()) | set(distinct["entry"][overlaps].tolist())
    if wrong:
        by_entry = dict(zip(distinct["entry"][of_entries].tolist(), covered.tolist(), strict=True))
        raise Disagreement({entry: by_entry[entry] for entry in sorted(wrong)[:3]})


def _differs(records: np.ndarray, *names: str) -> np.ndarray:
    """Flags [records] bool: True for the first record, and for each that differs from the one before in one of these fields."""
    differs = np.zeros(len(records), bool)
    differs[0] = True
    for name in names:
        differs[1:] |= records[name][1:] != records[name][:-1]
    return differs


def _num_bytes(claims: np.ndarray) -> np.ndarray:
    return (claims["stop"] - claims["start"]) * claims["itemsize"]
