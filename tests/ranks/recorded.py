"""24 short training runs in as many layouts, and what was recorded of each: losses, norms and a digest of the last weights.

`python -m tests.ranks.recorded` writes the record anew. That is due after a change that was meant to move numbers, and the
commit says why; a change of structure must leave the record as it is.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.derive import derive
from framework.recipe.schema import Parallel, Pipeline, Recipe, Zero
from framework.verify.evidence import Evidence, make_batches
from framework.verify.layout import run_layout
from tests.families import build_config, family
from tests.ranks.parity import CONTEXT, CPU, small_recipe, topology_of
from tests.ranks.pool import RankPool

PATH = Path(__file__).parents[1] / "data" / "recorded_layouts.json"
STEPS = 20
SEQUENCES = 12
NUM_RANKS = 4


@dataclass(frozen=True)
class Layout:
    """A layout of a tiny model. rest: keys of the recipe's groups that `small_recipe` does not set."""

    model: str
    world: int
    precision: str = "fp32"
    zero: Zero = field(default_factory=Zero)
    parallel: Parallel = field(default_factory=Parallel)
    pipeline: Pipeline = field(default_factory=Pipeline)
    accumulation: int = 2
    rest: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def recipe(self) -> Recipe:
        small = small_recipe(self.precision, self.world, self.accumulation, SEQUENCES, 0.5, self.zero, self.parallel)
        small = replace(small, pipeline=self.pipeline, train=replace(small.train, steps=STEPS))
        groups = {name: replace(getattr(small, name), **values) for name, values in self.rest.items()}
        return replace(small, **groups)


DROPOUT = {"resid_pdrop": 0.2, "attn_pdrop": 0.1, "embd_pdrop": 0.1}
BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.05}
FIVE_LAYERS = {"num_hidden_layers": 5}

LAYOUTS = {
    "dp": Layout("llama", 2),
    "zero 0, accumulation, dropout": Layout("gpt2", 2, accumulation=3, changes=DROPOUT),
    "zero 1": Layout("gemma2", 2, zero=Zero(1)),
    "zero 2": Layout("qwen3_moe", 2, zero=Zero(2), changes=BALANCE),
    "zero 3": Layout("llama", 3, zero=Zero(3)),
    "zero 3, bf16, local": Layout("gemma2", 2, "bf16", Zero(3, accumulate="local")),
    "zero 3, checkpointing, chunked loss, frozen": Layout(
        "llama", 2, zero=Zero(3),
        rest={
            "memory": {"activation_checkpointing": "full", "chunked_loss": True},
            "model": {"freeze": ["embed", r"layers\.1\."]},
        },
    ),
    "hsdp, bf16, updates divided": Layout(
        "qwen3_moe", 4, "bf16", Zero(2, shard_within=2, optimizer_within="all"), accumulation=1
    ),
    "hsdp, zero 3": Layout("gpt2", 4, zero=Zero(3, shard_within=2), accumulation=3),
    "tp": Layout("gpt2", 2, parallel=Parallel(tp=2, sequence=False), changes=DROPOUT),
    "tp 4, bf16": Layout("llama", 4, "bf16", parallel=Parallel(tp=4, sequence=False)),
    "sp": Layout("gemma2", 2, parallel=Parallel(tp=2)),
    "sp, dropout": Layout("gpt2", 2, parallel=Parallel(tp=2), changes=DROPOUT),
    "sp, overlap, bf16": Layout("llama", 2, "bf16", parallel=Parallel(tp=2, overlap="always")),
    "sp, regather, experts": Layout("qwen3_moe", 2, parallel=Parallel(tp=2), rest={"memory": {"gathered_inputs": "regather"}}),
    "gpipe": Layout("llama", 2, parallel=Parallel(pp=2), pipeline=Pipeline("gpipe")),
    "1f1b, tied, zero 1": Layout("gpt2", 4, zero=Zero(1), parallel=Parallel(pp=2), pipeline=Pipeline("1f1b"), accumulation=3),
    "interleaved": Layout("gemma2", 2, parallel=Parallel(pp=2), pipeline=Pipeline("interleaved"), changes={
        "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}),
    "zb_h1, bf16": Layout("llama", 2, "bf16", parallel=Parallel(pp=2), pipeline=Pipeline("zb_h1"), accumulation=4),
    "zbv, zero 2, experts": Layout(
        "qwen3_moe", 4, zero=Zero(2), parallel=Parallel(pp=2), pipeline=Pipeline("zbv"), changes=FIVE_LAYERS | BALANCE
    ),
    "dualpipe_v, tied": Layout(
        "llama", 2, parallel=Parallel(pp=2), pipeline=Pipeline("dualpipe_v"), accumulation=4,
        changes=FIVE_LAYERS | {"tie_word_embeddings": True},
    ),
    "zero 3 x sp": Layout("llama", 4, zero=Zero(3), parallel=Parallel(tp=2), rest={"optim": {"name": "sgd"}}),
    "pp x sp, bf16": Layout("gemma2", 4, "bf16", parallel=Parallel(pp=2, tp=2), pipeline=Pipeline("1f1b")),
    "pp x tp, experts": Layout(
        "qwen3_moe", 4, parallel=Parallel(pp=2, tp=2, sequence=False), pipeline=Pipeline("zb_h1"), changes=BALANCE
    ),
}  # fmt: skip


def train(rank: int, world: int, rendezvous: str, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Body: what is to be recorded of the layouts of at most `world` ranks."""
    found = {}
    for number, name in enumerate(names):
        layout = LAYOUTS[name]
        if rank >= layout.world:
            continue
        recipe, config = layout.recipe, build_config(family(layout.model), **layout.changes)
        config.use_cache = False
        assert derive(recipe).accumulation == layout.accumulation, name
        mesh = connect(topology_of(recipe, config), CPU, f"{rendezvous}-{number}", rank)
        batches = make_batches(config, STEPS, SEQUENCES, CONTEXT, seed=11)
        evidence = run_layout(make_plan(recipe, config), batches, mesh)
        mesh.close()
        found[name] = {
            "losses": [each.hex() for each in evidence.losses],
            "norms": [each.hex() for each in evidence.norms],
            "weights": digest(evidence.weights),
        }
    return found


def digest(weights: Mapping[str, Tensor]) -> str:
    """Of every bit of every weight."""
    found = sha256()
    for name in sorted(weights):
        found.update(f"{name} {tuple(weights[name].shape)} {weights[name].dtype}".encode())
        found.update(weights[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def describe(evidence: Evidence) -> dict[str, Any]:
    """Every bit of it."""
    return {
        "losses": [each.hex() for each in evidence.losses],
        "norms": [each.hex() for each in evidence.norms],
        "gradients": digest(evidence.gradients),
        "weights": digest(evidence.weights),
    }


def describe_machine() -> dict[str, str]:
    """What chooses the kernels, and with them the rounding of sums."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = dict(tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line)
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": " ".join(fields.get(key, "") for key in ("model name", "cpu family", "model", "stepping")),
        "machine": platform.machine(),
    }


def write() -> None:
    pool = RankPool(NUM_RANKS)
    found = pool.run(NUM_RANKS, train, list(LAYOUTS), timeout_s=1200)[0]
    pool.close()
    PATH.write_text(json.dumps({"machine": describe_machine(), "layouts": found}, indent=1) + "\n")


if __name__ == "__main__":
    write()
