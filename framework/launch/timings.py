"""What `meshwright doctor --measure` times on one rank, while the other ranks do the same: operations as training calls them.

A figure is the median of batches, each of as many calls as take a millisecond: what now and then holds up a call on a busy
machine moves it little.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional

from framework.comm.transfer import pin, upload
from framework.model.matmul import accumulate_matmul

BATCH_S, LEAST_BATCHES, MOST_BATCHES, MOST_CALLS = 1e-3, 5, 15, 2000
# Batches of calls that take long.
LEAST_LONG = 3
# A layer's weights are used once for a microbatch: matmuls take theirs in turn from so many bytes, of at most so many tensors.
ROTATED_BYTES, ROTATED = 32 << 20, 16
# Calls between two matmuls of a layer's forward: some ten, half of them in backward.
CHAIN = 5
CHAINS = 60
# Tokens and words.
LOGITS = (256, 8192)
PAUSE_EDGE = 256

Work = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How much is measured. edges: sizes of matmuls, of which every triple is multiplied; wide: one more for features out, as
    of a vocabulary; memory_bytes: that a pass reads and writes; message_bytes: of collectives;
    contexts, features, width, tokens: of attention, features of a head and of all heads together; disk_bytes:
    written to disk; pause_s: of computing between two messages, as between those of a step; rounds: over all
    messages; point_s: for a figure, but for the fewest batches; pass_s: for all matmuls once, else the largest edges are left
    out."""

    edges: tuple[int, ...]
    wide: int
    memory_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    contexts: tuple[int, ...]
    features: tuple[int, ...]
    width: int
    tokens: int
    disk_bytes: int
    pause_s: float
    rounds: int
    point_s: float = 0.05
    pass_s: float = 3.0


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


def calibrate(work: Work, device: torch.device) -> int:
    """Calls that take a batch's time, once the work has been done before."""
    time_batch(work, device, 1)
    return min(MOST_CALLS, max(1, ceil(BATCH_S / max(time_batch(work, device, 1), 1e-9))))


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
    """What computes for about so long: matmuls, as between the messages of a step."""
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


def time_matmuls(
    device: torch.device, dtype: torch.dtype, edges: Sequence[int], wide: int, point_s: float
) -> Iterator[tuple[float, float, float, float]]:
    """(tokens, features in, features out, TFLOP/s) of a linear layer's forward, for each triple of edges, features out `wide`
    too."""
    for rows, inner, columns in product(edges, edges, (*edges, wide)):
        seconds = time_call(_linear(rows, inner, columns, device, dtype), device, point_s)
        yield rows, inner, columns, 2e-12 * rows * inner * columns / seconds


def time_gradients(
    device: torch.device, dtype: torch.dtype, edges: Sequence[int], wide: int, point_s: float
) -> Iterator[tuple[float, float, float, float]]:
    """(features out, tokens, features in, TFLOP/s) of its weight gradient, likewise."""
    for rows, inner, columns in product((*edges, wide), edges, edges):
        seconds = time_call(_gradient(rows, inner, columns, device, dtype), device, point_s)
        yield rows, inner, columns, 2e-12 * rows * inner * columns / seconds


def _gradient(rows: int, inner: int, columns: int, device: torch.device, dtype: torch.dtype) -> Work:
    """A weight gradient [rows, columns] of `inner` tokens, added to the main gradient in fp32: dW += dY^T X."""
    left, right = (torch.randn(inner, size, device=device).to(dtype) for size in (rows, columns))
    count = max(1, min(ROTATED, ROTATED_BYTES // (4 * rows * columns)))
    turn = iter_forever([torch.zeros(rows, columns, device=device) for _ in range(count)])
    return lambda: accumulate_matmul(next(turn), left, right, False)


def _linear(rows: int, inner: int, columns: int, device: torch.device, dtype: torch.dtype) -> Work:
    x = torch.randn(rows, inner, device=device).to(dtype)
    size = columns * inner * dtype.itemsize
    count = max(1, min(ROTATED, ROTATED_BYTES // size))
    weights = [torch.randn(columns, inner, device=device).to(dtype) for _ in range(count)]
    turn = iter_forever(weights)
    return lambda: functional.linear(x, next(turn))


def iter_forever(items: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The items in turn, without end."""
    while True:
        yield from items


def time_passes(device: torch.device, sizes: Sequence[int], point_s: float) -> Iterator[tuple[float, float]]:
    """(10^6 bytes, 10^9 bytes/s) of passes that read one half of the bytes and write the other."""
    for num_bytes in sizes:
        x = torch.ones(num_bytes // 8, device=device)
        out = torch.empty_like(x)
        seconds = time_call(lambda x=x, out=out: torch.mul(x, 1.5, out=out), device, point_s)  # type: ignore[misc]
        yield num_bytes / 1e6, num_bytes / seconds / 1e9


def time_attention(
    device: torch.device, dtype: torch.dtype, effort: Effort
) -> Iterator[tuple[float, float, float, float]]:
    """(context, features of a head, TFLOP/s in forward, in backward), by the pairs that a causal mask leaves: two matmuls and
    five."""
    for context, features in product(effort.contexts, effort.features):
        sequences, heads = max(1, effort.tokens // context), effort.width // features
        shape = (sequences, heads, context, features)
        q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
        gradient = torch.ones(shape, device=device, dtype=dtype)

        def forward(q=q, k=k, v=v) -> torch.Tensor:  # type: ignore[no-untyped-def]
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
