"""Tests on forked workers: each runs once, what they say is reported, and a worker that dies is a failure."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SESSION = """
import os, pytest, warnings

@pytest.fixture(scope="session")
def pool():
    yield os.getpid()
    open("closed", "a").write(f"{os.getpid()}\\n")

@pytest.fixture(autouse=True)
def note(request, tmp_path):
    open("ran", "a").write(f"{request.node.nodeid} {os.getpid()} {tmp_path}\\n")
"""
FILES = {
    "conftest.py": SESSION,
    "test_a.py": "import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_ranks(n, pool): pass\n",
    "test_b.py": "import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_plain(n): pass\n",
    "test_c.py": "import pytest\ndef test_skips(): pytest.skip('no reason')\n"
    "def test_prints(): print('seen', 'once'); assert 1 + 1 == 3\n",
    "test_d.py": "import warnings\ndef test_warns(): warnings.warn('a flood')\n",
}


def run(folder: Path, *words: str, **files: str) -> subprocess.CompletedProcess[str]:
    for name, text in (FILES | files).items():
        (folder / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.workers",
        "--workers",
        "2",
        "-p",
        "no:cacheprovider",
        *words,
    ]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_each_test_runs_once_and_is_reported(tmp_path):
    done = run(tmp_path, "-ra")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 41 passed, 1 skipped, 1 warning" in done.stdout
    assert done.stdout.count("seen once") == 1
    assert "assert (1 + 1) == 3" in done.stdout
    assert "no reason" in done.stdout
    assert "a flood" in done.stdout
    ran = [line.split() for line in (tmp_path / "ran").read_text().splitlines()]
    assert set(Counter(name for name, _, _ in ran).values()) == {1}
    assert len({place for _, _, place in ran}) == len(ran) == 43
    for file in FILES:
        assert len({worker for name, worker, _ in ran if name.startswith(file)}) <= 1, "a file's tests stay together"
    assert len((tmp_path / "closed").read_text().splitlines()) == 1, (
        "one worker had the session's fixture, and tore it down"
    )


def test_a_worker_that_dies_fails_its_test_and_the_files_behind_it_are_run(tmp_path):
    dies = "import os\ndef test_ends_all(pool): os._exit(0)\ndef test_is_lost(): pass\n"
    done = run(tmp_path, **{"test_0.py": dies, "test_c.py": ""})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_0.py::test_ends_all" in done.stdout
    assert "1 failed, 41 passed" in done.stdout
    assert "1 tests were not run" in done.stdout


def test_the_first_failure_ends_all_where_that_is_asked_for(tmp_path):
    slow = "import time\ndef test_fails(): assert False\ndef test_sleeps(): time.sleep(50)\n"
    done = run(tmp_path, "-x", **{"test_0.py": slow, "test_c.py": slow})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stopping after 1 failures" in done.stdout
