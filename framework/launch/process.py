"""The process of a rank: its threads, its fingerprint, its errors and its end. Its work is `train/program.py`.

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
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import xxhash

import framework
from framework.errors import EXIT_FAILED, HungError, MeshwrightError
from framework.host import count_cores
from framework.launch.order import NODES
from framework.launch.task import claim_outcome, is_task
from framework.output import keep_streams
from framework.recipe.plugins import describe_plugins
from framework.recipe.schema import Launch, Recipe

_PACKAGE = Path(__file__).parents[1]
# Device files of the drivers of NVIDIA and AMD, and of NVIDIA inside Windows.
# torch's, and its name before 2.9.
ALLOCATOR_VARIABLES = frozenset({"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"})
# Fewest cores of a rank with a GPU.
LEAST_CORES = 4
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
        text = f"ends as well: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
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
