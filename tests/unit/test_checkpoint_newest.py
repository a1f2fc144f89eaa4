"""Which checkpoint a run goes on from: never from none if it has saved, and no error of the file system is taken for damage."""

import errno
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from framework import object_store
from framework.checkpoint import commit
from framework.checkpoint.commit import (
    amend,
    explain,
    find_newest,
    folder_of,
    list_checkpoints,
    newest_checkpoint,
    retire_newer,
    step_of,
)
from framework.checkpoint.load import BeforeStage, load_newest
from framework.checkpoint.staging import Entry
from framework.comm.communicator import Communicator
from framework.errors import EXIT_FAILED, EXIT_USER, CheckpointError, StorageError
from framework.launch.directory import RunDirectory
from framework.launch.places import place_checkpoints
from framework.launch.resume import saved_step
from framework.lease import Lease
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from tests.saving import save_checkpoint

ALONE = Communicator(Axis("world", 1, 0))
NUMEL = 5_000


@pytest.fixture
def root(tmp_path):
    return tmp_path / "run" / "checkpoints"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """As many attempts as ever, without waiting."""
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,) * len(object_store.PAUSES_S))


def entry(step):
    return Entry("weight/w", Layout((NUMEL,)), torch.full((NUMEL,), float(step)))


def save(root, step, keep=3, fault=lambda point: None):
    return save_checkpoint(root, step, [entry(step)], {"step": step}, ALONE, keep, fault)


def load(root):
    """The step of what was loaded, every element seen to be that step's; None for a run that has never saved."""
    filled = entry(0)
    state = load_newest(root, [filled], ALONE)
    if state is None:
        return None
    assert (filled.data == state["step"]).all()
    return state["step"]


def flip(path):
    """Change one bit of a checkpoint's elements: only the hashes can tell."""
    file = path / "rank-00000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("is_noted", [False, True])
def test_a_disk_that_is_not_mounted_is_no_empty_folder(tmp_path, is_noted):
    run, place = RunDirectory.create(tmp_path / "runs", "x", "run"), tmp_path / "disk"
    place_checkpoints(run.path, str(place))
    save(run.checkpoints, 2)
    if not is_noted:
        (run.path / "checkpoints.json").unlink()
    place.rename(tmp_path / "away")
    for ask in (saved_step, lambda run: run.lock().__enter__()):
        with pytest.raises(StorageError, match="which is not there: is its disk mounted") as raised:
            ask(run)
        assert raised.value.exit_code == EXIT_FAILED
    (tmp_path / "away").rename(place)
    assert saved_step(run) == 2


def test_damage_before_a_stage_is_set_aside_and_said(root, capsys):
    """The older checkpoint has other entries, so it is not loaded and nobody is blamed for these."""
    for step, name in ((1, "weight/of_the_stage_before"), (2, "weight/w"), (3, "weight/w")):
        filled = Entry(name, Layout((NUMEL,)), torch.full((NUMEL,), float(step)))
        save_checkpoint(root, step, [filled], {"step": step}, ALONE, 3, lambda point: None)
    flip(list_checkpoints(root)[0])
    assert load_newest(root, [entry(0)], ALONE, since=2) == {"step": 2}
    flip(list_checkpoints(root)[0])
    with pytest.raises(BeforeStage, match="step-00000001 is of the stage before"):
        load_newest(root, [entry(0)], ALONE, since=2)
    assert [step_of(path) for path in list_checkpoints(root)] == [1]
    assert "step-00000002.bad" in capsys.readouterr().err


def tree(folder):
    """Every path below, with the bytes of files."""
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


def cut_all(root):
    for path in list_checkpoints(root):
        (path / "rank-00000.bin").write_bytes(b"")


def flip_all(root):
    for path in list_checkpoints(root):
        flip(path)


def set_all_aside(root):
    for path in list_checkpoints(root):
        path.rename(f"{path}.bad")


def remove_each(root):
    for path in list_checkpoints(root):
        shutil.rmtree(path)


def only_an_older_one_remains_damaged(root):
    shutil.rmtree(root / "step-00000002")
    (root / "step-00000001" / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut_all, ("all 2 checkpoints in", "step-00000002: ", "has 0 bytes", "step-00000001: ")),
        (flip_all, ("all 2 checkpoints in", "step-00000002: ", "was changed after it was saved", "step-00000001: ")),
        (set_all_aside, ("no checkpoint left", "step-00000002.bad: was set aside", "step-00000001.bad: ")),
        (remove_each, ("no checkpoint left", "step-00000002: was committed", "is gone")),
        (shutil.rmtree, ("no checkpoint left", "step-00000002: was committed", "is gone")),
        (only_an_older_one_remains_damaged, ("all 1 checkpoints", "step-00000002: was committed", "step-00000001: ")),
    ],
)
def test_a_run_that_has_saved_and_has_nothing_whole_is_not_started_over(root, harm, words):
    save(root, 1)
    save(root, 2)
    harm(root)
    before = tree(root.parent)
    with pytest.raises(CheckpointError) as caught:
        load(root)
    assert caught.value.exit_code == EXIT_USER
    said = str(caught.value)
    for word in (
        *words,
        "never starts over by itself",
        "meshwright inspect PATH",
        "leave run.id out",
        f"rm -f {folder_of(root).note}",
    ):
        assert word in said, word
    assert tree(root.parent) == before


def test_the_way_that_is_given_to_start_over_in_place_is_one(root):
    save(root, 1)
    flip_all(root)
    with pytest.raises(CheckpointError) as caught:
        load(root)
    command = str(caught.value).splitlines()[-1].partition("at step 0:  ")[2]
    assert os.system(command) == 0
    assert load(root) is None
    assert sorted(os.listdir(root.parent)) == ["checkpoints.lost"]


def test_a_run_that_has_never_saved_starts_at_its_beginning(root):
    assert load(root) is None
    with pytest.raises(CheckpointError):
        save(root, 1, fault=lambda point: _raise(CheckpointError(point)))
    (root / "step-00000001.tmp.123").mkdir(parents=True)  # of a save that was killed
    assert load(root) is None


def test_a_note_that_a_crash_has_emptied_still_says_that_something_was_saved(root):
    save(root, 1)
    shutil.rmtree(root)
    folder_of(root).note.write_text("")
    with pytest.raises(CheckpointError, match="was committed"):
        find_newest(root)


def test_a_note_that_lags_harms_nobody(root):
    save(root, 1)
    folder_of(root).note.unlink()
    assert load(root) == 1


def test_a_note_that_cannot_be_written_fails_no_save(root, capsys):
    folder_of(root).note.mkdir(parents=True)
    (folder_of(root).note / "full").write_text("")
    assert save(root, 1).is_dir()
    assert "the new checkpoint is safe, but cannot be noted" in capsys.readouterr().err
    assert load(root) == 1


def test_a_newest_that_somebody_removed_leaves_the_older_to_go_on_from(root):
    save(root, 1)
    shutil.rmtree(save(root, 2))
    assert load(root) == 1
    assert save(root, 3).is_dir()


def test_damaged_ones_are_set_aside_only_once_an_older_one_is_loaded(root, capsys):
    for step in (1, 2, 3):
        path = save(root, step)
    (path / "rank-00000.bin").unlink()
    flip(root / "step-00000002")
    assert newest_checkpoint(root) == root / "step-00000002"  # hashes are seen by who reads
    assert load(root) == 1
    said = capsys.readouterr().err
    assert "step-00000003.bad" in said
    assert "step-00000002.bad" in said
    assert "going on from step 1" in said
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002.bad", "step-00000003.bad"]


def _raise(error):
    raise error


def fail(monkeypatch, owner, name, number, times, when=lambda *args: True):
    """Have a function of the operating system fail so many times."""
    real, left = getattr(owner, name), [times]

    def failing(*args, **named):
        if left[0] and when(*args):
            left[0] -= 1
            raise OSError(number, os.strerror(number), str(args[0]))
        return real(*args, **named)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_folder_that_cannot_be_listed_for_a_moment_is_listed(root, monkeypatch, number):
    save(root, 1)
    fail(monkeypatch, os, "scandir", number, times=2)
    assert load(root) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_a_folder_that_cannot_be_listed_is_no_folder_without_checkpoints(root, monkeypatch, number):
    save(root, 1)
    fail(monkeypatch, os, "scandir", number, times=99)
    with pytest.raises(StorageError, match=errno.errorcode[number]) as caught:
        load(root)
    assert caught.value.exit_code == EXIT_FAILED
    assert os.listdir(root) == ["step-00000001"]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((number, EXIT_USER) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)),
        *((number, EXIT_USER) for number in (errno.EACCES, errno.EPERM, errno.ENOTDIR)),
        *((number, EXIT_FAILED) for number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)),
        *((number, EXIT_FAILED) for number in (errno.EROFS, errno.ETIMEDOUT, errno.ENOENT, errno.EEXIST)),
    ],
)
def test_a_save_that_the_file_system_refuses_is_the_users_only_where_the_user_can_mend_it(tmp_path, number, code):
    error = explain(OSError(number, os.strerror(number), "rank-00000.bin"), tmp_path, 7)
    assert error.exit_code == code
    assert isinstance(error, CheckpointError if code == EXIT_USER else StorageError)
    assert str(tmp_path) in str(error)


def test_room_that_cannot_be_asked_for_does_not_hide_the_error(tmp_path, monkeypatch):
    fail(monkeypatch, shutil, "disk_usage", errno.ESTALE, times=99)
    assert explain(OSError(errno.EDQUOT, "quota", "f"), tmp_path, 7).exit_code == EXIT_USER


def failing_at(point, number, times):
    left = [times]

    def fault(passed):
        if passed == point and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))

    return fault


@pytest.mark.parametrize("point", ["writing", "written"])
def test_a_file_that_fails_for_a_moment_is_written_again_from_its_start(root, point):
    save(root, 1)
    path = save(root, 2, fault=failing_at(point, errno.EIO, 3))
    assert (path / "rank-00000.bin").stat().st_size == 4 * NUMEL
    assert load(root) == 2


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, StorageError), (errno.EDQUOT, CheckpointError)])
def test_a_file_that_goes_on_failing_ends_the_save_and_leaves_the_former(root, number, error):
    save(root, 1)
    with pytest.raises(error):
        save(root, 2, fault=failing_at("writing", number, 99))
    assert os.listdir(root) == ["step-00000001"]
    assert load(root) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["fsync", "mkdir", "rename"])
def test_every_step_of_a_commit_outlives_an_error_that_passes(root, monkeypatch, name, number):
    save(root, 1)
    fail(monkeypatch, os, name, number, times=2)
    save(root, 2)
    assert load(root) == 2
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]


def test_a_rename_whose_answer_was_lost_is_a_commit(root, monkeypatch):
    """A file server did it, then failed; asked again, it finds nothing to rename."""
    real, lost = os.rename, []

    def rename(source, target, **named):
        real(source, target, **named)
        if Path(target).name == "step-00000001" and not lost:
            lost.append(target)
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "rename", rename)
    save(root, 1)
    assert lost
    assert load(root) == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(root, monkeypatch, capsys, number):
    save(root, 1)
    fail(monkeypatch, shutil, "rmtree", number, times=99)
    assert save(root, 2, keep=1).is_dir()
    assert "the new checkpoint is safe, but an old one cannot be removed" in capsys.readouterr().err
    assert save(root, 3, keep=1).is_dir()  # nor what is left of it, when the next one is begun
    assert load(root) == 3


def test_an_old_checkpoint_that_cannot_be_looked_at_ends_no_run(root, monkeypatch, capsys):
    save(root, 1)
    find_damage = commit.find_damage
    monkeypatch.setattr(
        commit,
        "find_damage",
        lambda path: _raise(StorageError("EIO")) if path.name.endswith("1") else find_damage(path),
    )
    assert save(root, 2, keep=1).is_dir()
    assert "an old one cannot be removed" in capsys.readouterr().err


def test_a_damaged_checkpoint_that_cannot_be_renamed_ends_no_run(root, monkeypatch, capsys):
    save(root, 1)
    flip(save(root, 2))
    fail(monkeypatch, os, "rename", errno.EACCES, times=99, when=lambda source, target: ".bad" in str(target))
    assert load(root) == 1
    assert "cannot be set aside" in capsys.readouterr().err
    assert save(root, 3).is_dir()


def save_poisoned(root, step, value):
    """Whole by all its hashes: whoever saved it had it so."""
    poisoned = entry(step)
    poisoned.data[17] = value
    save_checkpoint(root, step, [poisoned], {"step": step}, ALONE, keep=9)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_checkpoint_is_set_aside_and_the_one_before_is_taken(root, capsys, value):
    save(root, 1)
    for step in (2, 3):
        save_poisoned(root, step, value)
    filled = entry(0)
    assert load_newest(root, [filled], ALONE, finite={"weight/w"}) == {"step": 1}
    assert (filled.data == 1).all()
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002.bad", "step-00000003.bad"]
    assert "weight/w has values that are not finite" in capsys.readouterr().err


def test_poisoned_checkpoints_alone_end_a_run_with_the_list_and_stay(root):
    for step in (1, 2):
        save_poisoned(root, step, float("nan"))
    with pytest.raises(CheckpointError, match=r"(?s)all 2 checkpoints.*not finite.*not finite") as caught:
        load_newest(root, [entry(0)], ALONE, finite={"weight/w"})
    assert caught.value.exit_code == EXIT_USER
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]


def test_what_no_update_makes_may_be_infinite(root):
    save_poisoned(root, 1, -float("inf"))
    assert load_newest(root, [entry(0)], ALONE, finite={"weight/other"}) == {"step": 1}


# --- going back


def test_going_back_takes_newer_names_and_gives_the_older_one_a_state_and_nothing_else(root):
    for step in (1, 2, 3):
        save(root, step)
    before = tree(root / "step-00000001")
    retired = retire_newer(root, Lease(root.parent), 1)
    assert sorted(path.name for path in retired) == ["step-00000002.rewound", "step-00000003.rewound"]
    amend(root / "step-00000001", Lease(root.parent), {"step": 1, "skipped_samples": [[4, 8]]})
    assert load_newest(root, [entry(0)], ALONE) == {"step": 1, "skipped_samples": [[4, 8]]}
    after = tree(root / "step-00000001")
    assert {path for path in after if after[path] != before.get(path)} == {Path("manifest.json")}
    save(root, 2)  # the name is free
    assert retire_newer(root, Lease(root.parent), 1) == [root / "step-00000002.rewound"]
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002.rewound"]


@pytest.mark.parametrize("point", ["retired", "amending", "amended"])
def test_going_back_may_be_cut_anywhere(root, point):
    for step in (1, 2, 3):
        save(root, step)

    def cut(reached):
        if reached == point:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        retire_newer(root, Lease(root.parent), 1, cut)
        amend(root / "step-00000001", Lease(root.parent), {"step": 1, "new": True}, cut)
    newest = newest_checkpoint(root)
    state = load_newest(root, [entry(0)], ALONE)
    if point == "retired":  # the newest has lost its name, the others have theirs
        assert (newest.name, state) == ("step-00000002", {"step": 2})
    else:
        assert state == ({"step": 1, "new": True} if point == "amended" else {"step": 1})


LOST = r"checkpoint of step {last} was committed, as .*checkpoints.json says, and is gone.*of step {left}: {lost} steps are lost"


def test_a_newest_checkpoint_that_is_gone_is_said_with_the_steps_that_are_lost(root, tmp_path, capfd):
    for step in (1, 3, 8):
        save(root, step)
    shutil.rmtree(root / "step-00000008")
    capfd.readouterr()
    says = LOST.format(last=8, left=3, lost=5)
    assert re.search(says, find_newest(root).lost)
    assert newest_checkpoint(root).name == "step-00000003"
    assert re.search(says, capfd.readouterr().err)
    assert load(root) == 3
    assert re.search(says, capfd.readouterr().err)
    save(root, 9)
    assert find_newest(root).lost is None


@pytest.mark.parametrize("gone", ["retained", "older", "damaged", "set aside", "rewound", "rewound twice", "no note"])
def test_a_checkpoint_that_went_on_purpose_or_under_another_name_is_not_called_lost(root, gone):
    lease = Lease(root.parent)
    for step in (1, 2, 3):
        save(root, step, keep=2 if gone == "retained" else 9)
    if gone == "older":
        shutil.rmtree(root / "step-00000002")
    elif gone in ("damaged", "set aside"):
        (root / "step-00000003" / "rank-00000.bin").write_bytes(b"")
        if gone == "set aside":
            load(root)
    elif gone == "no note":
        shutil.rmtree(root / "step-00000003")
        folder_of(root).note.unlink()
    elif gone.startswith("rewound"):
        retire_newer(root, lease, 2)
        if gone == "rewound twice":
            retire_newer(root, lease, 1)
            retire_newer(root, lease, 1)
    found = find_newest(root)
    assert found.lost is None
    expected = {"retained": 3, "older": 3, "rewound twice": 1}.get(gone, 2)
    assert step_of(found.newest) == expected
