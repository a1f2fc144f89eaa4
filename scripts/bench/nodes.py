"""Seconds of a step between "nodes" of this machine whose network has a rate: do ZeRO++, and tokens that cross once for each
node, save what their bytes say?

    python scripts/bench/nodes.py [--rate-mb 2] [--steps 5] [--hidden 256]         ZeRO++ on a dense model
    python scripts/bench/nodes.py --tokens [--top-k 2] [--context 256]             the Qwen3-MoE of expert.py, ep over both nodes

Four gloo ranks are two nodes of two. A message from the other node lands in a rank when its adapter has carried it: one message
after the other, so many bytes a second; within a node nothing is slowed. Sides take turns, and step with and without the network.
Printed are medians of the slowest rank, what leaves a node by the ledger, the seconds that the bytes alone take at that rate, and
the step over that of the first side.
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
from expert import FAMILY, MODEL
from transformers import AutoConfig, PretrainedConfig

from framework.comm.algorithms import Pending
from framework.comm.collectives import all_reduce, barrier, start_all_to_all
from framework.comm.communicator import Communicator, Message, read_traffic, subtract_traffic
from framework.comm.connect import connect
from framework.parallel.experts import route
from framework.plan.plan import make_plan, make_topology
from framework.recipe.schema import Batch, Launch, Memory, Parallel, Precision, Recipe, Train, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share

WORLD, ON_NODE = 4, 2
FREE = 1e15  # bytes/s of a network that nobody notices
EXACT = Zero(stage=3)
SIDES = {
    "zero 3": EXACT,
    "qgZ": replace(EXACT, quantize_reduce="int4"),
    "hpZ": replace(EXACT, secondary_shard="node"),
    "qwZ": replace(EXACT, quantize_gather="int8"),
    "all three": replace(EXACT, quantize_gather="int8", secondary_shard="node", quantize_reduce="int4"),
}


MIXTURE = Zero(stage=1)
WAYS = {
    "to each expert": Parallel(ep=WORLD, expert_hierarchical=None),
    "once a node": Parallel(ep=WORLD),
    "once a node, codes": Parallel(ep=WORLD, expert_dispatch="fp8"),
    "once a node, halves": Parallel(ep=WORLD, expert_overlap=True),
    "once a node, codes, halves": Parallel(ep=WORLD, expert_dispatch="fp8", expert_overlap=True),
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

    def __init__(self, message: Message | Pending, at: float):
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

    def exchange_slowly(out: torch.Tensor, x: torch.Tensor, axis: Communicator, *given: Any) -> Pending:
        pending = start_all_to_all(out, x, axis, *given)
        counts = given[0] if given else [len(out) // axis.size] * axis.size
        rows = sum(count for source, count in enumerate(counts) if not axis.is_on_node(source))
        slowed = Slowed(pending, adapter.carry(rows * out.nbytes // max(1, len(out))))
        return Pending([slowed]) if rows else pending

    with (
        patch.object(Communicator, "receive", receive_slowly),
        patch("framework.parallel.experts.rows.start_all_to_all", exchange_slowly),
        patch.object(route, "all_to_all", lambda *given: exchange_slowly(*given).wait()),
    ):
        yield


def make_recipe(zero: Zero, parallel: Parallel, options: argparse.Namespace) -> Recipe:
    """In bf16, with all gradients reduced in bf16 where they are not coded."""
    if zero.quantize_gather != "none" or zero.quantize_reduce != "none":
        zero = replace(zero, quantize_min_elements=4096)
    return Recipe(
        train=Train(steps=100),
        batch=Batch(WORLD * options.microbatches * options.sequences, None, options.sequences, options.context),
        memory=Memory(compile="never"),
        precision=Precision("bf16", "fp32", "bf16"),
        zero=zero,
        parallel=parallel,
        launch=Launch(kind="slurm", ranks=WORLD, ranks_per_node=ON_NODE, device="cpu"),
    )


def time_sides(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    """Print a line per side, from rank 0."""
    torch.set_num_threads(1)
    rate, config = 1e6 * options.rate_mb, llama(options.hidden)
    sides = {name: (zero, Parallel()) for name, zero in SIDES.items()}
    if options.tokens:
        sides = {name: (MIXTURE, WAYS[name]) for name in options.ways or WAYS}
        config = AutoConfig.for_model(FAMILY, **(MODEL | {"num_experts_per_tok": options.top_k}), use_cache=False)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    sent: dict[str, int] = {}
    for turn in range(options.steps):
        for number, (name, side) in enumerate(sides.items()):
            # A process has one mesh at a time, and sides have different ones.
            place = f"{rendezvous}-{turn}-{number}"
            seconds, sent[name] = time_steps(make_recipe(*side, options), config, place, rank, rate)
            found[name].append(seconds)
    if rank:
        return
    columns = "MB that leave | s by bytes | s free | s | s more than free | of the first"
    print(f"| {options.rate_mb:g} MB/s between nodes | {columns} |")
    print("|---|---|---|---|---|---|---|")
    first = statistics.median(slow for _, slow in next(iter(found.values())))
    for name, times in found.items():
        free, slow = map(statistics.median, zip(*times, strict=True))
        row = f"{sent[name] / 1e6:.2f} | {sent[name] / rate:.2f} | {free:.2f} | {slow:.2f} | {slow - free:.2f}"
        print(f"| {name} | {row} | {slow / first:.2f} |", flush=True)


def time_steps(
    recipe: Recipe, config: PretrainedConfig, rendezvous: str, rank: int, rate: float
) -> tuple[tuple[float, float], int]:
    """(seconds of a step without a network, and with one), of the slowest rank; bytes that leave this rank's node in a step."""
    mesh = connect(make_topology(recipe, config), torch.device("cpu"), rendezvous, rank)
    run = build(make_plan(recipe, config), mesh)
    batch = recipe.batch
    assert batch.sequences_per_step is not None
    sequences = make_batches(config, 1, batch.sequences_per_step, batch.context, 1)[0]
    microbatches = share(sequences, batch.sequences_per_microbatch, mesh)
    seconds = []
    for turn, speed in enumerate((FREE, FREE, rate)):  # the first step takes memory
        before = read_traffic(mesh.axes, between_nodes=True)
        barrier(mesh.axis("world"))
        started = time.perf_counter()
        with network(speed):
            train_step(run, microbatches, turn, 1e-3)
        took = torch.tensor([time.perf_counter() - started])
        all_reduce(took, mesh.axis("world"), "max")
        seconds.append(took.item())
    away = subtract_traffic(read_traffic(mesh.axes, between_nodes=True), before)
    sent = sum(num_bytes for axis, each in away.items() if axis != "world" for _, num_bytes in each.values())
    run.close()
    mesh.close()
    return (seconds[1], seconds[2]), sent


def llama(hidden: int) -> PretrainedConfig:
    """A dense model of four layers."""
    return AutoConfig.for_model(
        "llama", vocab_size=512, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Seconds of a step over a slow network between two nodes of this machine."
    )
    parser.add_argument("--rate-mb", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=1, help="of a rank and step: gradients are summed once")
    parser.add_argument("--sequences", type=int, default=1, help="of a microbatch; halves need two")
    parser.add_argument("--tokens", action="store_true", help="a mixture of experts over both nodes")
    parser.add_argument(
        "--ways", nargs="+", choices=list(WAYS), help="of tokens; the first is compared with; all by default"
    )
    parser.add_argument("--top-k", type=int, default=MODEL["num_experts_per_tok"], help="experts of a token")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = Path(folder, "rendezvous").as_uri()
        torch.multiprocessing.spawn(time_sides, (rendezvous, options), nprocs=WORLD)


if __name__ == "__main__":
    main()
