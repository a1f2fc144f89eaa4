"""What a device computes and sends in a second, by data sheets: the peaks for MFU, and the rates by which `plan` tells the time.

A plan runs nothing. Where the recipe names no GPU whose rates are listed here it assumes an H100 and says so.
"""

import re
from dataclasses import dataclass

from framework.recipe.schema import Launch

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
# Bytes in a second of a GPU: those that it sends, one way, over its node's NVLinks (half of the data sheet's sum of both
# directions) and to other nodes, with a network adapter for each GPU as in NVIDIA's DGX systems (200 Gb/s for A100, 400 Gb/s for
# the others); and those of its memory.
RATES = {
    "A100": (300e9, 25e9, 2.0e12),
    "H100": (450e9, 50e9, 3.35e12),
    "H200": (450e9, 50e9, 4.8e12),
    "B200": (900e9, 50e9, 7.7e12),
}
# Bytes of memory of the largest variant of each, by its maker's data sheet.
LARGEST_MEMORY = {"A100": 80 * 10**9, "H100": 96 * 10**9, "H200": 141 * 10**9, "B200": 192 * 10**9}
ASSUMED = "H100"
# Before a message's first byte arrives, by NCCL's own model (src/graph/tuning.cc: a ring with the simple protocol): 8.4 us, and
# for a hop 3.4 us over NVLink, 14 us between nodes.
LATENCIES_S = (8.4e-6 + 3.4e-6, 8.4e-6 + 14e-6)
# The share of the peak that attention reaches: FlashAttention-2, which torch's SDPA calls, on an H100 (Shah et al. 2024,
# FlashAttention-3, abstract). FlashAttention-3 itself reaches up to twice that.
ATTENTION_SHARE = 0.35


@dataclass(frozen=True)
class Link:
    """What one device sends over: bytes in a second, one way, and seconds before the first of a message arrives."""

    rate: float
    latency_s: float

    def seconds(self, num_bytes: float, messages: int = 1) -> float:
        """Of so many bytes in so many messages, one behind the other."""
        return messages * self.latency_s + num_bytes / self.rate if num_bytes else 0.0


@dataclass(frozen=True)
class Machine:
    """Rates of one device. name: of the GPU; is_assumed: the recipe does not name it. attention_flops: FLOP/s that attention
    reaches; memory_rate: bytes that it reads and writes in a second."""

    name: str
    is_assumed: bool
    attention_flops: float
    memory_rate: float
    in_node: Link
    between_nodes: Link


def find_machine(launch: Launch) -> Machine:
    """The GPU that launch.gres names, such as gpu:h100, else the assumed one."""
    words = re.split(r"[^A-Z0-9]+", (launch.gres or "").upper())
    named = next((name for name in RATES if name in words), None)
    name = named or ASSUMED
    peak, (in_node, between_nodes, memory_rate) = peak_flops(name), RATES[name]
    assert peak is not None, f"{name} has links and no peak"
    links = [Link(*each) for each in zip((in_node, between_nodes), LATENCIES_S, strict=True)]
    return Machine(name, named is None, ATTENTION_SHARE * peak, memory_rate, *links)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 peak of the device that the driver calls `device_name`; None on a CPU or an unknown device."""
    for name, peak in PEAK_BF16_FLOPS:
        if re.search(rf"\b{re.escape(name)}\b", device_name):
            return peak
    return None
