"""A step of other methods beside a step of AdamW on all parameters, in the same layout on the same data.

    python scripts/bench/methods.py                                            LoRA
    python scripts/bench/methods.py --method muon --layouts zero_1 --sequences 32 --layers 2      Muon

CPU seconds of a rank in one step (forward, backward, reduction, update), median over the steps of each form, on two gloo ranks of
one thread each. CPU seconds and not those of the clock: other programs on the machine do not lengthen them.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from transformers.models.llama import LlamaConfig

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import (
    Adapter,
    Batch,
    Launch,
    Memory,
    Muon,
    Optim,
    Parallel,
    Precision,
    Recipe,
    Train,
    Zero,
)
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from framework.verify.pool import RankPool

CPU = torch.device("cpu")
CONTEXT = 256


def make_forms(method: str, rank: int, layout: str, sequences: int) -> dict[str, Recipe]:
    """The recipes that are compared. sequences: of a step."""
    full = Recipe(
        train=Train(steps=100, seed=5),
        batch=Batch(sequences_per_step=sequences, sequences_per_microbatch=max(1, sequences // 8), context=CONTEXT),
        memory=Memory(compile="never"),
        precision=Precision("fp32", "fp32", "fp32"),
        parallel=Parallel(tp=2 if layout == "tp" else 1),
        zero=Zero(stage=0 if layout == "tp" else int(layout.removeprefix("zero_"))),
        launch=Launch(ranks=2, device="cpu"),
    )
    if method == "lora":
        return {"full": full, "lora": replace(full, adapter=Adapter("lora", rank, 2.0 * rank))}
    return {"full": full, "muon": replace(full, optim=Optim(name="muon", momentum=0.95, muon=Muon(dtype="master")))}


def measure(
    rank: int, world: int, rendezvous: str, forms: dict[str, Recipe], config: Any, steps: int
) -> dict[str, float]:
    """Body: the median CPU seconds of a step of each form, in turns."""
    torch.set_num_threads(1)
    plans = {name: make_plan(recipe, config) for name, recipe in forms.items()}
    mesh = connect(plans["full"].topology, CPU, rendezvous, rank)
    runs = {name: build(plan, mesh) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    batches = make_batches(config, steps + 1, forms["full"].batch.sequences_per_step or 1, CONTEXT, 3)
    for step, batch in enumerate(batches):
        for name, run in runs.items():
            microbatches = share(batch, forms[name].batch.sequences_per_microbatch, mesh)
            start = time.process_time()
            train_step(run, microbatches, step, 1e-4).read()
            if step:
                seconds[name].append(time.process_time() - start)
    mesh.close()
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--method", choices=["lora", "muon"], default="lora")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--sequences", type=int, default=2, help=f"of {CONTEXT} tokens, in a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layouts", nargs="+", default=["zero_0", "zero_3", "tp"])
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        vocab_size=options.vocabulary,
        use_cache=False,
    )
    pool = RankPool(2, measure.__module__)
    for layout in options.layouts:
        forms = make_forms(options.method, options.rank, layout, options.sequences)
        found = pool.run(2, measure, forms, config, options.steps, timeout_s=1800)[0]
        shares = ", ".join(f"{name} {value:.2f} s ({value / found['full']:.2f})" for name, value in found.items())
        print(f"{layout:7} {shares}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
