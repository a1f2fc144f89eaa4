"""The contents of a checkpoint, printed and verified (`meshwright inspect`)."""

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import torch

from framework.checkpoint.blocks import BlockCache
from framework.checkpoint.commit import newest_checkpoint
from framework.checkpoint.index import (
    MANIFEST,
    DamagedCheckpoint,
    EntryRecord,
    Index,
    Manifest,
    read_manifest,
    verify_sizes,
)
from framework.checkpoint.load import BUFFER_BYTES
from framework.checkpoint.storage import checkpoints_of
from framework.errors import EXIT_DONE, EXIT_USER, CheckpointError
from framework.object_store import Place

# Characters shown of a value, and values shown of a group, such as the recipe's.
LONGEST = 64
MOST_SHOWN = 8


def inspect_command(path: Place) -> int:
    """Print the checkpoint at `path` and verify every byte of it; for a run directory, its newest checkpoint.

    Returns 0, or 86 if something is damaged. Raises CheckpointError if there is none.
    """
    path = find_checkpoint(path)
    manifest = read_manifest(path)
    print("\n".join(describe(path, manifest)))
    damages = verify_files(path, manifest)
    for damage in damages:
        print(f"DAMAGED       {damage}")
    if not damages:
        print("verified      every hash fits")
    return EXIT_USER if damages else EXIT_DONE


def verify_files(path: Place, manifest: Manifest) -> list[DamagedCheckpoint]:
    """Read everything and compare with the hashes: one error per file that is not as it was saved. Only the first if a file is
    missing or short, or if the index is damaged, without which nothing is known of the others."""
    damages: list[DamagedCheckpoint] = []
    try:
        verify_sizes(path, manifest)
        for file in Index(path, manifest, BlockCache(BUFFER_BYTES)).all_files():
            try:
                file.verify()
            except DamagedCheckpoint as error:
                damages.append(error)
    except DamagedCheckpoint as error:
        damages = damages or [error]
    return damages


def find_checkpoint(path: Place) -> Place:
    """`path` itself if it is a checkpoint, else the newest checkpoint of the run directory, or the folder of checkpoints,
    `path`."""
    if path.name.startswith("step-") and path.is_dir():
        return path
    for root in (*([checkpoints_of(path)] if isinstance(path, Path) else []), path):
        newest = newest_checkpoint(root)
        if newest is not None:
            return newest
    raise CheckpointError(f"{path} is neither a checkpoint (a folder step-N with a {MANIFEST}) nor a run with one")


def describe(path: Place, manifest: Manifest) -> list[str]:
    """The lines of the table: state, files, and entries by kind (the first component of their names)."""
    lines = [f"path          {path}", f"step          {manifest.step:,}"]
    lines += [
        f"{name:<13} {_shorten(value)}"
        for name, value in manifest.state.items()
        if name != "step" and value is not None
    ]
    size = sum(map(_bytes, manifest.entries.values()))
    ranks = "rank" if manifest.world == 1 else "ranks"
    lines.append(f"files         {manifest.world}, saved by {manifest.world} {ranks}, {size:,} bytes of tensors")
    lines.append("entries       " + f"{'kind':<14} {'tensors':>8} {'elements':>16} {'bytes':>18}  dtype")
    for kind, names in _kinds(manifest).items():
        records = [manifest.entries[name] for name in names]
        numel = sum(prod(record.shape) for record in records)
        dtypes = ", ".join(Counter(record.dtype for record in records))
        lines.append(
            f"              {kind:<14} {len(names):>8,} {numel:>16,} {sum(map(_bytes, records)):>18,}  {dtypes}"
        )
    return lines


def _shorten(value: Any) -> str:
    """A value of the state. A long one, such as the norms of the last steps, is given by its number of entries."""
    if len(text := str(value)) <= LONGEST:
        return text
    if isinstance(value, dict) and len(value) > MOST_SHOWN:
        return f"{len(value)} values"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_shorten(each)}" for name, each in value.items())
    return f"{len(value)} entries" if isinstance(value, list) else f"{text[:LONGEST]} ..."


def _kinds(manifest: Manifest) -> dict[str, list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in manifest.entries:
        kinds.setdefault(name.partition("/")[0], []).append(name)
    return kinds


def _bytes(record: EntryRecord) -> int:
    return prod(record.shape) * getattr(torch, record.dtype).itemsize
