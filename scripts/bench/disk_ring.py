"""The ring of offloaded states (`optim/disk_ring.py`) beside the disk itself, in turns on one file.

    python scripts/bench/disk_ring.py FOLDER [--mib 1024] [--rounds 7]

Every form moves the whole file once each way, in the ring's chunks, with direct I/O. Of each: the median of the rounds, and of
the ratio within a round, because a shared disk's speed changes from minute to minute.
  raw          one thread reads the whole file, then writes it: the disk's sequential bandwidth
  raw both     one thread reads it while another writes it, nothing between them: what no ring can pass
  ring         the ring with updates that do nothing
  ring adamw   with torch's fused AdamW on fp32 master and moments, in the main thread: what a step does
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from framework.optim.disk_ring import DiskShard, DiskState, DiskStates

KINDS = tuple(DiskState(name, torch.float32) for name in ("master", "exp_avg", "exp_avg_sq"))
STEP = torch.ones(())


def move(call: Callable[..., int], fd: int, num_bytes: int, chunk_bytes: int) -> None:
    """Read or write the file from its beginning to its end."""
    with mmap(-1, chunk_bytes) as buffer:
        for offset in range(0, num_bytes, chunk_bytes):
            size = min(chunk_bytes, num_bytes - offset)
            with memoryview(buffer) as view:
                moved = call(fd, [view[:size]], offset)
            assert moved == size, (offset, moved, size)


def raw(fd: int, num_bytes: int, chunk_bytes: int) -> None:
    """Read everything, then write everything: zeros, so the states are not used after it."""
    move(os.preadv, fd, num_bytes, chunk_bytes)
    move(os.pwritev, fd, num_bytes, chunk_bytes)


def raw_both(fd: int, num_bytes: int, chunk_bytes: int) -> None:
    """Read everything while everything is written."""
    with ThreadPoolExecutor(2) as threads:
        for moving in [threads.submit(move, call, fd, num_bytes, chunk_bytes) for call in (os.preadv, os.pwritev)]:
            moving.result()


def update_nothing(shard: int, where: slice, states: dict[str, Tensor]) -> None:
    """An update that costs no time."""


def make_adamw(numel: int) -> Callable[[int, slice, dict[str, Tensor]], None]:
    """An update with torch's fused AdamW. The gradient, [numel] of a chunk, is the same for all chunks."""
    gradient = torch.randn(numel)

    def update(shard: int, where: slice, states: dict[str, Tensor]) -> None:
        torch._fused_adamw_(
            [states["master"]], [gradient[: where.stop - where.start]], [states["exp_avg"]], [states["exp_avg_sq"]],
            [], [STEP], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return update


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the disk to measure")
    parser.add_argument("--mib", type=int, default=1024, help="of the file")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shard = DiskShard(args.mib * 2**20 // 12, KINDS)
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        DiskStates(Path(folder), "raw", [shard]) as plain,
        DiskStates(Path(folder), "ring", [shard]) as states,
    ):
        assert states.file.is_direct, "the page cache would be measured"
        chunk, num_bytes = states.chunks[0][0], states.file.num_bytes
        fd = os.open(plain.file.path, os.O_RDWR | os.O_DIRECT)
        adamw = make_adamw(shard.chunk_numel)
        forms: dict[str, Callable[[], None]] = {
            "raw": lambda: raw(fd, num_bytes, chunk.num_bytes),
            "raw both": lambda: raw_both(fd, num_bytes, chunk.num_bytes),
            "ring": lambda: states.update([0], update_nothing),
            "ring adamw": lambda: states.update([0], adamw),
        }
        print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {args.rounds} rounds")
        print(
            f"file {num_bytes / 2**20:.0f} MiB, chunk {chunk.num_bytes / 2**20:.2f} MiB, ring {states.host_bytes / 2**20:.1f} MiB"
        )
        report(measure(forms, args.rounds), 2 * num_bytes)
        os.close(fd)


def measure(forms: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each form by round, taking turns. The first round is left out: it writes blocks that were only allocated."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds + 1):
        for name, run in forms.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: taken[1:] for name, taken in seconds.items()}


def report(seconds: dict[str, list[float]], num_bytes: int) -> None:
    """A line for each form: MB/s of both ways together, and its speed over that of `raw` and `raw both` in the same round."""
    for name, taken in seconds.items():
        ratios = [
            [other / own for other, own in zip(seconds[against], taken, strict=True)] for against in ("raw", "raw both")
        ]
        words = ", ".join(
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f}) of {against}"
            for each, against in zip(ratios, ("raw", "raw both"), strict=True)
        )
        print(f"{name:10}  {num_bytes / statistics.median(taken) / 1e6:6.0f} MB/s   {words}")


if __name__ == "__main__":
    main()
