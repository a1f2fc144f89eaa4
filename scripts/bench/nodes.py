"""Seconds of a step between "nodes" of this machine whose network has a rate: does ZeRO++ save what its bytes say?

    python scripts/bench/nodes.py [--rate-mb 2] [--steps 5] [--hidden 256]

Four gloo ranks are two nodes of two. A message from the other node lands in a rank when its adapter has carried it: one message
after the other, so many bytes a second; within a node nothing is slowed. Steps with and without the network take turns. Printed
are medians of the slowest rank, what leaves a node by the ledger, and the seconds that the bytes alone take at that rate.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing
from transformers import AutoConfig

from framework.comm import ledger
from framework.comm.collectives import all_reduce, barrier
from framework.comm.communicator import Communicator, Message
from framework.comm.connect import connect
from framework.plan.plan import make_plan, make_topology
from framework.recipe.schema import Batch, Launch, Memory, Precision, Recipe, Train, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share

WORLD, ON_NODE = 4, 2
FREE = 1e15  # bytes/s of a network that nobody notices
EXACT = Zero(stage=3, bucket_bytes=0)
SIDES = {
    "zero 3": EXACT,
    "qgZ": replace(EXACT, quantize_reduce="int4"),
    "hpZ": replace(EXACT, secondary_shard="node"),
    "qwZ": replace(EXACT, quantize_gather="int8"),
    "all three": replace(EXACT, quantize_gather="int8", secondary_shard="node", quantize_reduce="int4"),
}


class Adapter:
    """A rank's link from other nodes, which carries one message after the other."""

    def __init__(self, rate: float):
        self._rate, self._free = rate, 0.0

    def carry(self, num_bytes: int) -> float:
        """When a message has come that is asked for now."""
        self._free = max(self._free, time.perf_counter()) + num_bytes / self._rate
        return self._free


class Slowed:
    """A message whose wait lasts until the adapter has carried it."""

    def __init__(self, message: Message, at: float):
        self._message, self._at = message, at

    def wait(self) -> None:
        self._message.wait()
        time.sleep(max(0.0, self._at - time.perf_counter()))


@contextmanager
def network(rate: float):
    """A context in which messages between nodes come at a rate, in bytes/s."""
    adapter, receive = Adapter(rate), Communicator.receive

    def receive_slowly(axis: Communicator, x: torch.Tensor, source: int, tag: int) -> Any:
        message = receive(axis, x, source, tag)
        return message if axis.is_on_node(source) else Slowed(message, adapter.carry(x.nbytes))

    with patch.object(Communicator, "receive", receive_slowly):
        yield


def make_recipe(zero: Zero) -> Recipe:
    """In bf16, with all gradients reduced in bf16 where they are not coded."""
    if zero.quantize_gather != "none" or zero.quantize_reduce != "none":
        zero = replace(zero, quantize_min_elements=4096)
    return Recipe(
        train=Train(steps=100),
        batch=Batch(sequences_per_step=WORLD, context=32),
        memory=Memory(compile="never"),
        precision=Precision("bf16", "fp32", "bf16"),
        zero=zero,
        launch=Launch(kind="slurm", ranks=WORLD, ranks_per_node=ON_NODE, device="cpu"),
    )


def time_sides(rank: int, rendezvous: str, rate: float, steps: int, hidden: int) -> None:
    """Print a line per layout, from rank 0."""
    torch.set_num_threads(1)
    config = AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    if rank == 0:
        print(f"| {rate / 1e6:g} MB/s between nodes | MB that leave | s by bytes | s free | s | s more than free |")
        print("|---|---|---|---|---|---|")
    for number, (name, zero) in enumerate(SIDES.items()):
        recipe = make_recipe(zero)
        mesh = connect(make_topology(recipe, config), torch.device("cpu"), f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, config), mesh)
        microbatches = share(make_batches(config, 1, WORLD, recipe.batch.context, 1)[0], 1, mesh)
        seconds: dict[float, list[float]] = {FREE: [], rate: []}
        for turn in range(steps + 1):
            for speed, times in seconds.items():
                before = ledger.snapshot(mesh, between_nodes=True)
                barrier(mesh.axis("world"))
                started = time.perf_counter()
                with network(speed):
                    train_step(run, microbatches, 2 * turn, 1e-3)
                took = torch.tensor([time.perf_counter() - started])
                all_reduce(took, mesh.axis("world"), "max")
                if turn:
                    times.append(took.item())
        away = ledger.difference(ledger.snapshot(mesh, between_nodes=True), before)["shard"]
        sent = sum(num_bytes for _, num_bytes in away.values())
        if rank == 0:
            free, slow = (statistics.median(times) for times in seconds.values())
            row = f"{sent / 1e6:.2f} | {sent / rate:.2f} | {free:.2f} | {slow:.2f} | {slow - free:.2f}"
            print(f"| {name} | {row} |", flush=True)
        run.close()
        mesh.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seconds of a step over a slow network between two nodes of this machine."
    )
    parser.add_argument("--rate-mb", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "rendezvous").as_uri()
        arguments = (rendezvous, 1e6 * options.rate_mb, options.steps, options.hidden)
        torch.multiprocessing.spawn(time_sides, arguments, nprocs=WORLD)


if __name__ == "__main__":
    main()
