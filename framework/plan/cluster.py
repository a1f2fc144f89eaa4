"""A machine as data (`recipes/cluster/*.yaml`): how long a matmul, a pass over memory and a collective take there."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import log
from typing import Literal

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True)
class Span:
    """A collective among the ranks of so many nodes. bus_rate: bytes in a second by the convention of nccl-tests: what a
    rank's link carries, so that n ranks take (n-1)/n of the bytes (all-reduce: twice) over it. latency_s: before a
    message's first byte, for each of a ring's n - 1 steps (all-reduce: twice)."""

    nodes: int
    latency_s: float
    bus_rate: Mapping[Collective, float]


@dataclass(frozen=True)
class Cluster:
    """Rates of one device and of the links between devices.

    name: of the file. device: as the driver calls it. peak_flops: FLOP/s by dtype (fp64, fp32, tf32, bf16, fp16, fp8),
    dense, by the maker's data sheet; of a measured CPU the best matmul. matmul_share: of the peak that a matmul of so many
    FLOPs reaches, points of a curve by log FLOPs. attention_share: of the peak that attention reaches. memory_bytes: of a
    device. memory_rate: bytes that it reads and writes in a second. host_rate: bytes from device to host in a second.
    disk_rate: of one node. spans: by rising number of nodes. price_per_hour: of one device, in dollars.
    failures_per_device_hour: expected. overhead_s: of launching one kernel. measured_on: fingerprint of the machine of a
    measured file, empty for data sheets."""

    name: str
    device: str
    ranks_per_node: int
    memory_bytes: int
    peak_flops: Mapping[str, float]
    matmul_share: tuple[tuple[float, float], ...]
    attention_share: float
    memory_rate: float
    host_rate: float
    disk_rate: float
    spans: tuple[Span, ...]
    price_per_hour: float
    failures_per_device_hour: float
    overhead_s: float = 0.0
    measured_on: str = ""

    def matmul_seconds(self, rows: int, inner: int, columns: int, dtype: str = "bf16") -> float:
        """Of [rows, inner] times [inner, columns]."""
        flops = 2.0 * rows * inner * columns
        return flops / (self.peak_flops[dtype] * interpolate(self.matmul_share, flops)) + self.overhead_s

    def memory_seconds(self, num_bytes: float) -> float:
        """Of a pass over memory that reads and writes so many bytes in all."""
        return num_bytes / self.memory_rate + self.overhead_s

    def collective_seconds(self, kind: Collective, num_bytes: float, ranks: int, nodes: int) -> float:
        """Of `ranks` ranks that lie on `nodes` nodes. num_bytes: of the whole tensor: what an all-gather returns, a
        reduce-scatter or an all-reduce takes, an all-to-all takes of one rank, a message is."""
        if ranks == 1 or not num_bytes:
            return 0.0
        span = next((each for each in self.spans if each.nodes >= nodes), self.spans[-1])
        if kind == "send":
            return span.latency_s + num_bytes / span.bus_rate[kind]
        passes = 2 if kind == "all_reduce" else 1
        steps = passes * (ranks - 1)
        return steps * span.latency_s + passes * (ranks - 1) / ranks * num_bytes / span.bus_rate[kind]


def interpolate(points: tuple[tuple[float, float], ...], at: float) -> float:
    """The value of a curve of points by rising abscissa, linear in the logarithm of the abscissa; constant beyond the
    ends."""
    for (left, low), (right, high) in pairwise(points):
        if at <= right:
            share = (log(max(at, left)) - log(left)) / (log(right) - log(left))
            return low + share * (high - low)
    return points[-1][1]
