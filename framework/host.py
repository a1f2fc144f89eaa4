"""This machine for a process: cores and memory that it may use within the limits of its container or job, and the software."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

# Fewest cores near its device to which a process is bound.
LEAST_NEAR = 4
# The memory limit of a container or a job; "max" without one.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def count_cores() -> int:
    """Cores that this process may use (a SLURM or container mask counts), where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_host_memory() -> int:
    """Bytes of the machine's memory, or of what its container gives."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(there, int(CONTAINER_LIMIT.read_text()))
    except (OSError, ValueError):  # no such group, or "max" where it has no limit
        return there


def find_near_cores(address: str, allowed: set[int], root: Path = Path("/sys")) -> set[int]:
    """The allowed cores in the NUMA node of a PCI device, such as `0000:1b:00.0`; all of them where the system does not tell or
    fewer than LEAST_NEAR are there."""
    try:
        node = int((root / "bus/pci/devices" / address / "numa_node").read_text())
        listed = (root / f"devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return allowed
    bounds = [[int(each) for each in part.split("-")] for part in listed.split(",") if part]
    near = {core for ends in bounds for core in range(ends[0], ends[-1] + 1)} & allowed
    return near if len(near) >= LEAST_NEAR else allowed


def stay_near(address: str) -> None:
    """Have this thread, and those that it starts, run in the NUMA node of a PCI device: pinned memory is then there as well, and
    copies and launches need not cross to another socket."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, find_near_cores(address, os.sched_getaffinity(0)))


def describe_software() -> dict[str, Any]:
    """Software of a launch: `describe_commit`, and the versions of Python and of the libraries that compute."""
    from importlib.metadata import version  # 20 ms, which no recipe should pay

    libraries = {name: version(name) for name in ("torch", "transformers")}
    return describe_commit() | {"versions": {"python": platform.python_version(), **libraries}}


def describe_commit() -> dict[str, Any]:
    """{commit, edited}: the commit of the package's repository, and whether files differ from it. Empty outside of git."""
    folder = Path(__file__).parent
    commit, edits = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--", ".")
    return {} if commit is None else {"commit": commit, "edited": bool(edits)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *words], check=False, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
