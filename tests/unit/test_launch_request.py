"""What is asked of a running run by files in its folder: who hears it, who answers, and who is told that nobody does."""

import threading
import time

import pytest

from framework.errors import EXIT_DONE, EXIT_FAILED, RunError
from framework.launch import request
from framework.launch.directory import RunDirectory
from framework.recipe.compose import compose, save_recipe
from framework.train.faults import SAVE_FILE, STOP_FILE, StepWatch, StopRequest


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


def test_rank_0_hears_requests_to_save_and_to_stop(tmp_path):
    with StopRequest() as stop, StepWatch(stop, folder=tmp_path) as watch:
        (tmp_path / SAVE_FILE).touch()
        wait_for(lambda: stop.wants_save)
        assert not stop.requested
        watch.end_save()
        assert not (tmp_path / SAVE_FILE).exists()
        assert not stop.wants_save
        (tmp_path / STOP_FILE).touch()
        wait_for(lambda: stop.requested)


def test_a_run_does_not_end_later_for_being_watched(tmp_path):
    started = time.monotonic()
    for _ in range(10):
        with StopRequest() as stop, StepWatch(stop, folder=tmp_path):
            pass
    assert time.monotonic() - started < 2.5  # ten polls of half a second would be five


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


def test_only_jobs_in_the_queue_are_cancelled(run, monkeypatch, capsys):
    from framework.launch.slurm import JobState

    called = []
    monkeypatch.setattr(
        request, "find_jobs", lambda _: [("7", JobState("7", "COMPLETED")), ("8", JobState("8", "PENDING"))]
    )
    monkeypatch.setattr(request.subprocess, "run", lambda words, check: called.append(words))
    assert request.stop_command(run.path) == EXIT_DONE
    assert called == [["scancel", "8"]]
    assert "cancelled 8" in capsys.readouterr().out
