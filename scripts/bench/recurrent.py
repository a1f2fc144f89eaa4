"""Layers of a gated delta net on two ranks beside torch's own path in one process, steps interleaved.

    python scripts/bench/recurrent.py --rounds 9

Every side makes whole steps of the same model (qwen3_5_text, linear attention only, fp32) on the same tokens, one thread each:
  torch    transformers' layers with torch's functions, fused AdamW, in rank 0 while the other waits
  tp, cp   framework.train.build and train_step on both ranks
A rank's share is half of what torch's side takes. CPU seconds count what the process itself used, so they hold on a busy machine;
seconds are those of the slower rank.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from framework.comm.connect import Mesh, connect
from framework.comm.objects import all_gather_object
from framework.plan.plan import Plan, make_plan
from framework.recipe.schema import Batch, Launch, Memory, Parallel, Recipe, Train, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from framework.verify.pool import RankPool

SIDES = {"tp": Parallel(tp=2), "cp": Parallel(cp=2)}
WARMUP = 2
Times = dict[str, list[tuple[float, float]]]


def config_of(layers: int, hidden: int) -> PretrainedConfig:
    heads = hidden // 64
    return AutoConfig.for_model(
        "qwen3_5_text", vocab_size=256, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        layer_types=["linear_attention"] * layers, num_attention_heads=heads, num_key_value_heads=heads,
        linear_num_key_heads=heads // 2, linear_num_value_heads=heads, linear_key_head_dim=64, linear_value_head_dim=64,
        tie_word_embeddings=False, use_cache=False, bos_token_id=1, eos_token_id=2, pad_token_id=None,
    )  # fmt: skip


def recipe_of(parallel: Parallel, context: int) -> Recipe:
    return Recipe(
        train=Train(steps=9), batch=Batch(sequences_per_step=1, sequences_per_microbatch=1, context=context),
        memory=Memory(compile="never"), parallel=parallel, zero=Zero(stage=0), launch=Launch(ranks=2, device="cpu"),
    )  # fmt: skip


def make_torch_step(config: PretrainedConfig, batch: Any) -> Callable[[], Any]:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        logits = model(batch.input_ids).logits
        F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_step(plan: Plan, batch: Any, mesh: Mesh) -> Callable[[], Any]:
    run, microbatches = build(plan, mesh), share(batch, 1, mesh)
    return lambda: train_step(run, microbatches, 0, 1e-3).read()


def measure(
    rank: int, world: int, rendezvous: str, rounds: int, config: PretrainedConfig, parallel: Parallel, context: int
) -> Times:
    """Body: (CPU, wall) seconds of this rank's steps, of torch's side and of a layout."""
    torch.set_num_threads(1)
    (batch,) = make_batches(config, 1, 1, context, seed=3)
    recipe = recipe_of(parallel, context)
    plan = make_plan(recipe, config)
    mesh = connect(plan.topology, torch.device("cpu"), rendezvous, rank)
    steps = {"torch": make_torch_step(config, batch), "ours": make_step(plan, batch, mesh)}
    found: Times = {name: [] for name in steps}
    for _ in range(WARMUP + rounds):
        for name, step in steps.items():
            all_gather_object(None, mesh.axis("world"))
            if rank and name == "torch":
                continue
            cpu, wall = time.process_time(), time.perf_counter()
            step()
            found[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    mesh.close()
    return {name: each[WARMUP:] for name, each in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.layers} layers of {options.hidden}, {options.context} tokens")
    pool, config = RankPool(2, __name__), config_of(options.layers, options.hidden)
    for side, parallel in SIDES.items():
        # Beside other programs a step takes ten times as long as alone.
        by_rank = pool.run(2, measure, options.rounds, config, parallel, options.context, timeout_s=3600)
        for kind, word in enumerate(("CPU", "wall")):
            ones = [each[kind] for each in by_rank[0]["torch"]]
            ours = [
                max(each[kind] for each in ranks) for ranks in zip(*(found["ours"] for found in by_rank), strict=True)
            ]
            ratios = [mine / (one / 2) for mine, one in zip(ours, ones, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            seconds = f"torch {statistics.median(ones):.3f} s, a rank {statistics.median(ours):.3f} s"
            print(f"{side}, {word}: {seconds}, {middle:.2f} ({low:.2f} to {high:.2f}) of its share", flush=True)
    pool.close()


if __name__ == "__main__":
    main()
