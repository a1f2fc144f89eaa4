"""A device's peak FLOP/s, and the share of it that a run's useful FLOPs reach (MFU; model/flops.py counts those)."""

import re

# Dense bf16 tensor-core peak of one device, FLOP/s, by a part of the name that the driver reports; the first match counts.
# From the makers' data sheets, halved where they state the figure "with sparsity". SXM unless the name says otherwise.
PEAK_BF16_FLOPS = (
    ("GB200", 2500e12),
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


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of the device that the driver calls `device_name`; None on a CPU or an unknown device."""
    for name, peak in PEAK_BF16_FLOPS:
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            return peak
    return None


def mfu(tokens_per_s: float, flops_per_token: float, num_devices: int, peak: float | None) -> float | None:
    """Share of the peak of all devices, 0 to 1, that useful FLOPs reach; None without a known peak."""
    return None if peak is None else tokens_per_s * flops_per_token / (num_devices * peak)
