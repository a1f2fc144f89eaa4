"""Devices in numbers: their peak FLOP/s, the share of it that useful FLOPs reach (MFU; model/flops.py counts them), and the peak
memory of this rank."""

import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from framework.recipe.schema import Cluster

if TYPE_CHECKING:
    import torch

_STATUS = Path("/proc/self/status")

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


def mfu(tokens_per_s: float, flops_per_token: float, num_devices: int, peak: float | None) -> float | None:
    """Share of the peak of all devices, 0 to 1, that useful FLOPs reach; None without a known peak."""
    return None if peak is None else tokens_per_s * flops_per_token / (num_devices * peak)


def find_peak(device_name: str, cluster: Cluster) -> float | None:
    """Dense bf16 peak of the GPU that the driver calls `device_name`: from the recipe's cluster if that has such GPUs, else
    from the makers' data sheets; None of a device in neither."""
    stated = cluster.matmul.get("bf16")
    if cluster.name is not None and stated is not None and _is_named(cluster.device, device_name):
        return stated.peak_tflops * 1e12
    return peak_flops(device_name)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of the device that the driver calls `device_name`; None on a CPU or an unknown device."""
    return next((peak for name, peak in PEAK_BF16_FLOPS if _is_named(name, device_name)), None)


def _is_named(name: str, device_name: str) -> bool:
    return name != "cpu" and re.search(rf"\b{re.escape(name)}\b", device_name) is not None


def peak_memory_bytes(device: "torch.device") -> int:
    """CUDA: the most bytes that tensors held at once since the process began; CPU: the process's peak resident set.

    On Linux the kernel's VmHWM is read rather than `ru_maxrss`, which a process inherits from the one that started it: a
    small rank would show the memory of a large launcher.
    """
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
