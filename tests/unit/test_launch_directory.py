"""The run directory: who gets which name, who may launch, and what is said when that fails."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from framework.commands import submit
from framework.errors import EXIT_FAILED, EXIT_USER, LeaseLost, MeshwrightError, RunError, RunInUse, StorageError
from framework.launch import directory
from framework.launch.directory import HolderState, RunDirectory, describe_self
from framework.launch.jobs import JobState
from framework.launch.parts import claim, go_on
from framework.launch.places import refuse_unwritable
from framework.launch.process import judge
from framework.lease import read_lease


def create(root, run_id=None):
    return RunDirectory.create(root, run_id, "demo")


def test_runs_are_numbered_after_the_last_one(tmp_path):
    root = tmp_path / "runs"
    assert [create(root).id for _ in range(2)] == ["demo-001", "demo-002"]
    (root / "demo-017").mkdir()
    (root / "demo-extra-099").mkdir()
    assert create(root).id == "demo-018"


def test_runs_that_are_created_at_once_get_different_directories(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        runs = list(threads.map(lambda _: create(tmp_path), range(32)))
    assert len({run.path for run in runs}) == 32


def test_what_speaks_against_a_launch_is_asked_under_the_lock_and_leaves_the_epoch(tmp_path, monkeypatch):
    """A job that was queued since `submit` looked first: a new epoch would end it."""
    run = create(tmp_path)
    run.note_launch([], {}, jobs=["7"])
    with run.lock():
        pass
    before = read_lease(run.path)
    (run.path / "request-save").touch()  # of the job
    is_held = []

    def find_job(job):
        is_held.append(run.find_holder() is not None)
        return JobState(job, "PENDING")

    monkeypatch.setattr(submit, "find_job", find_job)
    with pytest.raises(RunError, match="has job 7, which waits or runs"), run.lock(partial(submit._refuse_busy, run)):
        pytest.fail("locked")
    assert is_held == [True]
    assert read_lease(run.path) == before
    assert (run.path / "request-save").exists()
    with run.lock():  # which was given back
        assert read_lease(run.path)[0] == before[0] + 1


@pytest.mark.parametrize(
    ("root", "left"), [("memory://store", "recipe.yaml"), (None, "checkpoints/step-00000001/manifest.json")]
)
def test_a_new_run_that_is_refused_leaves_epoch_and_checkpoints_where_they_are(tmp_path, root, left):
    run = create(tmp_path, "taken")
    with run.lock(partial(claim, run, root)):
        pass
    (run.path / left).parent.mkdir(parents=True, exist_ok=True)
    (run.path / left).write_text("{}")
    before = read_lease(run.path), run.checkpoints
    with pytest.raises(MeshwrightError), run.lock(partial(claim, run, str(tmp_path / "elsewhere"))):
        pytest.fail("locked")
    assert (read_lease(run.path), run.checkpoints) == before
    assert not (tmp_path / "elsewhere").exists()


def test_what_is_asked_while_a_launch_is_decided_is_asked_of_it(tmp_path):
    """To decide may take hours where data are prepared. What was asked of a launcher that was killed goes."""
    run = create(tmp_path)
    (run.path / "request-save").touch()
    with run.lock((run.path / "request-stop").touch):
        assert sorted(path.name for path in run.path.glob("request-*")) == ["request-stop"]
    assert not list(run.path.glob("request-*"))


def test_a_resume_asks_for_a_job_before_and_under_the_lock(tmp_path, monkeypatch):
    run, asked = create(tmp_path), []

    def active_job(run):
        asked.append(run.find_holder() is not None)
        return "7" if asked[-1] else None

    monkeypatch.setattr(submit, "active_job", active_job)
    with pytest.raises(RunError, match="has job 7"), go_on(run, [], [], submit._refuse_busy):
        pytest.fail("goes on")
    assert asked == [False, True]
    assert read_lease(run.path)[0] == 0


def test_a_run_that_is_begun_anew_at_the_same_path_has_another_birth(tmp_path):
    births = []
    for _ in range(3):
        births.append(create(tmp_path, "mine").read_record()["birth"])
        shutil.rmtree(tmp_path / "mine")
    assert births == sorted(set(births))


def test_run_has_the_id_that_is_asked_for(tmp_path):
    run = create(tmp_path, "mine")
    assert run.path == tmp_path / "mine"
    assert json.loads(run.record.read_text())["id"] == "mine"
    assert create(tmp_path, "mine").path == run.path, "a resume finds it again"


def test_folder_of_something_else_is_not_taken(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("")
    with pytest.raises(RunError, match="not empty and not a run"):
        create(tmp_path, "thesis")
    assert os.listdir(tmp_path / "thesis") == ["chapter1.tex"]


def test_opening_what_is_not_a_run_names_the_runs_beside_it(tmp_path):
    create(tmp_path).recipe.write_text("")
    with pytest.raises(RunError, match=r"nothing is not a run .* Runs there: demo-001"):
        RunDirectory.open(tmp_path / "nothing")


def test_launches_are_recorded_in_order(tmp_path):
    run = create(tmp_path)
    run.note_launch(["train.steps=2"], {})
    run.note_launch(["train.steps=4"], {"train.steps": 4})
    launches = run.read_record()["launches"]
    assert [launch["overrides"] for launch in launches] == [["train.steps=2"], ["train.steps=4"]]
    assert launches[1]["changes"] == {"train.steps": 4}


def hold(run, started, ranks_only):
    with run.attend() if ranks_only else run.lock():
        started.set()
        signal.pause()


@pytest.fixture
def holder():
    """Starts a process that holds a run; it is killed at the end."""
    context = multiprocessing.get_context("fork")
    processes = []

    def start(run, ranks_only=False):
        started = context.Event()
        process = context.Process(target=hold, args=(run, started, ranks_only))
        process.start()
        processes.append(process)
        assert started.wait(10)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def test_second_launcher_is_refused_and_told_who_holds_the_run(tmp_path, holder):
    run = create(tmp_path)
    process = holder(run)
    with (
        pytest.raises(RunError, match=rf"is in use by process {process.pid} on \S+ since 20\d\d-") as caught,
        run.lock(),
    ):
        pass
    assert caught.value.exit_code == EXIT_USER


def test_lock_of_a_killed_launcher_is_free(tmp_path, holder):
    run = create(tmp_path)
    process = holder(run)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with run.lock():
        pass


def test_ranks_that_outlive_their_launcher_keep_others_out(tmp_path, holder):
    run = create(tmp_path)
    process = holder(run, ranks_only=True)
    with pytest.raises(RunError, match="in use by ranks whose launching process is gone"), run.lock():
        pass
    process.kill()
    process.join()
    with run.lock(), run.attend(), run.attend():
        pass


def test_error_of_what_runs_under_the_lock_stays_what_it_is(tmp_path):
    run = create(tmp_path)
    with pytest.raises(FileNotFoundError), run.lock():
        raise FileNotFoundError(2, "No such file or directory", "x")


def test_root_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=rf"cannot write at {tmp_path}/file/runs .*set run.root"):
        create(tmp_path / "file" / "runs")


def test_a_root_is_tried_and_not_judged_by_its_permissions(tmp_path, monkeypatch):
    root = tmp_path / "disk" / "runs"
    refuse_unwritable(root)
    assert list(tmp_path.iterdir()) == []

    def mkdir(path, *_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(RunError, match=r"cannot write at .*Read-only file system"):
        refuse_unwritable(root)


def test_launchers_that_begin_at_once_do_not_remove_a_root_under_each_other(tmp_path):
    root = tmp_path / "runs"
    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(refuse_unwritable, root) for _ in range(400)]:
            future.result()
    assert list(tmp_path.iterdir()) == []


def hold_at_once(run):
    return run.hold(0.0, describe_self("4"), 0, lambda holder, me: HolderState.UNKNOWN)


@pytest.mark.parametrize(
    ("number", "error"),
    [
        *((number, StorageError) for number in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ETIMEDOUT)),
        *((number, RunError) for number in (errno.EACCES, errno.EROFS, errno.ENOLCK)),
    ],
)
@pytest.mark.parametrize("enter", [RunDirectory.attend, RunDirectory.lock, hold_at_once])
def test_a_file_system_that_fails_for_a_rank_ends_no_run_for_good(tmp_path, monkeypatch, number, error, enter):
    """A job is started again after it, and stops for good only after what the user must mend."""
    run = create(tmp_path)

    def fail(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(error) as caught, enter(run):
        pass
    assert caught.value.exit_code == (EXIT_USER if error is RunError else EXIT_FAILED)
    assert str(run.path) in str(caught.value)


def test_full_disk_is_an_error_with_its_path(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        (disk / "ballast").write_bytes(bytes(4096))
        with pytest.raises(RunError, match=rf"no room at {disk}.* set run.root to a larger disk"):
            create(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def ask(run, verdict, me=None, within_s=0.5, began_at=None):
    """What a job's rank 0 gets of a run that another process holds."""
    began_at = read_lease(run.path)[0] if began_at is None else began_at
    return run.hold(within_s, me or describe_self("4", 1), began_at, lambda holder, me: verdict)


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(directory, "PATIENCE_S", 0.05)
    monkeypatch.setattr(directory, "TAKE_OVER_AFTER_S", 0.1)


def test_a_holder_that_is_over_loses_the_run_and_its_lock(tmp_path, holder, at_once, capsys):
    """Its lock is still there: a process that is frozen keeps it, on this machine and on an NFSv3 server."""
    run = create(tmp_path)
    process = holder(run)
    os.kill(process.pid, signal.SIGSTOP)
    with ask(run, HolderState.OVER) as lease:
        assert lease.epoch == 2
        assert f"process {process.pid} on" in capsys.readouterr().err
        with pytest.raises(RunError, match=f"in use by process {os.getpid()} on"), run.lock():
            pass
    with run.lock() as lease:
        assert lease.epoch == 3, "the lock was given back, that of the frozen process counts no more"


def test_a_holder_that_lives_is_not_waited_for(tmp_path, holder, at_once):
    run = create(tmp_path)
    process = holder(run)
    with (
        pytest.raises(RunError, match=f"in use by process {process.pid} .* one too many") as caught,
        ask(run, HolderState.LIVES, within_s=60),
    ):
        pass
    assert caught.value.exit_code == EXIT_USER
    assert read_lease(run.path)[0] == 1


def test_a_holder_of_whom_nothing_is_known_is_waited_for(tmp_path, holder, at_once):
    run = create(tmp_path)
    holder(run)
    with pytest.raises(RunInUse, match=r"still in use by process \d+ .*rm -f"), ask(run, HolderState.UNKNOWN):
        pass
    assert read_lease(run.path)[0] == 1


def test_a_start_that_others_have_overtaken_takes_nothing(tmp_path):
    """Frozen before it came to take the lease: the run is free, and yet no longer its own."""
    run = create(tmp_path)
    with ask(run, HolderState.UNKNOWN, describe_self("4", 1)):
        pass
    for job, restart, began_at in (("4", 0, 1), ("5", 0, 0)):
        with (
            pytest.raises(LeaseLost, match="was taken by process"),
            ask(run, HolderState.OVER, describe_self(job, restart), began_at=began_at),
        ):
            pass
    with ask(run, HolderState.UNKNOWN, describe_self("4", 1, step=1)) as lease:
        assert lease.epoch == 2


def test_a_launch_that_came_to_nothing_leaves_no_trace_of_training(tmp_path):
    run = create(tmp_path)
    with run.lock():
        assert not run.has_trained
    assert not run.has_trained
    assert sorted(path.name for path in run.path.iterdir()) == ["lease", "lock", "lock.ranks", "run.json"]


def test_slurms_word_decides_who_is_over(monkeypatch):
    def start(job, restart, step=0):
        return describe_self(job, restart, step)

    states = {"7": "RUNNING", "8": "COMPLETED", "9": None}
    monkeypatch.setattr("framework.launch.process.find_job", lambda job: states[job] and JobState(job, states[job]))
    me = start("4", 1, 1)
    assert judge(start("4", 0, 5), me) is HolderState.OVER
    assert judge(start("4", 1, 0), me) is HolderState.OVER
    assert judge(start("4", 2, 0), me) is HolderState.UNKNOWN
    assert [judge(start(job, 0), me) for job in "789"] == [HolderState.LIVES, HolderState.OVER, HolderState.UNKNOWN]
    assert judge(start("", 0), me) is HolderState.UNKNOWN
