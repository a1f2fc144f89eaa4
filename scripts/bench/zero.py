"""Our ZeRO stages beside torch's DDP, ZeroRedundancyOptimizer and FSDP2, step by step: interleave.py has the method.

    python scripts/bench/zero.py                                     all cases in fp32 and bf16 on two ranks
    python scripts/bench/zero.py --memory                            peak resident memory, each side in ranks of its own
    python scripts/bench/zero.py --trace zero3.json --sides ours3    one step, for chrome://tracing or Perfetto, and its overlap

Every side: sdpa, fused AdamW, decay on matrices only, no clipping (`--clip-norm 1.0` for it), accumulated microbatches
reduced once where the system can. bf16: fp32 master weights and fp32 gradient sums; torch's DDP has autocast for that.
  ours0 .. ours3   framework.train.build and train_step; ours3 gathers parameters again in every microbatch
  ours3keep        zero.keep_gathered: gathered parameters live until the update
  ddp              DistributedDataParallel, gradients as views of its buckets
  zero1            the same with ZeroRedundancyOptimizer, torch's stage 1
  fsdp2            fully_shard on each layer and on the model, reshard_after_forward (stage 3)
  fsdp2keep        the same without resharding after forward (stage 2)
  deepspeed1 .. 3  DeepSpeed's stages with its defaults; only where asked for, since it has to be installed first
"""

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from interleave import (
    BETAS,
    EPS,
    LR,
    WARMUP_ROUNDS,
    Case,
    Loop,
    Ours,
    Setting,
    Side,
    decay_groups,
    join,
    make_adamw,
    measure,
    microbatches_of,
    parse_clip_norm,
    print_memory,
    run_ranks,
    save_weights,
    stock_model,
    table,
    title,
    tokens_of,
    wrap_ddp,
)
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

from framework.comm.algorithms import Pending
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh
from framework.data.loader import Microbatch
from framework.parallel.zero import gradients, parameters
from framework.recipe.schema import Zero

OURS = {
    "ours0": Zero(stage=0),
    "ours1": Zero(stage=1),
    "ours2": Zero(stage=2, accumulate="local"),
    "ours3": Zero(stage=3, accumulate="local"),
    "ours3keep": Zero(stage=3, accumulate="local", keep_gathered=True),
}
SIDES = [*OURS, "ddp", "zero1", "fsdp2", "fsdp2keep"]
DEEPSPEED = {f"deepspeed{stage}": stage for stage in (1, 2, 3)}
# fp32 sums in another order; bf16 weights that round to the other neighbour.
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


class Fsdp2(Loop):
    """fully_shard as its tutorial has it: each layer, then the model."""

    def __init__(self, setting: Setting, reshards: bool):
        if setting.precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        else:
            policy = MixedPrecisionPolicy()

        def shard(model: Any) -> torch.nn.Module:
            for layer in model.model.layers:
                fully_shard(layer, mp_policy=policy, reshard_after_forward=reshards)
            return fully_shard(model, mp_policy=policy, reshard_after_forward=reshards)

        super().__init__(setting, shard)

    def synchronising(self, is_last: bool) -> Any:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last)
        self.model.set_is_last_backward(is_last)
        return nullcontext()

    def autocasting(self) -> Any:
        return nullcontext()


class DeepSpeed:
    """deepspeed.initialize as its tutorial has it, with our optimizer."""

    is_global = False

    def __init__(self, setting: Setting, stage: int):
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(setting.world)}
        import deepspeed

        model = stock_model(setting)
        config = {
            "train_micro_batch_size_per_gpu": setting.case.sequences,
            "gradient_accumulation_steps": setting.case.accumulation,
            "gradient_clipping": setting.clip_norm or 0.0,
            "bf16": {"enabled": setting.precision == "bf16"},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, dist_init_required=False)
        optimizer = make_adamw(decay_groups(model))
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        total = 0.0
        for each in microbatches:
            loss = self.engine(each.input_ids, labels=each.labels, shift_labels=each.labels, use_cache=False).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.item() / len(microbatches)
        return total

    def close(self) -> None:
        """Nothing to end."""


def make_zero_redundancy(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, lr=LR, betas=BETAS, eps=EPS, fused=True)


def build_side(name: str, setting: Setting, mesh: Mesh, tokens: Tensor) -> Side:
    match name:
        case "ddp":
            return Loop(setting, wrap_ddp, make_adamw)
        case "zero1":
            return Loop(setting, wrap_ddp, make_zero_redundancy)
        case "fsdp2" | "fsdp2keep":
            return Fsdp2(setting, reshards=name == "fsdp2")
    if name in DEEPSPEED:
        return DeepSpeed(setting, DEEPSPEED[name])
    return Ours(setting, mesh, OURS[name])


def trace(setting: Setting, name: str, rendezvous: str, results: Path) -> None:
    """One rank: profile a step; every collective is a range in a thread of its own, from its start to its end."""
    mesh = join(setting, rendezvous)
    tokens = tokens_of(setting)
    side = build_side(name, setting, mesh, tokens)
    for step in range(setting.steps - 1):
        side.step(microbatches_of(setting, tokens, step))
    parameters.start_all_gather = shown(parameters.start_all_gather)
    gradients.start_reduce_scatter = shown(gradients.start_reduce_scatter)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=config) as profile:
        side.step(microbatches_of(setting, tokens, setting.steps - 1))
    if setting.rank == 0:
        profile.export_chrome_trace(str(results))
    mesh.close()


class WatchedPending(Pending):
    """An operation that a thread waits for, so that its true end is known."""

    def __init__(self, pending: Pending, label: str):
        super().__init__(finish=pending.wait)
        self._thread = threading.Thread(target=self._watch, args=(pending._works, label))
        self._thread.start()

    def advance(self) -> bool:
        self._thread.join()
        return super().advance()

    def _watch(self, works: Sequence[Any], label: str) -> None:
        with torch.profiler.record_function(label):
            for work in works:
                work.wait()


def shown(start: Callable[..., Pending]) -> Callable[..., Pending]:
    def started(out: Tensor, x: Tensor, axis: Communicator, label: str, *args: Any) -> Pending:
        pending = start(out, x, axis, label, *args)
        if axis.size == 1:
            return pending
        watched = WatchedPending(pending, label)
        pending._works = ()
        return watched

    return started


def print_overlap(events: list[dict[str, Any]]) -> None:
    """When each collective was under way, in ms of the step, and for how long of that torch's operators ran."""
    ranges = [event for event in events if event.get("ph") == "X" and "dur" in event]
    operators = sorted(
        (each["ts"], each["ts"] + each["dur"]) for each in ranges if each["name"].startswith(("aten::", "mkldnn::"))
    )
    first = operators[0][0]
    under_way_ms = hidden_ms = 0.0
    print("| collective | from ms | to ms | under operators ms |\n|---|---|---|---|")
    for each in sorted(ranges, key=lambda each: each["ts"]):
        if each["name"].startswith(("parameters of", "gradient of", "updated part of")):
            start, end = each["ts"], each["ts"] + each["dur"]
            hidden = overlap(start, end, operators)
            print(f"| {each['name']} | {(start - first) / 1e3:.1f} | {(end - first) / 1e3:.1f} | {hidden / 1e3:.1f} |")
            under_way_ms, hidden_ms = under_way_ms + (end - start) / 1e3, hidden_ms + hidden / 1e3
    print(f"{hidden_ms:.0f} of {under_way_ms:.0f} ms lie under operators, {hidden_ms / under_way_ms:.0%}")


def overlap(start: float, end: float, intervals: Sequence[tuple[float, float]]) -> float:
    """The length of [start, end) that the intervals cover; they are sorted by their starts and may nest."""
    covered, reached = 0.0, start
    for low, high in intervals:
        low, high = max(low, reached), min(high, end)
        if low < high:
            covered, reached = covered + high - low, high
    return covered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", type=Case.parse, default=[Case(1, 1, 128), Case(1, 2, 512), Case(4, 1, 256)]
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=[*SIDES, *DEEPSPEED], default=SIDES)
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clip-norm", type=parse_clip_norm, default=None)
    parser.add_argument("--against", choices=SIDES, default=None, help="the side that ratios are over; else the first")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--trace", type=Path, default=None)
    options = parser.parse_args()
    against = options.against or options.sides[0]
    print(f"torch {torch.__version__}, {options.rounds} rounds, clip_norm {options.clip_norm}")
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights)
        for precision in options.precisions:
            for case in options.cases:
                steps = WARMUP_ROUNDS + options.rounds
                setting = Setting(case, options.ranks, 0, steps, options.clip_norm, weights, "", precision)
                print(f"\n{precision}, {case}", flush=True)
                if options.memory:
                    print_memory(setting, build_side, options.sides)
                elif options.trace is not None:
                    found = run_ranks(trace, setting, options.sides[0])
                    options.trace.write_text(json.dumps(found))
                    print_overlap(found["traceEvents"])
                else:
                    measured = run_ranks(measure, setting, build_side, options.sides)
                    print("\n".join([title(against), *table(setting, measured, against, LOSS_TOLERANCES[precision])]))


if __name__ == "__main__":
    main()
