"""Our expert parallelism beside Hugging Face's own, DDP and FSDP2, step by step: interleave.py has the method.

    python scripts/bench/expert.py --rounds 31                   every side, two ranks, 1 x 128 tokens on each
    python scripts/bench/expert.py --sides ddp ep0 --json a.json  the first of the sides is what ratios are over
    python scripts/bench/expert.py --experts 2 --top-k 1         other mixtures; --cases and --precisions as in zero.py
    python scripts/bench/expert.py --memory                      peak resident memory, each side in ranks of its own
    python scripts/bench/expert.py --profile ep0                 what one rank's time goes into, by operator

A Qwen3-MoE of hidden 512, 4 layers, 8 experts of width 704, top 2, vocabulary 8192. Every side: sdpa, fused AdamW, decay on
matrices only, no clipping, no auxiliary loss, the same tokens in a step. Losses of all steps are compared.
  ddp, ddpeager    Hugging Face's model in DistributedDataParallel, experts on every rank; its default kernels (grouped_mm), eager
  ep0 .. ep3       ours with parallel.ep of all ranks, zero.stage 0 to 3
  dp0              ours with experts on every rank, stage 0
  tpep0            ours with parallel.tp and parallel.ep of all ranks, stage 0: all ranks take all ranks' tokens
  hfep             Hugging Face's expert parallelism: DistributedConfig(fsdp_size=N, ep_size=N), the rest of the model in FSDP2
  hftpep           Hugging Face's TP+EP: DistributedConfig(tp_size=N, ep_size=N), all ranks take all ranks' tokens
  fsdp2            fully_shard on each layer and on the model
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from interleave import (
    WARMUP_ROUNDS,
    Case,
    Loop,
    Ours,
    Setting,
    Side,
    make_adamw,
    measure,
    microbatches_of,
    print_memory,
    profile,
    run_ranks,
    save_weights,
    stock_model,
    table,
    title,
    wrap_ddp,
)
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from zero import Fsdp2

from framework.comm.connect import Mesh
from framework.data.loader import Microbatch
from framework.recipe.schema import Parallel, Zero

FAMILY = "qwen3_moe"
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
OURS = {f"ep{stage}": Zero(stage=stage) for stage in range(4)}
SIDES = ["ddp", "ddpeager", *OURS, "dp0", "tpep0", "hfep", "hftpep", "fsdp2"]
DEFAULT = ["ddp", "ep0", "ep1", "hfep", "hftpep", "fsdp2"]
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


class Eager(Loop):
    """DDP with a loop over experts in the model's own forward."""

    def load(self, setting: Setting) -> PreTrainedModel:
        return stock_model(setting, experts_implementation="eager")


class HuggingFace(Loop):
    """The model as `from_pretrained(distributed_config=...)` makes it."""

    def __init__(self, setting: Setting, config: DistributedConfig):
        self._config = config
        super().__init__(setting, lambda model: model, make_adamw_by_mesh)

    def load(self, setting: Setting) -> PreTrainedModel:
        return stock_model(setting, distributed_config=self._config)


def make_adamw_by_mesh(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Fused AdamW takes tensors of one mesh at a time."""
    by_mesh: dict[Any, dict[str, Any]] = {}
    for number, group in enumerate(groups):
        for each in group["params"]:
            mesh = (each.device_mesh, each.placements) if isinstance(each, DTensor) else None
            by_mesh.setdefault((number, mesh), group | {"params": []})["params"].append(each)
    return make_adamw(list(by_mesh.values()))


class TakesAll:
    """A side whose ranks all take the tokens of all ranks: it is given the whole step instead of this rank's share."""

    def __init__(self, side: Side, setting: Setting, tokens: Tensor):
        self._side, self._tokens, self._step = side, tokens, 0
        self.is_global = side.is_global
        self._shares = [replace(setting, rank=rank) for rank in range(setting.world)]

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        shares = [microbatches_of(each, self._tokens, self._step) for each in self._shares]
        self._step += 1
        return self._side.step([_join(same) for same in zip(*shares, strict=True)])

    def close(self) -> None:
        self._side.close()


def _join(microbatches: Sequence[Microbatch]) -> Microbatch:
    ids, labels = (torch.cat([getattr(each, name) for each in microbatches]) for name in ("input_ids", "labels"))
    return Microbatch(ids, labels, None)


def build_side(name: str, setting: Setting, mesh: Mesh, tokens: Tensor) -> Side:
    world, case = setting.world, setting.case
    together = replace(setting, tp=world, case=replace(case, sequences=world * case.sequences))
    match name:
        case "ddp":
            return Loop(setting, wrap_ddp)
        case "ddpeager":
            return Eager(setting, wrap_ddp)
        case "dp0":
            return Ours(setting, mesh, Zero(stage=0))
        case "tpep0":
            return TakesAll(Ours(together, mesh, Zero(stage=0), Parallel(tp=world, ep=world)), setting, tokens)
        case "hfep":
            return HuggingFace(setting, DistributedConfig(fsdp_size=world, ep_size=world))
        case "hftpep":
            return TakesAll(HuggingFace(setting, DistributedConfig(tp_size=world, ep_size=world)), setting, tokens)
        case "fsdp2":
            return Fsdp2(setting, reshards=True)
    return Ours(setting, mesh, OURS[name], Parallel(ep=world))


def find_ratios(measured: dict[str, dict[str, list[float]]], against: str) -> dict[str, dict[str, float]]:
    """Medians over the rounds of a side's wall and CPU seconds over those of `against`."""
    return {
        key.removesuffix("_s"): {
            name: statistics.median(
                mine / theirs for mine, theirs in zip(own[WARMUP_ROUNDS:], measured[key][against][WARMUP_ROUNDS:], strict=True)
            )
            for name, own in measured[key].items()
        }
        for key in ("wall_s", "cpu_s")
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case(1, 1, 128)])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=DEFAULT)
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--experts", type=int, default=MODEL["num_experts"])
    parser.add_argument("--top-k", type=int, default=MODEL["num_experts_per_tok"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--json", type=Path, default=None, help="where to write the ratios' medians, by precision, case and side"
    )
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--profile", choices=SIDES, default=None)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} rounds")
    model = MODEL | {"num_experts": options.experts, "num_experts_per_tok": options.top_k}
    against, ratios = options.sides[0], {}
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights, model, FAMILY)
        for precision in options.precisions:
            for case in options.cases:
                steps = WARMUP_ROUNDS + options.rounds
                setting = Setting(
                    case, options.ranks, 0, steps, None, weights, "", precision, model=model, family=FAMILY
                )
                print(f"\n{precision}, {case}, {options.experts} experts, top {options.top_k}", flush=True)
                if options.memory:
                    print_memory(setting, build_side, options.sides)
                elif options.profile is not None:
                    print(run_ranks(profile, setting, build_side, options.profile))
                else:
                    measured = run_ranks(measure, setting, build_side, options.sides)
                    print("\n".join([title(against), *table(setting, measured, against, LOSS_TOLERANCES[precision])]))
                    ratios[f"{precision}, {case}"] = find_ratios(measured, against)
    if options.json is not None:
        options.json.write_text(json.dumps(ratios, indent=2) + "\n")


if __name__ == "__main__":
    main()
