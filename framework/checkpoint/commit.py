"""Commit: a checkpoint becomes visible all at once, after everything in it is durable, and older ones go only then.

    begin     remove what failed saves left; check the room; make a folder that no reader looks at
    (write)   every rank writes its file there and syncs it                                          save.py
    finish    write the manifest; *the commit*: on a file system a rename to `step-N`, in a store the manifest's put
    note      note beside the run's checkpoints that this step was committed, should it ever be lost
    retain    remove older checkpoints

A crash at any point leaves the former checkpoints alone, or the former ones and the new one. A checkpoint is never
overwritten: a crash between the two steps of an overwrite could lose both checkpoints or, worse, mix them.

A run resumes from the newest whole checkpoint (`find_newest`). A run that has or had a checkpoint never starts over by itself. An
error of the storage is not damage: it is retried, and then ends the rank with an exit code on which the next start tries again.

A rewind goes back to an older checkpoint:

    retire    step-N -> step-N.rewound, the newest first; from here on a start takes the older one
    amend     write the older one's manifest with another state beside it; sync; rename over it; sync

Killed between the two, a start resumes from the older checkpoint as it was saved: the run meets the cause of the rewind again,
and rewinds again. Killed before, it does so from the newest checkpoint that still has its name. Tensors are never written to.

On a file system every name is changed by a rename out of or into the workplace of the lease (framework/lease.py), which a newer
start takes away: a process that was taken for dead changes nothing, wherever in a save it wakes up. In a store the checkpoints
that it commits do not count.
"""

import errno
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from framework.checkpoint.folder import (
    BAD,
    REWOUND,
    Fault,
    LocalFolder,
    ObjectFolder,
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
    replace_state,
    verify_sizes,
)
from framework.errors import CheckpointError, StorageError
from framework.lease import Lease
from framework.object_store import ObjectPath, Place, error_text, read, retry, storage_error

T = TypeVar("T")
Folder = LocalFolder | ObjectFolder

# Names of the moments at which a save can die; `fault` is called with each, so that tests can kill it there.
SAVE_POINTS = (
    "planned",  # it is settled which rank writes what
    "staging",  # a segment of the rank's bytes is staged
    "staged",  # all are, if they are staged whole
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
# From these points on the checkpoint is there, whatever happens.
COMMITTED_POINTS = SAVE_POINTS[SAVE_POINTS.index("renamed") :]
# Points of all ranks; the others are rank 0's alone.
RANK_POINTS = SAVE_POINTS[: SAVE_POINTS.index("indexed")]

# Errors that another start would meet again, so that only the user can end them: no room (EFBIG is a limit on the size of a
# file), no right, no folder. The rest may pass, or concern this node alone (EROFS: Linux remounts a failing disk read-only).
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.ENOTDIR)


@dataclass(frozen=True)
class Retention:
    """The rule for checkpoints that stay: the newest `keep`, those of steps that `keep_every` divides, and those being read."""

    keep: int
    keep_every: int | None = None
    is_read: Callable[[int], bool] = lambda step: False
    """Whether the checkpoint of a step is being read."""

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of a step stays, however old."""
        return (self.keep_every is not None and step % self.keep_every == 0) or self.is_read(step)


@dataclass(frozen=True)
class FoundCheckpoints:
    """The checkpoints that a run finds when it starts."""

    newest: Place | None
    """The newest whole one; None for a run that has never saved."""
    damaged: dict[Place, DamagedCheckpoint]
    """Newer ones."""
    manifest: Manifest | None = None
    """The newest one's."""
    lost: str | None = None
    """A message if one that was committed after the newest is gone."""


def folder_of(root: Place) -> Folder:
    """The folder of checkpoints `root`."""
    return ObjectFolder(root) if isinstance(root, ObjectPath) else LocalFolder(root)


def unleased(root: Place) -> Lease:
    """The lease of a run that no launcher has started, such as a test's, whose checkpoints lie in `root`."""
    run = root.run if isinstance(root, ObjectPath) else root.parent
    assert run is not None, f"{root} is of no run"
    return Lease(run)


def step_of(path: Place) -> int:
    """The step of a checkpoint, from its name."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def list_checkpoints(root: Place) -> list[Place]:
    """The committed checkpoints in `root`, whole or not, newest first."""
    return sorted(folder_of(root).list(), key=lambda path: (step_of(path), path.name), reverse=True)


def locate(root: Place, step: int) -> Place | None:
    """The committed checkpoint of a step, whole or not; None if there is none."""
    return next((path for path in list_checkpoints(root) if step_of(path) == step), None)


def newest_checkpoint(root: Place) -> Place | None:
    """The newest checkpoint in `root` whose manifest is whole and whose files have their sizes, None if there never was one.

    Reports newer ones that were passed over on stderr. Readers verify the hashes. Raises what `find_newest` raises.
    """
    found = find_newest(root)
    for damage in found.damaged.values():
        report(f"passing over a damaged checkpoint: {damage}")
    if found.lost is not None:
        report(found.lost)
    return found.newest


def find_newest(root: Place, known: Mapping[Place, DamagedCheckpoint] | None = None) -> FoundCheckpoints:
    """The newest whole checkpoint in `root`, and the newer ones that are damaged. known: damage that readers have met.

    Raises CheckpointError if there is or was a checkpoint and none is whole: starting over is the user's decision. Raises
    StorageError if the storage does not answer, which says nothing about the checkpoints.
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
    """The manifest of a checkpoint, once all its files are seen in their sizes. For one rank of many: one stat per file."""
    manifest = read_manifest(path)
    verify_sizes(path, manifest)
    return manifest


def find_damage(path: Place) -> DamagedCheckpoint | None:
    """The damage that the manifest and the files' sizes show; None if there is none. Hashes are not verified."""
    try:
        open_checkpoint(path)
    except DamagedCheckpoint as error:
        return error
    return None


def noted_step(root: Place) -> int | None:
    """The step that was committed last, by the note; None if that says nothing."""
    name = _noted(root)
    return int(name.removeprefix("step-")) if name and name[-1].isdigit() else None


def begin(root: Place, lease: Lease, step: int, state: dict[str, Any], bytes_needed: int) -> tuple[Place, bool]:
    """(the folder that a save of `step` writes to, False), or (the checkpoint, True) if it is committed already.

    Raises CheckpointError if the step was committed with another state, and if the disk is too small.
    """

    def begin_once() -> tuple[Place, bool]:
        folder = folder_of(root)
        folder.prepare(lease)
        committed = locate(root, step)
        if committed is not None and _is_committed(committed, lease, state):
            return committed, True
        folder.check_room(lease, bytes_needed)
        return folder.begin(lease, step), False

    return retry(begin_once, "begin a checkpoint in", root)


def finish(root: Place, lease: Lease, unfinished: Place, manifest: Manifest, fault: Fault = no_fault) -> Place:
    """Commit: write the manifest, give the name, write the note. Returns the checkpoint's path."""
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
    """Remove the whole checkpoints that `retention` does not keep, except that of best_step. Damaged ones do not count and
    stay, as evidence. Errors are reported and not raised: the new checkpoint is safe.
    """
    folder = folder_of(root)
    with reported("the new checkpoint is safe, but an old one cannot be removed"):
        for path in find_old(root, retention, best_step):
            folder.remove(lease, path, fault)
    folder.tidy(lease)


def find_old(root: Place, retention: Retention, best_step: int | None = None) -> list[Place]:
    """The whole checkpoints that `retain` removes, newest first."""
    # Damaged ones are not counted: `keep` damaged ones would let the only whole one go.
    whole = [path for path in list_checkpoints(root) if find_damage(path) is None]
    old = [path for path in whole[retention.keep :] if not retention.keeps(step_of(path))]
    return [path for path in old if step_of(path) != best_step]


def set_aside(path: Place, lease: Lease, suffix: str = BAD) -> Place:
    """Rename a damaged checkpoint, out of the way of resumes and saves. Returns its new path."""
    return folder_of(path.parent).rename(lease, path, suffix)


def set_aside_newer(found: FoundCheckpoints, lease: Lease) -> None:
    """Rename the damaged checkpoints that are newer than the one that a run has loaded. A rename that fails is reported."""
    for path, damage in found.damaged.items():
        with reported(f"damaged checkpoint cannot be set aside ({damage})"):
            report(f"damaged checkpoint set aside as {set_aside(path, lease)}: {damage}")
    if found.lost is not None:
        report(found.lost)
    if found.newest is not None and found.damaged:
        report(f"going on from step {step_of(found.newest)}")


def explain(error: OSError, root: Place, bytes_needed: int) -> CheckpointError | StorageError:
    """The error that ends a save after an OSError: a CheckpointError if only the user can mend it, else a StorageError."""
    if error.errno in NO_ROOM:
        cause = f"{error.strerror} at {error.filename or root}. " if error.errno != errno.ENOSPC else ""
        return CheckpointError(cause + str(no_room(root, bytes_needed)))
    if error.errno in NO_ACCESS:
        return CheckpointError(
            f"cannot save a checkpoint in {root}: {error_text(error)} ({error.filename or 'while writing'})."
            f" Checkpoints saved before are untouched. Give this user the right to write there, or set"
            f" {folder_of(root).key} to a place of yours"
        )
    return storage_error(error, "save a checkpoint in", root)


def has_whole(root: Place, last_step: int) -> bool:
    """Whether `root` has a whole checkpoint of `last_step` or before, by its manifest and sizes."""
    return any(step_of(path) <= last_step and find_damage(path) is None for path in list_checkpoints(root))


def retire_newer(root: Place, lease: Lease, last_step: int, fault: Fault = no_fault) -> Sequence[Place]:
    """Take their names from all checkpoints of steps after `last_step`, and remove those that an earlier rewind has left: the
    evidence of the last one is enough. Returns their new paths."""
    folder = folder_of(root)
    for former in folder.list_retired():
        with reported(f"a checkpoint that an earlier rewind has left cannot be removed, {former}"):
            folder.discard(lease, former)
    retired: list[Place] = []
    for path in (path for path in list_checkpoints(root) if step_of(path) > last_step):
        retired.append(_explained(root, partial(set_aside, path, lease, REWOUND)))
        fault("retired")
    left = list_checkpoints(root)
    if folder.note is not None and left:  # else a retired checkpoint would be reported as lost
        _explained(root, partial(write_note, lease, folder.note, step_of(left[0])))
    return retired


def amend(path: Place, lease: Lease, state: dict[str, Any], fault: Fault = no_fault) -> None:
    """Replace the state of the checkpoint `path`, atomically."""
    folder = folder_of(path.parent)
    _explained(path.parent, lambda: folder.amend(lease, path, replace_state(path, state), fault))


def _explained(root: Place, work: Callable[[], T]) -> T:
    try:
        return retry(work, "go back to an older checkpoint in", root)
    except OSError as error:
        raise explain(error, root, 0) from error


def _noted(root: Place) -> str | None:
    """The name of the checkpoint that was committed last; None if none ever was."""
    note = folder_of(root).note  # written after the commit, so no harm is done if it lags or is missing
    if note is None:
        return None
    try:
        text = read(lambda: note.read_text(errors="replace"), note)
    except FileNotFoundError:
        return None
    step = re.fullmatch(r'\{"committed_step": (\d+)\}', text)
    # A note that a crash has emptied still shows that something was committed.
    return f"step-{int(step[1]):08d}" if step else "step-?"


def _find_lost(root: Place, newest: Place, damaged: Mapping[Place, DamagedCheckpoint]) -> str | None:
    """A message if the checkpoint that was committed last is gone and newer than the newest whole one. Retention keeps the
    newest; rewinds and damage leave it under another name."""
    folder, last = folder_of(root), None
    with suppress(StorageError):  # a note that cannot be read says nothing
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
    """The error for a run that has saved and has no whole checkpoint, with a list and ways out. None if it has never saved."""
    noted = _noted(root)
    folder = folder_of(root)
    rows = {path.name: str(damage) for path, damage in damaged.items()}
    rows |= dict.fromkeys(sorted(folder.list_damaged(), reverse=True), "was set aside as damaged by an earlier start")
    if noted is not None and not any(name.startswith(noted) for name in rows):
        rows = {noted: f"was committed, as {folder.note} says, and is gone"} | rows
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
    """Whether `final` is whole and has this state; if it is damaged, it is set aside. Raises CheckpointError if it has another
    state: it is not replaced."""
    damage = find_damage(final)
    if damage is not None:
        report(f"damaged checkpoint set aside as {set_aside(final, lease)}: {damage}")
        return False
    if read_manifest(final).state == json.loads(json.dumps(state)):
        return True
    raise CheckpointError(f"{final} exists already, with another state: a checkpoint is never overwritten")
