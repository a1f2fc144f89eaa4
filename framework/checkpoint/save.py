"""Save: each rank writes the elements that are its own into one file; rank 0 commits.

    every rank    claims (48 bytes an entry)                          -> rank 0
    rank 0        divides the claims, makes the folder; flags         -> each rank
    every rank    writes its file; size, root, offsets, names         -> rank 0
    rank 0        writes the index and the manifest, renames; path    -> every rank

What several ranks own alike is written by one of them, the one with the least to write so far: replicas divide the checkpoint
among themselves. No rank but rank 0 hears of the others' tensors.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch

from framework.checkpoint.blocks import BlockHashes
from framework.checkpoint.commit import Fault, begin, committed_name, explain, finish, no_fault, retain
from framework.checkpoint.divide import (
    DESCRIBES,
    WRITES,
    Disagreement,
    Division,
    describe,
    divide,
    hash_name,
    owned_entries,
    pack_claims,
)
from framework.checkpoint.index import ALIGNMENT, BLOCK_BYTES, Entry, Manifest
from framework.checkpoint.pieces import INDEX, INDEX_BLOCK_BYTES, EntryRecord, FileRecord, encode_index, file_name
from framework.checkpoint.storage import retry
from framework.comm.communicator import Communicator
from framework.comm.objects import deal, gather_to_first, share_errors, tell
from framework.errors import CheckpointError, MeshwrightError

T = TypeVar("T")


@dataclass(frozen=True)
class Duty:
    """The message of rank 0 to a rank.

    folder: to write into, the checkpoint itself if the step is committed already. bytes_needed: what all ranks write. flags: what
    to do for each of this rank's claims."""

    folder: Path
    bytes_needed: int
    flags: np.ndarray


@dataclass(frozen=True)
class Written:
    """The message of a rank about its file.

    num_bytes, root: of its data and of its hash tree. offsets: of each entry. described: entries that it was to name."""

    num_bytes: int
    root: int
    offsets: np.ndarray
    described: dict[str, EntryRecord]


def save_checkpoint(
    root: Path,
    step: int,
    entries: Iterable[Entry],
    state: dict[str, Any],
    world: Communicator,
    keep: int,
    fault: Fault = no_fault,
) -> Path:
    """Commit `step-N` under `root`; the newest `keep` stay, and that of `state["best_step"]`. Collective over `world`. Returns
    the new folder.

    The entries of all ranks together cover every tensor. `state` is JSON-able and equal on all ranks; rank 0's is kept.
    Needs host memory for the largest entry of a device, none for entries on the CPU or on a disk; on rank 0 also some 250 bytes
    for each entry of each rank. Raises on *every* rank when one fails: CheckpointError where the user must act (no space, no
    permission), StorageError for what may pass. Former checkpoints are then intact, of the new one nothing is left.
    A step that is committed already, with the same state, is not written again.
    """
    mine = owned_entries(list(entries))
    division = divide(gather_to_first(pack_claims(mine), world))
    try:
        duty = deal(partial(_begin, root, step, state, division), world)
    except Disagreement as found:
        _explain_disagreement(found, mine, world)
    if duty.folder == committed_name(root, step):
        return duty.folder
    fault("begun")
    explained = partial(_explained, root, duty.bytes_needed)
    try:
        path = duty.folder / file_name(world.rank)
        mine_written = share_errors(
            lambda: explained(lambda: retry(lambda: write_duty(path, mine, duty.flags, fault), "write", path)), world
        )
        written = gather_to_first(mine_written, world)
        fault("gathered")
        committed = tell(lambda: explained(lambda: _finish(duty.folder, step, state, division, written, fault)), world)
    except MeshwrightError:
        if world.rank == 0:
            shutil.rmtree(duty.folder, ignore_errors=True)
        raise
    if world.rank == 0:
        retain(root, keep, fault, state.get("best_step"))
    return committed


def write_duty(
    path: Path, entries: Sequence[Entry], flags: np.ndarray, fault: Fault = no_fault, block_bytes: int = BLOCK_BYTES
) -> Written:
    """Write those of a rank's entries that its flags tell it to write, and describe those that it is to name."""
    chosen = [entry for entry, flag in zip(entries, flags, strict=True) if flag & WRITES]
    described = {entry.name: describe(entry) for entry, flag in zip(entries, flags, strict=True) if flag & DESCRIBES}
    num_bytes, root, offsets = write_file(path, chosen, fault, block_bytes)
    return Written(num_bytes, root, offsets, described)


def write_file(path: Path, entries: Sequence[Entry], fault: Fault, block_bytes: int) -> tuple[int, int, np.ndarray]:
    """Write the entries' elements one after another, hashed in memory on their way, and the tree of hashes; durable on return.

    Returns bytes of data, root, and each entry's offset. What a failed attempt has left goes first: after a failed fsync nobody
    knows which of its pages are on the disk.
    """
    hashes = BlockHashes(block_bytes)
    offsets = np.zeros(len(entries), np.uint64)
    path.unlink(missing_ok=True)
    with open(path, "xb") as file:
        for place, entry in enumerate(entries):
            padding = bytes(-hashes.size % ALIGNMENT)
            for view in chain((memoryview(padding),), map(_memory, entry.pieces())):
                hashes.add(view)
                file.write(view)
            offsets[place] = hashes.size - entry.data.nbytes
            fault("writing")
        num_bytes = hashes.size
        tree, root = hashes.finish()
        file.write(tree)
        file.flush()
        os.fsync(file.fileno())
    fault("written")
    return num_bytes, root, offsets


def write_index(
    folder: Path,
    step: int,
    state: dict[str, Any],
    division: Division,
    written: Sequence[Written],
    block_bytes: int = BLOCK_BYTES,
    index_block_bytes: int = INDEX_BLOCK_BYTES,
) -> Manifest:
    """Write the index of what the ranks wrote; durable on return. Returns the manifest."""
    data = encode_index(
        [(each.num_bytes, each.root) for each in written], division.located([each.offsets for each in written])
    )
    hashes = BlockHashes(index_block_bytes)
    hashes.add(memoryview(data))
    tree, root = hashes.finish()
    with open(folder / INDEX, "wb") as file:
        file.write(data)
        file.write(tree)
        file.flush()
        os.fsync(file.fileno())
    described = {name: record for each in written for name, record in each.described.items()}
    places = {entry: (first, count) for entry, first, count in division.entries}
    records = {}
    for name in sorted(described, key=_natural):
        first, count = places[hash_name(name)]
        records[name] = replace(described[name], first=first, count=count)
    return Manifest(step, len(written), state, records, FileRecord(len(data), index_block_bytes, root), block_bytes)


def _begin(root: Path, step: int, state: dict[str, Any], division: Division) -> list[Duty]:
    """Make the folder that all write into, on rank 0. Returns each rank's duty; raises the disagreement if there is one."""
    if division.disagreement is not None:
        raise division.disagreement
    needed = division.bytes_needed
    folder = _explained(root, needed, lambda: begin(root, step, state, needed))
    return [Duty(folder, needed, flags) for flags in division.duties]


def _finish(
    folder: Path, step: int, state: dict[str, Any], division: Division, written: Sequence[Written], fault: Fault
) -> Path:
    """Write the index and commit, on rank 0, when all ranks have written. Returns the checkpoint's folder."""
    manifest = retry(lambda: write_index(folder, step, state, division, written), "write", folder / INDEX)
    fault("indexed")
    return finish(folder, manifest, fault)


def _explained(root: Path, bytes_needed: int, work: Callable[[], T]) -> T:
    """The result of `work`, its OSError in words."""
    try:
        return work()
    except OSError as error:
        raise explain(error, root, bytes_needed) from error


def _explain_disagreement(found: Disagreement, entries: Sequence[Entry], world: Communicator) -> NoReturn:
    """Raise on all ranks what is wrong, in words: those who know the entries by name tell rank 0. Collective."""
    wrong = {entry.name: describe(entry) for entry in entries if hash_name(entry.name) in found.covered}
    known = gather_to_first(wrong, world)
    tell(lambda: _raise_disagreement(found, known), world)
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


def _memory(data: torch.Tensor) -> memoryview:
    """The bytes of a 1-D tensor; those of a CPU tensor itself, a copy's of a device's."""
    return data.detach().cpu().view(torch.uint8).numpy().data


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(not each.isdigit(), int(each) if each.isdigit() else 0, each) for each in re.split(r"(\d+)", name)]
