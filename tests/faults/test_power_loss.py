"""A power loss at any moment of a save leaves whole checkpoints, the former or the new one, and nothing half under its name."""

import pytest
import torch

from framework.checkpoint.commit import Retention, find_newest, step_of
from framework.checkpoint.folder import LocalFolder
from framework.checkpoint.load import load_newest
from framework.checkpoint.save import CPU, Saver
from framework.checkpoint.staging import Entry, StagingMemory
from framework.comm.communicator import Communicator
from framework.lease import Lease
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from tests.faults.power_loss import STATES, Disk, fresh

ALONE = Communicator(Axis("world", 1, 0))
# Without these a run resumes as well: the note beside the checkpoints is only asked where no checkpoint is left, and the folder
# that they are in is there already, but for the first save of a run.
NEEDLESS = {"checkpoints.json", "run"}


class Torn(AssertionError):
    """What a disk holds after a power loss is not what was there before or is there afterwards."""


def entries(step):
    return [Entry(f"weight/{number}", Layout((300,)), torch.full((300,), step + 0.5 * number)) for number in range(2)]


def save(root, step):
    saver = Saver(root, ALONE, Retention(1), StagingMemory(CPU, 1 << 20, segment_bytes=1 << 10))
    saver.start(step, entries(step), {"step": step})
    saver.finish()


def check(found, allowed):
    """The run in `found` resumes from one of the allowed steps, None for its beginning, with nothing damaged."""
    root = found / "checkpoints"
    try:
        newest = find_newest(root)
        filled = [Entry(entry.name, entry.layout, torch.zeros_like(entry.data)) for entry in entries(0)]
        state = load_newest(root, filled, ALONE)
    except Exception as error:
        raise Torn(f"cannot be resumed: {error}") from error
    step = state["step"] if state else None
    if newest.damaged or step not in allowed:
        raise Torn(f"step {step}, damaged {list(map(str, newest.damaged))}, where {allowed} are allowed")
    if step is not None and not all(map(torch.equal, *([e.data for e in each] for each in (filled, entries(step))))):
        raise Torn(f"not the values of step {step}")


def lose_power(folder, former, new, lost_sync=None):
    """Save step `new` in a run that has step `former`, None for none, and look at every state of the disk at every moment; then
    save once more in what the last of them has left. Returns what was synced."""
    run = folder / "run"
    run.mkdir()
    if former is not None:
        save(run / "checkpoints", former)
    allowed, moments = {former, new}, 0

    def look():
        nonlocal moments
        moments += 1
        for state in STATES:
            disk.write_state(state, fresh(folder / "found"))
            check(folder / "found", allowed)

    disk = Disk(run, look, lost_sync)
    with disk.watching():
        save(run / "checkpoints", new)
        allowed = {new}
    assert moments > 10
    disk_left = folder / "found" / "checkpoints"
    save(disk_left, new + 1)
    check(folder / "found", {new + 1})
    return disk.synced


@pytest.mark.parametrize("former", [None, 1])
def test_a_save_survives_a_power_loss_at_any_moment(tmp_path, former):
    synced = lose_power(tmp_path, former, 2)
    assert {"rank-00000.bin", "index.bin", "manifest.json", "checkpoints"} <= set(synced)


@pytest.mark.grid
def test_sabotaged_each_fsync_that_is_left_out_is_noticed(tmp_path):
    for place in ("first", "later"):
        (tmp_path / place).mkdir()
    noticed = set()
    synced = lose_power(tmp_path / "first", 1, 2)
    for number, name in enumerate(synced):
        folder = tmp_path / "later" / str(number)
        folder.mkdir()
        try:
            lose_power(folder, 1, 2, lost_sync=number)
        except Torn:
            noticed.add((number, name))
    assert {each for each in enumerate(synced) if each[1] not in NEEDLESS} == noticed
    assert len(noticed) == 5


def test_sabotaged_a_checkpoint_that_gets_its_name_before_its_manifest_is_noticed(tmp_path, monkeypatch):
    write, name = LocalFolder.write_manifest, LocalFolder.give_name

    def name_first(folder, unfinished, text):
        final = folder.root / unfinished.name
        name(folder, Lease(tmp_path / "run"), unfinished, final)
        write(folder, final, text)

    monkeypatch.setattr(LocalFolder, "write_manifest", name_first)
    monkeypatch.setattr(LocalFolder, "give_name", lambda *args: None)
    with pytest.raises(Torn, match="damaged"):
        lose_power(tmp_path, 1, 2)


def test_the_disk_loses_what_was_not_synced(tmp_path):
    """The double itself: what it must forget, and what it must not."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "old").write_text("old")
    disk = Disk(run, lambda: None)
    with disk.watching():
        (run / "old").write_text("new")
        (run / "more").write_text("more")
        found = {}
        for state in STATES:
            disk.write_state(state, fresh(tmp_path / "found"))
            found[state] = {path.name: path.read_text() for path in (tmp_path / "found").iterdir()}
    assert found["nothing"] == found["removals"] == {"old": "old"}
    assert found["names"] == {"old": "old", "more": ""}
    assert found["bytes"] == {"old": "new"}
    assert step_of(run / "step-00000007") == 7
