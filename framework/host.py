"""Cores and memory of this machine that a process may use, within the limits of its container or job."""

import os
from pathlib import Path

# What the kernel lets a container or a job take of the memory; "max" without a limit.
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
