"""Ranks that hang: real processes, one that sleeps and one that is stopped; who is named, and how soon all are gone."""

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.errors import EXIT_FAILED
from framework.monitor.watchdog import FLIGHT_RECORDS
from tests.faults.test_launch_agent import PROGRAM, ROOT, folder, launch

__all__ = ["folder"]

DEADLINE_S, DETECTION_S = 2.0, 10.0


def ready_s(path: Path) -> float:
    return path.stat().st_mtime


@pytest.mark.grid  # what it says, and when: unit/test_hang.py
def test_a_rank_that_sleeps_and_one_that_is_stopped_are_named_and_all_end(folder):
    outcome = launch("hang_watched", folder, 3)
    took_s = time.time() - max(ready_s(folder / f"ready-{rank}") for rank in (1, 2))
    assert outcome.code == EXIT_FAILED  # which a job's script tries again
    first, *rest = outcome.message.splitlines()
    assert re.fullmatch(r"\[rank \d\] step 40 hangs: ranks 2 do not answer, ranks 1 are behind", first)
    said = "\n".join(rest)
    assert re.search(r"rank 2 \[dp2\] on \S+, pid \d+, does not answer: stopped, .* Last seen in step \d+", said)
    assert re.search(r"rank 1 \[dp1\] on \S+, pid \d+, is in step 40 for \d+ s, waits for no other rank", said)
    assert "rank_program.py" in said
    assert "in _sleep_in_a_step" in said
    assert "rank 0 waits in all_reduce of ones over world" in said
    assert re.search(r"\[rank 2\] process \d+ was stopped \(state T\), and was killed", said)
    assert outcome.message.count("hangs:") == 1, "every rank ends with the verdict, which is said once"
    check_flight_records(folder)
    assert took_s < DEADLINE_S + DETECTION_S + 3  # what the agent needs to notice ends, and this machine to be busy


def check_flight_records(folder):
    """Of the ranks that answered: rank 0 has begun one collective more than rank 1, which sleeps before it."""
    files = sorted((folder / FLIGHT_RECORDS / "gloo").iterdir())
    assert [path.name for path in files] == ["rank-0", "rank-1"]
    begun = []
    for path in files:
        entries = pickle.loads(path.read_bytes())["entries"]
        begun.append(sum(each["input_sizes"] == [[2**19]] for each in entries))
    assert begun == [40, 39]


@pytest.mark.grid  # as above
def test_where_the_rank_that_hosts_the_store_is_stopped_the_others_say_so_and_end(folder):
    """As under srun, where no agent hosts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), "stop_rank_0", str(folder)],
            env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, said = ranks[1].communicate(timeout=60)
        took_s = time.time() - ready_s(folder / "ready-0")
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    assert ranks[1].returncode == EXIT_FAILED
    assert re.search(r"\[rank 1\] step 40 hangs: rank 0 \[dp0\] on \S+, pid \d+, does not answer", said)
    assert "rank 0 on 127.0.0.1 hosts the store" in said
    assert "in all_reduce of ones over world" in said
    assert took_s < DEADLINE_S + DETECTION_S
