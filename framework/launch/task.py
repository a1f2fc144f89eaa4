"""A rank as a task of SLURM: its number, its node, and its word to the job's script on why the ranks end."""

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from framework.errors import LeaseLost, NodeError, TopologyError
from framework.launch.directory import HolderState, describe_self
from framework.launch.jobs import WAITING_OR_RUNNING, find_job, read_history
from framework.launch.order import find_rank
from framework.lease import Holder, read_lease
from framework.mesh.topology import place
from framework.monitor.goodput import Job
from framework.recipe.derive import Derived

OUTCOME = "MESHWRIGHT_OUTCOME"
QUEUED = "MESHWRIGHT_QUEUED"


def is_task() -> bool:
    """Whether this process was started inside a job of ours."""
    return OUTCOME in os.environ and "SLURM_PROCID" in os.environ


def count_nodes() -> int:
    """The nodes of this start of a job's ranks."""
    return int(os.environ["SLURM_STEP_NUM_NODES"])


def adopt_task(derived: Derived) -> None:
    """Set the variables of torch's launchers from those of SLURM, where torchrun has not done so; the rank by the order of the
    nodes. Raises TopologyError where SLURM's numbers are not those of the plan."""
    if "RANK" not in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
        os.environ["LOCAL_WORLD_SIZE"] = os.environ["SLURM_NTASKS_PER_NODE"]
    check_place(derived)
    os.environ["RANK"] = str(find_rank(derived, int(os.environ["RANK"])))


def describe_start() -> Holder:
    """This start of the ranks as the holder of a lease: SLURM counts restarts of a job, and steps within one."""
    job, restart = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
    return describe_self(job, int(restart), int(os.environ.get("SLURM_STEP_ID", "0")))


def judge(holder: Holder, me: Holder) -> HolderState:
    """Whether the holder of a run is over, by SLURM's word. SLURM starts a job again only once it takes the former start for
    ended."""
    if holder.is_older_start(me):
        return HolderState.OVER
    if not holder.job or holder.job == me.job:
        return HolderState.UNKNOWN
    state = find_job(holder.job)
    if state is None:
        return HolderState.UNKNOWN
    return HolderState.LIVES if state.state in WAITING_OR_RUNNING else HolderState.OVER


def refuse_stale(run_dir: Path, began_at: int) -> None:
    """Raises LeaseLost where the run was taken since this process began, though not by its own start."""
    epoch, holder = read_lease(run_dir)
    mine = describe_start()
    if (
        holder
        and epoch != began_at
        and (holder.job, holder.restart, holder.step) != (mine.job, mine.restart, mine.step)
    ):
        raise LeaseLost(f"{run_dir} was taken by {holder.describe()} since this process began: it ends")


def check_place(derived: Derived) -> None:
    """Raises TopologyError when SLURM has not numbered this rank's node as the plan does, before nodes are ordered anew."""
    placement, rank = place(derived), int(os.environ["RANK"])
    node, nodes = int(os.environ["SLURM_NODEID"]), int(os.environ["SLURM_STEP_NUM_NODES"])
    if (node, nodes) != (placement.node(rank), placement.num_nodes):
        raise TopologyError(
            f"rank {rank} is on node {node} of {nodes}, but the plan is node {placement.node(rank)} of"
            f" {placement.num_nodes} ({placement.describe()}): start the script that `meshwright submit` rendered, unchanged"
        )


def check_node(run_dir: Path, device: str, began_at: int) -> None:
    """Raises NodeError where this node shows too few GPUs for its ranks, and has it left out from now on. It never falls back
    to CPUs: a CPU rank among GPU ranks would hold up all of them."""
    from framework.comm.connect import choose_device

    try:
        choose_device(device)
    except NodeError:
        refuse_stale(run_dir, began_at)
        leave_out(run_dir, [os.environ.get("SLURMD_NODENAME", "")])
        raise


def leave_out(run_dir: Path, nodes: Sequence[str]) -> None:
    """Have the job's script exclude these nodes when it requeues the job."""
    with open(run_dir / "slurm" / "bad-nodes", "a") as bad:
        bad.write("".join(f"{node}\n" for node in nodes))


def claim_outcome(code: int) -> bool:
    """Write `code` for the script, if this rank is the first to end; returns whether it is. The others end because it has, and
    srun's own code may be that of a rank it killed. A start that was thought dead gets True and writes nothing: nobody waits
    for its code."""
    path = Path(os.environ[OUTCOME])
    with suppress(OSError):
        _, holder = read_lease(path.parent.parent)
        if holder is not None and describe_start().is_older_start(holder):
            return True
    with suppress(FileExistsError):
        with open(path, "x") as file:
            file.write(f"{code}\n")
        return True
    return False


def describe_job(run_dir: Path) -> Job:
    """Times at which the job of this start was submitted and began, and the end of the start before it; nothing outside of a
    job."""
    return read_job(run_dir / "slurm" / "history", os.environ.get(QUEUED, "")) if is_task() else Job()


def read_job(history: Path, queued: str) -> Job:
    """Times from the job's script. queued: when the job was submitted and began, empty where SLURM does not say. history: the
    script's record of starts and ends, which lacks the end of a node that was lost."""
    notes = [
        note for note in read_history(history) if note.what != "left out"
    ]  # between an end and the start that follows it
    starts = [index for index, note in enumerate(notes) if note.what == "start"]
    before = notes[starts[-1] - 1 : starts[-1]] if starts else []
    gone = next(((_unix_s(each.time), int(each.values["code"])) for each in before if each.what == "end"), (None, None))
    moments = [float(word) for word in queued.split() if word.isdigit()]
    return Job(*(moments if len(moments) == 2 else (None, None)), *gone)


def _unix_s(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S%z").timestamp()
