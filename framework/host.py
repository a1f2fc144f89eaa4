"""This machine for a process: cores and memory that it may use within the limits of its container or job, its software, and the
peak of its GPUs.
"""

import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

# Fewest cores near its device to which a process is bound.
LEAST_NEAR = 4
# The memory limit of a container or a job; "max" without one.
CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")

# Dense bf16 tensor-core peak of one device, FLOP/s, by a part of the name that the driver reports; the first match counts.
# From the makers' data sheets, halved where they state the figure "with sparsity". SXM unless the name says otherwise.
PEAK_BF16_FLOPS = (
    ("GB300", 2500e12),
    ("GB200", 2500e12),
    ("B300", 2250e12),
    ("B200", 2250e12),
    ("GH200", 989.4e12),
    ("H200 NVL", 835e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("H800 PCIe", 756e12),
    ("H800", 989.4e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("A40", 149.7e12),
    ("A30", 165e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("MI300X", 1307.4e12),
    ("MI325X", 1307.4e12),
)


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


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of the device that the driver calls `device_name`; None on a CPU or an unknown device."""
    return next((peak for name, peak in PEAK_BF16_FLOPS if is_named(name, device_name)), None)


def is_named(name: str, device_name: str) -> bool:
    """Whether the name that the driver reports of a GPU is of a kind, such as `H100`."""
    return name != "cpu" and re.search(rf"\b{re.escape(name)}\b", device_name) is not None
