"""A run whose run.root is a URL: another machine goes on with its files, one start at a time, and a stale one overwrites
nothing."""

import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from framework.checkpoint import storage
from framework.checkpoint.storage import ObjectPath, checkpoints_of
from framework.errors import CheckpointError, LeaseLost, RunError, StorageError
from framework.launch import remote, sweep
from framework.launch.directory import RunDirectory, Verdict, describe_self, place_checkpoints
from framework.launch.remote import RemoteRun, Start, decode_start, locate
from framework.launch.resume import resume_recipe
from framework.launch.runs import Runs, find_run, find_running
from framework.launch.status import status_command
from framework.launch.subject import compose_run
from framework.lease import Holder, Lease, read_lease, take
from framework.recipe.compose import compose, save_recipe
from framework.recipe.overrides import write_resume
from framework.recipe.schema import Run
from tests.shared_store import register

ROOT = "memory://bucket/runs"
FILES = {
    "recipe.yaml": b"a: 1\n",
    "metrics.jsonl": b'{"step": 1}\n',
    "tokenizer/vocab.json": b"{}",
    "log/rank-0.json": b"{}",
}


class Died(BaseException):
    """The process is killed here."""


@pytest.fixture(autouse=True)
def store(monkeypatch):
    monkeypatch.setattr(storage, "PAUSES_S", (0.0,) * 4)
    monkeypatch.setattr(remote, "BEAT_S", 0.02)
    monkeypatch.setattr(remote, "HELD_S", 0.4)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return MemoryFileSystem.store


def runs_on(machine):
    """The runs as a machine with a disk of its own has them."""
    return Runs.of(Run(root=ROOT, work=str(machine)))


def begin(machine):
    return runs_on(machine).create("x", "run")


def write(run, files=FILES):
    for name, data in files.items():
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_bytes(data)


def files_on(machine):
    """What a machine fetches, but for run.json."""
    run = runs_on(machine).find("x")
    return {
        path.relative_to(run.path).as_posix(): path.read_bytes()
        for path in run.path.rglob("*")
        if path.is_file()
        and not path.name.startswith((".", "lock", "run."))
        and path.name not in ("checkpoints.url", "run.json", "lease")
    }


def freeze(run, files=FILES):
    """A start that holds the run, puts its files, and then is heard of no more: its lease."""
    held = RemoteRun.of(run.path)
    newest = held.find_free()
    lease = take(run.path, describe_self(), above=newest)
    held.claim(lease, describe_self(), newest)
    write(run, files)
    held.push(lease)
    return lease


def test_a_machine_that_has_nothing_of_a_run_goes_on_with_its_files(tmp_path, store):
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
        write(
            run,
            {"exports/step-1/model": b"w", "ranks.json": b"{}", "wandb/x": b"", "request-save": b"", "half.tmp": b""},
        )
    assert files_on(tmp_path / "b") == FILES
    assert not any(name.endswith(("/lease", "model", "ranks.json", ".tmp", "request-save", ".url")) for name in store)
    there = runs_on(tmp_path / "c").find("x")
    with there.lock() as lease:
        assert there.read_record() == run.read_record()
        assert lease.epoch == 2
        assert checkpoints_of(there.path) == ObjectPath(f"{ROOT}/x/checkpoints")
        write(there, {"metrics.jsonl": b"more\n"})
        (there.path / "log/rank-0.json").unlink()
    left = FILES | {"metrics.jsonl": b"more\n"}
    del left["log/rank-0.json"]
    assert files_on(tmp_path / "b") == files_on(tmp_path / "d") == left
    assert len({name.split("/")[4] for name in store}) == 1, "a former start's files are gone"
    with run.lock() as lease:
        assert lease.epoch == 3
        found = files_on(tmp_path / "a")
        assert {name: found.get(name) for name in FILES} == left | {"log/rank-0.json": None}, (
            "what another machine wrote since"
        )


def test_files_that_are_here_are_not_fetched_again(tmp_path, monkeypatch):
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
    there = runs_on(tmp_path / "b").find("x")
    before, plain = len(FILES), ObjectPath.read_bytes
    read = []
    monkeypatch.setattr(ObjectPath, "read_bytes", lambda path: read.append(path.name) or plain(path))
    there.refresh()
    assert set(read) == {".start.json"}, before
    assert (there.path / "recipe.yaml").stat().st_mode & 0o777 == 0o600


def test_a_second_start_is_refused_with_who_holds_the_run(tmp_path, store):
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
        run.upload(take_back(run))
        there = runs_on(tmp_path / "b").find("x")
        before = names(store)
        with (
            pytest.raises(RunError, match=rf"is in use by process {os.getpid()} on .*:{run.path}, which was heard of"),
            there.lock(),
        ):
            pass
        assert names(store) == before
        with pytest.raises(RunError, match=rf"runs elsewhere, as process {os.getpid()}"):
            find_running_on(tmp_path / "b")
    with there.lock():  # which has ended now, and says so
        pass


def take_back(run):
    """The lease that the folder has now."""
    return Lease(run.path, read_lease(run.path)[0])


def names(store):
    return sorted(store)


def find_running_on(machine):
    return find_running(str(machine / "memory" / "bucket" / "runs" / "x"))


def test_a_start_that_was_killed_is_taken_over_and_overwrites_nothing_when_it_thaws(tmp_path, capsys):
    run = begin(tmp_path / "a")
    stale = freeze(run)
    there = runs_on(tmp_path / "b").find("x")
    with there.lock() as lease:
        assert lease.epoch == 2
        assert "taken over" in capsys.readouterr().err
        write(there, {"metrics.jsonl": b"newer\n"})
        there.upload(lease)
        write(run, {"metrics.jsonl": b"of the stale one\n"})
        with pytest.raises(LeaseLost, match=rf"taken over by process {os.getpid()} on"):
            run.upload(stale)
        with pytest.raises(LeaseLost):
            stale.check()  # which is what its ranks ask
    assert files_on(tmp_path / "c")["metrics.jsonl"] == b"newer\n"


def test_a_sabotaged_stale_start_that_does_not_look_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(RemoteRun, "check", lambda self, lease: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_start_that_was_killed_is_taken_over_and_overwrites_nothing_when_it_thaws(tmp_path, capsys)


def test_a_start_that_is_frozen_right_behind_its_check_overwrites_nothing(tmp_path, monkeypatch):
    run = begin(tmp_path / "a")
    stale = freeze(run)
    there = runs_on(tmp_path / "b").find("x")
    with there.lock() as lease:
        write(there, {"metrics.jsonl": b"newer\n"})
        there.upload(lease)
        write(run, {"metrics.jsonl": b"of the stale one\n"})
        with monkeypatch.context() as frozen:
            frozen.setattr(RemoteRun, "check", lambda self, lease: None)
            run.upload(stale)
    assert files_on(tmp_path / "c")["metrics.jsonl"] == b"newer\n"


def check_frozen_upload(tmp_path, monkeypatch):
    """A start is frozen while it puts a file, with the lock of its uploads, and the next one has the same working folder."""
    run = begin(tmp_path / "a")
    stale = freeze(run)
    plain, is_frozen, thaws = ObjectPath.write_bytes, threading.Event(), threading.Event()
    put_by_stale = []

    def put(path, data):
        if threading.current_thread() is frozen:
            put_by_stale.append(f"{path}")
        if data == b"frozen" and not is_frozen.is_set():
            is_frozen.set()
            assert thaws.wait(20)
        plain(path, data)

    monkeypatch.setattr(ObjectPath, "write_bytes", put)
    write(run, {"metrics.jsonl": b"frozen"})
    frozen = threading.Thread(target=lambda: ignore(LeaseLost, run.upload, stale))
    frozen.start()
    assert is_frozen.wait(20)
    try:
        with run.lock() as lease:
            write(run, {"metrics.jsonl": b"newer\n"})
            began_s = time.monotonic()
            run.upload(lease)
            assert time.monotonic() - began_s < 10, "waited for a frozen process"
            thaws.set()
            frozen.join()
            write(run, {"metrics.jsonl": b"newest\n"})
            run.upload(lease)
    finally:
        thaws.set()
        frozen.join()
    assert all(f"/start-{stale.epoch:08d}-" in path for path in put_by_stale), put_by_stale
    assert files_on(tmp_path / "b")["metrics.jsonl"] == b"newest\n"


def check_beats_during_an_upload(tmp_path, monkeypatch):
    """A rank is stopped while it puts a file, and its launcher lives: another machine is refused, however long that takes."""
    run = begin(tmp_path / "a")
    plain, is_stopped, goes_on = ObjectPath.write_bytes, threading.Event(), threading.Event()

    def put(path, data):
        if data == b"stopped":
            is_stopped.set()
            assert goes_on.wait(20)
        plain(path, data)

    monkeypatch.setattr(ObjectPath, "write_bytes", put)
    with run.lock() as lease:
        write(run)
        run.upload(lease)
        write(run, {"metrics.jsonl": b"stopped"})
        rank = threading.Thread(target=run.upload, args=(lease,))
        rank.start()
        try:
            assert is_stopped.wait(20)
            time.sleep(2 * remote.BEAT_S)  # the launcher's own next upload begins, and waits for the rank's
            with pytest.raises(RunError, match="is in use by"), runs_on(tmp_path / "b").find("x").lock():
                pass
        finally:
            goes_on.set()
            rank.join()
    assert files_on(tmp_path / "c")["metrics.jsonl"] == b"stopped"


def test_a_start_is_heard_of_while_a_rank_stands_still_in_an_upload(tmp_path, monkeypatch):
    check_beats_during_an_upload(tmp_path, monkeypatch)


def test_sabotaged_beats_that_wait_for_uploads_are_noticed(tmp_path, monkeypatch):
    plain = RemoteRun._beat_on

    def beat_late(self, lease, ended):
        while not ended.is_set():
            with self._locked(f"lock.upload-{lease.epoch}"):
                pass
            once = threading.Event()
            threading.Timer(1.5 * remote.BEAT_S, once.set).start()
            plain(self, lease, once)

    monkeypatch.setattr(RemoteRun, "_beat_on", beat_late)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check_beats_during_an_upload(tmp_path, monkeypatch)


def ignore(kind, work, *words):
    with suppress(kind):
        work(*words)


def test_a_start_that_is_frozen_in_an_upload_does_not_hold_up_the_next_one_of_its_folder(tmp_path, monkeypatch):
    check_frozen_upload(tmp_path, monkeypatch)


def test_sabotaged_one_record_for_all_starts_of_a_folder_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(RemoteRun, "_record_of", lambda self, epoch: self.folder / ".start-all.json")
    with pytest.raises((AssertionError, LeaseLost)):
        check_frozen_upload(tmp_path, monkeypatch)


def test_a_job_whose_run_has_gone_on_elsewhere_since_it_was_queued_takes_nothing(tmp_path, store):
    """It has read a recipe that may be an older one."""
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
    with (there := runs_on(tmp_path / "b").find("x")).lock():
        write(there, {"recipe.yaml": b"a: 2\n"})
    before = read_lease(run.path), names(store)
    words = (0.0, describe_self("4"), before[0][0], lambda holder, me: Verdict.UNKNOWN)
    with (
        pytest.raises(RunError, match=r"gone on elsewhere since this job was submitted, as process \d+"),
        run.hold(*words),
    ):
        pytest.fail("held")
    assert (read_lease(run.path), names(store)) == before
    with runs_on(tmp_path / "a").find("x").lock() as submitted:
        pass
    with run.hold(0.0, describe_self("5"), submitted.epoch, words[-1]) as lease:
        assert lease.epoch == submitted.epoch + 1
    assert files_on(tmp_path / "c")["recipe.yaml"] == b"a: 2\n"


def test_what_speaks_against_a_launch_is_asked_with_the_newest_files_and_leaves_no_trace(tmp_path, store):
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
    with (there := runs_on(tmp_path / "b").find("x")).lock():
        write(there, {"recipe.yaml": b"a: 2\n"})
    before, seen = (read_lease(run.path), names(store)), []

    def refuse():
        seen.append((run.path / "recipe.yaml").read_bytes())
        raise RunError("no")

    with pytest.raises(RunError, match="no"), run.lock(refuse):
        pytest.fail("locked")
    assert seen == [b"a: 2\n"]
    assert (read_lease(run.path), names(store)) == before


def test_a_start_that_begins_while_another_launch_is_decided_keeps_the_run(tmp_path):
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
    there = runs_on(tmp_path / "b").find("x")
    with (
        pytest.raises(RunError, match=rf"taken by process {os.getpid()} on .* at the same moment"),
        run.lock(lambda: freeze(there)),
    ):
        pytest.fail("locked")
    assert {start.folder for start in RemoteRun.of(run.path).list_starts(1)} == {RemoteRun.of(there.path).folder_name}


def test_a_sweep_is_found_where_its_runs_lie(tmp_path, monkeypatch, capsys):
    runs, recipe = (
        runs_on(tmp_path / "a"),
        compose(["experiment=quickstart", "run.root=s3://b", f"run.work={tmp_path}/a"], []),
    )
    plain = Runs.of
    monkeypatch.setattr(Runs, "of", lambda run: plain(Run(root=ROOT, work=run.work or f"{tmp_path}/b")))
    sweep.begin_sweep([recipe.require()] * 2)
    with (member := runs.find("quickstart-sweep-001-0")).lock() as lease, lease.replacing(member.recipe) as made:
        save_recipe(recipe.require(), made)
    capsys.readouterr()
    assert status_command(find_run(f"{ROOT}/quickstart-sweep-001")) == 0
    said = capsys.readouterr().out
    assert f"run      {tmp_path}/b/memory/bucket/runs/quickstart-sweep-001-0\n" in said
    assert "quickstart-sweep-001-1, not begun" in said
    assert runs_on(tmp_path / "c").next_id("quickstart-sweep") == "quickstart-sweep-002"


def test_sabotaged_names_without_an_epoch_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Start, "name", "start-00000001-aaaa")
    with pytest.raises((AssertionError, LeaseLost, RunError)):
        test_a_start_that_is_frozen_right_behind_its_check_overwrites_nothing(tmp_path, monkeypatch)


def test_of_two_starts_at_once_only_one_has_the_run(tmp_path, monkeypatch, store):
    """The second one claims it between the first one's put and its listing."""
    first, second = (RemoteRun.of(begin(tmp_path / name).path) for name in "ab")
    plain = RemoteRun.list_starts

    def list_late(self, above=0):
        monkeypatch.setattr(RemoteRun, "list_starts", plain)
        with pytest.raises(RunError, match=rf"taken by process {os.getpid()} on .* at the same moment"):
            second.claim(take(second.folder, describe_self()), describe_self(), 0)
        return plain(self, above)

    monkeypatch.setattr(RemoteRun, "list_starts", list_late)
    first.claim(take(first.folder, describe_self()), describe_self(), 0)
    assert [start.folder for start in first.list_starts()] == [first.folder_name]


@pytest.mark.parametrize("puts", range(1, 8))
def test_a_crash_in_any_put_leaves_the_files_of_one_start(tmp_path, monkeypatch, puts):
    run, newer = begin(tmp_path / "a"), {name: data + b" " for name, data in FILES.items()}
    with run.lock():
        write(run)
    left, plain = [puts], ObjectPath.write_bytes

    def put(path, data):
        left[0] -= 1
        if left[0] == 0:
            raise Died
        plain(path, data)

    there = runs_on(tmp_path / "b").find("x")
    with monkeypatch.context() as dying:
        dying.setattr(ObjectPath, "write_bytes", put)
        with pytest.raises(Died):
            freeze(there, newer)
    shutil.rmtree(tmp_path / "b")
    found = files_on(tmp_path / "c")
    assert found in (FILES, newer)
    assert found == FILES, "the record comes last"
    with runs_on(tmp_path / "c").find("x").lock():
        assert files_on(tmp_path / "c") == FILES


def test_a_store_that_fails_stops_nothing_and_gets_the_files_once_it_is_back(tmp_path, monkeypatch, capsys):
    run = begin(tmp_path / "a")
    plain, is_down = ObjectPath.write_bytes, [False]

    def put(path, data):
        if is_down[0]:
            raise OSError(5, "down")
        plain(path, data)

    monkeypatch.setattr(ObjectPath, "write_bytes", put)
    with run.lock() as lease:
        write(run)
        run.upload(lease)
        is_down[0] = True
        write(run, {"metrics.jsonl": b"more\n"})
        with pytest.raises(StorageError, match="does this node reach it"):
            run.upload(lease)  # as a save does, which then fails
        wait_until(lambda: "training goes on" in capsys.readouterr().err)
        is_down[0] = False
        wait_until(lambda: "put there again" in capsys.readouterr().err)
    assert files_on(tmp_path / "b")["metrics.jsonl"] == b"more\n"


def wait_until(is_so):
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_what_is_written_while_a_run_is_held_is_put_behind_it(tmp_path):
    run = begin(tmp_path / "a")
    with run.lock() as lease:
        run.upload(lease)
        write(run)
        wait_until(lambda: files_on(tmp_path / "b") == FILES)


def test_a_start_that_is_refused_leaves_no_trace(tmp_path, store):
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
    before = dict(store)
    with pytest.raises(RunError, match="is finished"), runs_on(tmp_path / "b").find("x").lock():
        raise RunError("the run is finished")
    assert store.keys() == before.keys()


def test_runs_are_found_by_url_and_by_what_is_printed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(RunError, match="is not a run"):
        find_run(f"{ROOT}/x")
    assert not (tmp_path / "cache").exists()
    run = begin(tmp_path / "a")
    with run.lock():
        write(run)
    assert find_run(f"{ROOT}/x") == tmp_path / "cache/meshwright/runs/memory/bucket/runs/x"
    assert runs_on(tmp_path / "b").next_id("x") == "x-001"
    assert runs_on(tmp_path / "b").create(None, "y").id == "y-001"
    assert write_resume("local", run.keys) == f"meshwright train run.id=x run.root={ROOT} run.work={tmp_path}/a"
    assert (
        write_resume("local", RunDirectory(find_run(f"{ROOT}/x")).keys) == f"meshwright train run.id=x run.root={ROOT}"
    )
    assert Runs.of(Run(root=f"file://{tmp_path}")) == Runs(tmp_path)


def test_a_resume_stays_in_the_working_folder_in_which_it_found_the_run(tmp_path, monkeypatch):
    """And not in that of the machine on which the run began, which its recipe names."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    register()
    url = f"shared://{tmp_path}/store"
    typed = (f"run.root='{url}'", "run.id=x", "launch.device=cpu")
    recipe = compose_run(["experiment=quickstart", *typed, f"run.work={tmp_path}/a"], [])
    run = Runs.of(recipe.run).create("x", "run")
    with run.lock() as lease, lease.replacing(run.recipe) as made:
        save_recipe(recipe, made)
    again = compose_run([*typed, "train.steps=900"], [])
    assert (again.train.steps, again.run.work) == (900, None)
    there = Runs.of(again.run).find("x")
    assert there.path.is_relative_to(tmp_path / "cache")
    resumed, changes = resume_recipe(there, [*typed, "train.steps=900"], [])
    assert resumed.run.work is None
    assert [change.key for change in changes] == ["train.steps"]


def test_two_urls_have_two_working_folders():
    urls = ("s3://a/b", "gs://a/b", "s3://a/c", "s3://a/b c", "s3://a/../b", "s3://a/%2E%2E/b")
    folders = {locate(ObjectPath(url), "/work") for url in urls}
    assert len(folders) == len(urls)
    assert all(".." not in folder.parts for folder in folders)


def test_checkpoints_elsewhere_are_found_elsewhere_as_well(tmp_path):
    run = begin(tmp_path / "a")
    place_checkpoints(run, "s3://other/ckpt")
    with run.lock():
        write(run)
    assert checkpoints_of(runs_on(tmp_path / "b").find("x").path) == ObjectPath("s3://other/ckpt/x")


@pytest.mark.parametrize("name", ["../y/recipe.yaml", "/etc/x"])
def test_a_record_cannot_name_what_is_no_file_of_the_run(name):
    start = Start(1, "aaaa", Holder("h", 1, "now"), "h:/x", files={name: (1, 1)})
    with pytest.raises(CheckpointError, match="outside of the run"):
        decode_start(start.encode(), "there")
    with pytest.raises(CheckpointError, match="no record of a start"):
        decode_start(b"{}", "there")


def test_a_working_folder_is_a_run_directory(tmp_path):
    assert RemoteRun.of(Path(tmp_path)) is None
