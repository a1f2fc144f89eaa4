"""Agent: which of several failed ranks is the cause, and how it is told."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from framework.errors import ConnectionFailed, HungError, MeshwrightError, RecipeError, StorageError
from framework.launch.agent import judge, read_state


def fail(folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, error: Exception) -> ProcessFailure:
    """What the agent finds of a rank that told the error, as `launch/process.py` does."""
    file = folder / f"error-{rank}.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    try:
        raise error
    except Exception as caught:
        get_error_handler().record_exception(caught)
    code = error.exit_code if isinstance(error, MeshwrightError) else 1
    return ProcessFailure(rank, 100 + rank, code, str(file))


@pytest.mark.parametrize("kind", [StorageError, ConnectionFailed, RecipeError])
def test_an_explained_error_is_printed_without_a_traceback_whatever_its_exit_code(tmp_path, monkeypatch, kind):
    outcome = judge({1: fail(tmp_path, monkeypatch, 1, kind("disk: gone\nmore"))})
    assert (outcome.code, outcome.message) == (kind.exit_code, "[rank 1] disk: gone\nmore")


def test_another_error_is_printed_with_its_traceback(tmp_path, monkeypatch):
    outcome = judge({0: fail(tmp_path, monkeypatch, 0, ValueError("a bug"))})
    assert outcome.code == 1
    assert "Traceback" in outcome.message
    assert "ValueError: a bug" in outcome.message


def test_a_rank_that_lost_the_others_is_not_the_cause(tmp_path, monkeypatch):
    lost = fail(tmp_path, monkeypatch, 0, ConnectionFailed("only 1 of 2 ranks have connected"))
    cause = fail(tmp_path, monkeypatch, 1, StorageError("disk: gone"))
    assert judge({0: lost, 1: cause}).message == "[rank 1] disk: gone"


def test_a_rank_that_the_agent_killed_did_not_run_out_of_memory(tmp_path, monkeypatch):
    """Rank 1 hung, so a collective of rank 0 timed out; half a minute after that the agent ended what was left."""
    waited = fail(tmp_path, monkeypatch, 0, HungError("a collective timed out"))
    hung = ProcessFailure(1, 101, -signal.SIGKILL, "none")
    hung.timestamp = waited.timestamp + 30
    outcome = judge({0: waited, 1: hung})
    assert outcome.code == 1
    assert outcome.message.startswith("[rank 0] a collective timed out\n[rank 1] process 101 did not end")
    assert "memory" not in outcome.message


def test_a_rank_that_was_killed_first_is_the_cause(tmp_path, monkeypatch):
    killed = ProcessFailure(1, 101, -signal.SIGKILL, "none")
    lost = fail(tmp_path, monkeypatch, 0, RuntimeError("gloo/transport: Connection closed by peer"))
    assert "out of memory?" in judge({0: lost, 1: killed}).message


def test_a_stopped_rank_that_the_launcher_killed_is_not_the_cause(tmp_path, monkeypatch):
    """And the verdict, with which all other ranks end, is said once."""
    verdict = "step 41 hangs: rank 1 [pp0 dp1 cp0 tp0] on n1, pid 101, does not answer"
    hung = [fail(tmp_path, monkeypatch, rank, HungError(verdict)) for rank in (0, 2)]
    killed = ProcessFailure(1, 101, -signal.SIGKILL, "none")
    outcome = judge({0: hung[0], 1: killed, 2: hung[1]}, killed={101})
    assert outcome.code == 1
    assert outcome.message == f"[rank 0] {verdict}\n[rank 1] process 101 was stopped (state T), and was killed"
    assert "out of memory?" in judge({0: hung[0], 1: killed, 2: hung[1]}).message, "killed by somebody else"


def test_the_state_of_a_process_is_read():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert read_state(process.pid) in ("R", "S", "D")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert read_state(process.pid) == "T"
    finally:
        process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_state(process.pid) == "Z"
    process.wait()
    assert read_state(process.pid) == ""
