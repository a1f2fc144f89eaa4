"""A checkpoint saved while the caller waits, as a run saves its last one."""

from collections.abc import Iterable
from typing import Any

import torch

from framework.checkpoint.commit import Retention, locate
from framework.checkpoint.folder import Fault, no_fault
from framework.checkpoint.save import CPU, Saver
from framework.checkpoint.staging import Entry
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object
from framework.object_store import Place


def save_checkpoint(
    root: Place,
    step: int,
    entries: Iterable[Entry],
    state: dict[str, Any],
    world: Communicator,
    keep: int,
    fault: Fault = no_fault,
) -> Place:
    """Save and commit `step-N` under `root`, and return its folder; the newest `keep` stay. Collective over `world`."""
    saver = Saver(root, world, Retention(keep), is_async=False, fault=fault)
    entries = list(entries)
    devices = [entry.data.device for entry in entries if isinstance(entry.data, torch.Tensor)]
    saver.start(step, entries, state, next((device for device in devices if device.type != "cpu"), CPU))
    saver.finish()
    committed = broadcast_object(lambda: locate(root, step), world)
    assert committed is not None, f"{root} has no step {step}, which was committed"
    return committed
