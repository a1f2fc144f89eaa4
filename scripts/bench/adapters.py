"""A step with an adapter beside a step of all parameters, in the same layout on the same data.

    python scripts/bench/adapters.py

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
from framework.recipe.schema import Adapter, Batch, Launch, Memory, Parallel, Precision, Recipe, Train, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from framework.verify.pool import RankPool

CPU = torch.device("cpu")
SEQUENCES, CONTEXT = 2, 256


def make_forms(rank: int, layout: str) -> dict[str, Recipe]:
    """The recipes that are compared."""
    full = Recipe(
        train=Train(steps=100, seed=5),
        batch=Batch(sequences_per_step=SEQUENCES, sequences_per_microbatch=1, context=CONTEXT),
        memory=Memory(compile="never"),
        precision=Precision("fp32", "fp32", "fp32"),
        parallel=Parallel(tp=2 if layout == "tp" else 1),
        zero=Zero(stage=3 if layout == "zero_3" else 0),
        launch=Launch(ranks=2, device="cpu"),
    )
    lora = replace(full, adapter=Adapter("lora", rank, 2.0 * rank))
    return {"full": full, "lora": lora}


def measure(
    rank: int, world: int, rendezvous: str, forms: dict[str, Recipe], config: Any, steps: int
) -> dict[str, float]:
    """Body: the median CPU seconds of a step of each form, in turns."""
    torch.set_num_threads(1)
    plans = {name: make_plan(recipe, config) for name, recipe in forms.items()}
    mesh = connect(plans["full"].topology, CPU, rendezvous, rank)
    runs = {name: build(plan, mesh) for name, plan in plans.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for step, batch in enumerate(make_batches(config, steps + 1, SEQUENCES, CONTEXT, 3)):
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
    parser.add_argument("--rank", type=int, default=8)
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
        found = pool.run(2, measure, make_forms(options.rank, layout), config, options.steps, timeout_s=1800)[0]
        shares = ", ".join(f"{name} {value:.2f} s ({value / found['full']:.2f})" for name, value in found.items())
        print(f"{layout:7} {shares}", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
