"""Who writes what: every rank claims what it owns, rank 0 gives each claim to one of those who make it.

A claim is one record of CLAIM, whatever the tensor: names and shapes stay on the ranks and are compared by their hashes, so that
thousands of ranks' claims are an array, sorted at once. Claims that several ranks make alike are divided among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
import xxhash

from framework.checkpoint.entry import Entry, dtype_name
from framework.checkpoint.pieces import FILE, PIECE, EntryRecord, cell_of
from framework.errors import CheckpointError

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

# What a rank does for a claim: nothing, write its elements, and name the entry for the manifest as well.
WRITES, DESCRIBES = 1, 2


class Disagreement(CheckpointError):
    """The error of ranks whose elements do not make whole entries. covered: by hash of the name, how many elements they own."""

    def __init__(self, covered: dict[int, int]) -> None:
        super().__init__(covered)
        self.covered = covered


@dataclass(frozen=True)
class Division:
    """Which rank writes what of a checkpoint.

    duties: for each rank the flags of its claims. entries: (hash of the name, first piece, number of pieces) of each. pieces:
    records of the index, whose offsets are known only when the ranks have written. claims: for each piece the index of its claim
    among the claims of all ranks."""

    duties: list[np.ndarray]
    entries: list[tuple[int, int, int]] = field(default_factory=list)
    pieces: np.ndarray = field(default_factory=lambda: np.empty(0, PIECE))
    claims: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    bytes_needed: int = 0
    disagreement: Disagreement | None = None

    def located(self, offsets: Sequence[np.ndarray]) -> np.ndarray:
        """`pieces` with their offsets. offsets: for each rank those of the claims that it has written, in their order."""
        of_claim = np.zeros(sum(map(len, self.duties)), np.uint64)
        if len(of_claim):
            of_claim[np.concatenate(self.duties) > 0] = np.concatenate(offsets)
        self.pieces["offset"] = of_claim[self.claims]
        return self.pieces


def owned_entries(entries: Sequence[Entry]) -> list[Entry]:
    """The entries that a rank claims: not those of which it owns nothing, unless there is nothing to own."""
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
    """The number by which rank 0 knows an entry."""
    return xxhash.xxh3_64_intdigest(name.encode())


def describe(entry: Entry) -> EntryRecord:
    """The entry's shape, dtype and shards: equal on all ranks that own some of it. Only rank 0 knows its pieces in the index."""
    shards = tuple(replace(shard, axis="", index=0) for shard in entry.layout.shards)
    return EntryRecord(tuple(entry.layout.shape), dtype_name(entry.data.dtype), shards)


def divide(claims: Sequence[np.ndarray]) -> Division:
    """Assign each claim to one of the ranks that make it: large ones first, each to the rank with the least to write so far.

    claims: for each rank an array of CLAIM. Where they do not make whole entries, the division holds only the disagreement.
    """
    duties = [np.zeros(len(each), np.uint8) for each in claims]
    if not any(map(len, claims)):
        return Division(duties)
    every = np.concatenate(claims)
    ranks = np.repeat(np.arange(len(claims), dtype=np.uint32), list(map(len, claims)))
    # Not by stop: claims that begin alike and end apart overlap, so they are an error in any order.
    order = np.lexsort((every["start"], every["cell"], every["entry"]))
    every = every[order]
    firsts = np.flatnonzero(_differs(every, "entry", "cell", "start", "stop"))
    distinct = every[firsts]
    of_entries = np.flatnonzero(_differs(distinct, "entry"))
    disagreement = _find_disagreement(every, distinct, of_entries)
    if disagreement is not None:
        return Division(duties, disagreement=disagreement)
    chosen = _choose(distinct, firsts, ranks[order], len(claims))
    pieces = np.zeros(len(distinct), PIECE)
    for name in ("cell", "start", "stop"):
        pieces[name] = distinct[name]
    pieces["file"] = ranks[order[chosen]]
    flags = np.zeros(len(every), np.uint8)
    flags[order[chosen]] = WRITES
    flags[order[chosen[of_entries]]] |= DESCRIBES
    counts = np.diff(of_entries, append=len(distinct))
    return Division(
        np.split(flags, np.cumsum(list(map(len, claims)))[:-1]),
        list(zip(distinct["entry"][of_entries].tolist(), of_entries.tolist(), counts.tolist(), strict=True)),
        pieces,
        order[chosen],
        int(_num_bytes(distinct).sum()) + pieces.nbytes + len(claims) * FILE.itemsize,
    )


def _choose(distinct: np.ndarray, firsts: np.ndarray, ranks: np.ndarray, world: int) -> np.ndarray:
    """The index, among all sorted claims, of the one whose rank writes it, for each distinct claim.

    firsts: where each distinct claim begins among the sorted ones; ranks: the rank of each sorted claim.
    """
    num_holders = np.diff(firsts, append=len(ranks))
    sizes, chosen = _num_bytes(distinct), firsts.copy()
    alone = num_holders == 1
    loads = np.bincount(ranks[firsts[alone]], weights=sizes[alone], minlength=world)
    shared = np.flatnonzero(~alone)
    for number in shared[np.argsort(-sizes[shared].astype(np.int64), kind="stable")]:
        holders = ranks[firsts[number] : firsts[number] + num_holders[number]]
        place = int(np.argmin(loads[holders]))
        chosen[number] += place
        loads[holders[place]] += sizes[number]
    return chosen


def _find_disagreement(every: np.ndarray, distinct: np.ndarray, of_entries: np.ndarray) -> Disagreement | None:
    """The entries of which ranks describe different kinds, or own some elements twice or not at all."""
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
    """Flags of the records that differ from the one before in one of these fields; True for the first."""
    differs = np.zeros(len(records), bool)
    differs[0] = True
    for name in names:
        differs[1:] |= records[name][1:] != records[name][:-1]
    return differs


def _num_bytes(claims: np.ndarray) -> np.ndarray:
    return (claims["stop"] - claims["start"]) * claims["itemsize"]
