"""Host time: a model so small that a step is nothing but overhead, each way to train it side by side (method: interleave.py).

    python scripts/bench/overhead.py --rounds 31                       every side, with and without pipelines
    python scripts/bench/overhead.py --sides ddp zero0 --rounds 61     the first of the sides is what ratios are over
    python scripts/bench/overhead.py --json ratios.json                the ratios, by side
    python scripts/bench/overhead.py --sides zero3 --profile out.prof  what Python does in rank 0's steps, for pstats

On a machine that others use, put `chrt -r 5` in front (real-time priority). Else gloo's thread spins while its rank, with a lock
of gloo's, is preempted, and the messages of a step cost more than all the rest of it.

8 layers of width 64, microbatches of 1 x 16 tokens, two ranks with one thread each: computation is a tenth of a step. All sides
share one process group and take a step each in every round. Every side: sdpa, fused AdamW, decay on matrices only.

  plain                  Hugging Face's model and a loop, each rank for itself
  ddp                    the same in DistributedDataParallel
  fsdp2                  fully_shard on each layer and on the model, resharded after forward
  torchtp, torchtpseq    parallelize_module as torch's tutorial has it, without and with SequenceParallel
  zero0, zero3           ours, two ranks of data parallelism
  zero3alone             the same with zero.bucket_bytes=0: each layer travels in a message of its own
  tp, tpseq              ours, two of tensor parallelism, without and with parallel.sequence
  ours-, torch-SCHEDULE  pipelines of two ranks, eight microbatches (pipeline.py); ratios are over torch's same schedule
"""

import argparse
import cProfile
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipeline
import torch
import transformers
from interleave import (
    WARMUP_ROUNDS,
    Case,
    Loop,
    Ours,
    Setting,
    Side,
    join,
    mesh_over,
    microbatches_of,
    parse_clip_norm,
    run_ranks,
    save_weights,
    time_step,
    tokens_of,
    wrap_ddp,
)
from tensor import TorchTensorParallel
from zero import Fsdp2

from framework.comm.connect import Mesh
from framework.recipe.schema import Parallel, Zero

MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
RANKS, CONTEXT, PIPELINE_MICROBATCHES = 2, 16, 8
DATA_SIDES = ["plain", "ddp", "fsdp2", "zero0", "zero3", "zero3alone"]
TENSOR_SIDES = ["torchtp", "torchtpseq", "tp", "tpseq"]
PIPELINE_SIDES = [f"{system}-{name}" for name in pipeline.SCHEDULES for system in ("ours", "torch")]
SIDES = [*DATA_SIDES, *TENSOR_SIDES, *PIPELINE_SIDES]
# Losses agree within each of these: their sides take the same tokens. `plain` learns from its own rank's alone.
ALIKE = (DATA_SIDES[1:], TENSOR_SIDES, PIPELINE_SIDES)
LOSS_TOLERANCE = 1e-4


def setting_of(name: str, setting: Setting) -> Setting:
    """The layout of a side, and how many microbatches it takes in a step."""
    # torch clips neither what it has split (some of its gradients are DTensors, some are not) nor over stages.
    if name in TENSOR_SIDES:
        return replace(setting, tp=RANKS, clip_norm=None)
    if name in PIPELINE_SIDES:
        case = replace(setting.case, accumulation=PIPELINE_MICROBATCHES)
        return replace(setting, pp=RANKS, case=case, clip_norm=None)
    return setting


def build_side(name: str, setting: Setting, mesh: Mesh) -> Side:
    match name:
        case "plain":
            return Loop(setting, lambda model: model)
        case "ddp":
            return Loop(setting, wrap_ddp)
        case "fsdp2":
            return Fsdp2(setting, reshards=True)
        case "zero0" | "zero3":
            return Ours(setting, mesh, Zero(stage=int(name[-1])))
        case "zero3alone":
            return Ours(setting, mesh, Zero(stage=3, bucket_bytes=0))
        case "torchtp" | "torchtpseq":
            return TorchTensorParallel(setting, sequence=name.endswith("seq"), splits_loss=False)
        case "tp" | "tpseq":
            return Ours(setting, mesh, Zero(stage=0), Parallel(tp=RANKS, sequence=name.endswith("seq")))
    return pipeline.build_side(name, setting, mesh, torch.empty(0), cut="layers")


def measure(setting: Setting, names: Sequence[str], profile: str | None, rendezvous: str, results: Path) -> None:
    """One rank: every side takes a step in each round; rank 0 writes wall seconds, CPU seconds and losses by side and round."""
    mesh = join(setting, rendezvous)
    settings = {name: setting_of(name, setting) for name in names}
    tokens = {name: tokens_of(each) for name, each in settings.items()}
    sides = {name: build_side(name, each, mesh_over(mesh, each.topology)) for name, each in settings.items()}
    # A collection would walk all sides' models, in a step of whichever is next.
    gc.collect()
    gc.freeze()
    # CPU time of this thread: what it waits for, and what other processes take, is not in it.
    profiler = cProfile.Profile(time.thread_time)
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for step in range(setting.steps):
        first = step % len(names)
        for name in (*names[first:], *names[:first]):
            microbatches = microbatches_of(settings[name], tokens[name], step)
            if profile is not None and step >= WARMUP_ROUNDS:
                profiler.enable()
            times[name].append(time_step(sides[name], microbatches, setting.world))
            profiler.disable()
    if setting.rank == 0:
        columns = ("wall_s", "cpu_s", "losses")
        results.write_text(
            json.dumps(
                {key: {name: [each[i] for each in times[name]] for name in names} for i, key in enumerate(columns)}
            )
        )
        if profile is not None:
            profiler.dump_stats(profile)
    mesh.close()


def reference_of(name: str, against: str) -> str:
    """The side that a side's ratio is over: for a pipeline torch's same schedule, else `against`."""
    return name.replace("ours-", "torch-") if name in PIPELINE_SIDES else against


def find_ratios(times: Mapping[str, Sequence[float]], against: str) -> dict[str, list[float]]:
    """A side's time over its reference's, round by round, of the sides whose reference was measured."""
    return {
        name: [mine / theirs for mine, theirs in zip(own, times[reference], strict=True)]
        for name, own in times.items()
        if (reference := reference_of(name, against)) in times
    }


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """End with an error if sides that take the same tokens have other losses."""
    for alike in ALIKE:
        found = [name for name in alike if name in losses]
        for name in found[1:]:
            pairs = zip(losses[name], losses[found[0]], strict=True)
            error = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
            if not error <= LOSS_TOLERANCE:
                raise SystemExit(f"losses of {name} and {found[0]} differ by {error:.0e}")


def table(measured: Mapping[str, Mapping[str, Sequence[float]]], against: str) -> list[str]:
    """A markdown table: medians over the rounds."""
    rows = [
        "| side | wall ms | CPU ms per rank | CPU us per layer and microbatch | wall ratio (quartiles) | CPU ratio (quartiles) |",
        "|---|---|---|---|---|---|",
    ]
    ratios = [find_ratios(measured[key], against) for key in ("wall_s", "cpu_s")]
    for name in measured["wall_s"]:
        wall, cpu = (1e3 * statistics.median(measured[key][name]) for key in ("wall_s", "cpu_s"))
        quartiles = " | ".join(_quartiles(each[name]) if name in each else "" for each in ratios)
        rows.append(f"| {name} | {wall:.1f} | {cpu:.1f} | {1e3 * cpu / layer_calls(name):.0f} | {quartiles} |")
    return rows


def layer_calls(name: str) -> float:
    """Layers that a rank runs in a step, once for each microbatch; of a pipeline's ranks the mean."""
    layers = MODEL["num_hidden_layers"]
    return layers * PIPELINE_MICROBATCHES / RANKS if name in PIPELINE_SIDES else layers


def _quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--clip-norm", type=parse_clip_norm, default=None, help="of data-parallel sides")
    parser.add_argument("--json", type=Path, default=None, help="where to write the ratios' medians, by side")
    parser.add_argument(
        "--profile", default=None, help="where rank 0 writes what cProfile saw; its times are no figures"
    )
    options = parser.parse_args()
    against = "ddp" if "ddp" in options.sides else options.sides[0]
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} rounds, "
          f"clip_norm {options.clip_norm}, ratios over {against}")  # fmt: skip
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights, MODEL)
        steps = WARMUP_ROUNDS + options.rounds
        setting = Setting(Case(1, 1, CONTEXT), RANKS, 0, steps, options.clip_norm, weights, "", model=MODEL)
        measured = run_ranks(measure, setting, options.sides, options.profile)
    check_losses(measured.pop("losses"))
    measured = {
        key: {name: each[WARMUP_ROUNDS:] for name, each in by_side.items()} for key, by_side in measured.items()
    }
    print("\n".join(table(measured, against)))
    if options.json is not None:
        medians = {
            key.removesuffix("_s"): {
                name: statistics.median(each) for name, each in find_ratios(by_side, against).items()
            }
            for key, by_side in measured.items()
        }
        options.json.write_text(json.dumps(medians, indent=2) + "\n")


if __name__ == "__main__":
    main()
