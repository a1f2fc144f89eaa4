"""Who writes what of a checkpoint: the messages by which ranks divide it among them, once and where a layout has changed. The
order of the messages: save.py."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NoReturn

import numpy as np
import torch

from framework.checkpoint.divide import (
    DESCRIBES,
    WRITES,
    Disagreement,
    Division,
    describe,
    divide,
    hash_name,
    pack_claims,
)
from framework.checkpoint.entry import Entry
from framework.checkpoint.pieces import EntryRecord
from framework.checkpoint.staging import place_entries
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_object, scatter_object
from framework.errors import CheckpointError
from framework.mesh.layout import Layout


@dataclass(frozen=True)
class Duty:
    """The message of rank 0 to a rank. flags: what to do for each of its claims. bytes_needed: what all ranks write."""

    flags: np.ndarray
    bytes_needed: int


@dataclass(frozen=True)
class FilePlan:
    """The message of a rank about the file that it will write: the offset of each entry, and the entries that it was to name."""

    offsets: list[int]
    described: dict[str, EntryRecord]


@dataclass(frozen=True)
class IndexPlan:
    """What rank 0 writes of all ranks' entries: records of the index, and the manifest's entries by name."""

    pieces: np.ndarray
    records: dict[str, EntryRecord]


@dataclass(frozen=True)
class SavePlan:
    """Who writes what, good until a layout changes. keys: of this rank's entries. chosen: which of them it writes. bytes_needed:
    of all ranks. index: rank 0's."""

    keys: list[tuple[str, Layout, torch.dtype]]
    chosen: list[int]
    bytes_needed: int
    index: IndexPlan | None


def plan_save(entries: Sequence[Entry], world: Communicator) -> SavePlan:
    """Divide the entries of all ranks among them. Collective. Raises CheckpointError, on all, where they are not whole."""
    division = divide(gather_object(pack_claims(entries), world))
    try:
        duty = scatter_object(partial(_duties, division), world)
    except Disagreement as found:
        _explain_disagreement(found, entries, world)
    files = gather_object(plan_file(entries, duty.flags), world)
    index = plan_index(division, files) if world.rank == 0 else None
    keys = [(entry.name, entry.layout, entry.data.dtype) for entry in entries]
    return SavePlan(keys, np.flatnonzero(duty.flags & WRITES).tolist(), duty.bytes_needed, index)


def plan_file(entries: Sequence[Entry], flags: np.ndarray) -> FilePlan:
    """The file of a rank, which writes those of its entries that its flags tell it to write, and describes those that it is to
    name."""
    offsets, _ = place_entries([entry for entry, flag in zip(entries, flags, strict=True) if flag & WRITES])
    return FilePlan(
        offsets, {entry.name: describe(entry) for entry, flag in zip(entries, flags, strict=True) if flag & DESCRIBES}
    )


def plan_index(division: Division, files: Sequence[FilePlan]) -> IndexPlan:
    """The index of the files of all ranks."""
    described = {name: record for each in files for name, record in each.described.items()}
    places = {entry: (first, count) for entry, first, count in division.entries}
    records = {}
    for name in sorted(described, key=_natural):
        first, count = places[hash_name(name)]
        records[name] = replace(described[name], first=first, count=count)
    return IndexPlan(division.located([np.array(each.offsets, np.uint64) for each in files]), records)


def _duties(division: Division) -> list[Duty]:
    """Each rank's duty, on rank 0; raises the disagreement if there is one."""
    if division.disagreement is not None:
        raise division.disagreement
    return [Duty(flags, division.bytes_needed) for flags in division.duties]


def _explain_disagreement(found: Disagreement, entries: Sequence[Entry], world: Communicator) -> NoReturn:
    """Raise on all ranks what is wrong, in words: those who know the entries by name tell rank 0. Collective."""
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
    """Sorts layer 10 behind layer 9."""
    return [(not each.isdigit(), int(each) if each.isdigit() else 0, each) for each in re.split(r"(\d+)", name)]
