"""Our pipeline beside torch.distributed.pipelining, schedule by schedule: interleave.py has the method.

    python scripts/bench/pipeline.py                                     every schedule, 8 microbatches of 1 x 128 and 1 x 256
    python scripts/bench/pipeline.py --cut layers                        equally many layers in each stage, whatever they cost
    python scripts/bench/pipeline.py --memory                            peak resident memory, each side in ranks of its own

Every side: the same cut, by cost as ours chooses it, fp32, sdpa, fused AdamW, decay on matrices only, no clipping.
  ours-SCHEDULE    framework.train.build and train_step
  torch-SCHEDULE   PipelineStage over stock layers, cut by hand. Shapes are given, so none are inferred; the loss is a sum
                   over the batch's tokens, so gradients need no scaling; outputs are not collected; rotary tables are made once
zero_bubble is our zb_h1 with a stage on each rank, and torch's ScheduleInterleavedZeroBubble with two.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from interleave import (
    WARMUP_ROUNDS,
    Case,
    Ours,
    Setting,
    Side,
    decay_groups,
    make_adamw,
    measure,
    print_memory,
    run_ranks,
    save_weights,
    stock_model,
    table,
    title,
)
from torch import Tensor, nn
from torch.distributed import pipelining
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from framework.comm.connect import Mesh
from framework.data.loader import Microbatch
from framework.model.flops import unit_flops
from framework.model.units import find_units
from framework.parallel.pipeline.pipeline import plan_pipeline
from framework.parallel.pipeline.schedules import rank_of_stage
from framework.recipe.schema import Parallel, Pipeline, Zero

# Name: our schedule, torch's, stages on each rank of ours and of torch's.
SCHEDULES: dict[str, tuple[str, Any, int, int]] = {
    "gpipe": ("gpipe", pipelining.ScheduleGPipe, 1, 1),
    "1f1b": ("1f1b", pipelining.Schedule1F1B, 1, 1),
    "interleaved": ("interleaved", pipelining.ScheduleInterleaved1F1B, 2, 2),
    "zero_bubble": ("zb_h1", pipelining.ScheduleInterleavedZeroBubble, 1, 2),
    "zbv": ("zbv", pipelining.ScheduleZBVZeroBubble, 2, 2),
    "dualpipe_v": ("dualpipe_v", pipelining.ScheduleDualPipeV, 2, 2),
}
IN_A_V = ("zbv", "dualpipe_v")
LOSS_TOLERANCE = 1e-4


class Part(nn.Module):
    """The layers [start, stop) of a stock model, with its embedding before the first and its norm and head behind the last.

    Takes tokens [B, T] or hidden states [B, T, D]; gives hidden states or logits [B, T, V].
    """

    def __init__(self, whole: LlamaForCausalLM, start: int, stop: int, context: int):
        super().__init__()
        model = whole.model
        self.embedding = model.embed_tokens if start == 0 else None
        self.layers = model.layers[start:stop]
        is_last = stop == len(model.layers)
        self.norm, self.head = (model.norm, whole.lm_head) if is_last else (None, None)
        self.rotary = model.rotary_emb(torch.empty(1), torch.arange(context)[None])

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=self.rotary, use_cache=False)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Torch:
    """torch.distributed.pipelining as its tutorial has it, with AdamW over this rank's parts."""

    is_global = False

    def __init__(self, setting: Setting, mesh: Mesh, name: str, cut: str):
        _, schedule, _, virtual_stages = SCHEDULES[name]
        case, axis = setting.case, mesh.axis("pp")
        ranks = rank_of_stage(axis.size, virtual_stages, name in IN_A_V)
        own = [stage for stage, rank in enumerate(ranks) if rank == axis.rank]
        self._parts = cut_parts(setting, own, choose_layers(setting, virtual_stages, name in IN_A_V, cut))
        stages = [
            make_stage(part, number, len(ranks), setting)
            for number, part in zip(own, self._parts.children(), strict=True)
        ]
        num_tokens = case.accumulation * case.sequences * case.context

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_tokens

        self._schedule = schedule(
            stages if virtual_stages > 1 else stages[0], case.accumulation, loss_of, scale_grads=False
        )
        self._optimizer = make_adamw(decay_groups(self._parts))
        self._is_first, self._is_last = 0 in own, len(ranks) - 1 in own
        self._num_ranks = setting.world

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        """The loss where it is known, such that the mean over all ranks is the loss."""
        inputs = (torch.cat([each.input_ids for each in microbatches]),) if self._is_first else ()
        targets = {"target": torch.cat([each.labels for each in microbatches])} if self._is_last else {}
        losses: list[Tensor] = []
        self._schedule.step(*inputs, **targets, losses=losses, return_outputs=False)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._num_ranks * torch.stack(losses).sum().item() if losses else 0.0

    def close(self) -> None:
        """Nothing to end."""


def choose_layers(setting: Setting, virtual_stages: int, is_v: bool, cut: str) -> list[int]:
    """Layers of each stage: equally many, or by cost as ours cuts by itself for stages in a V or in a loop."""
    if cut == "layers":
        stages = np.array_split(range(setting.model["num_hidden_layers"]), setting.pp * virtual_stages)
        return [len(layers) for layers in stages]
    with torch.device("meta"):
        whole = LlamaForCausalLM(LlamaConfig(**setting.model))
    costs = unit_flops(whole, find_units(whole), setting.case.context)
    schedule: Any = "zbv" if is_v else "1f1b" if virtual_stages == 1 else "interleaved"
    pipeline = Pipeline(schedule=schedule, virtual_stages=virtual_stages)
    planned = plan_pipeline(pipeline, setting.pp, setting.case.accumulation, costs, Zero())
    return [each.stop - each.start for each in planned.stages]


def cut_parts(setting: Setting, own: Sequence[int], layers: Sequence[int]) -> nn.ModuleList:
    """This rank's parts; the rest of the model is given back."""
    whole = stock_model(setting)
    bounds = list(pairwise(accumulate(layers, initial=0)))
    return nn.ModuleList(Part(whole, *bounds[stage], setting.case.context) for stage in own)


def make_stage(part: nn.Module, number: int, num_stages: int, setting: Setting) -> pipelining.PipelineStage:
    """With the shapes of what comes in and goes out."""
    shape = setting.case.sequences, setting.case.context
    hidden = torch.empty(*shape, setting.model["hidden_size"], requires_grad=True)
    logits = torch.empty(*shape, setting.model["vocab_size"], requires_grad=True)
    return pipelining.PipelineStage(
        part,
        number,
        num_stages,
        torch.device("cpu"),
        input_args=torch.zeros(shape, dtype=torch.int64) if number == 0 else hidden,
        output_args=logits if number == num_stages - 1 else hidden,
    )


def build_side(name: str, setting: Setting, mesh: Mesh, tokens: Tensor, cut: str) -> Side:
    system, _, schedule = name.partition("-")
    if system == "torch":
        return Torch(setting, mesh, schedule, cut)
    ours, _, virtual_stages, _ = SCHEDULES[schedule]
    layers = choose_layers(setting, virtual_stages, schedule in IN_A_V, cut)
    pipeline = Pipeline(schedule=ours, virtual_stages=virtual_stages, layers=layers)  # type: ignore[arg-type]
    return Ours(setting, mesh, Zero(stage=0), Parallel(pp=setting.pp), pipeline)


def compare(measured: dict[str, Any], schedules: Sequence[str]) -> list[str]:
    """torch's wall time over ours, round by round: of the same schedule, of the best on each side, and of our best and the
    better of torch's schedules with one stage on each rank."""
    walls = {name: times[WARMUP_ROUNDS:] for name, times in measured["wall_s"].items()}

    def best(system: str, among: Sequence[str]) -> str:
        return min((f"{system}-{name}" for name in among), key=lambda side: statistics.median(walls[side]))

    def row(mine: str, theirs: str) -> str:
        ratios = [b / a for a, b in zip(walls[mine], walls[theirs], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        return f"| {mine} | {theirs} | {middle:.3f} ({low:.3f} to {high:.3f}) |"

    plain = [name for name in schedules if SCHEDULES[name][3] == 1]
    rows = [
        "| ours | torch's | torch's wall over ours (quartiles) |",
        "|---|---|---|",
        *(row(f"ours-{name}", f"torch-{name}") for name in schedules),
        f"the best of each: {row(best('ours', schedules), best('torch', schedules))}",
    ]
    if plain:
        rows.append(f"with one stage on each rank of torch's: {row(best('ours', schedules), best('torch', plain))}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case(8, 1, 128), Case(8, 1, 256)])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedules", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES))
    parser.add_argument("--cut", choices=["cost", "layers"], default="cost")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    sides = [f"{system}-{name}" for name in options.schedules for system in ("ours", "torch")]
    build = partial(build_side, cut=options.cut)
    print(f"torch {torch.__version__}, {options.rounds} rounds, cut by {options.cut}")
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights)
        for case in options.cases:
            setting = Setting(
                case,
                options.ranks,
                0,
                WARMUP_ROUNDS + options.rounds,
                None,
                weights,
                "",
                pp=options.ranks,
            )
            print(f"\n{case}", flush=True)
            if options.memory:
                print_memory(setting, build, sides)
            else:
                measured = run_ranks(measure, setting, build, sides)
                print("\n".join([title(sides[0]), *table(setting, measured, sides[0], LOSS_TOLERANCE)]))
                print("\n".join(["", *compare(measured, options.schedules)]))


if __name__ == "__main__":
    main()
