"""How a checkpoint becomes visible: all at once, after everything in it is durable. What differs between a file system and an
object store is in `Folder` (folder.py, object_folder.py), which this asks.

    begin     clear what failed saves left; is there room?; a place that no reader looks at
    (write)   every rank writes its file there and syncs it                                          save.py
    finish    write the manifest; *the commit*: on a file system a rename to `step-N`, in a store the manifest's put
    note      write beside the run's checkpoints that this step was committed, should it ever be gone
    retain    only now may older checkpoints go

A crash at any point leaves the former checkpoints alone, or the former ones and the new one. A checkpoint is never
overwritten: the two steps of an overwrite are where others lose both or, worse, mix them.

A run goes on from the newest whole checkpoint (`find_newest`). One that has or had a checkpoint never starts over by itself,
and an error of the file system is no damage: it is tried again, and then ends the rank with an exit code that is tried again.

On a file system every name is changed by a rename out of or into the workplace of the lease (framework/lease.py), which a newer
start takes away: a process that was held for dead changes nothing, wherever in a save it wakes up. In a store what it commits
does not count.
"""

import errno
import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework.checkpoint.folder import (
    BAD,
    Fault,
    Folder,
    LocalFolder,
    no_fault,
    no_room,
    report,
    reported,
    write_note,
)
from framework.checkpoint.index import (
    DamagedCheckpoint,
    Manifest,
    encode_manifest,
    read_manifest,
    verify_sizes,
)
from framework.checkpoint.object_folder import ObjectFolder
from framework.checkpoint.place import ObjectPath, Place
from framework.checkpoint.storage import error_text, read, retry, storage_error
from framework.errors import CheckpointError, StorageError
from framework.lease import Lease

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
    damaged: the newer ones, with what is wrong with each. lost: what is said of one that was committed after the newest and is
    gone, None where none is."""

    newest: Place | None
    damaged: dict[Place, DamagedCheckpoint]
    manifest: Manifest | None = None
    lost: str | None = None


def folder_of(root: Place) -> Folder:
    """The folder of checkpoints `root`."""
    return ObjectFolder(root) if isinstance(root, ObjectPath) else LocalFolder(root)


def unleased(root: Place) -> Lease:
    """The lease of a run that nobody launches, such as a test's, whose checkpoints lie in `root`."""
    run = root.run if isinstance(root, ObjectPath) else root.parent
    assert run is not None, f"{root} is of no run"
    return Lease(run)


def step_of(path: Place) -> int:
    """The step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def list_checkpoints(root: Place) -> list[Place]:
    """The committed checkpoints in `root`, newest first; whether they are whole is not asked."""
    return sorted(folder_of(root).list(), key=lambda path: (step_of(path), path.name), reverse=True)


def locate(root: Place, step: int) -> Place | None:
    """The committed checkpoint of a step, None where there is none; whether it is whole is not asked."""
    return next((path for path in list_checkpoints(root) if step_of(path) == step), None)


def newest_checkpoint(root: Place) -> Place | None:
    """The newest checkpoint in `root` whose manifest is whole and whose files have their sizes, None if there never was one.

    Says on stderr which newer ones were passed over and why. Hashes are verified by whoever reads the bytes. Raises what
    `find_newest` raises.
    """
    found = find_newest(root)
    for damage in found.damaged.values():
        report(f"passing over a damaged checkpoint: {damage}")
    if found.lost is not None:
        report(found.lost)
    return found.newest


def find_newest(root: Place, known: Mapping[Place, DamagedCheckpoint] | None = None) -> FoundCheckpoints:
    """The newest whole checkpoint in `root`, and the newer ones that are damaged. known: damage that readers have met.

    Raises CheckpointError where there is or was a checkpoint and none is whole: starting over is the user's decision. Raises
    StorageError where the file system does not answer, which says nothing of the checkpoints.
    """
    damaged: dict[Place, DamagedCheckpoint] = {}
    for path in list_checkpoints(root):
        try:
            if known and path in known:
                raise known[path]
            return FoundCheckpoints(path, damaged, open_checkpoint(path), _find_lost(root, path, damaged))
        except DamagedCheckpoint as damage:
            damaged[path] = damage
    refusal = _refuse_to_start_over(root, damaged)
    if refusal is not None:
        raise refusal
    return FoundCheckpoints(None, {})


def open_checkpoint(path: Place) -> Manifest:
    """The manifest of a checkpoint, all of whose files are there in their sizes. For one rank of many: one stat for each file."""
    manifest = read_manifest(path)
    verify_sizes(path, manifest)
    return manifest


def find_damage(path: Place) -> DamagedCheckpoint | None:
    """The damage that the manifest and the files' sizes show, None if there is none. Hashes are not read."""
    try:
        open_checkpoint(path)
    except DamagedCheckpoint as error:
        return error
    return None


def note_of(root: Place) -> Path | None:
    """The file beside a run's checkpoints that says which step was committed last, `checkpoints.json`; None for those of no run.

    It is written after the commit and read to find that a checkpoint is gone, so one that lags, or is missing, harms nobody.
    """
    return folder_of(root).note


def noted_step(root: Place) -> int | None:
    """The step that was committed last, as the note says; None where it says nothing."""
    name = _noted(root)
    return int(name.removeprefix("step-")) if name and name[-1].isdigit() else None


def begin(root: Place, lease: Lease, step: int, state: dict[str, Any], bytes_needed: int) -> tuple[Place, bool]:
    """Where a save of `step` writes to, and False; or the checkpoint itself, if it is committed already, and True.

    Raises CheckpointError when the step was committed with another state, and when the disk is too small.
    """
    return retry(lambda: _begin(root, lease, step, state, bytes_needed), "begin a checkpoint in", root)


def finish(root: Place, lease: Lease, unfinished: Place, manifest: Manifest, fault: Fault = no_fault) -> Place:
    """Commit: the manifest, the name, the note. Returns the checkpoint's path."""
    folder = folder_of(root)
    retry(lease.check, "read the lease of", lease.run)
    final = folder.commit(lease, unfinished, manifest.step, encode_manifest(manifest), fault)
    note = folder.note
    if note is not None:
        with reported(f"the new checkpoint is safe, but cannot be noted in {note}"):
            retry(lambda: write_note(lease, note, manifest.step), "write", note)
    fault("noted")
    return final


def retain(
    root: Place, lease: Lease, retention: Retention, fault: Fault = no_fault, best_step: int | None = None
) -> None:
    """Remove all whole checkpoints that `retention` does not keep, but that of best_step. Damaged ones do not count and stay, as
    evidence.

    What cannot be removed, or not even looked at, is said and stays: the new checkpoint is safe.
    """
    folder = folder_of(root)
    with reported("the new checkpoint is safe, but an old one cannot be removed"):
        whole = [path for path in list_checkpoints(root) if find_damage(path) is None]
        old = [path for path in whole[retention.keep :] if not retention.keeps(step_of(path))]
        for path in (each for each in old if step_of(each) != best_step):
            folder.remove(lease, path, fault)
    folder.tidy(lease)


def set_aside(path: Place, lease: Lease) -> Place:
    """Take a damaged checkpoint out of the way of resumes and saves; returns where it is now."""
    return folder_of(path.parent).rename(lease, path, BAD)


def set_aside_newer(found: FoundCheckpoints, lease: Lease) -> None:
    """Rename the damaged checkpoints that a run goes on without, which has loaded an older one. A rename that fails is said."""
    for path, damage in found.damaged.items():
        with reported(f"damaged checkpoint cannot be set aside ({damage})"):
            report(f"damaged checkpoint set aside as {set_aside(path, lease)}: {damage}")
    if found.lost is not None:
        report(found.lost)
    if found.newest is not None and found.damaged:
        report(f"going on from step {step_of(found.newest)}")


def explain(error: OSError, root: Place, bytes_needed: int) -> CheckpointError | StorageError:
    """The error that ends a save which the file system has refused: what only the user can mend, or what may pass."""
    if error.errno in NO_ROOM:
        cause = f"{error.strerror} at {error.filename or root}. " if error.errno != errno.ENOSPC else ""
        return CheckpointError(cause + str(no_room(root, bytes_needed)))
    if error.errno in NO_ACCESS:
        return CheckpointError(
            f"cannot save a checkpoint in {root}: {error_text(error)} ({error.filename or 'while writing'})."
            f" Former checkpoints are intact. Give this user the right to write there, or set"
            f" {folder_of(root).key} to a place of yours"
        )
    return storage_error(error, "save a checkpoint in", root)


def _begin(root: Place, lease: Lease, step: int, state: dict[str, Any], bytes_needed: int) -> tuple[Place, bool]:
    folder = folder_of(root)
    folder.prepare(lease)
    committed = locate(root, step)
    if committed is not None and _is_committed(committed, lease, state):
        return committed, True
    folder.check_room(lease, bytes_needed)
    return folder.begin(lease, step), False


def give_up(root: Place, lease: Lease, unfinished: Place) -> None:
    """Remove what a failed save has left."""
    folder_of(root).give_up(lease, unfinished)


def _noted(root: Place) -> str | None:
    """The name of the checkpoint that was committed last; None if none ever was."""
    note = note_of(root)
    if note is None:
        return None
    try:
        text = read(lambda: note.read_text(errors="replace"), note)
    except FileNotFoundError:
        return None
    step = re.fullmatch(r'\{"committed_step": (\d+)\}', text)
    # A note that a crash has emptied still says that something was committed.
    return f"step-{int(step[1]):08d}" if step else "step-?"


def _find_lost(root: Place, newest: Place, damaged: Mapping[Place, DamagedCheckpoint]) -> str | None:
    """The words on the checkpoint that was committed last, where it is gone and newer than the newest whole one. Retention leaves
    the newest, a rewind and damage leave it under another name."""
    folder, last = folder_of(root), None
    with suppress(StorageError):  # a note that cannot be read is none
        last = noted_step(root)
    left = [*(path.name for path in (*damaged, *folder.list_retired())), *folder.list_damaged()]
    if (
        last is None
        or last <= step_of(newest)
        or any(int(name.split("-")[1].partition(".")[0]) == last for name in left)
    ):
        return None
    return (
        f"the checkpoint of step {last:,} was committed, as {folder.note} says, and is gone. The newest that is left is of step"
        f" {step_of(newest):,}: {last - step_of(newest):,} steps are lost, and a resume trains them again. If it was moved away"
        " by mistake, put it back first"
    )


def _refuse_to_start_over(root: Place, damaged: Mapping[Place, DamagedCheckpoint]) -> CheckpointError | None:
    """The error of a run that has saved and has no whole checkpoint: a list, and what to do. None if it has never saved."""
    noted = _noted(root)
    folder = folder_of(root)
    rows = {path.name: str(damage) for path, damage in damaged.items()}
    rows |= dict.fromkeys(sorted(folder.list_damaged(), reverse=True), "was set aside as damaged by an earlier start")
    if noted is not None and not any(name.startswith(noted) for name in rows):
        rows = {noted: f"was committed, as {note_of(root)} says, and is gone"} | rows
    if not rows:
        return None
    first = f"all {len(damaged)} checkpoints in {root} are damaged" if damaged else f"{root} has no checkpoint left"
    return CheckpointError(
        "\n".join(
            [
                f"{first}, and a run that has saved never starts over by itself. Nothing was changed.",
                *(f"  {name}: {why}" for name, why in rows.items()),
                "to go on:       restore the files of one of them, under its name step-N; `meshwright inspect PATH` verifies it",
                "to train anew:  leave run.id out, or give one that is not taken",
                f"to start over in this folder, at step 0:  {folder.commands_to_start_over()}",
            ]
        )
    )


def _is_committed(final: Place, lease: Lease, state: dict[str, Any]) -> bool:
    """True if `final` is whole and has this state; False if it was damaged, and is set aside. Raises CheckpointError if it has
    another state: it is not replaced."""
    damage = find_damage(final)
    if damage is not None:
        report(f"damaged checkpoint set aside as {set_aside(final, lease)}: {damage}")
        return False
    if read_manifest(final).state == json.loads(json.dumps(state)):
        return True
    raise CheckpointError(f"{final} exists already, with another state: a checkpoint is never overwritten")
