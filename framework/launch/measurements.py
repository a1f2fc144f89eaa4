"""What the ranks of `meshwright doctor --measure` find out together.

    all ranks at once     matmuls, passes over memory, attention, calls, copies: as in a step, when all cores are taken
    together              collectives of each kind and size
    rank 0 alone          what it writes to disk; where ranks share a CPU, matmuls and passes with all of its cores

The result is the median over ranks.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from framework.comm.collectives import all_gather, all_reduce, all_to_all, barrier, gather_objects, reduce_scatter
from framework.comm.connect import Mesh
from framework.comm.objects import tell
from framework.comm.p2p import start_receive, start_send
from framework.launch import timings
from framework.launch.measure_order import Order
from framework.launch.timings import Effort
from framework.model.precision import DTYPES

# Batches of a collective, each of as many calls as take so long, with what is computed between them.
BATCHES, BATCH_S = 8, 25e-3
# The first calls among these ranks connect them.
WARM_UP = 3
# No message takes less.
LEAST_S = 1e-6


def measure(order: Order, mesh: Mesh) -> dict[str, Any]:
    """What was measured, by name; equal on all ranks, but for what rank 0 does alone and only it has. Collective."""
    effort = Effort(**order.effort)
    say = partial(print, file=sys.stderr, flush=True) if mesh.rank == 0 else lambda _: None
    say(f"measuring with {order.ranks} ranks of {order.threads} threads each: matmuls")
    found = combine(gather_objects(measure_compute(order, effort, mesh), mesh.axis("world")))
    say("measuring collectives")
    found["links"] = combine(gather_objects(measure_links(mesh, effort), mesh.axis("world")))
    if mesh.rank == 0:
        say("measuring the disk" + ", and one rank with all cores" * (order.device == "cpu"))
        found |= measure_alone(order, effort, found["edges"])
    barrier(mesh.axis("world"))
    return found


def measure_compute(order: Order, effort: Effort, mesh: Mesh) -> dict[str, Any]:
    """What this rank computes in a second while the others compute the same. Collective: ranks begin each part together."""
    device, world = mesh.device, mesh.axis("world")
    edges = {name: tell(partial(timings.choose_edges, device, DTYPES[name], effort), world) for name in order.dtypes}
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
        "overhead_s": lambda: timings.time_overhead(device, effort.point_s),
        "host_rate": lambda: timings.time_host_copy(device, effort.memory_bytes[-1], effort.point_s),
    }
    found: dict[str, Any] = {"edges": {name: list(each) for name, each in edges.items()}}
    for name, work in parts.items():
        barrier(world)
        found[name] = work()
    return found


def measure_alone(order: Order, effort: Effort, edges: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What rank 0 does while the others wait."""
    found: dict[str, Any] = {"disk_rate": timings.time_disk(Path(order.folder), effort.disk_bytes)}
    if order.device == "cpu":
        device = torch.device("cpu")
        torch.set_num_threads(order.cores)
        try:
            found["alone"] = {
                name: list(
                    timings.time_matmuls(
                        device, DTYPES[name], [round(each) for each in edges[name]], effort.wide, effort.point_s
                    )
                )
                for name in edges
            }
            found["memory_alone"] = list(timings.time_passes(device, effort.memory_bytes, effort.point_s))
        finally:
            torch.set_num_threads(order.threads)
    return found


def measure_links(mesh: Mesh, effort: Effort) -> dict[str, list[tuple[float, float]]]:
    """(10^6 bytes, microseconds) of each kind of message among all ranks. Collective."""
    between = timings.make_pause(mesh.device, effort.pause_s)
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, make in _KINDS.items():
        found[kind] = []
        messages = 2 if kind == "send" else 1
        for size in effort.message_bytes:
            num_bytes = ceil(size / 4 / mesh.topology.world) * 4 * mesh.topology.world
            seconds = time_collective(make(mesh, num_bytes // 4), between, mesh)
            found[kind].append((num_bytes / 1e6, 1e6 * seconds / messages))
    return found


def time_collective(work: timings.Work, between: timings.Work, mesh: Mesh) -> float:
    """Mean seconds of a call that all ranks make together, equally often, computing in between as a step does. Collective.

    On a CPU the threads that carry a message have to get a core first, and a thread that computes gives its core up when the
    kernel's tick comes: where ranks do nothing but send, messages take a tenth of what they take in a step. Most calls come
    through at once and some wait for the tick, and a step has many of them: so the mean counts, of (both) - (computing alone).
    """
    world, device = mesh.axis("world"), mesh.device

    def both() -> None:
        between()
        work()

    timings.time_batch(both, device, WARM_UP)
    once_s = timings.time_batch(both, device, 1)
    count = tell(lambda: min(timings.MOST_CALLS, max(1, ceil(BATCH_S / max(once_s, 1e-9)))), world)
    times = []
    for _ in range(BATCHES):
        alone_s = timings.time_batch(between, device, count)
        barrier(world)
        times.append(timings.time_batch(both, device, count) - alone_s)
    return max(mean(times), LEAST_S)


def combine(found: Sequence[Any]) -> Any:
    """The median of what ranks found, number by number: all have the same names and sizes."""
    first = found[0]
    if isinstance(first, dict):
        return {name: combine([each[name] for each in found]) for name in first}
    if isinstance(first, list | tuple):
        return [combine(list(each)) for each in zip(*found, strict=True)]
    return median(found)


def _reduce(mesh: Mesh, numel: int) -> Callable[[], None]:
    x = torch.zeros(numel, device=mesh.device)
    return lambda: all_reduce(x, mesh.axis("world"))


def _gather(mesh: Mesh, numel: int) -> Callable[[], None]:
    out = torch.zeros(numel, device=mesh.device)
    x = torch.zeros(numel // mesh.topology.world, device=mesh.device)
    return lambda: all_gather(out, x, mesh.axis("world"))


def _scatter(mesh: Mesh, numel: int) -> Callable[[], None]:
    x = torch.zeros(numel, device=mesh.device)
    out = torch.zeros(numel // mesh.topology.world, device=mesh.device)
    return lambda: reduce_scatter(out, x, mesh.axis("world"))


def _exchange(mesh: Mesh, numel: int) -> Callable[[], None]:
    x = torch.zeros(mesh.topology.world, numel // mesh.topology.world, device=mesh.device)
    out = torch.zeros_like(x)
    return lambda: all_to_all(out, x, mesh.axis("world"))


def _send(mesh: Mesh, numel: int) -> Callable[[], None]:
    """A message from each even rank to the next, and one back: two messages. An odd last rank has no peer."""
    axis, x = mesh.axis("world"), torch.zeros(numel, device=mesh.device)
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


_KINDS: Mapping[str, Callable[[Mesh, int], Callable[[], None]]] = {
    "all_reduce": _reduce,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "send": _send,
}
