"""Ranks under the elastic agent: their signals, their deaths, and the one message and exit code that come of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NUMERICS, EXIT_RESUME, EXIT_USER, RunError
from framework.launch.agent import run_ranks
from framework.launch.directory import RunDirectory
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

PROGRAM = Path(__file__).with_name("rank_program.py")
ROOT = PROGRAM.parents[2]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def launch(kind, folder, num_ranks=2):
    return run_ranks((str(PROGRAM), kind, str(folder)), num_ranks, folder / "log")


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def are_ready(folder, num_ranks=2):
    return all((folder / f"ready-{rank}").exists() for rank in range(num_ranks))


def signal_when_ready(folder, *numbers):
    """Once all ranks are at work, this process gets the signals, half a second apart, as from a terminal."""

    def send():
        wait_for(lambda: are_ready(folder))
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    threading.Thread(target=send, daemon=True).start()


def test_ranks_get_their_places_and_end_well(folder):
    assert launch("say_environment", folder, 3).code == EXIT_DONE
    assert [(folder / f"environment-{rank}").read_text() for rank in range(3)] == ["0 3 0", "1 3 1", "2 3 2"]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@pytest.mark.parametrize("number", few_of(SIGNALS, lambda number: number == signal.SIGTERM))
def test_signal_lets_every_rank_save(folder, number, capfd):
    before = signal.getsignal(number)
    signal_when_ready(folder, number)
    outcome = launch("stop_when_asked", folder)
    assert (outcome.code, outcome.message) == (EXIT_RESUME, "")
    assert all((folder / f"saved-{rank}").exists() for rank in range(2))
    assert signal.getsignal(number) is before
    assert ("saving" in capfd.readouterr().err) == (number == signal.SIGINT)


def test_second_interrupt_ends_ranks_that_do_not_stop(folder):
    signal_when_ready(folder, signal.SIGINT, signal.SIGINT)
    started = time.monotonic()
    outcome = launch("never_stop", folder)
    assert (outcome.code, outcome.message) == (EXIT_INTERRUPTED, "")
    assert time.monotonic() - started < 25


@pytest.mark.grid
def test_error_of_all_ranks_is_said_once(folder, capfd):
    outcome = launch("fail_alike", folder)
    assert outcome.code == EXIT_NUMERICS
    assert outcome.message in ("[rank 0] loss is not finite", "[rank 1] loss is not finite")
    assert capfd.readouterr().err == ""


@pytest.mark.grid  # beside a rank that is killed; which error is the cause: unit/test_launch_agent.py
def test_error_of_one_rank_is_the_cause_and_the_others_are_silent(folder, capfd):
    outcome = launch("fail_on_one_rank", folder)
    assert (outcome.code, outcome.message) == (EXIT_USER, "[rank 1] corpus/a.jsonl row 7 is broken")
    assert capfd.readouterr().err == ""


@pytest.mark.grid
def test_fault_of_ours_is_told_with_its_traceback(folder):
    outcome = launch("fail_by_our_fault", folder)
    assert outcome.code == 1
    assert outcome.message.startswith("[rank 1] Traceback")
    assert outcome.message.endswith("KeyError: 'no such key'")


def test_killed_rank_is_the_cause_and_not_the_peers_that_lost_it(folder):
    outcome = launch("die_on_one_rank", folder)
    assert outcome.code == 128 + signal.SIGKILL
    assert outcome.message.startswith("[rank 1] process ")
    assert "killed by SIGKILL" in outcome.message


@pytest.mark.grid
def test_a_collective_whose_time_is_up_is_the_cause_and_not_the_end_of_the_rank_that_hung(folder):
    outcome = launch("hang_until_time_is_up", folder)
    assert outcome.code == EXIT_FAILED
    assert outcome.message.startswith("[rank 0] a collective timed out: this rank waited 2 s")
    assert "framework/comm/collectives.py" in outcome.message
    assert "\n[rank 1] asked to stop, this rank was in step 4 for " in outcome.message
    assert "rank_program.py" in outcome.message.partition("[rank 1]")[2]
    assert "SIGKILL" not in outcome.message


@pytest.mark.grid  # a hung run that ends by itself: above
def test_a_hung_run_obeys_sigterm(folder):
    """Its collectives wait for half an hour, and no handler of Python's runs meanwhile on rank 0."""
    signal_when_ready(folder, signal.SIGTERM)
    outcome = launch("hang_until_asked", folder)
    asked = max((folder / f"ready-{rank}").stat().st_mtime for rank in range(2))
    assert time.time() - asked < 10
    assert outcome.code == EXIT_FAILED
    assert "it hangs, and ends without saving" in outcome.message


def test_ranks_of_a_killed_launcher_save_and_end(folder):
    script = (
        "from pathlib import Path; from framework.launch.agent import run_ranks;"
        f"run_ranks(({str(PROGRAM)!r}, 'stop_when_asked', {str(folder)!r}), 2, Path({str(folder)!r}) / 'log')"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script])
    wait_for(lambda: are_ready(folder))
    launcher.kill()
    launcher.wait()
    with pytest.raises(RunError, match="ranks whose launching process is gone"), RunDirectory(folder).lock():
        pass
    wait_for(lambda: all((folder / f"saved-{rank}").exists() for rank in range(2)))
