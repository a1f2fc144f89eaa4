"""What a device did, as a Chrome trace of torch.profiler has it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from scripts.bench.activation_offload import Interval, length, merge, overlap


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel or a copy, on a stream of the device. category: kernel or gpu_memcpy; num_bytes: of a copy."""

    category: str
    name: str
    stream: int
    when: Interval
    num_bytes: int = 0


def read_device_events(trace: Path) -> list[DeviceEvent]:
    """Kernels and copies, in the order of the file."""
    return [
        DeviceEvent(
            event["cat"],
            event["name"],
            event["args"]["stream"],
            (event["ts"], event["ts"] + event["dur"]),
            event["args"].get("bytes", 0),
        )
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy")
    ]


def share_under(some: Iterable[DeviceEvent], others: Iterable[DeviceEvent]) -> float:
    """The share of the time of some events in which one of the others runs too."""
    times = merge(event.when for event in some)
    return length(overlap(times, (event.when for event in others))) / length(times)
