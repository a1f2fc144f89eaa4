"""The update on the host beside DeepSpeed's CPUAdam and torch's plain loop: seconds of a step, interleaved, one process.

    python scripts/bench/offload.py [--parameters 100e6] [--threads 1] [--rounds 9]

Each side begins with fp32 gradients in the host's memory and ends with bf16 parameters: ours is `StepOptimizer.step` of a run
with memory.offload.optimizer=1, clipping and skipping included, over the units of a Llama; the others update the same flat
tensors, one a unit, and cast them. DeepSpeed is left out where it is not installed; it builds its kernel when it is first used
(DS_ACCELERATOR=cpu, ninja on PATH). Compare sides of one run only: this machine's load changes by the minute.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama import LlamaConfig

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Batch, Launch, Memory, Offload, Optim, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.step import TrainingRun

WIDTH, LAYERS = 512, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    run = build_run(int(options.parameters))
    sizes = [len(buffer.master) for buffer in run.buffers]
    sides = {"ours": step_of_ours(run), "torch, unfused": step_of_torch(sizes)}
    for name, unscales in (("DeepSpeed", True), ("its kernel, cast", False)):
        deepspeed = step_of_deepspeed(sizes, unscales)
        if deepspeed is not None:
            sides[name] = deepspeed
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    on_cpu: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for number in range(options.rounds + 1):
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            begin, began = time.perf_counter(), time.process_time()
            sides[name]()
            if number:  # the first round touches new memory
                seconds[name].append(time.perf_counter() - begin)
                on_cpu[name].append(time.process_time() - began)
    print(f"{sum(sizes):,} parameters in {len(sizes)} units, {options.threads} threads, {options.rounds} rounds")
    ours = seconds["ours"]
    for name, taken in seconds.items():
        paired = median(theirs / mine for theirs, mine in zip(taken, ours, strict=True))
        paired_cpu = median(theirs / mine for theirs, mine in zip(on_cpu[name], on_cpu["ours"], strict=True))
        print(
            f"{name:16} median {median(taken) * 1e3:7.1f} ms, least {min(taken) * 1e3:7.1f} ms, {paired:.2f} times ours;"
            f" CPU time median {median(on_cpu[name]) * 1e3:7.1f} ms, {paired_cpu:.2f} times ours"
        )


def build_run(num_parameters: int) -> TrainingRun:
    """A rank alone with all masters and moments on the host, and gradients that have arrived there."""
    layer = 4 * WIDTH**2
    width = max(64, (num_parameters // LAYERS - layer) // (3 * WIDTH) // 64 * 64)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=width, num_hidden_layers=LAYERS, num_attention_heads=8, vocab_size=128
    )
    recipe = Recipe(
        batch=Batch(sequences_per_step=1, sequences_per_microbatch=1, context=8),
        zero=Zero(stage=0),
        memory=Memory(compile="never", offload=Offload(optimizer=1.0)),
        precision=Precision("bf16", "fp32", "fp32"),
        optim=Optim(),
        launch=Launch(ranks=1, device="cpu"),
    )
    plan = make_plan(recipe, config)
    run = build(plan, connect(plan.topology, torch.device("cpu"), rank=0))
    for buffer in run.buffers:
        buffer.delivered.normal_()
    return run


def step_of_ours(run: TrainingRun) -> Callable[[], None]:
    divisor, skip = torch.ones((), dtype=torch.float64), torch.tensor(False)
    return lambda: run.optimizer.step(1e-4, divisor, skip, 0)


def step_of_torch(sizes: list[int]) -> Callable[[], None]:
    """`torch.optim.AdamW` with neither fused nor multi-tensor kernels."""
    masters, parameters = make_tensors(sizes)
    return stepping(torch.optim.AdamW(masters, lr=1e-4, foreach=False, fused=False), masters, parameters)


def step_of_deepspeed(sizes: list[int], unscales: bool) -> Callable[[], None] | None:
    """CPUAdam and the casts, as ZeRO-Offload calls them (`stage_1_and_2.py`: step, then bit16 parameters from fp32 ones).
    unscales: with the pass over the gradients before it, `unscale_and_clip_grads`, which it always makes and we need not."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # not a dependency
    except ImportError as error:
        print(f"without DeepSpeed: {error}")
        return None
    masters, parameters = make_tensors(sizes)
    step = stepping(DeepSpeedCPUAdam(masters, lr=1e-4), masters, parameters)

    def unscale_and_step() -> None:
        for master in masters:
            assert master.grad is not None
            master.grad.mul_(1.0)
        step()

    return unscale_and_step if unscales else step


def make_tensors(sizes: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    masters = [torch.nn.Parameter(torch.randn(size)) for size in sizes]
    for master in masters:
        master.grad = torch.randn_like(master)
    return masters, [torch.zeros(size, dtype=torch.bfloat16) for size in sizes]


def stepping(optimizer: Any, masters: list[Tensor], parameters: list[Tensor]) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()
        for parameter, master in zip(parameters, masters, strict=True):
            parameter.copy_(master.detach())

    return step


if __name__ == "__main__":
    main()
