"""Head and cross-entropy of one microbatch: logits of all tokens, in chunks that backward computes again (`memory.chunked_loss`),
and in chunks whose gradients forward computes (as Liger's kernel does), which the framework does not have.

    python scripts/bench/loss_head.py

CPU seconds of forward and backward on one thread, median of the rounds, in turns; and the most bytes that they allocate at once.
The gradient of the weight goes to a main gradient in fp32, in the third form by way of one of its own, which backward scales.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.mesh.topology import Topology
from framework.model.chunked_loss import ChunkedLoss, LogitMap
from framework.model.loss import LocalSums, TokenLoss, chunk_size, find_kernel
from framework.model.matmul import Matmul, accumulate_matmul
from framework.parallel.zero.gradients import _DirectLinear
from framework.plan.plan import unconnected


@dataclass
class GradView:
    """A weight's gradient in fp32 that is added to (`model.matmul.GradView`)."""

    parameter: nn.Parameter
    view: Tensor
    is_deferred: bool = False

    def add(self, gradient: Tensor) -> None:
        self.view.add_(gradient)

    def add_matmul(self, left: Tensor, right: Tensor) -> None:
        accumulate_matmul(self.view, left, right, is_first=False)

    def add_stacked_matmul(self, left: Tensor, right: Tensor, groups: Any) -> None:
        raise NotImplementedError(left.shape, right.shape, groups)


class GradientsInForward(torch.autograd.Function):
    """Each chunk's logits once; gradients for a loss whose gradient is 1, scaled by what it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tick: Tensor, weight: Tensor, labels: Tensor, view: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        dx, dw, losses = torch.empty_like(rows), torch.zeros_like(view), []
        chunk = chunk_size(len(rows), len(weight) * rows.itemsize, fused=False)
        for first in range(0, len(rows), chunk):
            part = slice(first, first + chunk)
            sums = LocalSums.make(labels[part], rows)
            logits = F.linear(rows[part], weight)
            kernel = find_kernel(logits)
            kernel.read(logits, labels[part], 0, sums.of(slice(None)))
            log_sum, of_tokens = sums.combine(unconnected(Topology(), 0)["tp"])
            kernel.differentiate(logits, labels[part], 0, log_sum, torch.ones_like(log_sum), logits)
            dx[part] = logits @ weight
            accumulate_matmul(dw, logits, rows[part], is_first=False)
            losses.append(of_tokens.sum())
        ctx.save_for_backward(dx.view_as(x), dw)
        ctx.view = view
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        ctx.view.add_(dw * gradient)
        return dx * gradient.to(dx.dtype), None, None, None, None


def make_forms(vocabulary: int, hidden: int, dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    axis = unconnected(Topology(), 0)["tp"]
    weight = nn.Parameter(torch.randn(vocabulary, hidden, dtype=dtype) * 0.05)
    main = GradView(weight, torch.zeros(vocabulary, hidden))
    head = nn.Linear(hidden, vocabulary, bias=False, device="meta")
    head.weight = weight
    chunked = ChunkedLoss(head, [main], LogitMap((), ()), axis, vocabulary)
    direct = Matmul(head, is_transposed=False)
    direct.write_gradient_to(main)
    plain, one = TokenLoss(axis, vocabulary), torch.tensor(1)

    def compute_whole(x: Tensor, labels: Tensor) -> Tensor:
        return plain(_DirectLinear.apply(x, direct.graph_input, None, direct), labels, one)

    def compute_in_chunks(x: Tensor, labels: Tensor) -> Tensor:
        chunked.expect(labels)
        return chunked(head(x), labels, one)

    def compute_in_forward(x: Tensor, labels: Tensor) -> Tensor:
        return GradientsInForward.apply(x, direct.graph_input, weight.data, labels.flatten(), main.view)

    return {
        "all logits": compute_whole,
        "chunks, logits again in backward": compute_in_chunks,
        "chunks, gradients in forward": compute_in_forward,
    }


def run(form: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor) -> float:
    start = time.process_time()
    form(x.detach().requires_grad_(), labels).backward()
    return time.process_time() - start


def peak_bytes(form: Callable[[Tensor, Tensor], Tensor], x: Tensor, labels: Tensor) -> int:
    """The peak by allocations that torch's profiler notes, above what there was."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run(form, x, labels)
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    sizes = sorted((each["ts"], each["args"]["Bytes"]) for each in events if each["name"] == "[memory]")
    return max(accumulate(size for _, size in sizes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--tokens", type=int, nargs=2, default=(2, 512), metavar=("SEQUENCES", "CONTEXT"))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; {vars(options)}")
    print("| | dtype | seconds | peak |\n|---|---|---|---|")
    for dtype in (getattr(torch, name) for name in options.dtypes):
        forms = make_forms(options.vocabulary, options.hidden, dtype)
        x = torch.randn(*options.tokens, options.hidden, dtype=dtype)
        labels = torch.randint(0, options.vocabulary, tuple(options.tokens))
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(options.rounds + 1):
            for name, form in forms.items():
                seconds[name].append(run(form, x, labels))
        for name, form in forms.items():
            peak = peak_bytes(form, x, labels) / 2**20
            print(
                f"| {name} | {str(dtype).removeprefix('torch.')} | {statistics.median(seconds[name][1:]):.2f} | {peak:,.0f} MiB |"
            )


if __name__ == "__main__":
    main()
