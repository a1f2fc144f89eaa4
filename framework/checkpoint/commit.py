"""How a checkpoint becomes visible: all at once, by one rename, after everything in it is on the disk.

    begin     clear what dead saves left; is there room?; make `step-N.tmp.<pid>`
    (write)   every rank writes its file there and syncs it                                          save.py
    finish    write the manifest, sync it and the folder; rename to `step-N`: *this is the commit*; sync the parent
    retain    only now may older checkpoints go

A crash at any point leaves the former checkpoints alone, or the former ones and the new one. A checkpoint is never
overwritten: the two steps of an overwrite are where others lose both or, worse, mix them.
"""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from framework.checkpoint.index import (
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    encode_manifest,
    read_manifest,
    verify_sizes,
)
from framework.errors import CheckpointError

# Names of the moments at which a save can die; `fault` is called with each, so that tests can kill it there.
COMMIT_POINTS = ("begun", "writing", "written", "gathered", "indexed", "manifest", "renamed", "retained")
Fault = Callable[[str], None]

# What the file system and the manifest may need beyond the tensors' bytes.
SPARE_BYTES = 1 << 20


def no_fault(point: str) -> None:
    """Nothing fails."""


def committed_name(root: Path, step: int) -> Path:
    """`step-N` in `root`."""
    return root / f"step-{step:08d}"


def list_checkpoints(root: Path) -> list[Path]:
    """Folders in `root` with the name of a committed checkpoint, newest first; whether they are whole is not asked."""
    steps = {int(m[1]): p for p in _folders(root) if (m := re.fullmatch(r"step-(\d+)", p.name))}
    return [steps[step] for step in sorted(steps, reverse=True)]


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint in `root` whose manifest is whole and whose files have their sizes, None without any.

    Says on stderr which newer ones were passed over and why. Hashes are verified by whoever reads the bytes.
    """
    for path in list_checkpoints(root):
        damage = find_damage(path)
        if damage is None:
            return path
        report(f"passing over a damaged checkpoint: {damage}")
    return None


def find_damage(path: Path) -> DamagedCheckpoint | None:
    """What a look at the manifest and the files' sizes finds wrong, None when they are right."""
    try:
        verify_sizes(path, read_manifest(path))
    except DamagedCheckpoint as error:
        return error
    return None


def begin(root: Path, step: int, state: dict[str, Any], bytes_needed: int) -> Path:
    """The folder that a save of `step` writes into, or the checkpoint itself if it is committed already.

    Raises CheckpointError when the step was committed with another state, and when the disk is too small.
    """
    root.mkdir(parents=True, exist_ok=True)
    sync_folder(root.parent)
    for path in _folders(root):
        if ".tmp." in path.name:
            shutil.rmtree(path)
    final = committed_name(root, step)
    if final.exists() and _is_committed(final, state):
        return final
    free = shutil.disk_usage(root).free
    if free < bytes_needed + SPARE_BYTES:
        raise no_room(root, bytes_needed)
    unfinished = root / f"{final.name}.tmp.{os.getpid()}"
    unfinished.mkdir()
    return unfinished


def finish(unfinished: Path, manifest: Manifest, fault: Fault = no_fault) -> Path:
    """Commit: manifest, sync, rename, sync. Returns the checkpoint's path."""
    final = committed_name(unfinished.parent, manifest.step)
    with open(unfinished / MANIFEST, "x") as file:
        file.write(encode_manifest(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(unfinished)
    fault("manifest")
    # rename(2) onto a folder that is not empty fails, so even a rival cannot be overwritten here.
    unfinished.rename(final)
    fault("renamed")
    sync_folder(final.parent)
    return final


def retain(root: Path, keep: int, fault: Fault = no_fault) -> None:
    """Remove all but the newest `keep` whole checkpoints. Damaged ones do not count and stay, as evidence."""
    whole = [path for path in list_checkpoints(root) if find_damage(path) is None]
    for path in whole[keep:]:
        # Renamed first, so that a crash in the middle of the removal leaves no half checkpoint under a final name.
        path = path.rename(root / f"{path.name}.tmp.{os.getpid()}")
        fault("retained")
        shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint out of the way of resumes and saves, to `<name>.bad` or `<name>.bad.1` and so on."""
    target = path.with_name(f"{path.name}.bad")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.bad.{number}")
    path.rename(target)
    return target


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_room(root: Path, bytes_needed: int) -> CheckpointError:
    """The error of a disk that is too small for a checkpoint of `bytes_needed`."""
    free = shutil.disk_usage(root).free
    return CheckpointError(
        f"no room for a checkpoint in {root}: it needs {bytes_needed + SPARE_BYTES:,} bytes, {free:,} are free."
        f" Former checkpoints are intact. Free space, lower checkpoint.keep, or move run.root to a larger disk"
    )


def explain(error: OSError, root: Path, bytes_needed: int) -> CheckpointError:
    """The CheckpointError for an error of the file system during a save."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        cause = f"{error.strerror} at {error.filename or root}. " if error.errno != errno.ENOSPC else ""
        return CheckpointError(cause + str(no_room(root, bytes_needed)))
    return CheckpointError(
        f"cannot save a checkpoint in {root}: {error.strerror} ({error.filename or 'while writing'})."
        f" Former checkpoints are intact"
    )


def report(message: str) -> None:
    """Say what a user must hear even when all goes on."""
    print(message, file=sys.stderr, flush=True)


def _is_committed(final: Path, state: dict[str, Any]) -> bool:
    """Whether `final` is whole and has this state. A damaged one is set aside; one of another state is not replaced."""
    damage = find_damage(final)
    if damage is not None:
        report(f"damaged checkpoint set aside as {set_aside(final)}: {damage}")
        return False
    if read_manifest(final).state == json.loads(json.dumps(state)):
        return True
    raise CheckpointError(f"{final} exists already, with another state: a checkpoint is never overwritten")


def _folders(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if path.is_dir() and path.name.startswith("step-")] if root.is_dir() else []
