"""What tests cost in CPU seconds, their processes included: `pytest -p tests.cpu_seconds --cpu-file FILE`, to which each worker
appends. `python -m tests.cpu_seconds FILE...` says what each folder and file costs.

Wall time says how busy a machine is. A module's fixtures are counted for its first test; what a process costs that nobody waits
for is counted until it ends. Imports of pytest's own processes and the collection of tests are not counted.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")
NUM_ROWS = 25


def seconds_of_tree(pid: int) -> float:
    """CPU seconds of process `pid`, of the children that it has waited for, and of those that live."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended meanwhile; its parent waits for it, and counts it then
        return 0.0
    own = sum(int(field) for field in fields[11:15]) / TICKS
    return own + sum(seconds_of_tree(child) for task in tasks for child in _children(pid, task))


def _children(pid: int, task: str) -> list[int]:
    """Processes that a thread has started; none of a thread that has ended meanwhile."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-file", metavar="FILE", help="where tests' CPU seconds are written, a line of JSON for each")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = seconds_of_tree(os.getpid())
    yield
    spent = seconds_of_tree(os.getpid()) - before
    path = item.config.getoption("--cpu-file")
    if path:
        with open(path, "a") as file:
            file.write(json.dumps([item.nodeid, round(spent, 3)]) + "\n")


def describe(files: list[str]) -> str:
    """Seconds by folder, and the dearest files and tests."""
    spent = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    sums: dict[str, Counter[str]] = {"folder": Counter(), "file": Counter(), "test": Counter()}
    for name, seconds in spent:
        file = name.partition("::")[0]
        for level, key in (("folder", str(Path(file).parent)), ("file", file), ("test", name)):
            sums[level][key] += seconds
    lines = [f"{sum(sums['folder'].values()):8.1f} CPU s in {len(sums['test'])} tests"]
    for each in sums.values():
        lines += ["", *(f"{seconds:8.1f} {key}" for key, seconds in each.most_common(NUM_ROWS))]
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe(sys.argv[1:]))
