"""One rank of a run: this module as a program, with RUN_DIR [EPOCH], or `main(run_dir, lease)` in the launching process when it
is alone. EPOCH: of the launcher's lease; in a job rank 0 takes the lease itself.

Torch is imported late: how many threads it may use is read from the environment at that time.
"""

import ctypes
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from framework.errors import EXIT_FAILED, EXIT_INTERRUPTED, HungError, MeshwrightError
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory
from framework.launch.fingerprint import take_fingerprint
from framework.launch.task import adopt_task, check_node, check_place, claim_outcome, describe_start, is_task, judge
from framework.lease import Lease, read_lease
from framework.monitor.phases import START_UP, PhaseBar, Phases
from framework.monitor.stop import StopRequest
from framework.output import keep_streams
from framework.recipe.compose import load_recipe
from framework.recipe.derive import derive
from framework.recipe.elastic import at_nodes
from framework.recipe.host import count_cores
from framework.recipe.schema import Launch, Recipe

if TYPE_CHECKING:
    from framework.launch.fault_door import FaultDoor

# Ranks of a job's former start, killed with their node perhaps, may take so long to vanish.
RUN_FREE_WITHIN_S = 60.0
_PACKAGE = Path(__file__).parents[1]
# What the drivers of NVIDIA and AMD make, and that of NVIDIA inside Windows.
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))


def main(run_dir: Path, lease: Lease | None = None) -> int:
    """Train as the rank that the environment says, to the exit code; an error is said, not raised. lease: the launcher's, None in
    a job."""
    try:
        return _train(run_dir, lease)
    except KeyboardInterrupt:
        # The loop has not taken the signals over yet: there is nothing to save.
        return EXIT_INTERRUPTED
    except Exception as error:
        return tell(error)


def tell(error: Exception) -> int:
    """Say the error that is being handled, and return its exit code: to the launcher's error file where there is a launcher,
    so that ranks which fail alike are heard once, else on stderr; a user's mistake without a traceback."""
    error = _explain_timeout(error)
    is_explained = isinstance(error, MeshwrightError)
    code = error.exit_code if isinstance(error, MeshwrightError) else EXIT_FAILED
    if is_task():
        _tell_job(error, code)
    elif os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        # Once one rank has ended, the launcher ends the others by SIGTERM. One that is cut while it writes leaves half a file,
        # and the launcher fails over that instead of saying the cause.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        get_error_handler().record_exception(error)
    else:
        place = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        print(f"{place}{error if is_explained else traceback.format_exc()}", file=sys.stderr)
    return code


def end_hung(error: HungError) -> None:
    """Say the error and end this rank, from another thread than the one that hangs."""
    code = tell(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _explain_timeout(error: Exception) -> Exception:
    """gloo's error of a collective whose time is up as a HungError that says where this rank waited; others as they are."""
    found = re.search(r"[Tt]imed out waiting (\d+)ms", str(error))
    if not isinstance(error, RuntimeError) or found is None:
        return error
    ours = [each for each in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(each.filename).parents]
    places = "".join(f"\n  {each.filename}:{each.lineno} in {each.name}" for each in reversed(ours[-6:]))
    return HungError(
        f"a collective timed out: this rank waited {int(found[1]) / 1000:,.0f} s for ranks that did not come to it, for they hang"
        f" or have taken another path (track.debug_collectives=true finds such). It waited at{places}"
    )


def count_threads(launch: Launch, num_neighbours: int) -> int:
    """CPU threads of one rank: as the recipe says, else its CPUs of a job, else an equal part of the cores that this process
    may use. num_neighbours: ranks on this machine."""
    return launch.threads_per_rank or launch.cpus_per_rank or max(1, count_cores() // num_neighbours)


def may_use_gpus(launch: Launch) -> bool:
    """Whether the device may settle as cuda, judged without torch. Ranks in processes of their own know their device."""
    return launch.device == "cuda" or (launch.device == "auto" and any(driver.exists() for driver in GPU_DRIVERS))


def let_threads_sleep() -> None:
    """Have OpenMP's threads sleep where they wait for one another, and not spin; a choice of the user's stands. Torch reads it
    when it is imported. Between two small operations spinning takes the very cores that others need: docs/measurements/."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_process(work: Callable[[], int]) -> NoReturn:
    """The life of a rank's process: `work`, to its exit code. Ends without Python's teardown, which can wait forever for a
    peer that is gone."""
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


def _train(run_dir: Path, lease: Lease | None) -> int:
    run, began_at = RunDirectory.open(run_dir), read_lease(run_dir)[0]
    recipe = load_recipe(run.recipe)
    if is_task():
        recipe = at_nodes(recipe, int(os.environ["SLURM_STEP_NUM_NODES"]))
    threads = count_threads(recipe.launch, derive(recipe).ranks_per_node)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if recipe.launch.device == "cpu":
        let_threads_sleep()
    with run.attend():
        if is_task():
            return _train_task(run, recipe, threads, began_at)
        bar = PhaseBar(START_UP if os.environ.get("RANK", "0") == "0" else ())
        try:
            return _train_here(recipe, lease or Lease(run_dir), threads, bar)
        finally:
            bar.close()


def _train_here(recipe: Recipe, lease: Lease, threads: int, bar: PhaseBar) -> int:
    door = _open_door(recipe, lease.run)
    phases = Phases(bar.begin if door is None else door.hear_phases(bar.begin))
    with loading_libraries():
        import torch

        from framework.launch.train import train_rank

    torch.set_num_threads(threads)
    return train_rank(recipe, lease.run, None, take_fingerprint(recipe), phases, end_hung, lease, door)


def _open_door(recipe: Recipe, run_dir: Path) -> "FaultDoor | None":
    """What `meshwright inject` comes through; None where the recipe does not allow faults."""
    if not recipe.run.allow_faults:
        return None
    from framework.launch.fault_door import FaultDoor

    return FaultDoor(run_dir, int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))))


def _train_task(run: RunDirectory, recipe: Recipe, threads: int, began_at: int) -> int:
    """A rank inside a job. Requests to stop count from now on: a time limit may be near while the ranks still connect."""
    door = _open_door(recipe, run.path)
    phases = Phases() if door is None else Phases(door.begin_phase)
    with StopRequest() as stop:
        adopt_task()
        check_place(derive(recipe))
        with loading_libraries():
            import torch

            from framework.launch.train import train_rank

        check_node(run.path, recipe.launch.device, began_at)
        torch.set_num_threads(threads)
        is_first = os.environ["RANK"] == "0"
        with run.hold(RUN_FREE_WITHIN_S, describe_start(), began_at, judge) if is_first else nullcontext() as lease:
            return train_rank(recipe, run.path, stop, take_fingerprint(recipe), phases, end_hung, lease, door)


def _tell_job(error: Exception, code: int) -> None:
    """The job's log hears in full of the first error only: the other ranks fail because that one has."""
    place = f"[rank {os.environ.get('RANK', os.environ['SLURM_PROCID'])}] "
    if not claim_outcome(code):
        print(f"{place}ends as well: {type(error).__name__}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
    elif isinstance(error, MeshwrightError):
        print(f"{place}{error}", file=sys.stderr)
    else:
        print(f"{place}{traceback.format_exc()}", file=sys.stderr)


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the launcher dies, even by SIGKILL: the rank then saves and ends, instead of
    writing on into a run that somebody else may resume. Linux only; elsewhere `lock.ranks` still keeps others out."""
    if sys.platform == "linux" and os.environ.get("TORCHELASTIC_RUN_ID"):
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    path, *epoch = sys.argv[1:]
    run_process(partial(main, Path(path), Lease(Path(path), int(epoch[0])) if epoch else None))
