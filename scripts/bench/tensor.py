"""Our tensor parallelism beside torch's parallelize_module, step by step: interleave.py has the method.

    python scripts/bench/tensor.py                        both cases on two ranks
    python scripts/bench/tensor.py --precisions bf16      parameters stay fp32 on torch's side: autocast
    python scripts/bench/tensor.py --memory               peak resident memory, each side in ranks of its own
    python scripts/bench/tensor.py --profile ours         what one rank's time goes into

All ranks take the same tokens. Every side: sdpa, fused AdamW, decay on matrices only, no clipping.
  ours, oursplain            framework.train.build and train_step with parallel.sequence on, off; zero.stage 0
  torch, torchplain          Colwise, Rowwise and (torch) SequenceParallel as torch's tutorial has them, whole logits, HF's loss
  torchloss, torchplainloss  the same with the logits left split and torch.distributed.tensor.parallel.loss_parallel
  ddp                        DistributedDataParallel: every rank takes its share of the sequences (where they divide)
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from interleave import (
    WARMUP_ROUNDS,
    Case,
    Loop,
    Ours,
    Setting,
    Side,
    measure,
    print_memory,
    profile,
    run_ranks,
    save_weights,
    table,
    title,
    wrap_ddp,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from framework.comm.connect import Mesh
from framework.data.loader import Microbatch
from framework.recipe.schema import Parallel, Zero

TORCH = ["torch", "torchplain", "torchloss", "torchplainloss"]
SIDES = ["ours", "oursplain", *TORCH]
LOSS_TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}


class TorchTensorParallel(Loop):
    """torch's tutorial for tensor parallelism, with the names of Hugging Face's Llama."""

    is_global = True

    def __init__(self, setting: Setting, sequence: bool, splits_loss: bool):
        self.splits_loss = splits_loss
        super().__init__(setting, lambda model: split_by_torch(model, setting.tp, sequence, splits_loss))

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        total = 0.0
        for each in microbatches:
            # Hugging Face counts positions by its hidden states, of which a rank may have a part.
            positions = torch.arange(each.input_ids.shape[1])[None]
            with loss_parallel() if self.splits_loss else nullcontext():
                with self.autocasting():
                    logits = self.model(each.input_ids, position_ids=positions, use_cache=False).logits
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), each.labels.flatten()) / len(microbatches)
                loss.backward()
            total += loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def split_by_torch(model: Any, tp: int, sequence: bool, splits_loss: bool) -> torch.nn.Module:
    """Attentions and mlps by columns and rows, embedding and head by words."""
    mesh = init_device_mesh("cpu", (tp,))
    outside = Shard(1) if sequence else Replicate()
    logits = {"output_layouts": Shard(-1), "use_local_output": False}
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=outside),
            "lm_head": ColwiseParallel(
                input_layouts=outside, **(logits if splits_loss else {"output_layouts": Replicate()})
            ),
            **({"model.norm": SequenceParallel()} if sequence else {}),
        },
    )
    plan: dict[str, ParallelStyle] = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=outside),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=outside),
    }
    if sequence:
        plan |= {
            "input_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            ),
            "post_attention_layernorm": SequenceParallel(),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


class Shared(Loop):
    """DistributedDataParallel on the tokens of all ranks: each takes its share of the sequences."""

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        world, rank = self._setting.world, self._setting.rank
        return super().step(
            [
                Microbatch(each.input_ids[rank::world].contiguous(), each.labels[rank::world].contiguous(), None)
                for each in microbatches
            ]
        )


def build_side(name: str, setting: Setting, mesh: Mesh, tokens: Tensor) -> Side:
    if name in TORCH:
        return TorchTensorParallel(setting, sequence="plain" not in name, splits_loss=name.endswith("loss"))
    if name == "ddp":
        return Shared(setting, wrap_ddp)
    return Ours(setting, mesh, Zero(stage=0), Parallel(tp=setting.tp, sequence=name == "ours"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.parse, default=[Case(1, 1, 128), Case(1, 2, 512)])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=[*SIDES, "ddp"], default=SIDES)
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--profile", choices=[*SIDES, "ddp"], default=None)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights)
        for precision in options.precisions:
            for case in options.cases:
                setting = Setting(
                    case=case, world=options.ranks, rank=0, steps=WARMUP_ROUNDS + options.rounds, clip_norm=None,
                    weights=weights, scratch="", precision=precision, tp=options.ranks,
                )  # fmt: skip
                print(f"\n{precision}, {case}", flush=True)
                if options.memory:
                    print_memory(setting, build_side, options.sides)
                elif options.profile is not None:
                    print(run_ranks(profile, setting, build_side, options.profile))
                else:
                    measured = run_ranks(measure, setting, build_side, options.sides)
                    against = options.sides[0]
                    print("\n".join([title(against), *table(setting, measured, against, LOSS_TOLERANCES[precision])]))


if __name__ == "__main__":
    main()
