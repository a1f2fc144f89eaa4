"""Measurements of the ranks of `meshwright doctor --measure`: operations as training calls them, on all ranks at once.

    each rank, all at once    matmuls, passes over memory, attention, calls, copies: as in a step, when all cores are taken
    together                  collectives of each kind and size
    rank 0                    writing to disk

A figure is the median over ranks of the median of batches, each of as many calls as take a millisecond: a call that a busy
machine holds up moves it little.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, product
from math import ceil
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from framework.comm.collectives import all_gather, all_reduce, all_to_all, barrier, reduce_scatter
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh
from framework.comm.objects import all_gather_object, broadcast_object
from framework.comm.p2p import start_receive, start_send
from framework.comm.transfer import pin, upload
from framework.model.matmul import accumulate_matmul
from framework.model.precision import DTYPES

BATCH_S, LEAST_BATCHES, MOST_BATCHES, MOST_CALLS = 1e-3, 5, 15, 2000
# Batches of calls that take long.
LEAST_LONG = 3
# A layer's weights are used once for a microbatch: matmuls take theirs in turn from so many bytes, of at most so many tensors.
ROTATED_BYTES, ROTATED = 32 << 20, 16
# Calls between two matmuls of a layer's forward: some ten, half of them in backward.
CHAIN = 5
CHAINS = 60
# Tokens, vocabulary size.
LOGITS = (256, 8192)
PAUSE_EDGE = 256
# Seconds of a message's calls in a round, with the computing between them.
MESSAGES_S = 20e-3
# The first calls among these ranks connect them.
WARM_UP = 3
# No message takes less.
LEAST_S = 1e-6

Work = Callable[[], object]
Rates = tuple[float, float, float, float]


@dataclass(frozen=True)
class Effort:
    """The amount of measurement."""

    edges: tuple[int, ...]  # sizes of matmuls, of which every triple is multiplied
    wide: int  # one more size for features out, as of a vocabulary
    memory_bytes: tuple[int, ...]  # bytes that a pass reads and writes
    message_bytes: tuple[int, ...]  # bytes of collectives
    contexts: tuple[int, ...]  # attention: contexts, features of a head, features of all heads together, tokens
    features: tuple[int, ...]
    width: int
    tokens: int
    disk_bytes: int  # bytes written to disk
    pause_s: float  # seconds of computing between two messages, as between those of a step
    rounds: int  # rounds over all messages
    point_s: float = 0.05  # seconds for a figure, but for the fewest batches
    pass_s: float = 3.0  # seconds for all matmuls once, else the largest edges are left out


ON_CPU = Effort(
    edges=(32, 128, 512, 2048),
    wide=8192,
    memory_bytes=(1 << 16, 1 << 20, 1 << 23, 1 << 26, 1 << 28),
    message_bytes=(1 << 12, 1 << 16, 1 << 19, 1 << 20, (1 << 20) + 4096, 1 << 23, 1 << 25),
    contexts=(64, 256, 1024),
    features=(16, 32, 128),
    width=256,
    tokens=1024,
    disk_bytes=1 << 28,
    pause_s=2e-3,
    rounds=14,
)
ON_GPU = Effort(
    edges=(64, 256, 1024, 4096, 16384),
    wide=65536,
    memory_bytes=(1 << 20, 1 << 24, 1 << 27, 1 << 30),
    message_bytes=(1 << 14, 1 << 18, 1 << 22, 1 << 25, 1 << 28),
    contexts=(512, 2048, 8192, 32768),
    features=(64, 128),
    width=2048,
    tokens=32768,
    disk_bytes=1 << 30,
    pause_s=0.0,
    rounds=8,
)


def measure(
    mesh: Mesh, dtypes: Sequence[str], folder: Path, threads: int, effort: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Measurements by name, equal on all ranks; the disk's rate on rank 0 alone. Collective. effort: fields of `Effort`, None:
    those for the device. dtypes: of matmuls and attention, as recipes name them. folder: on the disk that is timed."""
    amount = Effort(**effort) if effort else ON_GPU if mesh.device.type == "cuda" else ON_CPU
    axis = mesh.axis("tp")
    say = partial(print, file=sys.stderr, flush=True) if mesh.rank == 0 else lambda _: None
    say(f"measuring with {axis.size} ranks of {threads} threads each: matmuls")
    found: dict[str, Any] = combine(all_gather_object(measure_compute(dtypes, amount, axis, mesh.device), axis))
    say("measuring collectives")
    found["links"] = combine(all_gather_object(measure_links(axis, mesh.device, amount), axis))
    if mesh.rank == 0:
        say("measuring the disk")
        found["disk_rate"] = time_disk(folder, amount.disk_bytes)
    barrier(axis)
    return found


def measure_compute(dtypes: Sequence[str], effort: Effort, axis: Communicator, device: torch.device) -> dict[str, Any]:
    """Rates of this rank while the others of the axis compute the same. Collective: ranks begin each part together."""
    edges = {name: broadcast_object(partial(choose_edges, device, DTYPES[name], effort), axis) for name in dtypes}
    middle = sorted(effort.edges)[len(effort.edges) // 2]

    def of_dtypes(time_shapes: Callable[[torch.dtype, Sequence[int]], Iterator[Rates]]) -> dict[str, list[Rates]]:
        return {name: list(time_shapes(DTYPES[name], edges[name])) for name in dtypes}

    parts: dict[str, Callable[[], Any]] = {
        "matmul": lambda: of_dtypes(partial(time_products, device, effort, _linear, (False, False, True))),
        "gradient": lambda: of_dtypes(partial(time_products, device, effort, _gradient, (True, False, False))),
        "memory": lambda: list(time_passes(device, effort.memory_bytes, effort.point_s)),
        "attention": lambda: of_dtypes(lambda dtype, _: time_attention(device, dtype, effort)),
        "softmax": lambda: time_softmax(device, effort.point_s),
        "overhead_s": lambda: time_overhead(device, middle),
        "host_rate": lambda: time_host_copy(device, effort.memory_bytes[-1], effort.point_s),
    }
    found: dict[str, Any] = {}
    for name, work in parts.items():
        barrier(axis)
        found[name] = work()
    return found


def measure_links(axis: Communicator, device: torch.device, effort: Effort) -> dict[str, list[tuple[float, float]]]:
    """(10^6 bytes, microseconds) of each kind of message among all ranks of the axis. Collective.

    Kinds and sizes take turns, a few calls at a time: where threads are placed by the kernel, messages take some hundred
    microseconds for a while and some milliseconds for another, and each figure is to have its part of both."""
    between = make_pause(device, effort.pause_s)
    points = [
        (kind, 4 * numel, make(axis, device, numel))
        for kind, make in _KINDS.items()
        for numel in (ceil(size / 4 / axis.size) * axis.size for size in effort.message_bytes)
    ]
    counts = [count_calls(work, between, axis, device) for *_, work in points]
    times: list[list[float]] = [[] for _ in points]
    for _ in range(effort.rounds):
        for seconds, count, (*_, work) in zip(times, counts, points, strict=True):
            seconds.append(time_messages(work, between, count, axis, device))
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in _KINDS}
    for seconds, (kind, num_bytes, _) in zip(times, points, strict=True):
        messages = 2 if kind == "send" else 1
        found[kind].append((num_bytes / 1e6, 1e6 * max(mean(seconds), LEAST_S) / messages))
    return found


def count_calls(work: Work, between: Work, axis: Communicator, device: torch.device) -> int:
    """Calls that take a batch's time, the same on all ranks. Collective."""

    def both() -> None:
        between()
        work()

    count = calibrate(both, device, MESSAGES_S, WARM_UP)
    return broadcast_object(lambda: count, axis)


def time_messages(work: Work, between: Work, count: int, axis: Communicator, device: torch.device) -> float:
    """Mean seconds of a call that all ranks make together, so often, computing in between as a step does. Collective.

    On a CPU the threads that carry a message have to get a core first, and one that computes keeps it for a while: where ranks
    do nothing but send, messages take a tenth of what they take in a step. Some calls come through at once and some wait, and a
    step has many of them: so the mean counts, of (both) - (computing alone).
    """
    alone_s = time_batch(between, device, count)
    barrier(axis)
    began_s = time.perf_counter()
    for _ in range(count):
        between()
        work()
    finish(device)
    return (time.perf_counter() - began_s) / count - alone_s


def combine(found: Sequence[Any]) -> Any:
    """The median over ranks, number by number: all have the same names and sizes."""
    first = found[0]
    if isinstance(first, dict):
        return {name: combine([each[name] for each in found]) for name in first}
    if isinstance(first, list | tuple):
        return [combine(list(each)) for each in zip(*found, strict=True)]
    return median(found)


def _send(x: Tensor, axis: Communicator) -> None:
    """Send a message from each even rank to the next, and one back: two messages. An odd last rank has no peer."""
    peer = axis.rank ^ 1
    if peer >= axis.size:
        return
    for start in (start_send, start_receive) if axis.rank < peer else (start_receive, start_send):
        start(x, axis, peer).wait()


def _make_message(
    work: Callable[[Tensor, Tensor, Communicator], object],
    axis: Communicator,
    device: torch.device,
    numel: int,
) -> Work:
    """A call of a collective on `numel` numbers and on a rank's part of them."""
    whole = torch.zeros(axis.size, numel // axis.size, device=device)
    part = torch.zeros_like(whole[0])
    return lambda: work(whole, part, axis)


def _make_exchange(axis: Communicator, device: torch.device, numel: int) -> Work:
    x = torch.zeros(axis.size, numel // axis.size, device=device)
    out = torch.zeros_like(x)
    return lambda: all_to_all(out, x, axis)


_KINDS: Mapping[str, Callable[[Communicator, torch.device, int], Work]] = {
    "all_reduce": partial(_make_message, lambda whole, part, axis: all_reduce(whole, axis)),
    "all_gather": partial(_make_message, lambda whole, part, axis: all_gather(whole.view(-1), part, axis)),
    "reduce_scatter": partial(_make_message, lambda whole, part, axis: reduce_scatter(part, whole.view(-1), axis)),
    "all_to_all": _make_exchange,
    "send": partial(_make_message, lambda whole, part, axis: _send(whole, axis)),
}


def time_call(work: Work, device: torch.device, point_s: float) -> float:
    """Median seconds of a call, once it has been made before."""
    count = calibrate(work, device)
    times: list[float] = []
    began_s = time.perf_counter()
    # A call that takes longer than all batches were to take is steady: what holds up a short one is little of it.
    while len(times) < (LEAST_BATCHES if sum(times) < point_s else LEAST_LONG) or (
        len(times) < MOST_BATCHES and time.perf_counter() - began_s < point_s
    ):
        times.append(time_batch(work, device, count))
    return median(times)


def calibrate(work: Work, device: torch.device, batch_s: float = BATCH_S, warm_up: int = 1) -> int:
    """Calls that take a batch's time, once the work has been done `warm_up` times."""
    time_batch(work, device, warm_up)
    return min(MOST_CALLS, max(1, ceil(batch_s / max(time_batch(work, device, 1), 1e-9))))


def time_batch(work: Work, device: torch.device, count: int) -> float:
    """Seconds of one of so many calls."""
    finish(device)
    began_s = time.perf_counter()
    for _ in range(count):
        work()
    finish(device)
    return (time.perf_counter() - began_s) / count


def finish(device: torch.device) -> None:
    """Wait for what the device has still to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_pause(device: torch.device, seconds: float) -> Work:
    """A function that computes matmuls for about so long, as between the messages of a step."""
    once = _linear(PAUSE_EDGE, PAUSE_EDGE, PAUSE_EDGE, device, torch.float32)
    count = round(seconds / time_call(once, device, 10 * BATCH_S))

    def pause() -> None:
        for _ in range(count):
            once()

    return pause


def choose_edges(device: torch.device, dtype: torch.dtype, effort: Effort) -> tuple[int, ...]:
    """The edges whose matmuls are done in time, by the rate of one of middle size."""
    middle = sorted(effort.edges)[len(effort.edges) // 2]
    rate = 2 * middle**3 / time_call(_linear(middle, middle, middle, device, dtype), device, effort.point_s)
    edges = effort.edges
    while len(edges) > 2 and 2 * sum(edges) ** 3 / rate > effort.pass_s:
        edges = edges[:-1]
    return edges


def time_products(
    device: torch.device,
    effort: Effort,
    make: Callable[[int, int, int, torch.device, torch.dtype], Work],
    are_wide: Sequence[bool],
    dtype: torch.dtype,
    edges: Sequence[int],
) -> Iterator[Rates]:
    """(rows, inner, columns, TFLOP/s) of matmuls of each triple of edges. are_wide: the sizes that are `wide`, too.

    `_linear`: tokens, features in, features out; `_gradient`: features out, tokens, features in."""
    for rows, inner, columns in product(*((*edges, effort.wide) if is_wide else edges for is_wide in are_wide)):
        seconds = time_call(make(rows, inner, columns, device, dtype), device, effort.point_s)
        yield rows, inner, columns, 2e-12 * rows * inner * columns / seconds


def _gradient(rows: int, inner: int, columns: int, device: torch.device, dtype: torch.dtype) -> Work:
    """A weight gradient [rows, columns] of `inner` tokens, added to the main gradient in fp32: dW += dY^T X."""
    left, right = (torch.randn(inner, size, device=device).to(dtype) for size in (rows, columns))
    count = max(1, min(ROTATED, ROTATED_BYTES // (4 * rows * columns)))
    turn = cycle([torch.zeros(rows, columns, device=device) for _ in range(count)])
    return lambda: accumulate_matmul(next(turn), left, right, False)


def _linear(rows: int, inner: int, columns: int, device: torch.device, dtype: torch.dtype) -> Work:
    """A linear layer's forward [rows, columns]."""
    x = torch.randn(rows, inner, device=device).to(dtype)
    count = max(1, min(ROTATED, ROTATED_BYTES // (columns * inner * dtype.itemsize)))
    turn = cycle([torch.randn(columns, inner, device=device).to(dtype) for _ in range(count)])
    return lambda: functional.linear(x, next(turn))


def time_passes(device: torch.device, sizes: Sequence[int], point_s: float) -> Iterator[tuple[float, float]]:
    """(10^6 bytes, 10^9 bytes/s) of passes that read one half of the bytes and write the other."""
    for num_bytes in sizes:
        x = torch.ones(num_bytes // 8, device=device)
        out = torch.empty_like(x)
        seconds = time_call(lambda x=x, out=out: torch.mul(x, 1.5, out=out), device, point_s)  # type: ignore[misc]
        yield num_bytes / 1e6, num_bytes / seconds / 1e9


def time_attention(device: torch.device, dtype: torch.dtype, effort: Effort) -> Iterator[Rates]:
    """(context, features of a head, TFLOP/s in forward, in backward), by the pairs that a causal mask leaves: two matmuls and
    five."""
    for context, features in product(effort.contexts, effort.features):
        sequences, heads = max(1, effort.tokens // context), effort.width // features
        shape = (sequences, heads, context, features)
        q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        gradient = torch.ones(shape, device=device, dtype=dtype)

        def forward(q=q, k=k, v=v) -> Tensor:  # type: ignore[no-untyped-def]
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(forward=forward, inputs=(q, k, v), gradient=gradient) -> object:  # type: ignore[no-untyped-def]
            return torch.autograd.grad(forward(), inputs, gradient)

        forward_s = time_call(forward, device, effort.point_s)
        backward_s = max(time_call(both, device, effort.point_s) - forward_s, forward_s)
        flops = 4.0 * sequences * effort.width * context * (context + 1) / 2
        yield context, features, 1e-12 * flops / forward_s, 2.5e-12 * flops / backward_s


def time_softmax(device: torch.device, point_s: float) -> float:
    """10^9 logits in a second whose logarithms of softmax are computed."""
    logits = torch.randn(LOGITS, device=device)
    return logits.numel() / time_call(lambda: torch.log_softmax(logits, -1), device, point_s) / 1e9


def time_overhead(device: torch.device, edge: int) -> float:
    """Seconds of a call of torch's on next to nothing, in forward and backward together, as a step makes them: a few behind each
    matmul, whose operands have pushed the interpreter and torch out of the caches. In a loop of calls alone they take a third.
    edge: of the matmul."""
    between = _linear(edge, edge, edge, device, torch.float32)
    x = torch.ones(1, device=device, requires_grad=True)

    def chain() -> object:
        y = x
        for _ in range(CHAIN):
            y = y * 1.5
        return torch.autograd.grad(y, x)

    times = []
    for _ in range(CHAINS):
        between()
        times.append(time_batch(chain, device, 1))
    return median(times) / (2 * CHAIN)


def time_host_copy(device: torch.device, num_bytes: int, point_s: float) -> float:
    """Bytes in a second from the host's memory to the device; on a CPU from memory to memory."""
    x = pin(torch.ones(num_bytes // 4), device)
    out = torch.empty_like(x)
    copy = (lambda: upload(x, device)) if device.type == "cuda" else (lambda: out.copy_(x))
    return num_bytes / time_call(copy, device, point_s)


def time_disk(folder: Path, num_bytes: int) -> float:
    """Bytes in a second that are written to a file there and kept, which is then removed."""
    block, path = os.urandom(min(num_bytes, 1 << 24)), folder / f".meshwright-measure-{os.getpid()}"
    try:
        began_s = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(max(1, num_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return max(1, num_bytes // len(block)) * len(block) / (time.perf_counter() - began_s)
    finally:
        path.unlink(missing_ok=True)
