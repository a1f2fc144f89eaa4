"""The process of a rank, under torch's launchers or as a task of SLURM: its threads, its number and node, its fingerprint, its
errors and its end, with a word to the job's script on why the ranks end. Its work is `train/program.py`.

Nothing here imports torch, which reads from the environment how many threads it may use.
"""

import ctypes
import faulthandler
import os
import platform
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import xxhash

import framework
from framework.errors import EXIT_FAILED, HungError, LeaseLost, MeshwrightError, NodeError, TopologyError
from framework.host import count_cores
from framework.launch.directory import HolderState, describe_self
from framework.launch.jobs import WAITING_OR_RUNNING, find_job, read_history
from framework.launch.nodes import NODES, find_rank
from framework.lease import Holder, read_lease
from framework.mesh.topology import place
from framework.monitor.goodput import Job
from framework.output import first_line, keep_streams
from framework.recipe.derive import Derived
from framework.recipe.plugins import describe_plugins
from framework.recipe.schema import Launch, Recipe

_PACKAGE = Path(__file__).parents[1]
# Variables of the job's script: the file for the exit code of the first rank that ends, and when the job was submitted and began.
OUTCOME, QUEUED = "MESHWRIGHT_OUTCOME", "MESHWRIGHT_QUEUED"
# torch's, and its name before 2.9.
ALLOCATOR_VARIABLES = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
# Fewest cores of a rank with a GPU.
LEAST_CORES = 4
# Device files of the drivers of NVIDIA and AMD, and of NVIDIA inside Windows.
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))


def report_error(error: Exception) -> int:
    """Report the error that is being handled and return its exit code.

    With a launcher it goes into the launcher's error file, so that ranks which fail alike are heard once; else to stderr, a
    user's mistake without a traceback.
    """
    error = _explain_timeout(error)
    code = error.exit_code if isinstance(error, MeshwrightError) else EXIT_FAILED
    if not is_task() and os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        # Once one rank has ended, the launcher ends the others by SIGTERM. One that is cut while it writes leaves half a file,
        # and the launcher fails over that instead of saying the cause.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        get_error_handler().record_exception(error)
        return code
    text = str(error) if isinstance(error, MeshwrightError) else traceback.format_exc()
    if is_task() and not claim_outcome(code):  # a rank that fails because of another: a line in the job's log
        text = f"ends as well: {type(error).__name__}: {first_line(error)[:200]}"
    rank = os.environ.get("RANK", os.environ["SLURM_PROCID"] if is_task() else None)
    print(text if rank is None else f"[rank {rank}] {text}", file=sys.stderr)
    return code


def end_hung(error: HungError) -> None:
    """Report the error and end this rank, from another thread than the one that hangs."""
    code = report_error(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _explain_timeout(error: Exception) -> Exception:
    """Return gloo's error of a collective that timed out as a HungError that says where this rank waited; others as they are."""
    found = re.search(r"[Tt]imed out waiting (\d+)ms", str(error))
    if not isinstance(error, RuntimeError) or found is None:
        return error
    ours = [each for each in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(each.filename).parents]
    places = "".join(f"\n  {each.filename}:{each.lineno} in {each.name}" for each in reversed(ours[-6:]))
    return HungError(
        f"a collective timed out: this rank waited {int(found[1]) / 1000:,.0f} s for ranks that did not come to it, for they hang"
        f" or have taken another path (track.debug_collectives=true finds such). It waited at{places}"
    )


def limit_threads(launch: Launch, num_neighbours: int) -> int:
    """Set this rank's CPU threads in the environment, from which libraries take their number, and return it.

    The number is the recipe's, else that of the CPUs which the job gives a rank, else an equal share of this process's cores.
    num_neighbours: ranks on this machine.
    """
    threads = launch.threads_per_rank or launch.cpus_per_rank or max(1, count_cores() // num_neighbours)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if launch.device == "cpu":
        let_threads_sleep()
    return threads


def prepare_gpu_rank() -> None:
    """Choose torch's allocator in the environment, unless the user has; and say it loudly where this rank has too few cores.

    Expandable segments map memory page by page: units that come and go between activations of other sizes would leave gaps that
    nothing fits into. torch reads the variable at its first allocation.
    """
    if not ALLOCATOR_VARIABLES & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if count_cores() < LEAST_CORES and rank_in_environment() == 0:
        print(
            f"WARNING: a rank with a GPU may use {count_cores()} of this machine's cores, and wants {LEAST_CORES} at the least:"
            " the thread that launches kernels, autograd's, NCCL's proxy and the loader wait for one another, the GPU for all of"
            " them. Under SLURM set launch.cpus_per_rank, else widen the mask of the process (taskset, cpuset)",
            file=sys.stderr,
        )


def rank_in_environment() -> int:
    """The number of this rank, as torch's launchers or SLURM say it; 0 of a rank that is alone."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def may_use_gpus(launch: Launch) -> bool:
    """Whether launch.device may resolve to cuda, judged without torch. Ranks in processes of their own know their device."""
    return launch.device == "cuda" or (launch.device == "auto" and any(driver.exists() for driver in GPU_DRIVERS))


def let_threads_sleep() -> None:
    """Have OpenMP's threads sleep while they wait, unless the user has chosen. Torch reads the variable when it is imported.

    Threads that spin between two small operations take the cores that other ranks need.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def take_fingerprint(recipe: Recipe) -> dict[str, str]:
    """Values that must be equal on all ranks of a run (comm/groups.py), by name. Torch is imported already."""
    import torch

    found = {
        "recipe": xxhash.xxh3_64_hexdigest(repr(recipe).encode()),
        "code": hash_code(Path(framework.__file__ or "").parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": recipe.launch.device,
        "compute": recipe.precision.compute,
    }
    if NODES in os.environ:
        found["nodes"] = xxhash.xxh3_64_hexdigest(os.environ[NODES].encode())
    if recipe.plugins:
        found["plugins"] = str(describe_plugins(recipe.plugins))
    if recipe.launch.device == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def hash_code(package: Path) -> str:
    """A hash of the names and the texts of a package's Python files."""
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def run_process(work: Callable[[], int]) -> NoReturn:
    """Run `work` and end this process with its exit code, without Python's teardown, which can wait forever for a lost peer."""
    keep_streams()
    faulthandler.enable()
    _end_with_parent()
    code = work()
    if is_task():
        claim_outcome(code)
    # The launcher sends SIGTERM once the first rank has ended; from here on it must not replace the code.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the launcher dies, even by SIGKILL: the rank then saves and ends, instead of
    writing on into a run that somebody else may resume. Linux only; elsewhere `lock.ranks` still keeps others out."""
    if sys.platform == "linux" and os.environ.get("TORCHELASTIC_RUN_ID"):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


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
    try:
        with open(path, "x") as file:
            file.write(f"{code}\n")
    except FileExistsError:
        return False
    except OSError:
        pass  # on a full disk nobody is the first, so each rank says all that it knows, and ends with its own code
    return True


def describe_job(run_dir: Path) -> Job:
    """Times at which the job of this start was submitted and began, and the end of the start before it; nothing outside of a
    job."""
    return read_job(run_dir / "slurm" / "history", os.environ.get(QUEUED, "")) if is_task() else Job()


def read_job(history: Path, queued: str) -> Job:
    """Times from the job's script. queued: the value of QUEUED, empty where SLURM does not say. history: the
    script's record of starts and ends, which lacks the end of a node that was lost."""
    # Nodes are left out between an end and the start that follows it.
    notes = [note for note in read_history(history) if note.what != "left out"]
    starts = [index for index, note in enumerate(notes) if note.what == "start"]
    before = notes[starts[-1] - 1 : starts[-1]] if starts else []
    gone = next(((_unix_s(each.time), int(each.values["code"])) for each in before if each.what == "end"), (None, None))
    moments = [float(word) for word in queued.split() if word.isdigit()]
    return Job(*(moments if len(moments) == 2 else (None, None)), *gone)


def _unix_s(stamp: str) -> float:
    return datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%S%z").timestamp()
