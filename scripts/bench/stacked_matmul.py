"""Matmuls of stacked experts on one CPU core: ways to multiply groups of rows, each with its own matrix.

    python scripts/bench/stacked_matmul.py                  both tables, fp32 and bf16
    python scripts/bench/stacked_matmul.py --rounds 51

First the three matmuls of `model/matmul.py`'s StackedMatmul: forward Y = X W_e^T, input gradient dX = dY W_e, and weight gradient
dW_e = dY^T X added to a main gradient in fp32. Rows are in groups of random sizes, as a router's choices make them.
  loop      a matmul for each group, in place: what `model/matmul.py` takes on CPUs
  grouped   F.grouped_mm on all groups: what it takes on GPUs where memory is aligned
  padded    torch.bmm on groups padded to the largest, the copies there and back counted

Then a whole module of experts, forward and backward, from tokens and a router's choices to their sum: Hugging Face's Qwen3-MoE
with its kernels (`experts_implementation`; not batched_mm, which copies a matrix for each row) beside ours (`parallel/experts`,
one rank). Ours adds gradients of weights to main gradients, as in a run, Hugging Face's to `.grad`.

Ways take turns; CPU time of this thread, in ms, median of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from framework.comm.communicator import Communicator
from framework.mesh.topology import Axis
from framework.model.experts import form_of
from framework.model.matmul import RowGroups, accumulate_stacked_matmul, matmul_into
from framework.model.routers import RoutedTokens
from framework.parallel.experts.dispatch import ExpertDispatch, LocalExperts
from framework.parallel.experts.route import ExpertRoute

# Experts, rows of all of them, features in, features out.
SHAPES = ((4, 256, 512, 1408), (8, 256, 512, 1408), (4, 2048, 512, 1408), (16, 2048, 1024, 1024), (64, 512, 512, 512))
# Experts, experts per token, tokens, hidden features, features inside an expert.
MODULES = ((4, 2, 128, 512, 704), (8, 2, 128, 512, 704), (8, 2, 1024, 512, 704), (64, 8, 256, 512, 256))
WAYS = ("loop", "grouped", "padded")
IMPLEMENTATIONS = ("eager", "grouped_mm")
WARMUP_ROUNDS = 3

Way = Callable[[], object]


def measure(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Milliseconds of each way, taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARMUP_ROUNDS + rounds):
        for name, run in ways.items():
            start = time.thread_time()
            run()
            taken[name].append(1e3 * (time.thread_time() - start))
    return {name: statistics.median(each[WARMUP_ROUNDS:]) for name, each in taken.items()}


def draw_groups(experts: int, rows: int) -> RowGroups:
    """Rows that go to each expert, by chance."""
    chosen = torch.randint(experts, (rows,), generator=torch.Generator().manual_seed(0))
    return RowGroups.of(chosen.bincount(minlength=experts).tolist(), torch.device("cpu"))


class GradView:
    """A main gradient in fp32, as `model.matmul.GradView`."""

    def __init__(self, parameter: torch.nn.Parameter):
        self.parameter = parameter
        self._sum = torch.zeros(parameter.shape)

    def add_matmul(self, left: Tensor, right: Tensor) -> None:
        raise AssertionError("experts are stacked")

    def add_stacked_matmul(self, left: Tensor, right: Tensor, groups: RowGroups) -> None:
        accumulate_stacked_matmul(self._sum, left, right, groups, is_first=False)


class Padding:
    """Groups of rows as a batch of equal ones, and back."""

    def __init__(self, groups: RowGroups):
        self._experts, self._longest = len(groups.counts), max(groups.counts)
        self._places = torch.cat([torch.arange(size) + e * self._longest for e, size in enumerate(groups.counts)])

    def pad(self, x: Tensor) -> Tensor:
        """[R, F] -> [E, longest, F]."""
        padded = x.new_zeros(self._experts * self._longest, x.shape[1])
        return padded.index_copy_(0, self._places, x).view(self._experts, self._longest, -1)

    def unpad(self, y: Tensor) -> Tensor:
        """[E, longest, F] -> [R, F]."""
        return y.flatten(0, 1).index_select(0, self._places)


def forward_ways(x: Tensor, weights: Tensor, groups: RowGroups) -> dict[str, Way]:
    """y = x W_e^T. weights: [E, N, K]; the gradient of inputs is the same with the weights transposed."""
    padding = Padding(groups)
    return {
        "loop": lambda: multiply_by_loop(x, weights, groups),
        "grouped": lambda: F.grouped_mm(x, weights.transpose(1, 2), offs=groups.offsets),
        "padded": lambda: padding.unpad(torch.bmm(padding.pad(x), weights.transpose(1, 2))),
    }


def multiply_by_loop(x: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    out = x.new_empty(x.shape[0], weights.shape[1])
    for y, rows, weight in zip(groups.split(out), groups.split(x), weights.unbind(), strict=True):
        if len(rows):
            matmul_into(y, rows, weight)
    return out


def gradient_ways(main: Tensor, dy: Tensor, x: Tensor, groups: RowGroups) -> dict[str, Way]:
    """main += dy^T x of each group. main: [E, N, K] fp32."""
    padding = Padding(groups)
    return {
        "loop": lambda: accumulate_stacked_matmul(main, dy, x, groups, is_first=False),
        "grouped": lambda: main.add_(F.grouped_mm(dy.t(), x, offs=groups.offsets)),
        "padded": lambda: main.add_(torch.bmm(padding.pad(dy).transpose(1, 2), padding.pad(x))),
    }


def print_matmuls(dtype: torch.dtype, rounds: int) -> None:
    print(f"| experts, rows, in x out | forward {' / '.join(WAYS)} | input gradient | weight gradient | all three |")
    print("|---|---|---|---|---|")
    for experts, rows, inputs, outputs in SHAPES:
        x, dy = (torch.randn(rows, features, dtype=dtype) for features in (inputs, outputs))
        weights, main = torch.randn(experts, outputs, inputs, dtype=dtype), torch.zeros(experts, outputs, inputs)
        groups = draw_groups(experts, rows)
        found = [
            measure(forward_ways(x, weights, groups), rounds),
            measure(forward_ways(dy, weights.transpose(1, 2), groups), rounds),
            measure(gradient_ways(main, dy, x, groups), rounds),
        ]
        cells = [[each[way] for way in WAYS] for each in found]
        cells.append([sum(column) for column in zip(*cells, strict=True)])
        texts = (" / ".join(f"{each:.2f}" for each in cell) for cell in cells)
        print(f"| {experts}, {rows}, {inputs} x {outputs} | {' | '.join(texts)} |", flush=True)


def module_ways(dtype: torch.dtype, experts: int, top_k: int, tokens: int, hidden: int, inner: int) -> dict[str, Way]:
    """Forward and backward of a module of experts with each of Hugging Face's kernels, and with ours."""
    hidden_states = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    scores = torch.rand(tokens, experts).topk(top_k)
    weights = scores.values.to(dtype).requires_grad_()
    dout = torch.randn(tokens, hidden, dtype=dtype)
    modules = {}
    for name in (*IMPLEMENTATIONS, "ours"):
        config = AutoConfig.for_model("qwen3_moe", hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts)
        config._experts_implementation = "eager" if name == "ours" else name
        modules[name] = Qwen3MoeExperts(config).to(dtype)
        for parameter in modules[name].parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    form = form_of(modules["ours"])
    assert form is not None
    alone = Communicator(Axis("ep", 1, 0))
    local = LocalExperts(modules["ours"], form, keeps_tokens=False)
    for matmul in local.matmuls:
        matmul.write_gradient_to(GradView(modules["ours"].get_parameter(matmul.name)))
    modules["ours"].forward = ExpertDispatch(local, experts, ExpertRoute(alone, alone), RoutedTokens.of_one_rank())  # type: ignore[assignment]

    def both(module: torch.nn.Module) -> None:
        module(hidden_states, scores.indices, weights).backward(dout)

    return {name: lambda module=module: both(module) for name, module in modules.items()}  # type: ignore[misc]


def print_modules(dtype: torch.dtype, rounds: int) -> None:
    names = (*IMPLEMENTATIONS, "ours")
    print(f"| experts, top, tokens, hidden x inner | {' | '.join(names)} |\n|---|---|---|---|")
    for shape in MODULES:
        found = measure(module_ways(dtype, *shape), rounds)
        experts, top_k, tokens, hidden, inner = shape
        texts = (f"{found[name]:.1f}" for name in names)
        print(f"| {experts}, {top_k}, {tokens}, {hidden} x {inner} | {' | '.join(texts)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, one thread, {rounds} rounds")
    for dtype in (torch.float32, torch.bfloat16):
        print(f"\n{dtype}, matmuls, ms")
        print_matmuls(dtype, rounds)
        print(f"\n{dtype}, a module of experts, forward and backward, ms")
        print_modules(dtype, rounds)


if __name__ == "__main__":
    main()
