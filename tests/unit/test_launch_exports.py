"""Exports beside training: one at a time, in processes whose failures are said and end nothing. Here a shell stands for the
process that exports; tests/faults/test_launch_train.py has the real one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.checkpoint.commit import Retention, list_checkpoints, retain, step_of
from framework.checkpoint.folder import committed_name
from framework.launch import exports as exports_module
from framework.launch.directory import RunDirectory
from framework.launch.exports import Exports, exports_have_ended
from framework.lease import Lease
from framework.start import python_words
from tests.unit.test_checkpoint import ALONE, save

MAKES = 'mkdir -p "$1"'
WAITS = 'while ! test -e "$2/go"; do sleep 0.02; done; mkdir -p "$1"'


@pytest.fixture
def run(tmp_path):
    run = RunDirectory(tmp_path / "run")
    run.checkpoints.mkdir(parents=True)
    return run


@pytest.fixture
def shell(monkeypatch, run):
    """Has a script export: $1 is the folder, $2 the run, $3 the step. Lists the steps that were asked for."""
    asked = []

    def choose(script):
        def command(path: Path, step: int, folder: Path):
            asked.append(step)
            return ["/bin/sh", "-c", script, "sh", str(folder), str(path), str(step)]

        monkeypatch.setattr(exports_module, "make_command", command)
        return asked

    return choose


def made(run):
    return sorted(path.name for path in run.exports.iterdir()) if run.exports.exists() else []


def wait_for_process(exports):
    while exports._process is None:
        time.sleep(0.01)
    return exports._process


def test_steps_that_are_due_are_exported_once_they_are_committed(run, shell, capsys):
    asked = shell(MAKES)
    exports = Exports(Lease(run.path), 10)
    for step, is_committed in ((10, True), (15, True), (20, False)):
        exports.end_save(step, is_committed)
        assert exports.wait(30)
    assert asked == [10]
    assert made(run) == ["step-00000010"]
    assert "exported step 10 to" in capsys.readouterr().err
    exports.end()


def test_a_rank_that_exports_nothing_does_not_look_at_the_checkpoints(run, monkeypatch):
    monkeypatch.setattr(exports_module, "list_checkpoints", lambda root: pytest.fail("looked"))
    Exports(Lease(run.path), None).end()


def test_an_export_imports_the_code_of_its_rank(run):
    """How no clone around it is imported: tests/unit/test_start.py."""
    words = exports_module.make_command(run.path, 7, run.exports / "x")
    assert words[:5] == [sys.executable, *python_words("framework", "export")]


def test_without_the_key_nothing_is_exported(run, shell):
    asked = shell(MAKES)
    exports = Exports(Lease(run.path), None)
    exports.end_save(10, True)
    assert exports.wait(0)
    assert asked == []
    exports.end()


@pytest.mark.parametrize(
    ("script", "words"), [("echo no room; exit 3", "exit code 3\nno room"), ("kill -9 $$", "exit code -9")]
)
def test_an_export_that_fails_is_said_and_the_next_goes_on(run, shell, capsys, script, words):
    shell(f"test $3 = 20 && {MAKES} || {{ {script}; }}")
    exports = Exports(Lease(run.path), 10)
    for step in (10, 20):
        exports.end_save(step, True)
        assert exports.wait(30)
    said = capsys.readouterr().err
    assert "step 10 was not exported; training goes on" in said
    assert words in said
    assert made(run) == ["step-00000020"]
    exports.end()


def test_a_process_that_cannot_start_is_said(run, monkeypatch, capsys):
    monkeypatch.setattr(exports_module, "make_command", lambda *_: ["/nowhere/python"])
    exports = Exports(Lease(run.path), 10)
    exports.end_save(10, True)
    assert exports.wait(30)
    assert "step 10 was not exported" in capsys.readouterr().err
    exports.end()


def test_a_save_never_waits_and_of_those_that_wait_the_newest_is_exported(run, shell, capsys):
    asked = shell(WAITS)
    exports = Exports(Lease(run.path), 10)
    exports.end_save(10, True)
    wait_for_process(exports)
    for step in (20, 30):
        exports.end_save(step, True)
    assert not exports.wait(0.05)
    assert "the export of step 20 is left out" in capsys.readouterr().err
    (run.path / "go").touch()
    assert exports.wait(30)
    assert asked == [10, 30]
    exports.end()


def check_retention(run, shell, make_retention):
    """Steps 1 to 3 are saved, of which one is to stay, while step 1 is being exported and step 2 waits."""
    shell(WAITS)
    exports = Exports(Lease(run.path), 1)
    for step in (1, 2, 3):
        save(run.checkpoints, step, keep=9)
        if step < 3:
            exports.end_save(step, True)
            wait_for_process(exports)
    retain(run.checkpoints, Lease(run.path), make_retention(exports))
    kept = [step_of(path) for path in list_checkpoints(run.checkpoints)]
    (run.path / "go").touch()
    assert exports.wait(30)
    exports.end()
    assert kept == [3, 2, 1]
    retain(run.checkpoints, Lease(run.path), make_retention(exports))
    assert [step_of(path) for path in list_checkpoints(run.checkpoints)] == [3]


def test_a_checkpoint_that_is_to_be_exported_outlives_the_newest_ones(run, shell):
    check_retention(run, shell, lambda exports: Retention(1, is_read=exports.reads))


def test_sabotaged_retention_that_does_not_ask_for_readers_is_noticed(run, shell):
    with pytest.raises(AssertionError):
        check_retention(run, shell, lambda exports: Retention(1))


def test_the_end_of_a_run_ends_its_export_without_a_folder_and_the_next_start_makes_it(run, shell, capsys):
    asked = shell(WAITS)
    save(run.checkpoints, 10, keep=9)
    exports = Exports(Lease(run.path), 10)
    exports.end_save(10, True)
    process = wait_for_process(exports)
    assert exports_have_ended(exports, ALONE, is_stopped=True)
    exports.end()
    assert process.returncode == -signal.SIGTERM
    assert "the export of step 10 was stopped with the run" in capsys.readouterr().err
    assert made(run) == []
    (run.path / "go").touch()
    again = Exports(Lease(run.path), 10)
    assert again.wait(30)
    again.end()
    assert (asked, made(run)) == ([10, 10], ["step-00000010"])


def test_an_export_that_does_not_end_is_killed_with_the_run(run, shell, monkeypatch, capsys):
    monkeypatch.setattr(exports_module, "END_S", 0.2)
    shell('trap "" TERM; touch "$2/ready"; while true; do sleep 0.02; done')
    exports = Exports(Lease(run.path), 10)
    exports.end_save(10, True)
    process = wait_for_process(exports)
    while not (run.path / "ready").exists():
        time.sleep(0.01)
    exports.end()
    assert process.wait(30) == -signal.SIGKILL


def test_a_start_makes_what_is_missing_of_the_newest(run, shell):
    asked = shell(MAKES)
    for step in (10, 20, 25):
        save(run.checkpoints, step, keep=9)
    committed_name(run.exports, 20).mkdir(parents=True)
    exports = Exports(Lease(run.path), 10)
    assert exports.wait(30)
    exports.end()
    assert (asked, made(run)) == ([10], ["step-00000010", "step-00000020"])


def test_a_step_that_is_come_to_once_more_is_exported_anew(run, shell):
    shell(MAKES)
    former = committed_name(run.exports, 10)
    former.mkdir(parents=True)
    (former / "old").touch()
    exports = Exports(Lease(run.path), 10)
    exports.end_save(10, True)
    assert exports.wait(30)
    exports.end()
    assert made(run) == ["step-00000010"]
    assert os.listdir(former) == []


def test_the_process_yields_the_processor_and_sees_no_gpu(run, shell):
    shell(
        'mkdir -p "$1"; sleep 0.3; ps -o ni= -p $$ > "$1/nice"; echo "$CUDA_VISIBLE_DEVICES$OMP_NUM_THREADS" > "$1/env"'
    )
    exports = Exports(Lease(run.path), 10)
    exports.end_save(10, True)
    assert exports.wait(30)
    exports.end()
    folder = committed_name(run.exports, 10)
    assert (folder / "nice").read_text().strip() == "19"
    assert (folder / "env").read_text() == "1\n"


@pytest.mark.grid  # a real export beside training: tests/faults/test_launch_train.py
def test_the_words_are_those_of_the_command_line(run):
    words = exports_module.make_command(run.path, 7, run.exports / "x")
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    assert found.returncode == 86
    assert "is not a run" in found.stderr
