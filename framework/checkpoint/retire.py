"""Going back to an older checkpoint: the newer ones lose their names, and then the older one learns what is left out.

    retire    step-N -> step-N.rewound, the newest first; from here on a start takes the older one
    amend     its manifest with another state, beside the old one; sync; rename over it; sync

Killed between the two, a start goes on from the older checkpoint as it was saved: the run meets again what made it go back, and
goes back again. Killed before, it meets it from the newest of those that have their names. Tensors are never written to.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from framework.checkpoint.commit import explain, find_damage, folder_of, list_checkpoints, step_of
from framework.checkpoint.folder import REWOUND, Fault, no_fault, report, reported, write_note
from framework.checkpoint.index import replace_state
from framework.checkpoint.place import Place
from framework.checkpoint.storage import retry
from framework.lease import Lease

T = TypeVar("T")

# Names of the moments at which going back can die.
RETIRE_POINTS = ("retired", "amending", "amended")


def has_whole(root: Place, last_step: int) -> bool:
    """Whether `root` has a checkpoint of `last_step` or before, by its manifest and sizes."""
    return any(step_of(path) <= last_step and find_damage(path) is None for path in list_checkpoints(root))


def retire_newer(root: Place, lease: Lease, last_step: int, fault: Fault = no_fault) -> Sequence[Place]:
    """Take their names from all checkpoints of steps after `last_step`, and remove those that were retired before: evidence of
    the last time is enough. Returns what they are called now."""
    folder = folder_of(root)
    for former in folder.list_retired():
        with reported(f"a checkpoint that an earlier rewind has left cannot be removed, {former}"):
            folder.discard(lease, former)
    retired = []
    for path in (path for path in list_checkpoints(root) if step_of(path) > last_step):
        retired.append(_explained(root, partial(folder.rename, lease, path, REWOUND)))
        fault("retired")
    left = list_checkpoints(root)
    if folder.note is not None and left:  # what went back on purpose is not lost
        _explained(root, partial(write_note, lease, folder.note, step_of(left[0])))
    return retired


def amend(path: Place, lease: Lease, state: dict[str, Any], fault: Fault = no_fault) -> None:
    """Give the checkpoint `path` another state: it has the old one or the new one, whenever this is cut."""
    _explained(path.parent, partial(_amend, path, lease, state, fault))


def _amend(path: Place, lease: Lease, state: dict[str, Any], fault: Fault) -> None:
    folder_of(path.parent).amend(lease, path, replace_state(path, state), fault)


def _explained(root: Place, work: Callable[[], T]) -> T:
    try:
        return retry(work, "go back to an older checkpoint in", root)
    except OSError as error:
        raise explain(error, root, 0) from error


__all__ = ["RETIRE_POINTS", "amend", "has_whole", "report", "retire_newer"]
