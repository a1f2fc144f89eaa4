"""How a checkpoint becomes visible: all at once, by one rename, after everything in it is on the disk.

    begin     clear what failed saves left; is there room?; make `.epoch-E/step-N`, in the workplace of the run's lease
    (write)   every rank writes its file there and syncs it                                          save.py
    finish    write the manifest, sync it and the folder; rename to `step-N`: *this is the commit*; sync the parent
    note      write beside the folder that this step was committed, should it ever be gone
    retain    only now may older checkpoints go

A crash at any point leaves the former checkpoints alone, or the former ones and the new one. A checkpoint is never
overwritten: the two steps of an overwrite are where others lose both or, worse, mix them.

A run goes on from the newest whole checkpoint (`find_newest`). One that has or had a checkpoint never starts over by itself,
and an error of the file system is no damage: it is tried again, and then ends the rank with an exit code that is tried again.

Every name is changed by a rename out of or into the workplace of the lease (framework/lease.py), which a newer start takes away:
a process that was held for dead changes nothing, wherever in a save it wakes up.
"""

import errno
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
from framework.checkpoint.storage import error_text, read, retry, storage_error
from framework.errors import CheckpointError, LeaseLost, MeshwrightError, StorageError
from framework.lease import Lease, discard

# Names of the moments at which a save can die; `fault` is called with each, so that tests can kill it there.
SAVE_POINTS = (
    "planned",  # who writes what is known
    "staging",  # a segment of the rank's bytes is staged
    "staged",  # all are, where they have a place all at once
    "begun",  # the folder is there
    "writing",  # a segment, or the tree of hashes, is written
    "written",  # the rank's file is synced
    "gathered",  # rank 0 has heard from all ranks
    "indexed",
    "manifest",
    "renamed",
    "noted",
    "retiring",  # an older checkpoint has lost its name
    "retained",  # and is gone
)
# Behind these the checkpoint is there, whatever happens.
COMMITTED_POINTS = SAVE_POINTS[SAVE_POINTS.index("renamed") :]
# Those of all ranks; the others are rank 0's alone.
RANK_POINTS = SAVE_POINTS[: SAVE_POINTS.index("indexed")]
Fault = Callable[[str], None]

# What the file system and the manifest may need beyond the tensors' bytes.
SPARE_BYTES = 1 << 20

# Errors that another start would meet again, so that only the user can end them: no room (EFBIG is a limit on the size of a
# file), no right, no folder. The rest may pass, or be this node's (EROFS: Linux remounts a disk so after errors).
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay: the newest `keep`, those of steps that `keep_every` divides, and those that are read just now, as
    `is_read` says of a step."""

    keep: int
    keep_every: int | None = None
    is_read: Callable[[int], bool] = lambda step: False

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step stays however old it is."""
        return (self.keep_every is not None and step % self.keep_every == 0) or self.is_read(step)


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints that a run finds when it starts. newest: the newest whole one, None for a run that has never saved.
    damaged: the newer ones, with what is wrong with each."""

    newest: Path | None
    damaged: dict[Path, DamagedCheckpoint]
    manifest: Manifest | None = None


def no_fault(point: str) -> None:
    """Nothing fails."""


def committed_name(root: Path, step: int) -> Path:
    """`step-N` in `root`."""
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def list_checkpoints(root: Path) -> list[Path]:
    """Folders in `root` with the name of a committed checkpoint, newest first; whether they are whole is not asked."""
    found = [path for path in _folders(root) if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint in `root` whose manifest is whole and whose files have their sizes, None if there never was one.

    Says on stderr which newer ones were passed over and why. Hashes are verified by whoever reads the bytes. Raises what
    `find_newest` raises.
    """
    found = find_newest(root)
    for damage in found.damaged.values():
        report(f"passing over a damaged checkpoint: {damage}")
    return found.newest


def find_newest(root: Path, known: Mapping[Path, DamagedCheckpoint] | None = None) -> FoundCheckpoints:
    """The newest whole checkpoint in `root`, and the newer ones that are damaged. known: damage that readers have met.

    Raises CheckpointError where there is or was a checkpoint and none is whole: starting over is the user's decision. Raises
    StorageError where the file system does not answer, which says nothing of the checkpoints.
    """
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in list_checkpoints(root):
        try:
            if known and path in known:
                raise known[path]
            return FoundCheckpoints(path, damaged, open_checkpoint(path))
        except DamagedCheckpoint as damage:
            damaged[path] = damage
    refusal = _refuse_to_start_over(root, damaged)
    if refusal is not None:
        raise refusal
    return FoundCheckpoints(None, {})


def open_checkpoint(path: Path) -> Manifest:
    """The manifest of a checkpoint, all of whose files are there in their sizes. For one rank of many: one stat for each file."""
    manifest = read_manifest(path)
    verify_sizes(path, manifest)
    return manifest


def find_damage(path: Path) -> DamagedCheckpoint | None:
    """The damage that the manifest and the files' sizes show, None if there is none. Hashes are not read."""
    try:
        open_checkpoint(path)
    except DamagedCheckpoint as error:
        return error
    return None


def note_of(root: Path) -> Path:
    """The file beside `root` that says which step was committed last, `checkpoints.json` for `checkpoints`.

    It is written after the commit and read only when no checkpoint is whole, so one that lags, or is missing, harms nobody.
    """
    return root.with_name(f"{root.name}.json")


def noted_step(root: Path) -> int | None:
    """The step that was committed last, as the note says; None where it says nothing."""
    name = _noted(root)
    return int(name.removeprefix("step-")) if name and name[-1].isdigit() else None


def begin(root: Path, lease: Lease, step: int, state: dict[str, Any], bytes_needed: int) -> Path:
    """The folder that a save of `step` writes into, or the checkpoint itself if it is committed already.

    Raises CheckpointError when the step was committed with another state, and when the disk is too small.
    """
    return retry(lambda: _begin(root, lease, step, state, bytes_needed), "begin a checkpoint in", root)


def finish(root: Path, lease: Lease, unfinished: Path, manifest: Manifest, fault: Fault = no_fault) -> Path:
    """Commit: manifest, sync, rename, sync, note. Returns the checkpoint's path."""
    final = committed_name(root, manifest.step)
    text = encode_manifest(manifest)
    retry(lease.check, "read the lease of", lease.run)
    retry(lambda: _write_manifest(unfinished / MANIFEST, text), "write", unfinished / MANIFEST)
    fault("manifest")
    retry(lambda: _commit(lease, unfinished, final), "rename", unfinished)
    fault("renamed")
    retry(lambda: sync_folder(root), "sync", root)
    with reported(f"the new checkpoint is safe, but cannot be noted in {note_of(root)}"):
        retry(lambda: _note(lease, final), "write", note_of(root))
    fault("noted")
    return final


def retain(
    root: Path, lease: Lease, retention: Retention, fault: Fault = no_fault, best_step: int | None = None
) -> None:
    """Remove all whole checkpoints that `retention` does not keep, but that of best_step. Damaged ones do not count and stay, as
    evidence.

    What cannot be removed, or not even looked at, is said and stays: the new checkpoint is safe.
    """
    with reported("the new checkpoint is safe, but an old one cannot be removed"):
        whole = [path for path in list_checkpoints(root) if find_damage(path) is None]
        old = [path for path in whole[retention.keep :] if not retention.keeps(step_of(path))]
        for path in (each for each in old if step_of(each) != best_step):
            # Renamed first, so that a crash in the middle of the removal leaves no half checkpoint under a final name.
            gone = lease.withdraw(path, path.name, root)
            fault("retiring")
            if gone is not None:
                shutil.rmtree(gone)
            fault("retained")
    lease.tidy(root)


def set_aside(path: Path, lease: Lease) -> Path:
    """Rename a damaged checkpoint out of the way of resumes and saves, to `<name>.bad` or `<name>.bad.1` and so on.

    By way of the workplace: once that was taken away, a name may be that of a newer start's checkpoint.
    """
    target = path.with_name(f"{path.name}.bad")
    number = 0
    while target.exists():
        number += 1
        target = path.with_name(f"{path.name}.bad.{number}")
    withdrawn = lease.withdraw(path, target.name, path.parent)
    if withdrawn is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    lease.publish(withdrawn, target)
    lease.tidy(path.parent)
    return target


def set_aside_newer(found: FoundCheckpoints, lease: Lease) -> None:
    """Rename the damaged checkpoints that a run goes on without, which has loaded an older one. A rename that fails is said."""
    for path, damage in found.damaged.items():
        with reported(f"damaged checkpoint cannot be set aside ({damage})"):
            report(f"damaged checkpoint set aside as {set_aside(path, lease)}: {damage}")
    if found.newest is not None and found.damaged:
        report(f"going on from step {step_of(found.newest)}")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def no_room(root: Path, bytes_needed: int) -> CheckpointError:
    """The error of a disk that is too small for a checkpoint of `bytes_needed`."""
    free = "how many are free cannot be found out"
    with suppress(OSError):
        free = f"{shutil.disk_usage(root).free:,} are free"
    return CheckpointError(
        f"no room for a checkpoint in {root}: it needs {bytes_needed + SPARE_BYTES:,} bytes, {free}."
        f" Former checkpoints are intact. Free space, lower checkpoint.keep, or move run.root to a larger disk"
    )


def explain(error: OSError, root: Path, bytes_needed: int) -> CheckpointError | StorageError:
    """The error that ends a save which the file system has refused: what only the user can mend, or what may pass."""
    if error.errno in NO_ROOM:
        cause = f"{error.strerror} at {error.filename or root}. " if error.errno != errno.ENOSPC else ""
        return CheckpointError(cause + str(no_room(root, bytes_needed)))
    if error.errno in NO_ACCESS:
        return CheckpointError(
            f"cannot save a checkpoint in {root}: {error_text(error)} ({error.filename or 'while writing'})."
            " Former checkpoints are intact. Give this user the right to write there, or set run.root to a folder of yours"
        )
    return storage_error(error, "save a checkpoint in", root)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Report errors of the file system in this block instead of raising them: a checkpoint is safe already. Not the loss of the
    lease, which ends this process."""
    try:
        yield
    except LeaseLost:
        raise
    except (OSError, MeshwrightError) as error:
        report(f"{what}: {error}")


def report(message: str) -> None:
    """Say what a user must hear even when all goes on."""
    print(message, file=sys.stderr, flush=True)


def _begin(root: Path, lease: Lease, step: int, state: dict[str, Any], bytes_needed: int) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    sync_folder(root.parent)
    workplace = lease.workplace(root)
    for path in (*workplace.iterdir(), *_folders_before_leases(root)):
        with reported(f"an unfinished checkpoint cannot be removed, {path}"):
            shutil.rmtree(path)
    final = committed_name(root, step)
    if final.exists() and _is_committed(final, lease, state):
        return final
    free = shutil.disk_usage(root).free
    if free < bytes_needed + SPARE_BYTES:
        lease.tidy(root)
        raise no_room(root, bytes_needed)
    unfinished = lease.workplace(root) / final.name
    unfinished.mkdir()
    return unfinished


def give_up(root: Path, lease: Lease, unfinished: Path) -> None:
    """Remove what a failed save has left."""
    discard(unfinished)
    lease.tidy(root)


def _folders_before_leases(root: Path) -> Iterator[Path]:
    """Unfinished checkpoints of a version that had no workplaces."""
    return (path for path in _folders(root) if ".tmp." in path.name)


def _write_manifest(path: Path, text: str) -> None:
    # Over what a failed attempt has left.
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def _commit(lease: Lease, unfinished: Path, final: Path) -> None:
    """rename(2) onto a folder that is not empty fails, so even a rival cannot be overwritten here."""
    lease.check()
    try:
        unfinished.rename(final)
    except FileNotFoundError:
        # The workplace was taken away: what has the final name then is not ours.
        lease.refuse_fenced(unfinished.parent)
        # A file server that did it and could not say so is asked again.
        if not (final / MANIFEST).exists():
            raise


def _note(lease: Lease, committed: Path) -> None:
    note = note_of(committed.parent)
    with lease.replacing(note, note.parent) as made, open(made, "w") as file:
        json.dump({"committed_step": step_of(committed)}, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(note.parent)


def _noted(root: Path) -> str | None:
    """The name of the checkpoint that was committed last; None if none ever was."""
    note = note_of(root)
    try:
        text = read(lambda: note.read_text(errors="replace"), note)
    except FileNotFoundError:
        return None
    step = re.fullmatch(r'\{"committed_step": (\d+)\}', text)
    # A note that a crash has emptied still says that something was committed.
    return committed_name(root, int(step[1])).name if step else "step-?"


def _refuse_to_start_over(root: Path, damaged: Mapping[Path, DamagedCheckpoint]) -> CheckpointError | None:
    """The error of a run that has saved and has no whole checkpoint: a list, and what to do. None if it has never saved."""
    noted = _noted(root)
    aside = [path.name for path in _folders(root) if re.fullmatch(r"step-\d+\.bad(\.\d+)?", path.name)]
    rows = {path.name: str(damage) for path, damage in damaged.items()}
    rows |= dict.fromkeys(sorted(aside, reverse=True), "was set aside as damaged by an earlier start")
    if noted is not None and not any(name.startswith(noted) for name in rows):
        rows = {noted: f"was committed, as {note_of(root)} says, and is gone"} | rows
    if not rows:
        return None
    first = f"all {len(damaged)} checkpoints in {root} are damaged" if damaged else f"{root} has no checkpoint left"
    away = [f"mv {shlex.quote(str(root))} {shlex.quote(f'{root}.lost')}"] if root.exists() else []
    away += [f"rm -f {shlex.quote(str(note_of(root)))}"]
    return CheckpointError(
        "\n".join(
            [
                f"{first}, and a run that has saved never starts over by itself. Nothing was changed.",
                *(f"  {name}: {why}" for name, why in rows.items()),
                "to go on:       restore the files of one of them, under its name step-N; `meshwright inspect PATH` verifies it",
                "to train anew:  leave run.id out, or give one that is not taken",
                f"to start over in this folder, at step 0:  {' && '.join(away)}",
            ]
        )
    )


def _is_committed(final: Path, lease: Lease, state: dict[str, Any]) -> bool:
    """True if `final` is whole and has this state; False if it was damaged, and is set aside. Raises CheckpointError if it has
    another state: it is not replaced."""
    damage = find_damage(final)
    if damage is not None:
        report(f"damaged checkpoint set aside as {set_aside(final, lease)}: {damage}")
        return False
    if read_manifest(final).state == json.loads(json.dumps(state)):
        return True
    raise CheckpointError(f"{final} exists already, with another state: a checkpoint is never overwritten")


def _folders(root: Path) -> list[Path]:
    """Folders of checkpoints whole, damaged or unfinished; none where there is no `root`."""

    def scan() -> list[Path]:
        with os.scandir(root) as entries:
            return [root / each.name for each in entries if each.name.startswith("step-") and each.is_dir()]

    try:
        return read(scan, root)
    except FileNotFoundError:
        return []
