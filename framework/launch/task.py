"""A rank as a task of SLURM: who it is, whether it is where the plan says, and how it tells the job's script why it ended."""

import os
from contextlib import suppress
from pathlib import Path

from framework.errors import NodeError, TopologyError
from framework.mesh.placement import place
from framework.recipe.derive import Derived

OUTCOME = "MESHWRIGHT_OUTCOME"


def is_task() -> bool:
    """Was this process started inside a job of ours?"""
    return OUTCOME in os.environ and "SLURM_PROCID" in os.environ


def adopt_task() -> None:
    """Say in the words of torch's launchers what SLURM says in its own. Where torchrun started the rank it has done so."""
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["SLURM_NTASKS_PER_NODE"]


def check_place(derived: Derived) -> None:
    """Raises TopologyError when this rank is not on the node that the plan gives it."""
    placement, rank = place(derived), int(os.environ["RANK"])
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_STEP_NUM_NODES"])
    if (node, nodes) != (placement.node(rank), placement.num_nodes):
        raise TopologyError(
            f"rank {rank} is on node {node} of {nodes}, but the plan is node {placement.node(rank)} of"
            f" {placement.num_nodes} ({placement.describe()}): start the script that `meshwright submit` rendered, unchanged"
        )


def check_node(run_dir: Path, device: str) -> None:
    """Raises NodeError where this node shows too few GPUs for its ranks, and has it left out from now on. It never trains on
    something else: a CPU rank among GPU ranks would hold up all of them."""
    from framework.comm.connect import choose_device

    try:
        choose_device(device)
    except NodeError:
        with open(run_dir / "slurm" / "bad-nodes", "a") as bad:
            bad.write(f"{os.environ.get('SLURMD_NODENAME', '')}\n")
        raise


def claim_outcome(code: int) -> bool:
    """Is this the first rank that knows why the ranks end? Then `code` is what the script acts upon. The others end because
    it has, and srun's own code may be that of a rank it killed."""
    with suppress(FileExistsError):
        with open(os.environ[OUTCOME], "x") as file:
            file.write(f"{code}\n")
        return True
    return False
