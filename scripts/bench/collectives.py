"""Milliseconds per collective over gloo, torch's own form beside ours: why comm/algorithms.py is as it is.

    python scripts/bench/collectives.py [--ranks 2] [--rounds 15] [--megabytes 0.25 4 16 64]

Forms take turns in one set of ranks, so that a busy machine slows all of them; the table shows medians over rounds of
the slowest rank. `full size` is the gathered, or unreduced, fp32 tensor. Buffers are reused, except what a form
allocates itself.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from framework.comm import algorithms, collectives
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.mesh.topology import Topology

Algorithm = Callable[[], None]


def forms_of(axis: Communicator, num_bytes: int) -> dict[str, Algorithm]:
    """Algorithms to time, by column title, on a full tensor of so many bytes."""
    numel = num_bytes // 4 // axis.size * axis.size
    full, other, part = torch.ones(numel), torch.ones(numel), torch.ones(numel // axis.size)
    received = torch.ones(axis.size, numel // axis.size)
    own_part = full.view(axis.size, -1)[axis.rank]

    def scatter_by_all_to_all() -> None:
        dist.all_to_all_single(received, full, group=axis.group)
        torch.sum(received, 0, out=part)

    return {
        "gather: torch": lambda: algorithms.gather_by_tensor(full, part, axis).wait(),
        "gather: ours": lambda: collectives.all_gather(full, own_part, axis),
        "scatter: torch": lambda: algorithms.scatter_by_tensor(part, full, axis).wait(),
        "scatter: all-to-all": scatter_by_all_to_all,
        "scatter: ours": lambda: collectives.reduce_scatter(part, full, axis),
        "all-to-all": lambda: collectives.all_to_all(other, full, axis),
        "all-reduce": lambda: collectives.all_reduce(full, axis),
    }


def time_forms(rank: int, world: int, rendezvous: str, sizes_bytes: list[int], rounds: int) -> None:
    """Print one line per size, from rank 0."""
    torch.set_num_threads(1)
    mesh = connect(Topology(dp=world), torch.device("cpu"), rendezvous, rank)
    axis = mesh.axis("dp")
    for num_bytes in sizes_bytes:
        calls = forms_of(axis, num_bytes)
        times_ms: dict[str, list[float]] = {title: [] for title in calls}
        for turn in range(rounds + 2):
            for title, call in calls.items():
                collectives.barrier(axis)
                start = time.perf_counter()
                call()
                elapsed_ms = torch.tensor([1e3 * (time.perf_counter() - start)])
                collectives.all_reduce(elapsed_ms, axis, "max")
                if turn >= 2:
                    times_ms[title].append(elapsed_ms.item())
        if rank == 0:
            if num_bytes == sizes_bytes[0]:
                print(f"| {world} ranks | {' | '.join(calls)} |\n|{'---|' * (len(calls) + 1)}")
            medians = (f"{statistics.median(times):.2f}" for times in times_ms.values())
            print(f"| {num_bytes / 2**20:g} MiB | {' | '.join(medians)} |", flush=True)
    mesh.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Milliseconds per collective over gloo, torch's form beside ours.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.25, 4, 16, 64])
    options = parser.parse_args()
    sizes_bytes = [int(size * 2**20) for size in options.megabytes]
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "rendezvous").as_uri()
        arguments = (options.ranks, rendezvous, sizes_bytes, options.rounds)
        torch.multiprocessing.spawn(time_forms, arguments, nprocs=options.ranks)


if __name__ == "__main__":
    main()
