"""What is asked of a running run by files in its folder: who hears it, who answers, and who is told that nobody does."""

import errno
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from framework.commands import stop as request
from framework.errors import EXIT_DONE, EXIT_FAILED, RunError
from framework.launch import jobs
from framework.launch.directory import RunDirectory
from framework.launch.jobs import WAITING_OR_RUNNING, JobState
from framework.lease import Lease
from framework.monitor import watchdog as watchdog_module
from framework.monitor.progress import SAVE_FILE, STOP_FILE, Progress, StopRequest
from framework.monitor.watchdog import Watchdog
from framework.recipe.compose import compose, save_recipe


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "mine", "run")
    save_recipe(compose(["train.steps=100"]).require(), run.recipe)
    return run


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def has_jobs(monkeypatch, find_jobs):
    for module in (jobs, request):
        monkeypatch.setattr(module, "find_jobs", find_jobs)


@contextmanager
def watched(folder=None, **arguments):
    """A watchdog and the requests that it hears."""
    progress = Progress(lease=Lease(folder) if isinstance(folder, Path) else None)
    with Watchdog(progress, folder=folder, **arguments) as watch, StopRequest() as stop, watch.hear(stop):
        yield watch, stop


def test_rank_0_hears_requests_to_save_and_to_stop(tmp_path):
    with watched(folder=tmp_path) as (watch, stop):
        (tmp_path / SAVE_FILE).touch()
        wait_for(lambda: stop.wants_save)
        assert not stop.requested
        watch.begin_save()
        assert not watch.find_requests()
        assert not stop.wants_save, "the save that is under way answers it"
        watch.end_save(is_committed=True)
        assert not (tmp_path / SAVE_FILE).exists()
        assert not stop.wants_save
        (tmp_path / STOP_FILE).touch()
        wait_for(lambda: stop.requested)


def test_a_run_does_not_end_later_for_being_watched(tmp_path):
    started = time.monotonic()
    for _ in range(10):
        with watched(folder=tmp_path):
            pass
    assert time.monotonic() - started < 2.5  # ten polls of half a second would be five


def test_a_request_stays_where_its_save_has_failed_or_had_begun_before_it(tmp_path):
    with watched(folder=tmp_path) as (watch, stop):
        watch.begin_save()
        (tmp_path / SAVE_FILE).touch()
        watch.end_save(is_committed=True)
        assert (tmp_path / SAVE_FILE).exists()
        wait_for(lambda: stop.wants_save)
        watch.begin_save()
        watch.end_save(is_committed=False)
        assert (tmp_path / SAVE_FILE).exists()
        wait_for(lambda: stop.wants_save)


@pytest.mark.parametrize("is_first", [False, True])
def test_of_two_saves_under_way_the_one_that_began_after_a_request_answers_it(tmp_path, is_first):
    with watched(folder=tmp_path) as (watch, stop):
        for asks in (is_first, not is_first):
            if asks:
                (tmp_path / SAVE_FILE).touch()
                wait_for(lambda: stop.wants_save)
            watch.begin_save()
        watch.find_requests()
        assert not stop.wants_save
        watch.end_save(is_committed=True)
        assert (tmp_path / SAVE_FILE).exists() is not is_first
        watch.end_save(is_committed=is_first)
        assert (tmp_path / SAVE_FILE).exists() is not is_first
        assert is_first or (watch.find_requests(), stop.wants_save) == (False, True)


class FailingFolder:
    """A run's folder whose file system fails so many times, as NFS does with ESTALE."""

    def __init__(self, path, num_failures):
        self.path, self.num_failures = path, num_failures

    def __truediv__(self, name):
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return self.path / name


def test_a_stale_handle_ends_neither_the_watch_nor_the_run(tmp_path):
    (tmp_path / SAVE_FILE).touch()
    folder = FailingFolder(tmp_path, num_failures=1)
    with watched(folder=folder) as (watch, stop):
        wait_for(lambda: stop.wants_save)
        folder.num_failures = 10
        watch.begin_save()
        watch.end_save(is_committed=True)
        folder.num_failures = 0
        wait_for(lambda: stop.wants_save)
        watch.begin_save()
        watch.end_save(is_committed=True)
        assert not (tmp_path / SAVE_FILE).exists()


def test_a_log_that_cannot_be_written_does_not_end_the_watch(monkeypatch):
    said = []

    def say(text):
        said.append(text)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(watchdog_module, "LONG_S", 0.0)
    with watched(say=say) as (watch, _):
        with watch.step(1):
            time.sleep(0.001)
        with watch.step(2):
            wait_for(lambda: len(said) == 2)


def judge_step(seconds_of_steps, asked_after_s, took_s, **patience):
    """Whether a step of `took_s` seconds, after steps of `seconds_of_steps`, is ended as hung."""
    errors = []
    with watched(end=errors.append, **patience) as (watch, _):
        for number, seconds in enumerate(seconds_of_steps):
            with watch.step(number):
                time.sleep(seconds)
        with watch.step(len(seconds_of_steps)):
            time.sleep(asked_after_s)
            signal.raise_signal(signal.SIGTERM)
            time.sleep(took_s - asked_after_s)
    return bool(errors)


@pytest.mark.parametrize(("num_before", "is_ended"), [(0, False), (1, False), (2, False), (3, True)])
def test_a_step_is_judged_by_those_before_only_once_three_are_measured(num_before, is_ended):
    """The first may compile, and the second waits for what the first left to a GPU."""
    assert judge_step([0.0] * num_before, 0.0, 1.0, patience_s=0.2) == is_ended


def test_a_first_step_that_hangs_is_ended_as_well():
    assert judge_step([], 0.0, 1.0, patience_s=0.1, first_patience_s=0.2)


def test_patience_counts_from_the_request_and_not_from_the_begin_of_the_step():
    assert not judge_step([0.0] * 3, asked_after_s=1.2, took_s=1.8, patience_s=1.0)


@pytest.mark.parametrize("command", [request.save_command, request.stop_command])
def test_a_run_that_does_not_run_is_not_asked(run, command):
    with pytest.raises(RunError, match="does not run"):
        command(run.path)
    assert not (run.path / SAVE_FILE).exists()
    assert not (run.path / STOP_FILE).exists()


@pytest.mark.parametrize(
    ("command", "file", "said"),
    [(request.save_command, SAVE_FILE, "saved    step 30"), (request.stop_command, STOP_FILE, "stopped  step 30")],
)
def test_the_answer_is_the_step_that_was_saved(run, monkeypatch, capsys, command, file, said):
    steps = iter((20, 30))
    monkeypatch.setattr(request, "saved_step", lambda _: next(steps))

    def answer():
        wait_for((run.path / file).exists)
        (run.path / file).unlink()

    threading.Thread(target=answer, daemon=True).start()
    with run.lock():
        assert command(run.path) == EXIT_DONE
    out = capsys.readouterr().out
    assert said in out
    assert ("meshwright train run.id=mine" in out) == (file == STOP_FILE)


def test_a_run_that_does_not_answer_is_said_to_and_keeps_the_request(run, capsys):
    with run.lock():
        assert request.stop_command(run.path, answer_s=0.3) == EXIT_FAILED
        assert (run.path / STOP_FILE).exists()
    assert "no answer" in capsys.readouterr().err
    assert not (run.path / STOP_FILE).exists()  # the launcher that has ended takes it along


def test_what_was_asked_of_a_launcher_that_was_killed_is_not_asked_of_the_next(run):
    (run.path / STOP_FILE).touch()
    with run.lock():
        assert not (run.path / STOP_FILE).exists()


@pytest.mark.parametrize("state", sorted(set(WAITING_OR_RUNNING) - {"PENDING", "RUNNING"}))
def test_a_job_that_starts_or_is_suspended_or_requeued_is_asked_to_stop(run, monkeypatch, capsys, state):
    """It hears of that at its first step; a save it could not make yet."""
    has_jobs(monkeypatch, lambda _: [("8", JobState("8", state))])
    with pytest.raises(RunError, match=f"is starting .*: job 8 is {state}"):
        request.save_command(run.path)
    assert not (run.path / SAVE_FILE).exists()
    assert request.stop_command(run.path, answer_s=0.0) == EXIT_FAILED
    assert (run.path / STOP_FILE).exists()
    assert "no answer" in capsys.readouterr().err


def test_a_job_that_completes_for_good_is_not_waited_for(run, monkeypatch, capsys):
    """COMPLETING is the state of a requeue, and of an end as well: nobody takes the request away then."""
    states = iter(("COMPLETING", "COMPLETING", None))
    has_jobs(monkeypatch, lambda _: [("8", (state := next(states, "FAILED")) and JobState("8", state))])
    monkeypatch.setattr(request, "ENDED_POLL_S", 0.0)
    assert request.stop_command(run.path, answer_s=5.0) == EXIT_FAILED
    assert "ended    without a newer checkpoint" in capsys.readouterr().err
    assert not (run.path / STOP_FILE).exists()  # else the run's next start would stop at once


def test_only_jobs_in_the_queue_are_cancelled(run, monkeypatch, capsys):
    called = []
    has_jobs(monkeypatch, lambda _: [("7", JobState("7", "COMPLETED")), ("8", JobState("8", "PENDING"))])
    monkeypatch.setattr(request.subprocess, "run", lambda words, env, check: called.append(words))
    assert request.stop_command(run.path) == EXIT_DONE
    assert called == [["scancel", "8"]]
    assert "cancelled 8" in capsys.readouterr().out
