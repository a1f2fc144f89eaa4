"""Going back to an older checkpoint: the newer ones lose their names, and then the older one learns what is left out.

    retire    step-N -> step-N.rewound, the newest first; from here on a start takes the older one
    amend     its manifest with another state, beside the old one; sync; rename over it; sync

Killed between the two, a start goes on from the older checkpoint as it was saved: the run meets again what made it go back, and
goes back again. Killed before, it meets it from the newest of those that have their names. Tensors are never written to.
"""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint.commit import (
    Fault,
    explain,
    find_damage,
    list_checkpoints,
    no_fault,
    report,
    reported,
    step_of,
    sync_folder,
)
from framework.checkpoint.index import MANIFEST, replace_state
from framework.checkpoint.storage import retry
from framework.lease import Lease

REWOUND = ".rewound"
# Names of the moments at which going back can die.
RETIRE_POINTS = ("retired", "amending", "amended")


def has_whole(root: Path, last_step: int) -> bool:
    """Whether `root` has a checkpoint of `last_step` or before, by its manifest and sizes."""
    return any(step_of(path) <= last_step and find_damage(path) is None for path in list_checkpoints(root))


def retire_newer(root: Path, lease: Lease, last_step: int, fault: Fault = no_fault) -> Sequence[Path]:
    """Take their names from all checkpoints of steps after `last_step`, and remove those that were retired before: evidence of
    the last time is enough. Returns what they are called now."""
    for former in root.glob(f"step-*{REWOUND}"):
        with reported(f"a checkpoint that an earlier rewind has left cannot be removed, {former}"):
            lease.remove(former, root)
    retired = []
    for path in (path for path in list_checkpoints(root) if step_of(path) > last_step):
        target = path.with_name(path.name + REWOUND)
        _explained(root, partial(_rename, lease, path, target))
        fault("retired")
        retired.append(target)
    _explained(root, lambda: sync_folder(root))
    return retired


def _rename(lease: Lease, path: Path, target: Path) -> None:
    """Through the workplace: a start that was held for dead takes no name away."""
    withdrawn = lease.withdraw(path, target.name, path.parent)
    if withdrawn is not None:
        lease.publish(withdrawn, target)
    lease.tidy(path.parent)


def amend(path: Path, lease: Lease, state: dict[str, Any], fault: Fault = no_fault) -> None:
    """Give the checkpoint `path` another state: it has the old one or the new one, whenever this is cut."""
    _explained(path.parent, lambda: _amend(path, lease, state, fault))


def _amend(path: Path, lease: Lease, state: dict[str, Any], fault: Fault) -> None:
    text = replace_state(path, state)
    with lease.replacing(path / MANIFEST, path.parent) as made:
        with open(made, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fault("amending")
    sync_folder(path)
    fault("amended")


def _explained(root: Path, work: Any) -> None:
    try:
        retry(work, "go back to an older checkpoint in", root)
    except OSError as error:
        raise explain(error, root, 0) from error


__all__ = ["RETIRE_POINTS", "amend", "has_whole", "report", "retire_newer"]
