"""The ranks of a verification: processes of this machine that run the layout and send its evidence.

They come from a fork server, which imports torch and transformers once for all of them.
"""

from typing import Literal

import torch
from transformers import PretrainedConfig
from transformers.utils.logging import set_verbosity_error

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.verify.evidence import Evidence, TokenBatch, make_batches
from framework.verify.layout import run_layout

TIMEOUT_S = 120.0


def make_run_batches(recipe: Recipe, config: PretrainedConfig, num_steps: int) -> list[TokenBatch]:
    """The batches of a verification, equal in every process."""
    derived = derive(recipe)
    packs_documents = recipe.data.pack == "documents"
    return make_batches(
        config, num_steps, derived.sequences_per_step, derived.context, recipe.train.seed, packs_documents
    )


def run_rank(
    rank: int, world: int, rendezvous: str, recipe: Recipe, config: PretrainedConfig, num_steps: int
) -> Evidence | None:
    """Body of a pool's rank: the evidence of the recipe's layout, of rank 0."""
    torch.set_num_threads(1)
    set_verbosity_error()
    plan = make_plan(recipe, config)
    device, backend = choose_rank_device(recipe.launch.device, rank, world)
    compute_exactly(device)
    mesh = connect(plan.topology, device, rendezvous, rank, TIMEOUT_S, backend=backend)
    evidence = run_layout(plan, make_run_batches(recipe, config, num_steps), mesh)
    mesh.close()
    return evidence if rank == 0 else None


def choose_rank_device(kind: str, rank: int, world: int) -> tuple[torch.device, Literal["gloo", "nccl"]]:
    """A rank's device and the backend that all ranks use: NCCL if each has a GPU for itself, else gloo, and GPUs are shared."""
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    num_gpus = torch.cuda.device_count()
    return torch.device("cuda", rank % num_gpus), "nccl" if num_gpus >= world else "gloo"


def compute_exactly(device: torch.device) -> None:
    """Make this process compute in fp32 where it says fp32 (no TF32), accumulate bf16 and fp16 matmuls in fp32, and use
    deterministic kernels where there are any."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True, warn_only=True)
