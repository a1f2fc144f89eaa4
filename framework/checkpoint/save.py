"""Save: each rank writes the elements that are its own into one file; rank 0 commits.

What several ranks own alike is written by one of them, the one with the least to write so far: replicas divide the
checkpoint among themselves.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from framework.checkpoint.commit import Fault, begin, committed_name, explain, finish, no_fault, report, retain
from framework.checkpoint.index import (
    ALIGNMENT,
    BLOCK_BYTES,
    Entry,
    EntryRecord,
    FileRecord,
    Manifest,
    Piece,
    dtype_name,
)
from framework.comm.collectives import gather_objects
from framework.errors import CheckpointError
from framework.mesh.axis import Axis
from framework.mesh.box import Box

T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """What a rank has to say about an entry before anybody writes: that it owns these boxes of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    num_bytes: int


def save_checkpoint(
    root: Path,
    step: int,
    entries: Iterable[Entry],
    state: dict[str, Any],
    world: Axis,
    keep: int,
    fault: Fault = no_fault,
) -> Path:
    """Commit `step-N` under `root`, then keep the newest `keep`. Collective over `world`. Returns the new folder.

    The entries of all ranks together cover every tensor. `state` is JSON-able and equal on all ranks; rank 0's is kept.
    Needs host memory for the largest entry of a device, none for entries on the CPU. Raises CheckpointError on *every*
    rank when one fails (no space, no permission); former checkpoints are then intact, of the new one nothing is left.
    A step that is committed already, with the same state, is not written again.
    """
    entries = list(entries)
    claims = gather_objects([_claim(entry) for entry in entries], world)
    duties = divide(claims)
    bytes_needed = sum(claim.num_bytes for duty in duties for claim in duty.values())
    on_each = partial(agree, world, lambda error: explain(error, root, bytes_needed))
    on_first = partial(on_each, only_first=True)

    [folder] = on_first(lambda: begin(root, step, state, bytes_needed))
    if folder == committed_name(root, step):
        return folder
    fault("begun")
    try:
        mine = [entry for entry in entries if entry.name in duties[world.rank]]
        written = on_each(lambda: write_file(folder / f"rank-{world.rank:05d}.bin", mine, fault))
        fault("gathered")
        [committed] = on_first(lambda: finish(folder, index(step, state, claims, written), fault))
    except CheckpointError:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if world.rank == 0:
        try:
            retain(root, keep, fault)
        except OSError as error:
            report(f"the new checkpoint is safe, but an old one cannot be removed: {error}")
    return committed


def divide(claims: list[list[Claim]]) -> list[dict[str, Claim]]:
    """Which entries each rank writes: equal boxes of an entry once, large ones first, by whom has the least so far.

    Raises CheckpointError when the ranks disagree on an entry's shape or dtype, or do not cover it exactly.
    """
    holders: dict[Claim, list[int]] = {}
    for rank, claimed in enumerate(claims):
        for claim in claimed:
            holders.setdefault(claim, []).append(rank)
    _check_cover(holders)
    duties: list[dict[str, Claim]] = [{} for _ in claims]
    loads = [0] * len(claims)
    for claim, ranks in sorted(holders.items(), key=lambda item: (-item[0].num_bytes, item[0].name)):
        writer = min(ranks, key=lambda rank: loads[rank])
        duties[writer][claim.name] = claim
        loads[writer] += claim.num_bytes
    return duties


def write_file(
    path: Path, entries: list[Entry], fault: Fault = no_fault, block_bytes: int = BLOCK_BYTES
) -> tuple[FileRecord, dict[str, list[Piece]]]:
    """Write the entries' elements one after another, hashed in memory on their way; durable on return."""
    hashes = BlockHashes(block_bytes)
    pieces: dict[str, list[Piece]] = {}
    with open(path, "xb") as file:
        for entry in entries:
            padding = bytes(-hashes.size % ALIGNMENT)
            for view in (memoryview(padding), _memory(entry.data)):
                hashes.add(view)
                file.write(view)
            pieces[entry.name] = list(_pieces(entry, path.name, hashes.size - entry.data.nbytes))
            fault("writing")
        file.flush()
        os.fsync(file.fileno())
    fault("written")
    return FileRecord(hashes.size, block_bytes, hashes.finish()), pieces


def index(
    step: int,
    state: dict[str, Any],
    claims: list[list[Claim]],
    written: list[tuple[FileRecord, dict[str, list[Piece]]]],
) -> Manifest:
    """The manifest of what the ranks wrote."""
    pieces: dict[str, list[Piece]] = {claim.name: [] for claimed in claims for claim in claimed}
    for _, of_rank in written:
        for name, some in of_rank.items():
            pieces[name] += some
    known = {claim.name: claim for claimed in claims for claim in claimed}
    records = {name: EntryRecord(known[name].shape, known[name].dtype, tuple(some)) for name, some in pieces.items()}
    files = {f"rank-{rank:05d}.bin": record for rank, (record, _) in enumerate(written)}
    return Manifest(step, len(claims), state, records, files)


def agree(
    world: Axis, explained: Callable[[OSError], CheckpointError], work: Callable[[], T], only_first: bool = False
) -> list[T]:
    """Do `work` on every rank, or on the first only: the results, or a CheckpointError on all ranks if any failed.

    Without it a rank with a full disk would leave while the others wait for it.
    """
    outcome: T | CheckpointError | None = None
    try:
        if world.rank == 0 or not only_first:
            outcome = work()
    except OSError as error:
        outcome = explained(error)
    except CheckpointError as error:
        outcome = error
    outcomes = gather_objects(outcome, world)
    for each in outcomes:
        if isinstance(each, CheckpointError):
            raise each
    return outcomes[:1] if only_first else outcomes


class BlockHashes:
    """xxh3 of each block of a stream of bytes; the last block may be shorter."""

    def __init__(self, block_bytes: int) -> None:
        self.size = 0
        self._block_bytes = block_bytes
        self._done: list[str] = []
        self._block = xxhash.xxh3_64()

    def add(self, view: memoryview) -> None:
        """The stream goes on with these bytes."""
        while view:
            part = view[: self._block_bytes - self.size % self._block_bytes]
            self._block.update(part)
            self.size += len(part)
            if self.size % self._block_bytes == 0:
                self._cut()
            view = view[len(part) :]

    def finish(self) -> tuple[str, ...]:
        """The hashes; the stream is over."""
        if self.size % self._block_bytes:
            self._cut()
        return tuple(self._done)

    def _cut(self) -> None:
        self._done.append(self._block.hexdigest())
        self._block.reset()


def _claim(entry: Entry) -> Claim:
    boxes = tuple(entry.layout.boxes())
    return Claim(entry.name, tuple(entry.layout.shape), dtype_name(entry.data.dtype), boxes, entry.data.nbytes)


def _check_cover(claims: Iterable[Claim]) -> None:
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    covered: dict[str, int] = {}
    for claim in claims:
        kind = kinds.setdefault(claim.name, (claim.shape, claim.dtype))
        if kind != (claim.shape, claim.dtype):
            raise CheckpointError(f"ranks disagree on {claim.name}: {kind} and {(claim.shape, claim.dtype)}")
        covered[claim.name] = covered.get(claim.name, 0) + sum(box.numel for box in claim.boxes)
    for name, (shape, dtype) in kinds.items():
        if covered[name] != prod(shape):
            raise CheckpointError(
                f"the ranks own {covered[name]} elements of {name} {dtype}{list(shape)}, not {prod(shape)}"
            )


def _memory(data: torch.Tensor) -> memoryview:
    """The bytes of a 1-D tensor; those of a CPU tensor itself, a copy's of a device's."""
    return data.detach().cpu().view(torch.uint8).numpy().data


def _pieces(entry: Entry, file: str, offset: int) -> Iterator[Piece]:
    for box in entry.layout.boxes():
        yield Piece(box, file, offset)
        offset += box.numel * entry.data.itemsize
