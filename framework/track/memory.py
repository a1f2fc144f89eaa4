"""Peak memory of this rank."""

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: the most bytes that tensors held at once since the process began; CPU: the process's peak resident set.

    On Linux the kernel's VmHWM is read rather than `ru_maxrss`, which a process inherits from the one that started it: a
    small rank would show the memory of a large launcher.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
