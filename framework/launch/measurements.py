"""What the ranks of `meshwright doctor --measure` find out together.

    all ranks at once     matmuls, passes over memory, attention, calls, copies: as in a step, when all cores are taken
    together              collectives of each kind and size
    rank 0 alone          what it writes to disk

The result is the median over ranks.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from framework.comm.collectives import all_gather, all_reduce, all_to_all, barrier, gather_objects, reduce_scatter
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh
from framework.comm.objects import broadcast_object
from framework.comm.p2p import start_receive, start_send
from framework.launch import timings
from framework.launch.measure_order import Order
from framework.launch.timings import Effort
from framework.model.precision import DTYPES

# How long a message's calls in a round take, with what is computed between them.
BATCH_S = 20e-3
# The first calls among these ranks connect them.
WARM_UP = 3
# No message takes less.
LEAST_S = 1e-6


def measure(order: Order, mesh: Mesh) -> dict[str, Any]:
    """Measurements by name, equal on all ranks; the disk's rate on rank 0 alone. Collective."""
    effort = Effort(**order.effort)
    axis = mesh.axis("tp")
    say = partial(print, file=sys.stderr, flush=True) if mesh.rank == 0 else lambda _: None
    say(f"measuring with {order.ranks} ranks of {order.threads} threads each: matmuls")
    found: dict[str, Any] = combine(gather_objects(measure_compute(order, effort, axis, mesh.device), axis))
    say("measuring collectives")
    links = measure_links(axis, mesh.device, effort.pause_s, effort.message_bytes, order.ranks, effort.rounds)
    found["links"] = combine(gather_objects(links, axis))
    if mesh.rank == 0:
        say("measuring the disk")
        found["disk_rate"] = timings.time_disk(Path(order.folder), effort.disk_bytes)
    barrier(axis)
    return found


def measure_compute(order: Order, effort: Effort, axis: Communicator, device: torch.device) -> dict[str, Any]:
    """What this rank computes in a second while the others of the axis compute the same. Collective: ranks begin each part
    together."""
    edges = {
        name: broadcast_object(partial(timings.choose_edges, device, DTYPES[name], effort), axis)
        for name in order.dtypes
    }
    parts: dict[str, Callable[[], Any]] = {
        "matmul": lambda: {
            name: list(timings.time_matmuls(device, DTYPES[name], edges[name], effort.wide, effort.point_s))
            for name in edges
        },
        "gradient": lambda: {
            name: list(timings.time_gradients(device, DTYPES[name], edges[name], effort.wide, effort.point_s))
            for name in edges
        },
        "memory": lambda: list(timings.time_passes(device, effort.memory_bytes, effort.point_s)),
        "attention": lambda: {
            name: list(timings.time_attention(device, DTYPES[name], effort)) for name in order.dtypes
        },
        "softmax": lambda: timings.time_softmax(device, effort.point_s),
        "overhead_s": lambda: timings.time_overhead(device, sorted(effort.edges)[len(effort.edges) // 2]),
        "host_rate": lambda: timings.time_host_copy(device, effort.memory_bytes[-1], effort.point_s),
    }
    found: dict[str, Any] = {}
    for name, work in parts.items():
        barrier(axis)
        found[name] = work()
    return found


def measure_links(
    axis: Communicator, device: torch.device, pause_s: float, sizes: Sequence[int], multiple: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """(10^6 bytes, microseconds) of each kind of message among all ranks of the axis. multiple: of so many numbers of fp32 are
    all sizes. Collective.

    Kinds and sizes take turns, a few calls at a time: where threads are placed by the kernel, messages take some hundred
    microseconds for a while and some milliseconds for another, and each figure is to have its part of both."""
    between = timings.make_pause(device, pause_s)
    points = [
        (kind, num_bytes, make(axis, device, num_bytes // 4))
        for kind, make in _KINDS.items()
        for num_bytes in (ceil(size / 4 / multiple) * 4 * multiple for size in sizes)
    ]
    counts = [count_calls(work, between, axis, device) for *_, work in points]
    times: list[list[float]] = [[] for _ in points]
    for _ in range(rounds):
        for seconds, count, (*_, work) in zip(times, counts, points, strict=True):
            seconds.append(time_messages(work, between, count, axis, device))
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    for seconds, (kind, num_bytes, _) in zip(times, points, strict=True):
        messages = 2 if kind == "send" else 1
        found[kind].append((num_bytes / 1e6, 1e6 * max(mean(seconds), LEAST_S) / messages))
    return found


def count_calls(work: timings.Work, between: timings.Work, axis: Communicator, device: torch.device) -> int:
    """Calls that take a batch's time, the same on all ranks. Collective."""

    def both() -> None:
        between()
        work()

    timings.time_batch(both, device, WARM_UP)
    once_s = timings.time_batch(both, device, 1)
    return broadcast_object(lambda: min(timings.MOST_CALLS, max(1, ceil(BATCH_S / max(once_s, 1e-9)))), axis)


def time_messages(
    work: timings.Work, between: timings.Work, count: int, axis: Communicator, device: torch.device
) -> float:
    """Mean seconds of a call that all ranks make together, so often, computing in between as a step does. Collective.

    On a CPU the threads that carry a message have to get a core first, and one that computes keeps it for a while: where ranks
    do nothing but send, messages take a tenth of what they take in a step. Some calls come through at once and some wait, and a
    step has many of them: so the mean counts, of (both) - (computing alone).
    """
    alone_s = timings.time_batch(between, device, count)
    barrier(axis)
    began_s = time.perf_counter()
    for _ in range(count):
        between()
        work()
    timings.finish(device)
    return (time.perf_counter() - began_s) / count - alone_s


def combine(found: Sequence[Any]) -> Any:
    """The median of what ranks found, number by number: all have the same names and sizes."""
    first = found[0]
    if isinstance(first, dict):
        return {name: combine([each[name] for each in found]) for name in first}
    if isinstance(first, list | tuple):
        return [combine(list(each)) for each in zip(*found, strict=True)]
    return median(found)


def _reduce(axis: Communicator, device: torch.device, numel: int) -> Callable[[], None]:
    x = torch.zeros(numel, device=device)
    return lambda: all_reduce(x, axis)


def _gather(axis: Communicator, device: torch.device, numel: int) -> Callable[[], None]:
    out = torch.zeros(numel, device=device)
    x = torch.zeros(numel // axis.size, device=device)
    return lambda: all_gather(out, x, axis)


def _scatter(axis: Communicator, device: torch.device, numel: int) -> Callable[[], None]:
    x = torch.zeros(numel, device=device)
    out = torch.zeros(numel // axis.size, device=device)
    return lambda: reduce_scatter(out, x, axis)


def _exchange(axis: Communicator, device: torch.device, numel: int) -> Callable[[], None]:
    x = torch.zeros(axis.size, numel // axis.size, device=device)
    out = torch.zeros_like(x)
    return lambda: all_to_all(out, x, axis)


def _send(axis: Communicator, device: torch.device, numel: int) -> Callable[[], None]:
    """A message from each even rank to the next, and one back: two messages. An odd last rank has no peer."""
    x = torch.zeros(numel, device=device)
    peer = axis.rank ^ 1

    def there_and_back() -> None:
        if peer >= axis.size:
            return
        if axis.rank < peer:
            start_send(x, axis, peer).wait()
            start_receive(x, axis, peer).wait()
        else:
            start_receive(x, axis, peer).wait()
            start_send(x, axis, peer).wait()

    return there_and_back


_KINDS: Mapping[str, Callable[[Communicator, torch.device, int], Callable[[], None]]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "send": _send,
}
