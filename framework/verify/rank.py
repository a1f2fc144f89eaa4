"""The ranks of a verification: processes of this machine that run the layout and leave its evidence in a file.

They come from a fork server, which imports torch and transformers once for all of them.
"""

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException
from transformers import PretrainedConfig
from transformers.utils.logging import set_verbosity_error

from framework.comm.connect import connect
from framework.errors import MeshwrightError
from framework.plan.plan import make_plan
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.verify.evidence import Evidence, TokenBatch, make_batches
from framework.verify.layout import run_layout

TIMEOUT_S = 120.0


class RankFailed(Exception):
    """A rank ended without evidence; the message has its traceback."""


class Ranks:
    """Running ranks; `wait` returns their evidence."""

    def __init__(self, context: ProcessContext, folder: Path):
        self._context = context
        self._folder = folder

    def wait(self) -> Evidence:
        """Raises the MeshwrightError that a rank raised, or RankFailed."""
        try:
            while not self._context.join():
                pass
        except (ProcessRaisedException, ProcessExitedException) as error:
            for file in sorted(self._folder.glob("error-*")):
                raise pickle.loads(file.read_bytes()) from None
            raise RankFailed(str(error).strip()) from None
        return torch.load(self._folder / "evidence", weights_only=False)


@contextmanager
def running_ranks(recipe: Recipe, config: PretrainedConfig, num_steps: int, folder: Path) -> Iterator[Ranks]:
    """Run the recipe's layout while this context lives; leaving it ends ranks that still run."""
    multiprocessing.set_forkserver_preload([__name__])
    context = torch.multiprocessing.start_processes(
        _run_rank,
        (recipe, config, num_steps, folder),
        nprocs=derive(recipe).world,
        join=False,
        start_method="forkserver",
    )
    assert context is not None, "join=False returns the processes' context"
    try:
        yield Ranks(context, folder)
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def make_run_batches(recipe: Recipe, config: PretrainedConfig, num_steps: int) -> list[TokenBatch]:
    """The batches of a verification, equal in every process."""
    derived = derive(recipe)
    return make_batches(config, num_steps, derived.sequences_per_step, derived.context, recipe.train.seed)


def _run_rank(rank: int, recipe: Recipe, config: PretrainedConfig, num_steps: int, folder: Path) -> None:
    torch.set_num_threads(1)
    set_verbosity_error()
    try:
        plan = make_plan(recipe, config)
        device, backend = choose_rank_device(recipe.launch.device, rank, plan.topology.world)
        compute_exactly(device)
        mesh = connect(plan.topology, device, (folder / "rendezvous").as_uri(), rank, TIMEOUT_S, backend=backend)
        evidence = run_layout(plan, make_run_batches(recipe, config, num_steps), mesh)
        if rank == 0:
            torch.save(evidence, folder / "evidence")
        mesh.close()
    except MeshwrightError as error:
        (folder / f"error-{rank}").write_bytes(pickle.dumps(error))
        raise


def choose_rank_device(kind: str, rank: int, world: int) -> tuple[torch.device, Literal["gloo", "nccl"]]:
    """A rank's device and the backend that all ranks use: NCCL if each has a GPU for itself, else gloo, and GPUs are shared."""
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    num_gpus = torch.cuda.device_count()
    return torch.device("cuda", rank % num_gpus), "nccl" if num_gpus >= world else "gloo"


def compute_exactly(device: torch.device) -> None:
    """Make this process compute in fp32 where it says fp32 (no TF32), accumulate bf16 matmuls in fp32, and use deterministic
    kernels where there are any."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True, warn_only=True)
