"""Milliseconds of an optimizer's step by what its moments are kept in (`precision.moments`), and bytes of an element.

    python scripts/bench/moments.py [--optimizers adamw lion sgd] [--millions 8] [--rounds 15]

One rank on one CPU core: a shard of one matrix with rows of 1,024, as large as `--millions` says. Ways take turns; medians.
"""

import argparse
import statistics
import time
from typing import get_args

import torch

from framework.mesh.layout import Layout
from framework.optim.optimizers import FlatOptimizer
from framework.optim.states import MomentsDtype
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.recipe.schema import Optim

CPU = torch.device("cpu")
ROW = 1024


class Stepped:
    """An optimizer whose steps are timed. bytes_per_element: of its moments."""

    def __init__(self, name: str, moments: MomentsDtype, numel: int):
        shard = FlatShard((Layout((numel // ROW, ROW)),), torch.ones(numel), torch.randn(numel), ("w",))
        optim = Optim(name=name, momentum=0.9 if name == "sgd" else 0.0)  # type: ignore[arg-type]
        self._optimizer = FlatOptimizer(optim.name, optim, [ShardGroup("default", (shard,), 1.0, 0.1)], CPU, moments)
        memory = self._optimizer.states.memory(shard, 0, numel)
        self.bytes_per_element = sum(tensor.nbytes for tensor in memory) / numel
        self.taken_ms: list[float] = []

    def step(self) -> None:
        start = time.thread_time()
        one = torch.ones((), dtype=torch.float64)
        self._optimizer.step(1e-3, one, torch.tensor(False), len(self.taken_ms))
        self.taken_ms.append(1e3 * (time.thread_time() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=["adamw", "lion", "sgd"])
    parser.add_argument("--millions", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    numel = options.millions * (1 << 20)
    for name in options.optimizers:
        legal = [each for each in get_args(MomentsDtype) if (name, each) != ("lion", "int8")]
        ways = {moments: Stepped(name, moments, numel) for moments in legal}
        for _ in range(options.rounds):
            for way in ways.values():
                way.step()
        for moments, way in ways.items():
            median = statistics.median(way.taken_ms[1:])
            each = f"{way.bytes_per_element:.3f} bytes, {1e6 * median / numel:.1f} ns"
            print(f"{name:<6} {moments:<5} {median:8.1f} ms; an element {each}")


if __name__ == "__main__":
    main()
