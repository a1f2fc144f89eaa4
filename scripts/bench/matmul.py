"""fp32 products of a linear layer on one CPU core: torch's own (MKL) beside the form that `model/matmul.py` takes (oneDNN).

    python scripts/bench/matmul.py

Rows are tokens x inputs x outputs. Forward is Y = X W^T, input gradient dX = dY W, weight gradient dW = dY^T X copied into
place. Both forms take turns; median of the rounds, GFLOP/s.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from framework.model.matmul import matmul

SHAPES = ((128, 512, 512), (128, 512, 1408), (128, 512, 8192), (1024, 512, 1408), (1024, 512, 8192))


def measure(forms: dict[str, Callable[[], object]], flops: float, rounds: int) -> dict[str, float]:
    """GFLOP/s of each form, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds + 2):
        for name, run in forms.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: flops / statistics.median(taken[2:]) / 1e9 for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread, {rounds} rounds")
    print("| tokens x in x out | forward torch / ours | input gradient torch / ours | weight gradient torch / ours |")
    print("|---|---|---|---|")
    for tokens, inputs, outputs in SHAPES:
        x, w, dy = torch.randn(tokens, inputs), torch.randn(outputs, inputs), torch.randn(tokens, outputs)
        place = torch.empty_like(w)
        flops = 2.0 * tokens * inputs * outputs
        forms: list[dict[str, Callable[[], object]]] = [
            {"torch": lambda x=x, w=w: F.linear(x, w), "ours": lambda x=x, w=w: matmul(x, w)},
            {"torch": lambda dy=dy, w=w: dy @ w, "ours": lambda dy=dy, w=w: matmul(dy, w.t())},
            {
                "torch": lambda dy=dy, x=x, place=place: torch.mm(dy.t(), x, out=place),
                "ours": lambda dy=dy, x=x, place=place: place.copy_(matmul(dy.t(), x.t())),
            },
        ]
        cells = [measure(each, flops, rounds) for each in forms]
        row = " | ".join(f"{cell['torch']:.0f} / {cell['ours']:.0f}" for cell in cells)
        print(f"| {tokens} x {inputs} x {outputs} | {row} |", flush=True)


if __name__ == "__main__":
    main()
