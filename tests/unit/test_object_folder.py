"""Checkpoints in an object store: the commit is the manifest's put, and what a stale start commits does not count."""

import os

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from framework import object_store
from framework.checkpoint.commit import (
    SAVE_POINTS,
    Retention,
    amend,
    find_newest,
    folder_of,
    list_checkpoints,
    locate,
    retire_newer,
    step_of,
)
from framework.checkpoint.folder import ObjectFolder
from framework.checkpoint.index import DamagedCheckpoint
from framework.checkpoint.load import Reader, load_checkpoint, load_newest, verify_files
from framework.checkpoint.save import CPU, Saver
from framework.checkpoint.staging import Entry, StagingMemory
from framework.checkpoint.storage import checkpoints_of, find_probe_error
from framework.comm.communicator import Communicator
from framework.errors import CheckpointError, LeaseLost, RecipeError, StorageError
from framework.launch.directory import RunDirectory
from framework.launch.places import place_checkpoints, refuse_unreachable
from framework.lease import Holder, take
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from framework.object_store import ObjectPath, open_place

ALONE = Communicator(Axis("world", 1, 0))
NUMEL = 700_000  # of fp32: pages of the reader, and blocks of the file, in several
HERE = Holder("here", os.getpid(), "now")


class Died(BaseException):
    """The process is killed here."""


@pytest.fixture(autouse=True)
def store(monkeypatch):
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,) * 4)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return MemoryFileSystem.store


@pytest.fixture
def root(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    return ObjectPath("memory://bucket/runs/run", run)


def entries(step):
    return [Entry(f"weight/{number}", Layout((NUMEL,)), values(step) + number) for number in range(2)]


def values(step):
    return torch.arange(NUMEL, dtype=torch.float32) + step


def save(root, step, lease=None, keep=3, fault=lambda point: None, failures=1):
    memory = StagingMemory(CPU, 16 << 20)
    saver = Saver(root, ALONE, Retention(keep), memory, False, failures, fault=fault, lease=lease)
    saver.start(step, entries(step), {"step": step})
    saver.finish()


def load(root, lease=None):
    filled = [Entry(each.name, each.layout, torch.zeros_like(each.data)) for each in entries(0)]
    state = load_newest(root, filled, ALONE, lease=lease)
    if state is not None:
        assert all(map(torch.equal, *([each.data for each in some] for some in (filled, entries(state["step"])))))
    return state


def steps(root):
    return [step_of(path) for path in list_checkpoints(root)]


def start(root, owner="run"):
    """A start of the run: its lease, and its record in the store."""
    lease = take(root.run, HERE)
    folder_of(root).enter(lease, owner)
    return lease


def test_it_is_saved_found_loaded_verified_and_removed(root, store):
    for step in (1, 2, 3):
        save(root, step, keep=2)
    assert steps(root) == [3, 2]
    assert load(root) == {"step": 3}
    assert not any("step-00000001" in name for name in store)
    newest = find_newest(root)
    assert verify_files(newest.newest, newest.manifest) == []
    assert (root.run / "checkpoints.json").read_text() == '{"committed_step": 3}'


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_a_death_at_each_point_leaves_the_former_or_the_new_one(root, point):
    def die(at):
        if at == point:
            raise Died

    lease = start(root)
    save(root, 1, lease, keep=1)
    with pytest.raises(Died):
        save(root, 2, lease, keep=1, fault=die)
    is_committed = SAVE_POINTS.index(point) >= SAVE_POINTS.index("renamed")
    lease = start(root)
    assert load(root, lease) == {"step": 2 if is_committed else 1}
    # What the cut save has left goes with the next one.
    save(root, 3, lease, keep=1)
    assert steps(root) == [3]
    assert {name.split("/")[0] for name in root.list() if name.startswith("step")} == {f"step-00000003.{lease.epoch}"}


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "gone", "manifest"])
def test_damage_is_found_and_the_former_one_taken(root, store, harm, capsys):
    save(root, 1)
    save(root, 2)
    file = "/bucket/runs/run/step-00000002.0/" + ("manifest.json" if harm == "manifest" else "rank-00000.bin")
    data = store[file].getvalue()
    if harm == "gone":
        del store[file]
    else:
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        new = {"cut": data[:-1], "flip": bytes(changed), "empty": b"", "manifest": data[:-1]}[harm]
        folder_of(root).write(ObjectPath(f"memory:/{file}"), new)
    assert load(root) == {"step": 1}
    assert "set aside" in capsys.readouterr().err
    assert steps(root) == [1]
    assert folder_of(root).list_damaged() == ["step-00000002.0"]


def test_what_a_user_copies_there_counts_once_it_is_whole(root, store):
    lease = start(root)
    save(root, 1, lease)
    for name, file in list(store.items()):
        if ".bin" in name:
            folder_of(root).write(ObjectPath(f"memory:/{name.replace('001.1/', '007/')}"), file.getvalue())
    save(root, 2, lease)
    assert steps(root) == [2, 1]
    manifest = (root / f"step-00000001.{lease.epoch}" / "manifest.json").read_bytes()
    (root / "step-00000007" / "manifest.json").write_bytes(manifest)
    assert steps(root) == [7, 2, 1]
    assert load(root, lease) == {"step": 1}  # which was copied to that name


def test_a_run_that_has_saved_never_starts_over(root, store):
    save(root, 1)
    store.clear()
    with pytest.raises(CheckpointError, match="is gone") as error:
        find_newest(root)
    assert "memory://bucket/runs/run" in str(error.value)


def test_a_stale_start_commits_nothing_that_counts_and_overwrites_nothing(root, store):
    """Frozen in front of its manifest's put, behind the check of the lease; thawed when a newer start has saved that step."""
    stale = start(root)
    save(root, 1, stale)
    newer = []

    def thaw(point):
        if point == "manifest":
            newer.append(start(root))
            save(root, 2, newer[0])
            newer.append({name: file.getvalue() for name, file in store.items()})

    lease = FrozenLease(stale)
    with pytest.raises(LeaseLost, match="taken over"):
        save(root, 2, lease, fault=thaw)
    assert steps(root) == [2, 1]
    assert locate(root, 2).name == f"step-00000002.{newer[0].epoch}"
    assert {name: store[name].getvalue() for name in newer[1]} == newer[1]
    assert load(root, newer[0]) == {"step": 2}


def test_sabotaged_checkpoints_of_any_epoch_that_count_are_noticed(root, store, monkeypatch):
    monkeypatch.setattr(ObjectFolder, "_find_counted", lambda folder, names: lambda name: name.startswith("step-"))
    with pytest.raises(AssertionError):
        test_a_stale_start_commits_nothing_that_counts_and_overwrites_nothing(root, store)


class FrozenLease:
    """The lease of a process that was frozen between its check and the manifest's put: what it reads before is what was true."""

    def __init__(self, lease):
        self._lease, self.run, self.epoch = lease, lease.run, lease.epoch

    def check(self):
        path = ObjectPath("memory://bucket/runs/run") / f"step-00000002.{self.epoch}" / "manifest.json"
        if path.exists():
            self._lease.check()

    def __getattr__(self, name):
        return getattr(self._lease, name)


def test_a_store_that_fails_for_a_while_costs_nothing_and_one_that_stays_so_fails_the_save(root, monkeypatch, capsys):
    plain, left = MemoryFileSystem.pipe_file, [3]

    def fail(store, path, value, mode="overwrite", **more):
        if left[0] > 0:
            left[0] -= 1
            raise RuntimeError("503 slow down")  # a library's own error, which is no OSError
        return plain(store, path, value, mode=mode, **more)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    save(root, 1)
    assert "trying again" in capsys.readouterr().err
    left[0] = 10**6
    saver = Saver(root, ALONE, Retention(3), StagingMemory(CPU, 16 << 20), False, max_failures=2)
    saver.start(2, entries(2), {"step": 2})
    assert "training goes on, and the next save tries again" in capsys.readouterr().err
    left[0] = 0
    saver.start(3, entries(3), {"step": 3})
    assert (saver.failures, saver.failures_in_a_row) == (1, 0)
    left[0] = 10**6
    saver.start(4, entries(4), {"step": 4})
    with pytest.raises(StorageError, match="503 slow down"):
        saver.start(5, entries(5), {"step": 5})
    assert steps(root) == [3, 1]


def test_a_reader_fetches_what_it_needs_and_no_more(root, monkeypatch):
    save(root, 1)
    path, fetched = locate(root, 1), []
    plain = MemoryFileSystem.cat_file

    def count(store, path, start=None, end=None, **more):
        data = plain(store, path, start=start, end=end, **more)
        if path.endswith(".bin"):
            fetched.append((path.rpartition("/")[2], start >> 20, len(data)))
        return data

    manifest = Reader(path).manifest
    monkeypatch.setattr(MemoryFileSystem, "cat_file", count)
    wanted = Entry("weight/1", Layout((NUMEL,)), torch.zeros(NUMEL))
    Reader(path, manifest=manifest).fill([wanted])
    assert torch.equal(wanted.data, values(1) + 1)
    # Bytes 2.8 to 5.6 million lie in pages 2 to 5 of 1 MiB; each is asked for once, as is the index.
    assert sorted(each[:2] for each in fetched) == [
        ("index.bin", 0),
        *(("rank-00000.bin", page) for page in (2, 3, 4, 5)),
    ]
    assert max(each[2] for each in fetched) == 1 << 20


def test_going_back_keeps_a_retired_one_until_the_next_time(root):
    lease = start(root)
    for step in (1, 2, 3):
        save(root, step, lease)
    assert [path.name for path in retire_newer(root, lease, 1)] == ["manifest.json.rewound"] * 2
    amend(locate(root, 1), lease, {"step": 1, "skipped": [5]})
    assert load(root, lease) == {"step": 1, "skipped": [5]}
    save(root, 2, lease)  # under the name of the retired one
    assert steps(root) == [2, 1]
    retire_newer(root, lease, 1)
    assert steps(root) == [1]
    assert [path.name for path in folder_of(root).list_retired()] == [f"step-00000002.{lease.epoch}"]


def test_a_folder_of_another_run_is_refused(root, tmp_path):
    start(root, "run of Monday")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(CheckpointError, match="another run, run of Monday"):
        start(ObjectPath(root.url, other), "run of Tuesday")


def test_a_run_whose_folder_was_lost_goes_on_once_its_records_are_removed(root, tmp_path):
    for _ in range(2):
        lease = start(root)
    save(root, 1, lease)
    other = tmp_path / "other"
    other.mkdir()
    found = ObjectPath(root.url, other)
    with pytest.raises(CheckpointError, match="whose folder was lost"):
        start(found)
    for name in root.list():
        if name.startswith(".epoch"):
            (root / name).unlink()
    lease = start(found)
    assert load(found, lease) == {"step": 1}
    save(found, 2, lease)
    assert steps(found) == [2, 1]


def test_a_place_is_probed_and_an_unknown_one_is_explained(root, store, monkeypatch):
    before = dict(store)
    refuse_unreachable("memory://bucket/runs")
    assert store == before
    with pytest.raises(RecipeError, match=r"checkpoint\.root: nope://b/\S+ cannot be opened: Protocol not known"):
        refuse_unreachable("nope://b")
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *args, **more: (_ for _ in ()).throw(PermissionError()))
    assert "PermissionError" in find_probe_error(root)


def test_the_runs_folder_says_where_its_checkpoints_lie(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    assert run.checkpoints == run.path / "checkpoints"
    place_checkpoints(run.path, "s3://bucket/runs/")
    assert run.checkpoints == checkpoints_of(run.path) == ObjectPath("s3://bucket/runs/run")
    place_checkpoints(run.path, f"file://{tmp_path}/other")
    assert run.checkpoints.resolve() == tmp_path / "other" / "run"
    assert open_place("file:///a/b") == open_place("/a/b")
    place_checkpoints(run.path, None)
    assert not run.checkpoints.exists()
    assert load_and_refuse(tmp_path)


def load_and_refuse(tmp_path):
    """A checkpoint that is asked for an entry it lacks says which."""
    root = ObjectPath("memory://bucket/runs/more", tmp_path)
    save(root, 1)
    with pytest.raises(CheckpointError, match="has no weight/9"):
        load_checkpoint(locate(root, 1), [Entry("weight/9", Layout((1,)), torch.zeros(1))], ALONE)
    with pytest.raises(DamagedCheckpoint):
        load_checkpoint(root / "step-9", [], ALONE)
    return True
